# SPDX-License-Identifier: Apache-2.0
"""What tasks share whose targets are tokens: targets that end together, losses by example, their sums."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.errors import ConfigError, ModelError
from hofl.models.boundary import CutModel
from hofl.models.load import output_embedding
from hofl.tasks.base import IGNORED, Batch, Keep, token_losses
from hofl.tasks.metrics import Tally, exact_sum
from hofl.tasks.predictions import in_batches
from hofl.tasks.tokens import Tokens

Score = Callable[[NDArray[np.int64]], tuple[list[dict[str, Any]], list[float]]]
"""Numbers of examples -> one object each as ``Keep`` has it, with ``tokens``, and their summed losses."""


def tallied(
    score: Score,
    order: NDArray[np.int64],
    batch: int,
    keep: Keep | None,
    metric: str,
    points: Sequence[str] = (),
) -> Tally:
    """The sums of all examples, and each of them told to ``keep`` in the order of its number.

    Args:
        score: of the live parameters.
        order: the examples' numbers, each once, as they are put into batches.
        batch: examples a batch.
        keep: see :class:`hofl.tasks.base.Evaluate`.
        metric: see :class:`~hofl.tasks.metrics.Tally`.
        points: names of scores in the objects.
    """

    def summed(numbers: NDArray[np.int64], wanted: bool) -> tuple[Tally, list[dict[str, Any]]]:
        """One batch."""
        rows, losses = score(numbers)
        sums = {name: exact_sum([row[name] for row in rows]) for name in points}
        return Tally(metric, len(rows), sum(row["tokens"] for row in rows), exact_sum(losses), sums), rows

    return in_batches(summed, Tally(metric, points=dict.fromkeys(points, 0.0)), order, batch, keep)


def check_length(model: CutModel, length: int, new_tokens: int = 0) -> None:
    """Refuse texts that are too long for the model.

    Raises:
        ConfigError: names the settings and what is allowed.
    """
    longest = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    if longest and length + new_tokens > longest:
        given = f"task.length = {length}" + (f" and task.new_tokens = {new_tokens}" if new_tokens else "")
        raise ConfigError(f"{given}: allowed are {longest} tokens in all for this model")


def ends(targets: Sequence[Tokens]) -> NDArray[np.int64]:
    """Targets that end together, ``IGNORED`` before shorter ones: int64 [batch, longest]."""
    filled = np.full((len(targets), max(map(len, targets))), IGNORED, dtype=np.int64)
    for row, each in enumerate(targets):
        filled[row, filled.shape[1] - len(each) :] = each
    return filled


def row_losses(model: CutModel, batch: Batch) -> list[float]:
    """Summed cross-entropy of each example's tokens in nats, float64."""
    output = model.full(batch.inputs)
    rows = [slice(i, i + 1) for i in range(len(output))]  # one at a time: float64 logits are large
    return [exact_sum(token_losses(output[i].double(), batch.targets[i])[0].tolist()) for i in rows]


def vocabulary(model: CutModel) -> int:
    """How many tokens the model tells apart.

    Raises:
        ModelError: it has no logits of tokens.
    """
    embedding = output_embedding(model.module)
    if embedding is None:
        raise ModelError(f"{type(model.module).__name__} has no output embedding: it is no language model")
    return int(embedding.weight.shape[0])
