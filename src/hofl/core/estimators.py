# SPDX-License-Identifier: Apache-2.0
"""Estimators: scalars ``s_j`` about the directional derivative of a surrogate along u_j.

A surrogate is ``L(v) = <feedback, outputs(v)>``. For hybrid order ``outputs`` is the boundary
activation z and ``feedback`` is ``dloss/dz`` frozen at the anchor (HO-FL Alg. 3, HO-SFL stage 4); for
pure zeroth order ``outputs`` is the loss itself and ``feedback`` is one. Each estimator is a function

    estimator(surrogate, directions, radius, check) -> z, scalars        scalars(feedback) -> Scalars

in two phases, since z is needed to learn the feedback. All but ``forward`` and ``central`` are exact: their
scalars do not depend on the radius.

======== =================================================== ============================ =========
name     scalar                                              bottom passes a step         memory
======== =================================================== ============================ =========
forward  ``<feedback, z(v + radius u) - z(v)> / radius``     1 + q                        inference
central  ``<feedback, z(v + r u) - z(v - r u)> / 2r``        1 + 2q                       inference
tangent  ``<feedback, J u>``, forward-mode                   1 + q, on the anchor pass    inference
sketch   ``<J^T feedback, u>``, block-checkpointed backprop  4 whatever q is              one block
none     no scalars: the frozen-bottom control               1                            inference
======== =================================================== ============================ =========

Where ``check`` is asked for (a round's first step, if at all), ``forward`` takes q passes more.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.core.directions import Directions, blocks

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Surrogate(Protocol):
    """What an estimator differentiates; ``v`` are the bottom's d_zo trainables."""

    @property
    def anchor(self) -> Floats:
        """A private copy of v at the anchor: float32 [d_zo]."""
        ...

    def write(self, values: Floats, start: int) -> None:
        """Overwrite the live ``v[start : start + len(values)]``."""
        ...

    def outputs(self) -> Tensor:
        """z at the live v; records no graph."""
        ...

    def tangents(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Forward mode at the anchor: directions [q, d_zo] -> z and ``J u_j`` [q, *z.shape], in one pass."""
        ...

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], Floats]]:
        """z at the anchor, and ``feedback -> J^T feedback`` float32 [d_zo] by recomputing block by block."""
        ...


class Scalars(NamedTuple):
    """What one local step learnt about its directions.

    Attributes:
        values: s_j, float64 [q].
        halves: the one-sided differences ahead of and behind the anchor, float64 [q] each, or None
            where the estimator is exact or was not asked to check.
    """

    values: Doubles
    halves: tuple[Doubles, Doubles] | None = None


Phase = tuple[Tensor, Callable[[Tensor], Scalars]]
Estimator = Callable[[Surrogate, Directions, float, bool], Phase]


def _inner(feedback: Tensor, difference: Tensor) -> float:
    """``sum(feedback * difference)``, reduced in float64."""
    return float(torch.sum(feedback.to(difference.dtype) * difference, dtype=torch.float64))


def _wide(z: Tensor) -> Tensor:
    """Half precision to float32, so that differences are formed without another rounding."""
    return z if z.dtype in (torch.float32, torch.float64) else z.float()


def _displaced(surrogate: Surrogate, directions: Directions, probe: int, radius: float) -> Tensor:
    """z at ``anchor + radius u``; the live parameters are restored from the anchor, never by subtraction."""
    try:
        for start, stop in blocks(directions.size):
            u = directions.block(probe, start, stop)
            u *= np.float32(radius)
            u += surrogate.anchor[start:stop]
            surrogate.write(u, start)
        return surrogate.outputs()
    finally:
        surrogate.write(surrogate.anchor, 0)


def sides(
    surrogate: Surrogate, directions: Directions, radius: float
) -> tuple[Tensor, Callable[[Tensor, float], Doubles]]:
    """z, and (feedback, side) -> the q one-sided differences at ``anchor + side radius u``: float64 [q]."""
    z = surrogate.outputs()

    def _one_side(feedback: Tensor, side: float) -> Doubles:
        r = side * radius
        displaced = (_displaced(surrogate, directions, j, r) for j in range(directions.count))
        return np.array([_inner(feedback, _wide(there) - _wide(z)) / r for there in displaced])

    return z, _one_side


def forward(surrogate: Surrogate, directions: Directions, radius: float, check: bool) -> Phase:
    """One-sided differences (HO-FL Alg. 3). ``check`` also probes the mirrored points."""
    z, _one_side = sides(surrogate, directions, radius)

    def _scalars(feedback: Tensor) -> Scalars:
        ahead = _one_side(feedback, 1.0)
        return Scalars(ahead, (ahead, _one_side(feedback, -1.0)) if check else None)

    return z, _scalars


def central(surrogate: Surrogate, directions: Directions, radius: float, check: bool) -> Phase:
    """Two-sided differences (MeZO, HOSL); the two halves check each other for free."""
    z, _one_side = sides(surrogate, directions, radius)

    def _scalars(feedback: Tensor) -> Scalars:
        ahead, behind = _one_side(feedback, 1.0), _one_side(feedback, -1.0)
        return Scalars(
            (ahead + behind) / 2, (ahead, behind)
        )  # <f, z+ - z> and <f, z - z-> average to central

    return z, _scalars


def tangent(surrogate: Surrogate, directions: Directions, radius: float, check: bool) -> Phase:
    """Exact directional derivatives by forward-mode differentiation; all q ride on the anchor pass."""
    u = np.stack([directions.block(j, 0, directions.size) for j in range(directions.count)])  # [q, d_zo]
    z, tangents = surrogate.tangents(torch.from_numpy(u))
    return z, lambda feedback: Scalars(np.array([_inner(feedback, _wide(t)) for t in tangents]))


def sketch(surrogate: Surrogate, directions: Directions, radius: float, check: bool) -> Phase:
    """The exact bottom gradient, projected on as many directions as the uplink allows."""
    z, pull = surrogate.recorded()
    return z, lambda feedback: Scalars(directions.project(pull(feedback)))


def none(surrogate: Surrogate, directions: Directions, radius: float, check: bool) -> Phase:
    """No probes: the bottom stays where it is. The control every hybrid result is read against."""
    return surrogate.outputs(), lambda feedback: Scalars(np.empty(0))


ESTIMATORS: dict[str, Estimator] = {
    "forward": forward,
    "central": central,
    "tangent": tangent,
    "sketch": sketch,
    "none": none,
}


def signal(sums: Doubles) -> float:
    """zo_signal: the uncentred correlation of scalars and their mirror images.

    On a smooth surrogate the two sides of the anchor agree (1). Where rounding noise or curvature
    dominates they do not (near 0, or below): the bottom then walks at random.

    Args:
        sums: ``(sum a b, sum a a, sum b b)`` over the checked probes a and their mirrors b.
    """
    scale = math.sqrt(sums[1]) * math.sqrt(sums[2])
    return float(sums[0] / scale) if scale > 0 else 0.0


def agreement(scalars: Scalars) -> Doubles:
    """The sums of :func:`signal` for one step; they add over steps and clients: float64 [3]."""
    if scalars.halves is None:
        return np.zeros(3)
    a, b = scalars.halves
    return np.array([a @ b, a @ a, b @ b])
