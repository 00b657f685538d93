# SPDX-License-Identifier: Apache-2.0
"""Text classification: by label words after a prompt, or by a trained head.

Two steps, so that bad data fails before a model is loaded: :func:`read_text` needs files only,
:func:`text_task` adds the cut model and its tokenizer.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError, ModelError
from hofl.models.boundary import CutModel
from hofl.tasks import files, partition
from hofl.tasks.base import Batch, Task, cross_entropy
from hofl.tasks.files import Source, Table
from hofl.tasks.fill import known_lengths, model_inputs, pad_id
from hofl.tasks.metrics import Sums, majority_class
from hofl.tasks.templates import Template, class_ids, label_names, template
from hofl.tasks.tokens import Encoded, encode, word_tokens

MUCH = 0.1
"""Share of cut texts above which a run says so."""


@dataclass(frozen=True)
class Examples:
    """Texts, one tuple a row in the order of the template's fields, and their classes int64 [rows]."""

    texts: list[tuple[str, ...]]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class TextData:
    """Everything about the data that needs no model.

    Attributes:
        template: how a row becomes a prompt.
        names: the classes.
        train, evaluation: the examples.
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
        seed: of the partition and of the rows drawn.
        text: the column, or the columns with commas between in the order of the template's fields.
        label: the column of the labels.
        train_rows, evaluation_rows: draw that many rows; 0 takes all.

    Raises:
        DataError, ConfigError: one line, as the parts raise; it starts with the setting at fault.
    """
    chosen = template(template_id)
    fields = [name.strip() for name in text.split(",")]
    if len(fields) != len(chosen.fields):
        raise ConfigError(
            f"task.text = {text!a}: template {chosen.id!a} needs columns for {', '.join(chosen.fields)}"
        )
    columns = [*fields, label]
    with _about("task.train", fields, label):
        joined, sizes, clients = _training(train, columns, fields, divided)
    rows = files.drawn(sum(sizes), train_rows, Key.of(seed, "partition", 10), "task.train_rows")
    with _about("task.evaluation", fields, label):
        held_out = files.read_table(evaluation, columns, fields)
    scored = files.drawn(
        files.count(held_out), evaluation_rows, Key.of(seed, "evaluation", 0), "task.evaluation_rows"
    )
    joined, held_out = files.taken(joined, rows), files.taken(held_out, scored)
    with _about("task.label", fields, label):
        names = label_names(chosen, joined[label])
    learned = _examples(joined, fields, label, names, "task.train")
    tested = _examples(held_out, fields, label, names, "task.evaluation")
    if clients:
        owners = np.repeat(np.arange(len(sizes)), sizes)[rows]
        shards = partition.files(np.bincount(owners, minlength=len(sizes)).tolist())
    else:
        shards = divided.divide(learned.labels, seed=seed)
        clients = tuple(f"client-{client}" for client in range(len(shards)))
    facts = _facts(chosen, names, learned, tested)
    facts["partition"] = partition.table(shards, learned.labels, names, clients)
    return TextData(chosen, names, learned, tested, clients, shards, seed, facts)


def text_task(data: TextData, model: CutModel, tokenizer: Any, *, length: int, batch: int = 32) -> Task:
    """The task of a cut model on the data; every text is tokenised once, here.

    Args:
        data: from :func:`read_text`.
        model: whose output is logits [batch, positions, vocabulary or label words], or [batch, classes]
            for a trained head.
        tokenizer: of the model.
        length: tokens of the longest prompt; longer ones are cut in the text and counted.
        batch: examples an evaluation batch.

    Raises:
        ConfigError: ``length`` is too short for the template or too long for the model.
        ModelError: the label words are not one token each.
    """
    words = [] if data.template.head else word_tokens(tokenizer, data.template)
    _check_length(model, length)
    train = encode(tokenizer, data.template, data.train.texts, length)
    held_out = encode(tokenizer, data.template, data.evaluation.texts, length)
    fill = model_inputs(model, tokenizer, left=bool(words))
    score = _scores(words, len(data.names))
    stand_in = 0 if pad_id(model, tokenizer) else 1  # any token that is no pad

    def collate(numbers: NDArray[np.int64], of: Encoded = train, labels: Examples = data.train) -> Batch:
        """Examples by number, of the training set unless another is named."""
        targets = torch.from_numpy(labels.labels[numbers]).to(model.device)
        return Batch(fill([of.ids[i] for i in numbers]), targets)

    @torch.no_grad()
    def evaluate() -> Sums:
        """All held-out examples, in batches of like length."""
        order = np.argsort([len(ids) for ids in held_out.ids], kind="stable")
        sums = Sums.zero(len(data.names))
        for start in range(0, len(order), batch):
            scored = collate(order[start : start + batch], held_out, data.evaluation)
            sums += Sums.from_logits(score(model.full(scored.inputs)), scored.targets)
        return sums

    facts = {**data.facts, "label_tokens": words, "length": length, **_cuts(data, train, held_out)}
    return Task(
        "text",
        model,
        data.clients,
        data.shards,
        collate,
        lambda output, batch: cross_entropy(score(output), batch),
        evaluate,
        data.seed,
        facts,
        lengths=lambda batch: batch.inputs["attention_mask"].sum(1).cpu().numpy().astype(np.int32),
        top_inputs=lambda lengths, z: fill(
            [np.full(n, stand_in, dtype=np.int32) for n in known_lengths(lengths, z)]
        ),
    )


