# SPDX-License-Identifier: Apache-2.0
"""Per-example sums, from which every reported metric follows: never a mean of batch means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sums:
    """What a set of scored examples adds up to; ``+`` joins two disjoint sets.

    Attributes:
        loss_sum: sum of the per-example cross-entropies, in nats, added in float64.
        confusion: examples by (target, prediction), int64 [classes, classes].
    """

    loss_sum: float
    confusion: NDArray[np.int64]

    @classmethod
    def zero(cls, classes: int) -> "Sums":
        """No examples yet: the neutral element of ``+``."""
        return cls(0.0, np.zeros((classes, classes), dtype=np.int64))

    @classmethod
    def from_logits(cls, logits: Tensor, targets: Tensor) -> "Sums":
        """Score one batch: logits [batch, classes] of any float dtype, targets int64 [batch].

        A tie goes to the lowest class. The losses are added exactly, so their order is no matter.
        """
        classes = logits.shape[1]
        each = torch.nn.functional.cross_entropy(logits.detach().double(), targets, reduction="none")
        cells = (targets * classes + logits.argmax(1)).cpu().numpy()
        counts = np.bincount(cells, minlength=classes * classes).astype(np.int64)
        return cls(_exact_sum(each.cpu().tolist()), counts.reshape(classes, classes))

    def __add__(self, other: "Sums") -> "Sums":
        """The sums of both sets together."""
        return Sums(self.loss_sum + other.loss_sum, self.confusion + other.confusion)

    @property
    def n(self) -> int:
        """How many examples were scored."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        """How many examples were predicted right."""
        return int(np.trace(self.confusion))

    @property
    def loss(self) -> float | None:
        """Mean loss of an example in nats; None without examples."""
        return self.loss_sum / self.n if self.n else None

    @property
    def accuracy(self) -> float | None:
        """Share predicted right; None without examples."""
        return self.correct / self.n if self.n else None

    @property
    def balanced_accuracy(self) -> float | None:
        """Mean over the classes that occur of the share predicted right; None without examples."""
        per_class = self.confusion.sum(1)
        seen = per_class > 0
        return float((self.confusion.diagonal()[seen] / per_class[seen]).mean()) if self.n else None

    @property
    def majority_rate(self) -> float | None:
        """The accuracy of always answering the commonest class; None without examples."""
        return int(self.confusion.sum(1).max()) / self.n if self.n else None

    def to_row(self) -> dict[str, Any]:
        """Plain values for JSON; a loss that is not finite becomes None, for JSON has no NaN."""
        finite = self.loss is not None and math.isfinite(self.loss)
        return {
            "n": self.n,
            "loss": self.loss if finite else None,
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "majority_rate": self.majority_rate,
            "confusion": self.confusion.tolist(),
        }


def majority_class(targets: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """The commonest class of targets int64 [n] and its share: ``{"label": name, "rate": share}``."""
    counts = np.bincount(targets, minlength=len(names))
    return {"label": names[int(counts.argmax())], "rate": int(counts.max()) / max(1, len(targets))}


def _exact_sum(values: list[float]) -> float:
    """``math.fsum``, but NaN rather than an error where +inf meets -inf or the sum overflows."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
