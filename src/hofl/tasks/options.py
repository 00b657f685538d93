# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: a row's options as lines under letters, and the letter of the correct one.

Where a row keeps its correct answer apart from the wrong ones, a key of the seed and the row's own texts
puts them in order, so that whoever has the row, a node or the server, lists it the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hofl.core.keys import Key
from hofl.tasks.files import text_hash

LETTERS = ("A", "B", "C", "D", "E")
"""What options are called."""

_ORDER = 11
"""Coordinate of the stream, beside those that divide the examples, that orders a row's options."""

Arranged = tuple[tuple[str, ...], str]
"""What a pattern is filled with, and the letter of the correct option."""


@dataclass(frozen=True)
class Options:
    """How a row's cells become a question with lettered options.

    Attributes:
        slots: what the pattern is filled with, in the order that ``arrange`` gives them.
        wants: what a row needs, in words.
        arrange: (cells of the template's fields, label, seed) -> slots and letter; None for a row that
            has no such thing.
    """

    slots: tuple[str, ...]
    wants: str
    arrange: Callable[[Sequence[Any], Any, int], Arranged | None]


def clean(cell: Any) -> str:
    """A cell as text that can be encoded, without outer white space."""
    return str(cell).encode(errors="replace").decode().strip()


def dealt(cells: Sequence[Any], label: Any, seed: int) -> Arranged | None:
    """Support, question and wrong options, with the correct one for a label: all options in a seeded order.

    Returns:
        (support, question, options) and the letter; None where the question or an option is empty.
    """
    support, question, *wrong = map(clean, cells)
    options = ["" if label is None or label != label else clean(label), *wrong]
    if not question or not all(options):
        return None
    row = int.from_bytes(text_hash(support, question, *options)[:8], "big", signed=True)
    order = Key.of(seed, "partition", _ORDER, row).permutation(len(options)).tolist()
    return (support, question, _lines([options[place] for place in order])), LETTERS[order.index(0)]


def marked(cells: Sequence[Any], label: Any, seed: int) -> Arranged | None:
    """Question and ``{"text": [...], "label": [...]}``, with the correct one's label: the data's own order.

    Returns:
        (question, options) and the letter; None where there are not two to five options, one is empty or
        none has the label.
    """
    question, choices = cells
    if not isinstance(choices, Mapping) or {"text", "label"} - set(choices):
        return None
    options, names = ([clean(each) for each in choices[name]] for name in ("text", "label"))
    sound = len(options) == len(names) == len(set(names)) and 2 <= len(options) <= len(LETTERS)
    if not sound or not all(options) or clean(label) not in names or not clean(question):
        return None
    return (clean(question), _lines(options)), LETTERS[names.index(clean(label))]


def _lines(options: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
