# SPDX-License-Identifier: Apache-2.0
"""The planner's bytes against those of real participations, and its laws."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hofl.algorithms.ho_fl import hybrid_step
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.memory import lines
from hofl.memory.fake import bottom, pretending, top
from hofl.memory.orders import Costs, Order, single
from hofl.memory.plan import ALL, Plan, peak_of, plan
from hofl.memory.subject import Workload, staged, subject_of
from hofl.models.load import restrict_head
from hofl.models.tiny import FAMILIES, tiny
from hofl.runtime.tracked import GRAIN, Tracked
from hofl.tasks.base import Batch, Task
from memory_tasks import cut_lora, seen, token_task

WORK = Workload(batch=4, length=48, steps=1)


def real_task(family: str, work: Workload, layers: int = 4) -> Task:
    headed = family == "bert"
    module = tiny(family, head=2 if headed else None, layers=layers)
    if not headed:
        restrict_head(module, [0, 1])
    return token_task(cut_lora(module), work, headed)


def order(boundary: int, estimator: str | None, checkpointing: bool = False) -> Order:
    kind = "hybrid" if boundary else "zeroth_order" if estimator else "first_order"
    return Order(kind, boundary, estimator, checkpointing, 0, 0.0, 0)


def planned(family: str, work: Workload, orders: Sequence[Order]) -> list[int]:
    """What a plan says of storages, without NumPy's arrays."""
    with staged(subject_of(f"tiny:{family}", "float32"), work) as stage:
        rows = [single(stage, Costs.of(stage, work), like) for like in orders]
    return [row.peak_bytes - row.parts["state"] for row in rows]


@pytest.fixture(scope="module")
def llama() -> Plan:
    return plan(subject_of("tiny:llama", "float32"), WORK, (*ALL, "none"))


def row(found: Plan, boundary: int, estimator: str | None, checkpointing: bool = False) -> Order:
    wanted = replace(order(boundary, estimator), checkpointing=checkpointing).exactness
    (one,) = (r for r in found.rows if r.exactness == wanted)
    return one


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("attention", ["causal", "mask"])
def test_every_family_is_planned_within_five_per_cent(family: str, attention: Any) -> None:
    work = replace(WORK, attention=attention)
    orders = [order(0, None), order(2, "forward"), order(3, "tangent"), order(2, "sketch", True)]
    task = real_task(family, work)
    for like, found in zip(orders, planned(family, work, orders), strict=True):
        own = replace(work, checkpointing=like.checkpointing)
        there = seen(task, own, like.boundary, like.estimator)
        assert found == pytest.approx(there, rel=0.05), like.label


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_estimator_at_every_boundary(llama: Plan, checkpointing: bool) -> None:
    work = replace(WORK, checkpointing=checkpointing)
    task = real_task("llama", work)
    for estimator in (*ALL, "none"):
        for boundary in range(1, 5):
            there = seen(task, work, boundary, estimator)
            here = row(llama, boundary, estimator, checkpointing)
            assert here.peak_bytes - here.parts["state"] == pytest.approx(there, rel=0.03), here.label


