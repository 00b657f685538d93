# SPDX-License-Identifier: Apache-2.0
"""What methods that probe share: settings, the directions of a step, and whether the probes carry signal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from hofl.core.directions import RNG_ID, Directions, Family
from hofl.core.estimators import ESTIMATORS, Doubles, Floats, agreement, signal
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer, Update
from hofl.core.record import Record
from hofl.core.replay import Step, replay_
from hofl.errors import ClientError, RecordError
from hofl.models.forward_mode import LossSurrogate
from hofl.tasks.base import Task

SHARED = 0
"""The client coordinate of a key that all clients share; a method has shared keys or private ones."""

Along = Callable[[Directions, Sequence[Floats]], Directions]
"""(directions, the update's state) -> the directions to probe along."""


class Law(NamedTuple):
    """How shared scalars become steps: by an optimizer (DeComFL), or by a law of the method's own (HiSo).

    Attributes:
        update: of this run.
        update_of: of a recorded round, from what its recipe says.
        along: what is probed along.
    """

    update: Update
    update_of: Callable[[dict[str, Any]], Update] = Optimizer.from_values
    along: Along = lambda directions, _: directions


CHECKED = 3
"""Rounds in which one-sided probes also visit the mirrored points where that would cost much: see
:func:`checks` and :func:`loss_steps_`."""


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


def checks(plan: dict[str, Any], step: int) -> bool:
    """Whether the probes of local step ``step`` (from 0) are checked: in a round's first step alone.

    Where a step is all a round has, that would be every step: then only in the first ``CHECKED`` rounds.
    """
    return step == 0 and (plan["steps"] > 1 or plan["round"] < CHECKED)


def loss_steps_(
    task: Task,
    plan: dict[str, Any],
    root: Key,
    vector: Floats,
    state: Sequence[Floats],
    first: int = 1,
    update: Update | None = None,
    along: Along = lambda directions, _: directions,
) -> Record:
    """E zeroth-order steps of a client on the loss itself, along the directions of ``root``.

    A mirrored probe is a pass of the whole model: the first step of the first ``CHECKED`` rounds has them.

    Args:
        task: the client's.
        plan: values of its request.
        root: of the round; step e has its own child.
        vector: all trainables float32 [d], moved in place.
        state: of ``update``, moved in place.
        first: the update's number of the first step, from 1.
        update: what moves the vector; None is the plan's ``bottom_optimizer``.
        along: what is probed along, given the directions and the state; the step keeps the directions.

    Returns:
        scalars float32 [E, q], the agreement sums, the sum of losses and the number of examples.

    Raises:
        ClientError: a loss or scalar is not finite.
    """
    update = Optimizer.from_values(plan["bottom_optimizer"]) if update is None else update
    scalars = np.zeros((plan["steps"], plan["probes"]), dtype=np.float32)
    loss_sum, examples, agreed = 0.0, 0, np.zeros(3)
    for e in range(plan["steps"]):
        batch = task.batch(plan["client"], plan["position"] + e, plan["batch"])
        task.model.write(vector)
        surrogate = LossSurrogate(task.model, batch.inputs, task.loss_on(batch))
        directions = step_directions(plan, root, e, len(vector))
        probed = along(directions, state)
        check = e == 0 and plan["round"] < CHECKED
        loss, probe = ESTIMATORS[plan["estimator"]](surrogate, probed, plan["radius"], check)
        learnt = probe(torch.ones_like(loss))
        with np.errstate(over="ignore"):
            scalars[e] = learnt.values  # rounded to the wire's float32, then used
        if not (bool(torch.isfinite(loss).all()) and np.isfinite(scalars[e]).all()):
            raise ClientError(f"non-finite loss or scalar in local step {e + 1}")
        replay_(vector, [Step(directions, scalars[e])], update, state, first + e)
        agreed += agreement(learnt)
        loss_sum += float(loss) * len(batch.targets)
        examples += len(batch.targets)
    values = {name: plan[name] for name in ("run", "round", "client")}
    values |= {"loss_sum": loss_sum, "examples": examples}
    return Record({"scalars/s": scalars, "metrics/agreement": agreed}, values)


def agreement_of(reply: Record) -> Doubles:
    """A reply's agreement sums float64 [3], checked.

    Raises:
        RecordError: they are missing, or no sums of squares.
    """
    sums: Doubles = reply.array("metrics/agreement", "float64", (3,))
    if sums[1:].min() < 0:
        raise RecordError("its sums of squares are negative")
    return sums


def zo_signal(agreements: Iterable[Doubles], estimator: str) -> float | None:
    """A round's zo_signal from its agreement sums float64 [3]; 1 for estimators exact by construction.

    None without probes, where no mirrored point was visited, or where the sums are none.
    """
    sums = list(agreements)
    if not sums:
        return None
    if estimator not in ("forward", "central"):
        return 1.0
    with np.errstate(over="ignore"):  # of what a client claims
        total = np.sum(sums, axis=0)
    return signal(total) if (total[1] or total[2]) and np.isfinite(total).all() else None
