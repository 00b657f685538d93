# SPDX-License-Identifier: Apache-2.0
"""Causal language modelling: plain text in pieces of equal length, every token predicted from those before.

A piece begins with the token that the one before it ends with, so that each token of a file but the first
is predicted exactly once. Two steps: :mod:`hofl.tasks.language_data` needs files only,
:func:`language_task` adds the cut model and its tokenizer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.models.boundary import CutModel
from hofl.models.gguf import quiet
from hofl.tasks import nodes, partition, sources
from hofl.tasks.base import Batch, Keep, Task, aligned, token_cross_entropy
from hofl.tasks.files import drawn
from hofl.tasks.fill import known_lengths, model_inputs, pad_id, stand_ins, text_lengths
from hofl.tasks.generation_data import holders
from hofl.tasks.generation_tokens import (
    check_length,
    ends,
    row_losses,
    tallied,
    vocabulary,
)
from hofl.tasks.language_data import LanguageData
from hofl.tasks.metrics import Tally
from hofl.tasks.tokens import Tokens


def language_task(
    data: LanguageData,
    model: CutModel,
    tokenizer: Any,
    *,
    length: int,
    batch: int = 32,
    train_rows: int = 0,
    evaluation_rows: int = 0,
) -> Task:
    """The task of a cut model on text files; all are tokenised once, here.

    The logits of all positions are needed: they are batch x length x vocabulary numbers.

    Args:
        data: from :mod:`hofl.tasks.language_data`.
        model: whose output is logits [batch, positions, vocabulary].
        tokenizer: of the model.
        length: tokens of a piece.
        batch: pieces an evaluation batch.
        train_rows, evaluation_rows: draw that many pieces; 0 takes all.

    Raises:
        ConfigError: ``length`` is too long for the model, or more pieces are asked for than there are.
        DataError: a file has fewer than two tokens, so that nothing can be predicted.
    """
    check_length(model, length)
    pieces, owners = _pieces(tokenizer, data.train, length, "task.train")
    tested = _held_out(tokenizer, data, length, pieces)
    rows = drawn(len(pieces), train_rows, Key.of(data.seed, "partition", 10), "task.train_rows")
    held = drawn(len(tested), evaluation_rows, Key.of(data.seed, "evaluation", 0), "task.evaluation_rows")
    train, tested = [pieces[i] for i in rows], [tested[i] for i in held]
    clients, shards = _shards(data, rows, owners)
    fill, pad = model_inputs(model, tokenizer, left=True), pad_id(model, tokenizer)

    def collate(numbers: NDArray[np.int64], of: Sequence[Tokens] = train) -> Batch:
        """Pieces by number, of the training set unless another is named."""
        targets = torch.from_numpy(ends([of[i][1:] for i in numbers])).to(model.device)
        return aligned(fill([of[i][:-1] for i in numbers]), targets)

    def scored(numbers: NDArray[np.int64]) -> tuple[list[dict[str, Any]], list[float]]:
        """Held-out pieces by number: there is no answer, so the loss is what there is to know."""
        losses = row_losses(model, collate(numbers, tested))
        counts = [len(tested[i]) - 1 for i in numbers]
        return list(map(_row, numbers.tolist(), losses, counts)), losses

    def evaluate(keep: Keep | None = None) -> Tally:
        """All held-out pieces, in their order."""
        return tallied(scored, np.arange(len(tested)), batch, keep, "perplexity")

    facts = {**data.facts, "vocabulary": vocabulary(model), "length": length}
    facts |= _counts(data, len(train), len(tested), holders(shards, clients))
    return Task(
        "language",
        model,
        clients,
        shards,
        collate,
        token_cross_entropy,
        evaluate,
        data.seed,
        facts,
        lengths=text_lengths,
        top_inputs=lambda lengths, z: fill(stand_ins(known_lengths(lengths, z), pad)),
    )


def _row(row: int, loss: float, tokens: int) -> dict[str, Any]:
    """One piece as :data:`hofl.tasks.base.Keep` has it, with its mean loss of a token."""
    return {"row": row, "target": None, "prediction": None, "loss": loss / tokens, "tokens": tokens}


def _counts(data: LanguageData, train: int, tested: int, table: list[dict[str, Any]]) -> dict[str, Any]:
    """How many pieces there are and who holds them; None of what is elsewhere."""
    server, node = data.divided.kind == "nodes" and not data.client, bool(data.client)
    counts = {"n_train": None if server else train, "n_evaluation": None if node else tested}
    return {**counts, "partition": [] if server else table}


def _pieces(
    tokenizer: Any, texts: Sequence[str], length: int, setting: str
) -> tuple[list[Tokens], NDArray[np.int64]]:
    """Pieces of up to ``length + 1`` tokens, a file's last one shorter, and the number of each one's file."""
    pieces, owners = list[Tokens](), list[int]()
    with quiet():  # a whole file is longer than the model takes
        encoded = [tokenizer([text], add_special_tokens=True)["input_ids"][0] for text in texts]
    for owner, ids in enumerate(encoded):
        whole = np.array(ids, dtype=np.int32)
        found = [whole[start : start + length + 1] for start in range(0, len(whole) - 1, length)]
        pieces += found
        owners += [owner] * len(found)
    if not pieces:
        raise DataError(f"{setting}: its {len(texts)} files have fewer than two tokens each: give more text")
    return pieces, np.array(owners, dtype=np.int64)


def _held_out(tokenizer: Any, data: LanguageData, length: int, pieces: list[Tokens]) -> list[Tokens]:
    """Pieces to score on; the training ``pieces`` again where one of the two is elsewhere."""
    if data.evaluation is data.train:
        return pieces
    return _pieces(tokenizer, data.evaluation, length, "task.evaluation")[0]


def _shards(
    data: LanguageData, rows: Sequence[int], owners: NDArray[np.int64]
) -> tuple[tuple[str, ...], partition.Shards]:
    """Client ids and shards of the pieces that are used."""
    divided = data.divided
    if divided.kind == "nodes" and not data.client:
        return divided.names, nodes.unknown(divided.names)
    if data.client:
        return divided.names, nodes.alone(divided.names, data.client, len(rows))
    files = data.names if divided.kind == "files" else ()
    sizes = np.bincount(owners, minlength=len(data.names)).tolist()
    labels = np.zeros(len(rows), dtype=np.int64)  # there are no classes
    clients, shards = sources.dealt(divided, labels, rows, sizes, files, data.seed)
    if not any(map(len, shards)):
        raise ConfigError("task.train: no client has a piece of text")
    return clients, shards