@pytest.mark.parametrize("estimator", ["forward", "central", "tangent"])
def test_pure_zeroth_order(estimator: str) -> None:
    there = seen(real_task("llama", WORK), WORK, 0, estimator, pure=True)
    (here,) = planned("llama", WORK, [order(0, estimator)])
    assert here == pytest.approx(there, rel=0.05)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_halves_make_the_very_step_of_a_run(estimator: str, checkpointing: bool) -> None:
    """HO-FL's own hybrid_step on the same fake tensors: the same peak, but for the gradient in NumPy."""
    work, boundary = replace(WORK, checkpointing=checkpointing), 2
    with staged(subject_of("tiny:qwen2", "float32"), work) as stage:
        model, size = stage.model, stage.model.layout.bottom_size(boundary)
        task = Task("t", model, ("a",), [np.arange(4)], None, lambda o, b: stage.loss(o), None, 0)  # type: ignore[arg-type]
        step = {"boundary": boundary, "estimator": estimator, "radius": 1.0}
        directions = Directions(Key(0, 0), "gaussian", work.probes, size)
        batch = Batch(dict(stage.inputs), torch.zeros(4, dtype=torch.int64))
        with Tracked() as tracked:
            hybrid_step(task, batch, step, directions, True)
        found = bottom(model, stage.inputs, boundary, estimator, work.probes)
        above = top(model, stage.inputs, boundary, stage.loss)
    copied = -(-4 * size // GRAIN) * GRAIN  # the anchor's copy, which a stand-in of NumPy does not hold
    assert max(found.anchor, found.held + above, found.probes) == tracked.peak + copied


def test_nothing_is_allocated_and_nothing_stays_patched() -> None:
    """A layer of 4 TB."""
    import transformers.masking_utils as masks

    before = masks.is_tracing
    module = nn.Sequential(nn.Linear(1 << 20, 1 << 20, device="meta"), nn.Tanh())
    with pretending(module), torch.no_grad(), Tracked() as tracked:
        assert masks.is_tracing is not before
        output = module(torch.zeros(2, 1 << 20))
        assert output.device.type == "cpu"
    assert tracked.peak == 3 * 2 * 4 << 20  # input, linear result, tanh
    assert masks.is_tracing is before


def test_tied_tensors_are_counted_once() -> None:
    with staged(subject_of("tiny:llama", "float32"), WORK) as stage:
        held = Costs.of(stage, WORK).resident
    parameters = sum(p.numel() for p in cut_lora(tiny("llama")).module.parameters())
    assert 4 * parameters <= held <= 4 * parameters + 4096  # rotary buffers


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("estimator", ["forward", "central", "none"])
def test_deeper_boundaries_need_no_more(llama: Plan, estimator: str, checkpointing: bool) -> None:
    peaks = [row(llama, b, estimator, checkpointing).peak_bytes for b in range(1, 5)]
    assert peaks == sorted(peaks, reverse=True)
    assert row(llama, 0, None, checkpointing).peak_bytes >= peaks[0]


@pytest.mark.parametrize(
    "like", [order(0, None), order(2, "forward"), order(2, "tangent"), order(4, "forward")]
)
def test_more_examples_or_tokens_need_more(like: Order) -> None:
    subject = subject_of("tiny:llama")
    batches = [peak_of(subject, replace(WORK, batch=n), like) for n in (2, 4)]
    lengths = [peak_of(subject, replace(WORK, length=n), like) for n in (24, 48)]
    for peaks in (batches, lengths):
        assert all(a < b for a, b in pairwise(peaks))


def test_a_mask_and_a_rank_cost_something() -> None:
    subject, like = subject_of("tiny:llama"), order(1, "forward")
    least = peak_of(subject, WORK, like)
    assert peak_of(subject, replace(WORK, attention="mask"), like) > least
    assert peak_of(subject.with_rank(16), WORK, like) > least


def test_a_trace_between_blocks_that_are_alike_is_a_line() -> None:
    traced = []

    def trace(boundary: int) -> tuple[int, ...]:
        traced.append(boundary)
        return (1000 * boundary, 5000)

    at = lines.line(trace, lines.shallow(28), 28, 0)
    assert sorted(traced) == [1, 2, 5, 9]
    assert [at(b) for b in (3, 14, 28)] == [(3000, 5000), (14000, 5000), (28000, 5000)]
    traced.clear()
    lines.line(trace, lines.deep(28), 28, 0)
    assert sorted(traced) == [18, 22, 26, 27, 28]


def test_a_bent_line_and_a_short_model_are_traced_everywhere() -> None:
    traced = []

    def bent(boundary: int) -> tuple[int, ...]:
        traced.append(boundary)
        return (boundary**2,)

    at = lines.line(bent, lines.shallow(20), 20, 0)
    assert sorted(traced) == list(range(1, 21)) and at(13) == (169,)
    traced.clear()
    lines.line(bent, lines.shallow(lines.FEW), lines.FEW, 0)
    assert sorted(traced) == list(range(1, lines.FEW + 1))


@pytest.mark.slow
def test_lines_of_a_real_family_agree_with_a_trace_of_each_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers with sliding and full attention in turn."""
    from hofl.models.tiny import tiny_config

    monkeypatch.setattr("hofl.memory.subject.tiny_config", lambda family: tiny_config(family, 10))
    subject = subject_of("tiny:gemma3", "float32")
    found = plan(subject, WORK, ("sketch",), (True,))
    for boundary in (1, 4, 7, 10):
        here = row(found, boundary, "sketch", True)
        assert here.peak_bytes == pytest.approx(peak_of(subject, WORK, here), rel=0.015), here.label
