# SPDX-License-Identifier: Apache-2.0
"""The rows of the law suite: an algorithm joins by one entry and inherits every law."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from laws_base import ADAMW as ADAMW
from laws_base import CLIENTS, COHORT, SEED, Row
from laws_base import SGD as SGD
from laws_base import make_task as make_task
from rows_federated import BOUNDARIES as BOUNDARIES
from rows_federated import hybrid as hybrid

from hofl.core.record import Record
from hofl.core.sampling import uniform
from hofl.protocol.base import Algorithm, Call, Outcome, Replies
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task

GROUPS = ("rows_federated", "rows_shared", "rows_splitfed", "rows_zo_split")
ROWS: Mapping[str, Row] = {
    name: row for group in GROUPS if find_spec(group) for name, row in import_module(group).ROWS.items()
}
Wrap = Callable[[Call], Call]


def task_of(name: str) -> Task:
    """The task as the row's method sees it."""
    return make_task(ROWS[name].centralised)


def cohort_of(task: Task, round: int) -> list[int]:
    """Four of the six clients, or the one there is."""
    if len(task.clients) == 1:
        return [0]
    return [int(client) for client in uniform(CLIENTS, COHORT).draw(SEED, round)]


def play(algorithm: Algorithm, state: Record, task: Task, call: Call, number: int) -> Iterator[Outcome]:
    """Rounds from a state on, each after the one before."""
    for _ in range(number):
        outcome = algorithm.round(state, cohort_of(task, state.values["round"]), call)
        yield outcome
        state = outcome.state


def rounds(
    row: Row, task: Task, number: int = 2, wrap: Wrap = lambda call: call, meter: Meter | None = None
) -> Iterator[tuple[Record, Outcome]]:
    """Play rounds in process; yields (state before, outcome)."""
    algorithm = row.build(task)
    call = wrap(local_call(task, algorithm.actions, meter))
    state = algorithm.init(task.model.read())
    for outcome in play(algorithm, state, task, call, number):
        yield state, outcome
        state = outcome.state


def final(row: Row, task: Task, number: int = 2, wrap: Wrap = lambda call: call) -> np.ndarray:
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


def lossy(lost: int) -> Wrap:
    """A call in which one client never answers."""

    def wrap(call: Call) -> Call:
        def without(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
            replies = call(action, {c: r for c, r in requests.items() if c != lost}, deadline)
            gone = {lost: "gone"} if lost in requests else {}
            return Replies(replies.records, {**replies.failures, **gone})

        return without

    return wrap
