# SPDX-License-Identifier: Apache-2.0
"""Questions with their answers, read, checked and divided, before there is a model.

:func:`read_questions` has all data at hand. Where it is at the nodes, :func:`read_held_out` is the server's
part and :func:`read_own` a node's.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks import files, nodes, partition, sources
from hofl.tasks.files import Source, Table
from hofl.tasks.options import clean
from hofl.tasks.templates import Template, with_columns


@dataclass(frozen=True)
class Questions:
    """What the template is filled with, one tuple a row, and all answers of each that count as right."""

    texts: list[tuple[str, ...]]
    answers: list[tuple[str, ...]]


@dataclass(frozen=True)
class QuestionData:
    """Everything about the data that needs no model.

    Attributes:
        template: how a row becomes a prompt.
        train, evaluation: the examples; where one of them is elsewhere, both are those that are here.
        clients, shards: who holds which training examples.
        seed: of the run.
        facts: for the manifest; no text of any example.
    """

    template: Template
    train: Questions
    evaluation: Questions
    clients: tuple[str, ...]
    shards: partition.Shards
    seed: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """How a table is read.

    Attributes:
        template_id: see :mod:`hofl.tasks.templates`; of those whose answer is generated.
        text: the columns with commas between, in the order of the template's fields.
        label: the column of the answers: a text, texts, or the hub's ``{"text": [...]}``.
    """

    template_id: str
    text: str
    label: str

    def resolved(self) -> tuple[Template, list[str]]:
        """The template and the columns that fill it.

        Raises:
            ConfigError: no such template, or it has other fields.
        """
        return with_columns(self.template_id, self.text, generated=True)


def require_even(divided: partition.Partition) -> None:
    """Refuse a partition by classes, where there are none.

    Raises:
        ConfigError: names the kinds that are left.
    """
    if divided.kind not in partition.UNLABELLED:
        raise ConfigError(
            f"partition.kind = {divided.kind!a}: generated text has no classes; "
            f"allowed are {', '.join(partition.UNLABELLED)}"
        )


def read_questions(
    train: Source,
    evaluation: Source,
    divided: partition.Partition,
    columns: Columns,
    *,
    seed: int,
    train_rows: int = 0,
    evaluation_rows: int = 0,
) -> QuestionData:
    """Read, check and divide the data.

    Args:
        train, evaluation: see :mod:`hofl.tasks.files`; train is a glob where ``divided.kind`` is "files".
        divided: iid, or one client a file.
        columns: how they are read.
        seed: of the partition and of the rows drawn.
        train_rows, evaluation_rows: draw that many rows; 0 takes all.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault.
    """
    require_even(divided)
    chosen, fields = columns.resolved()
    table, sizes, clients = sources.training(train, fields, columns.label, divided)
    rows = files.drawn(sum(sizes), train_rows, Key.of(seed, "partition", 10), "task.train_rows")
    scored = sources.held_out(evaluation, fields, columns.label, seed, evaluation_rows)
    learned = _questions(files.taken(table, rows), fields, columns.label, "task.train")
    tested = _questions(scored, fields, columns.label, "task.evaluation")
    labels = np.zeros(len(rows), dtype=np.int64)  # there are no classes
    clients, shards = sources.dealt(divided, labels, rows, sizes, clients, seed)
    facts = _facts(chosen, learned, tested)
    facts["partition"] = holders(shards, clients)
    return QuestionData(chosen, learned, tested, clients, shards, seed, facts)


def read_held_out(
    evaluation: Source,
    divided: partition.Partition,
    columns: Columns,
    *,
    seed: int,
    evaluation_rows: int = 0,
) -> QuestionData:
    """Like :func:`read_questions` on the server, where the training data is at ``divided.names``.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault.
    """
    chosen, fields = columns.resolved()
    scored = sources.held_out(evaluation, fields, columns.label, seed, evaluation_rows)
    tested = _questions(scored, fields, columns.label, "task.evaluation")
    facts = _facts(chosen, None, tested) | {"partition": []}
    facts["data_sha256"]["nodes"] = {}
    return QuestionData(chosen, tested, tested, divided.names, nodes.unknown(divided.names), seed, facts)


def read_own(
    train: Source, divided: partition.Partition, columns: Columns, client: str, *, seed: int
) -> QuestionData:
    """Like :func:`read_questions` on a node, which has the examples of its client and no others.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault.
    """
    chosen, fields = columns.resolved()
    with sources.about("task.train", fields, columns.label):
        table = files.read_table(train, [*fields, columns.label], fields)
    learned = _questions(table, fields, columns.label, "task.train")
    shards = nodes.alone(divided.names, client, len(learned.texts))
    facts = _facts(chosen, learned, None) | {"partition": holders(shards, divided.names)}
    return QuestionData(chosen, learned, learned, divided.names, shards, seed, facts)


def holders(shards: partition.Shards, clients: Sequence[str]) -> list[dict[str, Any]]:
    """One row a client, for the report: there are no classes to count."""
    return [
        {"client": client, "examples": len(shard), "classes": {}, "duplicates": 0}
        for client, shard in zip(clients, shards, strict=True)
    ]


def _questions(table: Table, fields: Sequence[str], label: str, where: str) -> Questions:
    """Stripped texts, and the answers of each row."""
    cells = list(zip(*(table[name] for name in fields), strict=True))
    answers = [_answers(cell) for cell in table[label]]
    missing = sum(any(cell is None or cell != cell for cell in row) for row in cells)
    silent = sum(not any(each) for each in answers)
    if missing or silent:
        raise DataError(
            f"{where}: of {len(cells)} rows {missing} have no {' or '.join(fields)} and {silent} no answer "
            f"in {label}, which holds a text, texts, or {{'text': [...]}}: drop or fill them"
        )
    return Questions([tuple(map(clean, row)) for row in cells], answers)


def _answers(cell: Any) -> tuple[str, ...]:
    """All answers in a cell, in their order."""
    found = cell.get("text") if isinstance(cell, Mapping) else cell
    many = [found] if isinstance(found, str) else list(found) if isinstance(found, list | tuple) else []
    return tuple(text for each in many if isinstance(each, str) and (text := clean(each)))


def _facts(chosen: Template, train: Questions | None, evaluation: Questions | None) -> dict[str, Any]:
    """What the manifest says of the data: counts and hashes, never a text; None of what is elsewhere."""
    here = {name: part for name, part in (("train", train), ("evaluation", evaluation)) if part is not None}
    counts = {name: len(part.texts) for name, part in here.items()}
    elsewhere = train is None or evaluation is None
    twice = None if elsewhere else sources.shared(here["train"].texts, here["evaluation"].texts)
    flatters = f"{twice} of {counts.get('evaluation')} evaluation questions are also trained on: F1 flatters"
    return {
        "template": chosen.id,
        "labels": [],
        "majority_class": None,
        "n_train": counts.get("train"),
        "n_evaluation": counts.get("evaluation"),
        "shared_texts": twice,
        "data_sha256": {name: _sha256(part) for name, part in here.items()},
        "warnings": [flatters] if twice else [],
    }


def _sha256(examples: Questions) -> str:
    """Of every text and every answer, each with its length, in order."""
    h = hashlib.sha256()
    for texts, answers in zip(examples.texts, examples.answers, strict=True):
        for part in (texts, answers):
            h.update(len(part).to_bytes(8, "little"))
            for text in part:
                raw = text.encode()
                h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()
