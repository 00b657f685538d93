# SPDX-License-Identifier: Apache-2.0
"""HiSo: DeComFL along directions whitened by a diagonal curvature that everyone computes from the scalars.

"Hessian-informed DeComFL", ICLR 2026, and the ``adam_forward`` estimator of DeComFL's repository. Messages,
ledger, marks and catch-up are DeComFL's; nothing is sent for the diagonal but in snapshots.

Symbols: u ``directions``, z = H^{-1/2} u what is probed along, g ``scalars``, P ``probes`` q, eta learning
rate, tau or E ``steps``, nu ``curvature``, eps ``floor``. In each step, with H fixed while it is formed,

    ``dx = H^{-1/2} (1/q) sum_j s_j u_j``,  ``x <- x - eta dx``

and at the end of a round (``every = "step"``: of a step), from the averaged scalars alone,

    ``H <- (1 - nu) H + nu (dx^2 + eps)``,  ones at the start, dx of the last local step.

The mean over probes is squared, once: the authors' per-parameter version squares every direction by itself
and moves H q times a step, with directions of one step made under different H.

Deviations: those of DeComFL; weight decay is on x and not seen by H; eps is the note's, the code has none. In
a client's own steps H is that of the round's start; with ``every = "step"`` it moves with the client's own
scalars between them and is reverted like x, so that a client alone walks the server's path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hofl.algorithms.decomfl import protocol
from hofl.core.directions import Directions
from hofl.core.layout import Layout
from hofl.core.optimizers import Floats, Optimizer
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Law, Probing, Shared


def hiso(layout: Layout, training: Training, probing: Probing, shared: Shared) -> Algorithm:
    """HiSo over all d trainables of ``layout``."""
    every = training.steps if shared.every == "round" else 1
    optimizer = probing.optimizer
    update = Whitened(optimizer.lr, optimizer.weight_decay, shared.curvature, shared.floor, every)
    shared = replace(shared, average="scalars")
    return protocol(layout, training, probing, shared, Law(update, Whitened.from_values, whitened))


@dataclass(frozen=True, slots=True)
class Whitened:
    """HiSo's step and its diagonal; elementwise and bit-exact as :class:`Optimizer`, with H in its state.

    Attributes:
        lr: eta.
        weight_decay: of x, coupled as in SGD.
        curvature: nu, the share of the newest step in H; 0 keeps H at ones, which is SGD, bit for bit.
        floor: eps, added to that step's square.
        every: steps between two moves of H, the last of which moves it.
    """

    lr: float
    weight_decay: float
    curvature: float
    floor: float
    every: int

    def init(self, size: int) -> tuple[Floats]:
        """H: float32 [size] ones."""
        return (np.ones(size, dtype=np.float32),)

    def update_(self, weights: Floats, gradient: Floats, state: Sequence[Floats], step: int) -> None:
        """One step in place.

        Args:
            weights: float32 [n], overwritten.
            gradient: ``(1/q) sum_j s_j u_j``, float32 [n], used as scratch.
            state: (H,), float32 [n], overwritten.
            step: counts from 1 over the whole run.
        """
        (diagonal,) = state
        with np.errstate(all="ignore"):  # what overflows is found by whoever checks the result
            gradient /= np.sqrt(diagonal)
            if step % self.every == 0:
                square = gradient * gradient
                square += np.float32(self.floor)
                square *= np.float32(self.curvature)
                diagonal *= np.float32(1.0 - self.curvature)
                diagonal += square
        Optimizer("sgd", self.lr, weight_decay=self.weight_decay).update_(weights, gradient, (), step)

    def to_values(self) -> dict[str, Any]:
        """As it stands in a message or a ledger."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Whitened":
        """The inverse of :meth:`to_values`."""
        return cls(**values)


@dataclass(frozen=True, eq=False)
class WhitenedDirections(Directions):
    """Directions to probe along, ``z = H^{-1/2} u``; the step is made of the u themselves.

    Attributes:
        diagonal: H, float32 [size].
    """

    diagonal: Floats

    def block(self, probe: int, start: int, stop: int) -> Floats:
        """Coordinates ``start .. stop-1`` of z: float32 [stop-start]."""
        u = super().block(probe, start, stop)
        u /= np.sqrt(self.diagonal[start:stop])
        return u


def whitened(directions: Directions, state: Sequence[Floats]) -> Directions:
    """The directions under an update's state (H,)."""
    return WhitenedDirections(
        directions.key, directions.family, directions.count, directions.size, diagonal=state[0]
    )
