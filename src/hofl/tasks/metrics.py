# SPDX-License-Identifier: Apache-2.0
"""Per-example sums, from which every reported metric follows: never a mean of batch means."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORST = 700.0
"""Nats a token from which a perplexity is given as if it were this: JSON has no infinity."""


class Score(Protocol):
    """What an evaluation comes to, as far as a run needs it."""

    def to_row(self) -> dict[str, Any]:
        """Plain values for JSON: ``n``, ``loss`` and the metrics.

        ``metric`` names the one that is the run's result, unless that is accuracy.
        """


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
        return cls(exact_sum(each.cpu().tolist()), counts.reshape(classes, classes))

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


@dataclass(frozen=True)
class Tally:
    """What a set of scored texts adds up to; ``+`` joins two disjoint sets.

    Attributes:
        metric: the one that is the result: "perplexity", or a name in ``points``.
        n: examples.
        tokens: predicted tokens that the loss is over.
        loss_sum: sum over these tokens of the cross-entropy in nats, in float64.
        points: for each metric of examples, the sum over them of a score in [0, 1].
    """

    metric: str
    n: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    points: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Tally") -> "Tally":
        """The sums of both sets together."""
        names = {**self.points, **other.points}
        points = {name: self.points.get(name, 0.0) + other.points.get(name, 0.0) for name in names}
        total = self.loss_sum + other.loss_sum
        return Tally(self.metric, self.n + other.n, self.tokens + other.tokens, total, points)

    @property
    def loss(self) -> float | None:
        """Mean loss of a token in nats; None without tokens."""
        return self.loss_sum / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """``exp`` of the loss, at most e^700; None without tokens."""
        if self.loss is None:
            return None
        return math.exp(min(self.loss, _WORST)) if math.isfinite(self.loss) else math.exp(_WORST)

    def to_row(self) -> dict[str, Any]:
        """Plain values for JSON: means over tokens (loss) and over examples (all of ``points``)."""
        finite = self.loss is not None and math.isfinite(self.loss)
        shares = {name: total / self.n if self.n else None for name, total in self.points.items()}
        counts = {"metric": self.metric, "n": self.n, "tokens": self.tokens}
        return {**counts, "loss": self.loss if finite else None, "perplexity": self.perplexity, **shares}


def majority_class(targets: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """The commonest class of targets int64 [n] and its share: ``{"label": name, "rate": share}``."""
    counts = np.bincount(targets, minlength=len(names))
    return {"label": names[int(counts.argmax())], "rate": int(counts.max()) / max(1, len(targets))}


def exact_sum(values: list[float]) -> float:
    """``math.fsum``, but NaN rather than an error where +inf meets -inf or the sum overflows."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
