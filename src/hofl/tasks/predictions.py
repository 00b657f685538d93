# SPDX-License-Identifier: Apache-2.0
"""Held-out examples scored in batches, and what the model says of each in plain values; no text or image."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.tasks.base import Keep
from hofl.tasks.metrics import Sums, Tally

Answers = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]
"""Numbers of examples -> logits of the classes [batch, classes] and targets int64 [batch]."""

Total = TypeVar("Total", Sums, Tally)


@torch.no_grad()
def in_batches(
    score: Callable[[NDArray[np.int64], bool], tuple[Total, list[dict[str, Any]]]],
    zero: Total,
    order: NDArray[np.int64],
    batch: int,
    keep: Keep | None,
) -> Total:
    """The sums of all examples, and each of them told to ``keep`` in the order of its number.

    Args:
        score: (numbers of examples, whether they are told) -> their sums, and one object each with ``row``.
        zero: the sums of nothing.
        order: the examples' numbers, each once, as they are put into batches.
        batch: examples a batch.
        keep: see :class:`hofl.tasks.base.Evaluate`.
    """
    sums, told = zero, list[dict[str, Any]]()
    for start in range(0, len(order), batch):
        part, rows = score(order[start : start + batch], keep is not None)
        sums += part
        told += rows if keep is not None else []
    if keep is not None:
        for row in sorted(told, key=itemgetter("row")):
            keep(row)
    return sums


def classified(
    answers: Answers, order: NDArray[np.int64], batch: int, names: Sequence[str], keep: Keep | None
) -> Sums:
    """The sums of all examples, and each of them told to ``keep`` in the order of its number.

    Args:
        answers: of the live parameters.
        order: the examples' numbers, each once, as they are put into batches.
        batch: examples a batch.
        names: of the classes.
        keep: told each example's row, its target and prediction by name, its scores (log-probabilities by
            class) and its loss in nats; the last two need not be finite.
    """

    def score(numbers: NDArray[np.int64], wanted: bool) -> tuple[Sums, list[dict[str, Any]]]:
        """One batch."""
        logits, targets = answers(numbers)
        told = list(_rows(numbers, logits, targets, names)) if wanted else []
        return Sums.from_logits(logits, targets), told

    return in_batches(score, Sums.zero(len(names)), order, batch, keep)


def _rows(
    rows: NDArray[np.int64], logits: Tensor, targets: Tensor, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One object an example; as in the sums, a tie goes to the lowest class."""
    scores = torch.log_softmax(logits.double(), 1)
    losses = torch.nn.functional.nll_loss(scores, targets, reduction="none")
    columns = (column.cpu().tolist() for column in (targets, logits.argmax(1), scores, losses))
    for row, target, prediction, each, loss in zip(rows.tolist(), *columns, strict=True):
        told = {"row": row, "target": names[target], "prediction": names[prediction]}
        yield {**told, "scores": each, "loss": loss}