@contextmanager
def _about(setting: str, fields: Sequence[str], label: str) -> Iterator[None]:
    """Begin what is said of a source, or of a column that it lacks, with the setting that names it."""
    try:
        yield
    except files.MissingColumn as error:
        named = "task.text" if error.column in fields else "task.label" if error.column == label else setting
        raise DataError(f"{named}: {error}") from None
    except (DataError, ConfigError) as error:
        raise type(error)(f"{setting}: {error}") from None


def _training(
    source: Source, columns: Sequence[str], fields: Sequence[str], divided: partition.Partition
) -> tuple[Table, list[int], tuple[str, ...]]:
    """All training rows, how many of them each file has, and the client ids if the files are the clients."""
    if divided.kind != "files":
        table = files.read_table(source, columns, fields)
        return table, [files.count(table)], ()
    tables = files.client_tables(source, columns, fields)
    joined = {name: [cell for table in tables.values() for cell in table[name]] for name in columns}
    return joined, [files.count(table) for table in tables.values()], tuple(tables)


def _examples(table: Table, fields: Sequence[str], label: str, names: Sequence[str], where: str) -> Examples:
    """Stripped texts and class numbers."""
    texts = list(zip(*(table[name] for name in fields), strict=True))
    missing = sum(any(cell is None or cell != cell for cell in row) for row in texts)
    if missing:
        raise DataError(
            f"{where}: {missing} of {len(texts)} rows have no {' or '.join(fields)}: drop or fill them"
        )
    clean = [tuple(str(cell).encode(errors="replace").decode().strip() for cell in row) for row in texts]
    return Examples(clean, class_ids(table[label], names, where))


def _facts(chosen: Template, names: Sequence[str], train: Examples, evaluation: Examples) -> dict[str, Any]:
    """What the manifest says of the data: counts and hashes, never a text."""
    seen = {files.text_hash(*row) for row in train.texts}
    shared = sum(files.text_hash(*row) in seen for row in evaluation.texts)
    warnings = [
        f"{shared} of {len(evaluation.texts)} evaluation texts are also in the training data: the metric "
        "flatters; evaluate on other rows, or on split=rest of the same source"
    ]
    return {
        "template": chosen.id,
        "labels": list(names),
        "label_words": list(chosen.words),
        "majority_class": majority_class(evaluation.labels, names),
        "n_train": len(train.texts),
        "n_evaluation": len(evaluation.texts),
        "shared_texts": shared,
        "data_sha256": {"train": _sha256(train), "evaluation": _sha256(evaluation)},
        "warnings": warnings if shared else [],
    }


def _sha256(examples: Examples) -> str:
    """Of every text with its length, and every class, in order."""
    h = hashlib.sha256()
    for row in examples.texts:
        for text in row:
            raw = text.encode()
            h.update(len(raw).to_bytes(8, "little") + raw)
    h.update(examples.labels.astype("<i8").tobytes())
    return h.hexdigest()


def _cuts(data: TextData, train: Encoded, evaluation: Encoded) -> dict[str, Any]:
    """How many texts were cut, and a warning where that is many."""
    warnings = list(data.facts["warnings"])
    for name, encoded in (("training", train), ("evaluation", evaluation)):
        share = encoded.truncated / len(encoded.ids)
        if share > MUCH:
            warnings.append(
                f"{share:.0%} of the {name} texts are cut to task.length tokens: raise it if memory allows"
            )
    return {"truncated": {"train": train.truncated, "evaluation": evaluation.truncated}, "warnings": warnings}


def _check_length(model: CutModel, length: int) -> None:
    longest = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    if length < 1 or (longest and length > longest):
        raise ConfigError(f"task.length = {length}: allowed is 1 to {longest or 'any'} tokens for this model")


def _scores(words: Sequence[int], classes: int) -> Callable[[Tensor], Tensor]:
    """Output -> logits [batch, classes]: of the label words at the answer position, or of the head."""

    def score(output: Tensor) -> Tensor:
        """Logits of the last position, then of the label words."""
        last = output[:, -1] if output.ndim == 3 else output
        if words and last.shape[1] != classes:  # a whole vocabulary, not a head restricted to the words
            last = last[:, list(words)]
        if last.shape[1] != classes:
            raise ModelError(
                f"the model's head has {last.shape[1]} outputs for {classes} classes: rebuild the head"
            )
        return last

    return score
