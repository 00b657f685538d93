# SPDX-License-Identifier: Apache-2.0
"""Whatever one client sends, it alone is refused, and none of it stays behind."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from rows import ROWS, cohort_of, task_of

from hofl.algorithms import ALGORITHMS
from hofl.core.record import CATEGORIES, Record
from hofl.protocol.base import Call, Outcome, Replies, RoundVoid
from hofl.runtime.local import local_call

FIRST = {name.partition("-")[0]: name for name in reversed(ROWS)}
"""One row of each algorithm."""

each = pytest.mark.parametrize("name", FIRST.values(), ids=FIRST)
Change = Callable[[Record], Record]


def test_every_algorithm_is_attacked() -> None:
    assert set(FIRST) == set(ALGORITHMS)


def attacked(name: str, action: str, change: Change, spy: dict[str, Record] | None = None) -> Outcome | None:
    """A round in which the first client answers one action with something else; None where it is void."""
    task, cohort = task_of(name), cohort_of(task_of(name), 0)
    algorithm = ROWS[name].build(task)
    whole: Call = local_call(task, algorithm.actions)

    def hostile(asked: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = whole(asked, requests, deadline)
        reply = replies.records.get(cohort[0])
        if spy is not None and reply is not None:
            spy.setdefault(asked, reply)
        if asked == action and reply is not None:
            replies.records[cohort[0]] = change(reply)
        return replies

    try:
        outcome = algorithm.round(algorithm.init(task.model.read()), cohort, hostile)
    except RoundVoid as void:
        assert len(cohort) == 1 and void.failures, "one client has voided the round of all"
        return None
    assert set(outcome.failures) <= {cohort[0]}
    return outcome


def answers(name: str) -> dict[str, Record]:
    """What the first client of a round says to each action."""
    spy: dict[str, Record] = {}
    attacked(name, "", lambda reply: reply, spy)
    return spy


@each
def test_arrays_of_any_shape_are_refused(name: str) -> None:
    for action, reply in answers(name).items():
        for array, found in reply.arrays.items():
            point = found.ravel()[:1].reshape(())
            for other in (point, found[None], found[..., None], found[:0], np.concatenate([found] * 40)):
                outcome = attacked(
                    name, action, lambda r, a=array, o=other: Record({**r.arrays, a: o}, r.values)
                )
                assert outcome is None or outcome.failures, (action, array, other.shape)
        points = {n: a.ravel()[:1].reshape(()) for n, a in reply.arrays.items()}
        outcome = attacked(name, action, lambda r, p=points: Record(p, r.values))
        assert outcome is None or not reply.arrays or outcome.failures, action


@each
def test_values_of_any_type_are_refused_or_make_no_difference(name: str) -> None:
    for action, reply in answers(name).items():
        for value in reply.values:
            without = {n: v for n, v in reply.values.items() if n != value}
            for said in ({}, {value: None}, {value: [["x" * 99]]}):
                outcome = attacked(name, action, lambda r, v=without | said: Record(r.arrays, v))
                assert outcome is None or all(len(why) < 200 for why in outcome.failures.values())


@each
def test_huge_numbers_are_refused_or_make_the_state_non_finite_or_leave_it_finite(name: str) -> None:
    """No overflow is an error or a warning: whoever checks the state ends the run (test_endings)."""
    for action, reply in answers(name).items():
        for array, found in reply.arrays.items():
            if found.dtype.kind == "f":
                huge = np.full_like(found, 3e38 if found.dtype == np.float32 else 1e308)
                attacked(name, action, lambda r, a=array, h=huge: Record({**r.arrays, a: h}, r.values))


@each
def test_nothing_that_a_client_adds_is_in_the_ledger(name: str) -> None:
    arrays = {f"{c}/extra": np.ones(9, dtype=np.float32) for c in (*CATEGORIES, "other")}
    for action in answers(name):
        outcome = attacked(
            name, action, lambda r: Record({**r.arrays, **arrays}, {**r.values, "extra": "x" * 99})
        )
        assert outcome is not None and not outcome.failures
        for _, plan, reply in outcome.entries:
            assert not [
                n for record in (plan, reply) for n in (*record.arrays, *record.values) if "extra" in n
            ]
