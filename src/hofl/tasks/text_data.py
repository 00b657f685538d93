# SPDX-License-Identifier: Apache-2.0
"""The texts of a run, read, checked and divided, before there is a model.

:func:`read_text` has all data at hand. Where it is at the nodes, :func:`read_held_out` is the server's part
and :func:`read_own` a node's: what the other side has, each lacks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks import files, nodes, partition, sources
from hofl.tasks.facts import data_facts
from hofl.tasks.files import Source, Table
from hofl.tasks.templates import Template, class_ids, label_names, with_columns


@dataclass(frozen=True)
class Examples:
    """Texts, one tuple a row in the order of the template's slots, and their classes int64 [rows]."""

    texts: list[tuple[str, ...]]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class TextData:
    """Everything about the data that needs no model.

    Attributes:
        template: how a row becomes a prompt.
        names: the classes.
        train, evaluation: the examples; where one of them is elsewhere, both are those that are here.
        clients, shards: who holds which training examples.
        seed: of the run.
        facts: for the manifest; no text of any example.
    """

    template: Template
    names: tuple[str, ...]
    train: Examples
    evaluation: Examples
    clients: tuple[str, ...]
    shards: partition.Shards
    seed: int
    facts: dict[str, Any]


def read_text(
    train: Source,
    evaluation: Source,
    divided: partition.Partition,
    *,
    template_id: str,
    seed: int,
    text: str = "text",
    label: str = "label",
    train_rows: int = 0,
    evaluation_rows: int = 0,
) -> TextData:
    """Read, check and divide the data.

    Args:
        train, evaluation: see :mod:`hofl.tasks.files`; train is a glob where ``divided.kind`` is "files".
        divided: how the training rows are divided among how many clients.
        template_id: see :mod:`hofl.tasks.templates`.
        seed: of the partition, of the rows drawn and of the order of options.
        text: the column, or the columns with commas between in the order of the template's fields.
        label: the column of the labels.
        train_rows, evaluation_rows: draw that many rows; 0 takes all.

    Raises:
        DataError, ConfigError: one line, as the parts raise; it starts with the setting at fault.
    """
    chosen, fields = with_columns(template_id, text)
    joined, sizes, clients = sources.training(train, fields, label, divided)
    rows = files.drawn(sum(sizes), train_rows, Key.of(seed, "partition", 10), "task.train_rows")
    held_out = sources.held_out(evaluation, fields, label, seed, evaluation_rows)
    joined = files.taken(joined, rows)
    with sources.about("task.label", fields, label):
        names = label_names(chosen, joined[label])
    learned = _examples(joined, chosen, fields, label, names, seed, "task.train")
    tested = _examples(held_out, chosen, fields, label, names, seed, "task.evaluation")
    clients, shards = sources.dealt(divided, learned.labels, rows, sizes, clients, seed)
    facts = _facts(chosen, names, learned, tested)
    facts["partition"] = partition.table(shards, learned.labels, names, clients)
    return TextData(chosen, names, learned, tested, clients, shards, seed, facts)


def read_held_out(
    evaluation: Source,
    divided: partition.Partition,
    *,
    template_id: str,
    seed: int,
    text: str = "text",
    label: str = "label",
    evaluation_rows: int = 0,
) -> TextData:
    """Like :func:`read_text` on the server, where the training data is at the nodes ``divided.names``.

    A head's classes are what the evaluation labels hold.

    Raises:
        DataError, ConfigError: one line, as the parts raise; it starts with the setting at fault.
    """
    chosen, fields = with_columns(template_id, text)
    held_out = sources.held_out(evaluation, fields, label, seed, evaluation_rows)
    with sources.about("task.label", fields, label):
        names = label_names(chosen, held_out[label], "evaluation")
    tested = _examples(held_out, chosen, fields, label, names, seed, "task.evaluation")
    facts = _facts(chosen, names, None, tested)
    facts |= {"data_sha256": {**facts["data_sha256"], "nodes": {}}, "partition": []}
    shards = nodes.unknown(divided.names)
    return TextData(chosen, names, tested, tested, divided.names, shards, seed, facts)


def read_own(
    train: Source,
    divided: partition.Partition,
    client: str,
    *,
    template_id: str,
    seed: int,
    text: str = "text",
    label: str = "label",
    names: Sequence[str] = (),
) -> TextData:
    """Like :func:`read_text` on a node, which has the examples of its client and no others.

    Args:
        train: see :mod:`hofl.tasks.files`; a glob's files are joined.
        divided: its ``names`` number the clients; where its kind is "files" the client may have no row.
        client: one of them.
        template_id, seed, text, label: see :func:`read_text`.
        names: of a head's classes, which the server tells: this client may lack one, and must number the
            others as everyone does.

    Raises:
        DataError: also for a label that is no class. ConfigError: also where a head's classes are not told.
    """
    chosen, fields = with_columns(template_id, text)
    classes = chosen.names or tuple(names)
    if not classes:
        raise ConfigError(f"task.template = {chosen.id!a}: the server did not tell the names of the classes")
    with sources.about("task.train", fields, label):
        table = files.read_table(train, [*fields, label], fields, idle=divided.kind == "files")
    learned = _examples(table, chosen, fields, label, classes, seed, "task.train")
    shards = nodes.alone(divided.names, client, len(learned.texts))
    facts = _facts(chosen, classes, learned, None)
    facts["partition"] = partition.table(shards, learned.labels, classes, divided.names)
    return TextData(chosen, classes, learned, learned, divided.names, shards, seed, facts)


def _examples(
    table: Table,
    chosen: Template,
    fields: Sequence[str],
    label: str,
    names: Sequence[str],
    seed: int,
    where: str,
) -> Examples:
    """Stripped texts and class numbers."""
    cells = list(zip(*(table[name] for name in fields), strict=True))
    missing = sum(any(cell is None or cell != cell for cell in row) for row in cells)
    if missing:
        raise DataError(
            f"{where}: {missing} of {len(cells)} rows have no {' or '.join(fields)}: drop or fill them"
        )
    filled = [chosen.filled(row, given, seed) for row, given in zip(cells, table[label], strict=True)]
    sound = [each for each in filled if each is not None]
    if len(sound) < len(filled) and chosen.options:
        raise DataError(
            f"{where}: {len(filled) - len(sound)} of {len(filled)} rows do not fit template {chosen.id!a}, "
            f"which needs {chosen.options.wants}: drop or mend them"
        )
    return Examples([texts for texts, _ in sound], class_ids([given for _, given in sound], names, where))


def _facts(
    chosen: Template, names: Sequence[str], train: Examples | None, evaluation: Examples | None
) -> dict[str, Any]:
    """What the manifest says of the data: counts and hashes, never a text; None of what is elsewhere."""
    words = {"template": chosen.id, "labels": list(names), "label_words": list(chosen.words)}
    return words | data_facts("texts", names, train, evaluation, _sha256, _shared)


def _shared(train: Examples, evaluation: Examples) -> int:
    """How many evaluation texts are also trained on."""
    return sources.shared(train.texts, evaluation.texts)


def _sha256(examples: Examples) -> str:
    """Of every text with its length, and every class, in order."""
    h = hashlib.sha256()
    for row in examples.texts:
        for text in row:
            raw = text.encode()
            h.update(len(raw).to_bytes(8, "little") + raw)
    h.update(examples.labels.astype("<i8").tobytes())
    return h.hexdigest()
