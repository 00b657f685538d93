# SPDX-License-Identifier: Apache-2.0
"""Versioned prompts: how a row becomes a prompt, and a label one of a few words after it.

The papers do not give theirs, so these are our own and frozen: a change of one
character is a new id. Zero-shot accuracy is reported with each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.errors import ConfigError, DataError
from hofl.tasks.options import LETTERS, Options, clean, dealt, marked


@dataclass(frozen=True)
class Template:
    """One frozen prompt.

    Attributes:
        id: what a config names.
        fields: what the columns hold, in the order they are given, and what the pattern is filled with
            unless there are options.
        pattern: the prompt up to the answer.
        words: the label words, with the space before them, by class; none for a trained head.
        names: the classes' names, as data may spell them; empty where the data decides.
        options: how a row of a multiple choice becomes what the pattern is filled with.
        generated: whether the answer is generated text.
    """

    id: str
    fields: tuple[str, ...]
    pattern: str
    words: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    options: Options | None = None
    generated: bool = False

    @property
    def head(self) -> bool:
        """Whether a trained head answers instead of label words."""
        return not self.words and not self.generated

    @property
    def slots(self) -> tuple[str, ...]:
        """What the pattern is filled with; the first is the one that is cut where a prompt is too long."""
        return self.options.slots if self.options else self.fields

    def prompt(self, texts: Sequence[str]) -> str:
        """The pattern filled with one row's texts, in the order of ``slots``."""
        return self.pattern.format(**dict(zip(self.slots, texts, strict=True)))

    def filled(self, cells: Sequence[Any], label: Any, seed: int) -> tuple[tuple[str, ...], Any] | None:
        """One row's texts in the order of ``slots``, and its label; None for a row that does not fit."""
        if self.options is None:
            return tuple(map(clean, cells)), label
        return self.options.arrange(cells, label, seed)


TEMPLATES: Mapping[str, Template] = {
    template.id: template
    for template in (
        Template("sst2-v1", ("text",), "Review: {text}\nIt was", (" bad", " good"), ("negative", "positive")),
        Template(
            "ag_news-v1",
            ("text",),
            "{text}\nTopic:",
            (" World", " Sports", " Business", " Technology"),
            ("World", "Sports", "Business", "Sci/Tech"),
        ),
        Template(
            "rte-v1",
            ("premise", "hypothesis"),
            "{premise}\nQuestion: {hypothesis} Yes or No?\nAnswer:",
            (" Yes", " No"),
            ("entailment", "not_entailment"),
        ),
        Template(
            "boolq-v1",
            ("passage", "question"),
            "{passage}\nQuestion: {question}?\nAnswer:",
            (" No", " Yes"),
            ("False", "True"),
        ),
        Template(
            "sciq-v1",
            ("support", "question", "distractor1", "distractor2", "distractor3"),
            "{support}\nQuestion: {question}\n{options}\nAnswer:",
            (" A", " B", " C", " D"),
            LETTERS[:4],
            Options(
                ("support", "question", "options"),
                "a question, a correct answer in task.label and three wrong ones (the support may be empty)",
                dealt,
            ),
        ),
        Template(
            "arc-v1",
            ("question", "choices"),
            "Question: {question}\n{options}\nAnswer:",
            (" A", " B", " C", " D", " E"),
            LETTERS,
            Options(
                ("question", "options"),
                "a question, two to five choices with text and label, and the label of one in task.label",
                marked,
            ),
        ),
        Template("head-v1", ("text",), "{text}"),
        Template(
            "squad-v1",
            ("context", "question"),
            "{context}\nQuestion: {question}\nAnswer:",
            generated=True,
        ),
    )
}
"""Every template by id."""


def template(identifier: str, generated: bool = False) -> Template:
    """The template of an id; of those for classification, or of those whose answer is generated.

    Raises:
        ConfigError: there is none; lists them.
    """
    allowed = [name for name, each in TEMPLATES.items() if each.generated == generated]
    if identifier not in allowed:
        raise ConfigError(f"task.template = {identifier!a}: allowed are {', '.join(allowed)}")
    return TEMPLATES[identifier]


def with_columns(identifier: str, text: str, generated: bool = False) -> tuple[Template, list[str]]:
    """The template of an id, see :func:`template`, and the columns that fill it.

    Args:
        identifier: of the template.
        text: the columns with commas between, in the order of the template's fields.
        generated: see :func:`template`.

    Raises:
        ConfigError: there is no such template, or it has other fields.
    """
    chosen = template(identifier, generated)
    columns = [name.strip() for name in text.split(",")]
    if len(columns) != len(chosen.fields):
        raise ConfigError(
            f"task.text = {text!a}: template {chosen.id!a} needs columns for {', '.join(chosen.fields)}"
        )
    return chosen, columns


def label_names(chosen: Template, labels: Sequence[Any], kind: str = "training") -> tuple[str, ...]:
    """The classes' names: the template's, or for a head what the labels of a kind of rows hold.

    Whole numbers 0..m make the classes "0" .. "m"; anything else one class a distinct value, sorted.

    Raises:
        DataError: a label is missing, or there is only one class.
    """
    if chosen.names:
        return chosen.names
    found = {_spelled(label) for label in labels}
    numbers = all(name.isdecimal() and name.isascii() for name in found)
    many = 1 + max(map(int, found), default=0) if numbers else len(found)
    if "" in found or len(found) < 2 or many > len(labels):
        raise DataError(
            f"template {chosen.id!a}: labels must be given in every row, be names or numbers from 0, "
            f"and name 2 or more classes; the {len(labels)} {kind} rows have {len(found)} different labels"
        )
    return tuple(map(str, range(many))) if numbers else tuple(sorted(found))


def class_ids(labels: Sequence[Any], names: Sequence[str], where: str) -> NDArray[np.int64]:
    """Labels as class numbers, int64 [rows]: by number, by number as text, or by name in any case.

    Raises:
        DataError: a label is neither; names the first, how many rows have one like it, and the classes.
    """
    known = {str(i): i for i in range(len(names))}
    known.update({name.casefold(): i for i, name in enumerate(names)})
    spelled = [_spelled(label).casefold() for label in labels]
    bad = [row for row, label in enumerate(spelled) if label not in known]
    if bad:
        first = _spelled(labels[bad[0]])[:40]
        same = sum(spelled[row] == spelled[bad[0]] for row in bad)
        raise DataError(
            f"{where}: label {first!a} in {same} of {len(labels)} rows ({len(bad)} rows have an "
            f"unknown label): allowed are 0 to {len(names) - 1} or {', '.join(names)}"
        )
    return np.array([known[label] for label in spelled], dtype=np.int64)


def _spelled(label: Any) -> str:
    """One spelling a label: a whole number however it is stored, text without outer white space."""
    if label is None or label != label:  # None, or NaN from a DataFrame
        return ""
    if isinstance(label, bool | np.bool_) or (isinstance(label, float | np.floating) and label.is_integer()):
        return str(int(label))
    return str(label).strip()
