# SPDX-License-Identifier: Apache-2.0
"""What methods that probe share: settings, the directions of a step, and whether the probes carry signal."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hofl.core.directions import RNG_ID, Directions, Family
from hofl.core.estimators import Doubles, signal
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer

SHARED = 0
"""The client coordinate of a key that all clients share; a method has shared keys or private ones."""

CHECKED = 3
"""Rounds in which one-sided probes also visit the mirrored points, where a step is all a round has."""


@dataclass(frozen=True)
class Probing:
    """How zeroth-order parts are trained: estimator, q, mu, the law of directions and their optimizer."""

    estimator: str
    probes: int
    radius: float
    directions: Family
    optimizer: Optimizer

    def to_values(self) -> dict[str, Any]:
        """As it stands in a plan or a ledger, with the identity of the direction stream."""
        return {
            "estimator": self.estimator,
            "probes": self.probes if self.estimator != "none" else 0,
            "radius": self.radius,
            "directions": self.directions,
            "rng": RNG_ID,
            "bottom_optimizer": self.optimizer.to_values(),
        }


@dataclass(frozen=True)
class Shared:
    """Settings of methods whose clients share directions over all trainables (DeComFL, HiSo).

    Attributes:
        history: rounds a client may lag before it gets a snapshot.
        average: the clients' scalars, or the models that these make (DeComFL).
        curvature: nu, the share of the newest step in the diagonal (HiSo).
        floor: added to that step's square.
        every: the diagonal moves after each round or after each local step.
    """

    history: int = 1024
    average: Literal["scalars", "models"] = "scalars"
    curvature: float = 0.05
    floor: float = 1e-8
    every: Literal["round", "step"] = "round"


def root_key(seed: int, client: int, round: int) -> Key:
    """The key of a participation's directions; ``SHARED`` as the client where all have the same."""
    return Key.of(seed, "directions", client, round)


def step_directions(plan: dict[str, Any], root: Key, step: int, size: int) -> Directions:
    """The q directions of local step ``step`` (from 0): both halves derive them from the root key."""
    return Directions(root.fold(step), plan["directions"], plan["probes"], size)


def zo_signal(agreements: Iterable[Doubles], estimator: str) -> float | None:
    """A round's zo_signal from its agreement sums float64 [3]; 1 for estimators exact by construction.

    None without probes, or where no mirrored point was visited.
    """
    sums = list(agreements)
    if not sums:
        return None
    if estimator not in ("forward", "central"):
        return 1.0
    total = np.sum(sums, axis=0)
    return signal(total) if total[1] or total[2] else None
