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


@dataclass(frozen=True)
class Template:
    """One frozen prompt.

    Attributes:
        id: what a config names.
        fields: what the pattern is filled with, in the order columns are given; the first is the one
            that is cut where a prompt is too long.
        pattern: the prompt up to the answer.
        words: the label words, with the space before them, by class; none for a trained head.
        names: the classes' names, as data may spell them; empty where the data decides.
    """

    id: str
    fields: tuple[str, ...]
    pattern: str
    words: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def head(self) -> bool:
        """Whether a trained head answers instead of label words."""
        return not self.words

    def prompt(self, texts: Sequence[str]) -> str:
        """The pattern filled with one row's texts, in the order of ``fields``."""
        return self.pattern.format(**dict(zip(self.fields, texts, strict=True)))


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
        Template("head-v1", ("text",), "{text}"),
    )
}
"""Every template by id."""


def template(identifier: str) -> Template:
    """The template of an id.

    Raises:
        ConfigError: there is none; lists them.
    """
    if identifier not in TEMPLATES:
        raise ConfigError(f"task.template = {identifier!a}: allowed are {', '.join(TEMPLATES)}")
    return TEMPLATES[identifier]


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
