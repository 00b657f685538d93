# SPDX-License-Identifier: Apache-2.0
"""The planner: its bytes against those of real participations, its laws, and what it recommends."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hofl.errors import ConfigError
from hofl.memory.fake import bottom, pure, top
from hofl.memory.orders import Costs, Order
from hofl.memory.plan import ALL, Plan, peak_of, plan, recommend
from hofl.memory.subject import Adapters, Workload, staged, subject_of
from hofl.models.load import restrict_head
from hofl.models.tiny import FAMILIES, tiny
from memory_tasks import cut_lora, seen, token_task

WORK = Workload(batch=4, length=48, steps=1)
MIB = 2**20


def real_task(family: str, work: Workload, layers: int = 4):  # type: ignore[no-untyped-def]
    headed = family == "bert"
    module = tiny(family, head=2 if headed else None, layers=layers)
    if not headed:
        restrict_head(module, [0, 1])
    return token_task(cut_lora(module), work, headed)


def planned(family: str, work: Workload, **settings) -> Plan:  # type: ignore[no-untyped-def]
    return plan(subject_of(f"tiny:{family}", "float32"), work, **settings)


def row(found: Plan, boundary: int, estimator: str | None, checkpointing: bool = False) -> Order:
    kind = "hybrid" if estimator else "first_order"
    (one,) = (
        r
        for r in found.rows
        if (r.order, r.boundary, r.estimator, r.checkpointing) == (kind, boundary, estimator, checkpointing)
    )
    return one


def tracked(found: Order) -> int:
    """What a plan says of storages, without NumPy's arrays."""
    return found.peak_bytes - found.parts["state"]


@pytest.fixture(scope="module")
def llama() -> Plan:
    return planned("llama", WORK, estimators=(*ALL, "none"))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_planned_to_the_byte_nearly(family: str) -> None:
    """5% is the bound; what is left is NumPy arrays that hold a storage, and a mask's small change."""
    found = planned(family, WORK)
    task = real_task(family, WORK)
    for boundary, estimator in ((0, None), (2, "forward"), (2, "sketch"), (3, "tangent"), (4, "central")):
        there = seen(task, WORK, boundary, estimator)
        assert tracked(row(found, boundary, estimator)) == pytest.approx(there, rel=0.05), (boundary, estimator)


@pytest.mark.parametrize("estimator", [*ALL, "none"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_estimator_at_every_boundary(llama: Plan, estimator: str, checkpointing: bool) -> None:
    work = replace(WORK, checkpointing=checkpointing)
    task = real_task("llama", work)
    for boundary in range(1, 5):
        there = seen(task, work, boundary, estimator)
        assert tracked(row(llama, boundary, estimator, checkpointing)) == pytest.approx(there, rel=0.03)


@pytest.mark.parametrize("estimator", ["forward", "central", "tangent"])
def test_pure_zeroth_order(llama: Plan, estimator: str) -> None:
    there = seen(real_task("llama", WORK), WORK, 0, estimator, pure=True)
    (found,) = (r for r in llama.rows if r.order == "zeroth_order" and r.estimator == estimator)
    assert tracked(found) == pytest.approx(there, rel=0.05)


def test_a_mask_costs_what_it_costs() -> None:
    work = replace(WORK, attention="mask")
    found, task = planned("llama", work), real_task("llama", work)
    for boundary, estimator in ((0, None), (2, "forward"), (2, "tangent")):
        there = seen(task, work, boundary, estimator)
        assert tracked(row(found, boundary, estimator)) == pytest.approx(there, rel=0.05)
    assert row(found, 0, None).peak_bytes > row(planned("llama", WORK), 0, None).peak_bytes
