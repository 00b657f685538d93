# SPDX-License-Identifier: Apache-2.0
"""The rows of the law suite: an algorithm joins by one entry and inherits every law."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hofl.algorithms.aggregate import Training
from hofl.algorithms.base import Algorithm, Call, Replies
from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.ho_fl import Probing, ho_fl
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.sampling import uniform
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from hofl.theory import communication

SEED, STEPS, CLIENTS, COHORT = 11, 5, 6, 4
BOUNDARIES = (0, 1, 2, 4, 3, 4)  # 0, middle and L = 4
SGD = Optimizer("sgd", 0.05, weight_decay=1e-3)
MOMENTUM = Optimizer("sgd", 0.02, momentum=0.9)
ADAMW = Optimizer("adamw", 3e-3, weight_decay=5e-4)


class Row(NamedTuple):
    """build: layout -> Algorithm; traffic: (layout, client) -> its formula's bytes in one round."""

    build: Callable[[Layout], Algorithm]
    traffic: Callable[[Layout, int], communication.Traffic]


def hybrid(
    estimator: str,
    optimizer: Optimizer,
    probes: int = 2,
    family: str = "gaussian",
    boundaries: tuple = BOUNDARIES,
) -> Row:
    """HO-FL with one optimizer for both parts."""
    training = Training(SEED, STEPS, 8, optimizer, (1,) * CLIENTS)
    probing = Probing(estimator, probes, 1e-2, family, optimizer)

    def traffic(layout: Layout, client: int) -> communication.Traffic:
        d_zo = layout.bottom_size(boundaries[client])
        return communication.ho_fl(layout.size, d_zo, STEPS, 0 if estimator == "none" else probes)

    return Row(lambda layout: ho_fl(layout, boundaries, training, probing), traffic)


def first_order(optimizer: Optimizer) -> Row:
    """FedAvg."""
    return Row(
        lambda layout: fedavg(layout, Training(SEED, STEPS, 8, optimizer, (1,) * CLIENTS)),
        lambda layout, client: communication.fedavg(layout.size),
    )


ROWS: Mapping[str, Row] = {
    "fedavg-sgd": first_order(SGD),
    "fedavg-adamw": first_order(ADAMW),
    "ho_fl-forward-sgd": hybrid("forward", SGD),
    "ho_fl-forward-adamw": hybrid("forward", ADAMW),
    "ho_fl-forward-momentum-rademacher": hybrid("forward", MOMENTUM, family="rademacher"),
    "ho_fl-central-adamw": hybrid("central", ADAMW),
    "ho_fl-tangent-adamw": hybrid("tangent", ADAMW),
    "ho_fl-sketch-sgd-hadamard": hybrid("sketch", SGD, 32, "hadamard"),
    "ho_fl-sketch-adamw": hybrid("sketch", ADAMW, 3),
    "ho_fl-none": hybrid("none", ADAMW),
}


def make_task() -> Task:
    """Six clients of unequal sizes on clouds of points; four blocks and a head."""
    return synthetic_task(Partition("dirichlet", CLIENTS, alpha=1.0, minimum=9), seed=SEED, rows=160, width=6)


def rounds(
    row: Row,
    task: Task,
    number: int = 2,
    wrap: Callable[[Call], Call] = lambda call: call,
    meter: Meter | None = None,
) -> Iterator[tuple[Record, object]]:
    """Play rounds in process; yields (state before, outcome)."""
    algorithm = row.build(task.model.layout)
    call = wrap(local_call(task, algorithm.actions, meter))
    state, policy = algorithm.init(task.model.read()), uniform(CLIENTS, COHORT)
    for t in range(number):
        outcome = algorithm.round(state, policy.draw(SEED, t), call)
        yield state, outcome
        state = outcome.state


def final(
    row: Row, task: Task, number: int = 2, wrap: Callable[[Call], Call] = lambda call: call
) -> np.ndarray:
    """The vector after some rounds, from the task's own start."""
    start = task.model.read()
    *_, (_, outcome) = rounds(row, task, number, wrap)
    task.model.write(start)
    return outcome.state.arrays["weights/vector"]


def reordered(call: Call) -> Call:
    """A call whose replies arrive in the opposite order."""

    def backwards(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = call(action, requests, deadline)
        return Replies(dict(reversed(replies.records.items())), replies.failures)

    return backwards
