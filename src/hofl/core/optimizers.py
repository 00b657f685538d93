# SPDX-License-Identifier: Apache-2.0
"""The normative optimizers: one implementation for client and server, elementwise and bit-exact.

Every operation is one correctly rounded float32 operation on NumPy arrays in a written order, so
equal inputs give equal bits on every machine and for every way of slicing the vector. Scalars such
as bias corrections are formed in Python's float64 and rounded to float32 once.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
State = tuple[Floats, ...]


class Update(Protocol):
    """What moves weights: an :class:`Optimizer`, or a method's own law with the same functions."""

    def init(self, size: int) -> Sequence[Floats]:
        """Its state at the start: float32 [size] each."""
        ...

    def update_(self, weights: Floats, gradient: Floats, state: Sequence[Floats], step: int) -> None:
        """One step in place, as :meth:`Optimizer.update_`."""
        ...

    def to_values(self) -> dict[str, Any]:
        """As it stands in a ledger."""
        ...


@dataclass(frozen=True, slots=True)
class Optimizer:
    """SGD (momentum, coupled weight decay) or AdamW (decoupled weight decay, Loshchilov & Hutter 2019).

    Attributes:
        name: ``sgd`` or ``adamw``.
        lr: learning rate, constant.
        momentum: SGD only; 0 keeps no state.
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's epsilon, added outside the root after bias correction.
        weight_decay: ``lambda``.
    """

    name: Literal["sgd", "adamw"]
    lr: float
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def init(self, size: int) -> State:
        """Zero state for ``size`` coordinates: () or (m,) for SGD, (m, v) for AdamW."""
        count = 2 if self.name == "adamw" else int(self.momentum != 0.0)
        return tuple(np.zeros(size, dtype=np.float32) for _ in range(count))

    def update_(self, weights: Floats, gradient: Floats, state: Sequence[Floats], step: int) -> None:
        """One step in place.

        Args:
            weights: float32 [n], overwritten.
            gradient: float32 [n], used as scratch.
            state: slices of :meth:`init`'s arrays for the same n coordinates, overwritten.
            step: counts from 1 in each participation (bias correction).
        """
        with np.errstate(all="ignore"):  # what overflows is found by whoever checks the result
            (self._adamw_ if self.name == "adamw" else self._sgd_)(weights, gradient, state, step)

    def _sgd_(self, w: Floats, g: Floats, state: Sequence[Floats], step: int) -> None:
        # g <- g + lambda w;  m <- momentum m + g;  w <- w - lr m
        if self.weight_decay:
            g += np.float32(self.weight_decay) * w
        if state:
            (m,) = state
            m *= np.float32(self.momentum)
            m += g
            w -= np.float32(self.lr) * m
        else:
            g *= np.float32(self.lr)
            w -= g

    def _adamw_(self, w: Floats, g: Floats, state: Sequence[Floats], step: int) -> None:
        # m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2   (HO-FL eq. 24-26)
        m, v = state
        b1, b2 = self.betas
        m *= np.float32(b1)
        m += np.float32(1.0 - b1) * g
        v *= np.float32(b2)
        g *= g
        g *= np.float32(1.0 - b2)
        v += g
        # w <- (1 - lr lambda) w - lr mhat / (sqrt(vhat) + eps)
        if self.weight_decay:
            w *= np.float32(1.0 - self.lr * self.weight_decay)
        np.divide(v, np.float32(1.0 - math.pow(b2, step)), out=g)
        np.sqrt(g, out=g)
        g += np.float32(self.eps)
        step_size = m / np.float32(1.0 - math.pow(b1, step))
        step_size *= np.float32(self.lr)
        step_size /= g
        w -= step_size

    def to_values(self) -> dict[str, Any]:
        """As it stands in a message or a ledger."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Optimizer":
        """The inverse of :meth:`to_values`, also after JSON."""
        return cls(**{**values, "betas": tuple(values["betas"])})
