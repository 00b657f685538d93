# SPDX-License-Identifier: Apache-2.0
"""The plan: every order's memory, compute and uplink, and for a budget the most exact order that fits.

It is about a client that holds the whole model and trains it as HO-FL, FedAvg or DeComFL do. Nothing of the
model's size is allocated, so a laptop plans for any model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hofl.errors import ConfigError
from hofl.memory.orders import (
    EXACTNESS,
    Costs,
    Order,
    first_orders,
    hybrids,
    least_orders,
    single,
    to_json,
    zeroth_orders,
)
from hofl.memory.subject import Stage, Subject, Workload, staged
from hofl.report.tables import size

MARGIN = 1.1
"""What a peak is multiplied by before it is held against a budget: fragmentation, workspaces, the runtime."""
ALL = EXACTNESS[:-1]
"""Estimators that are planned for unless some are named: those that train the bottom."""


@dataclass(frozen=True)
class Plan:
    """All orders of a model and a workload.

    Attributes:
        subject, work: what it is about.
        costs: sizes of the model.
        rows: from the most exact order to the least.
    """

    subject: Subject
    work: Workload
    costs: Costs
    rows: tuple[Order, ...]

    @property
    def backbone(self) -> int:
        """Bytes of the frozen weights and buffers."""
        return self.costs.backbone

    @property
    def least(self) -> Order:
        """The order that needs the least memory."""
        return min(self.rows, key=lambda row: row.peak_bytes)

    def fitting(self, budget: int, margin: float = MARGIN) -> list[Order]:
        """The orders that fit a budget in bytes, the most exact first."""
        return [row for row in self.rows if row.peak_bytes * margin <= budget]

    def smallest_boundary(
        self, budget: int, estimator: str, checkpointing: bool, margin: float = MARGIN
    ) -> int | None:
        """The smallest boundary that fits, 0 for first order; None if none does."""
        fits = (
            row.boundary
            for row in self.fitting(budget, margin)
            if row.checkpointing == checkpointing
            and (row.order == "first_order" or (row.order == "hybrid" and row.estimator == estimator))
        )
        return min(fits, default=None)

    def to_json(self) -> dict[str, Any]:
        """As ``hofl plan --json`` has it, without budgets."""
        work, model = self.work, self.subject
        facts = {
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "train": model.adapters.train,
            "rank": model.adapters.rank if model.adapters.train == "lora" else None,
            "blocks": self.costs.blocks,
            "trainables": self.costs.trainables,
            "backbone_bytes": self.backbone,
            "batch": work.batch,
            "length": work.length if model.sample is None else None,
            "attention": work.attention,
            "probes": work.probes,
            "steps": work.steps,
        }
        return {**facts, "rows": [to_json(row) for row in self.rows]}


def plan(
    subject: Subject,
    work: Workload,
    estimators: Sequence[str] = ALL,
    checkpointing: Sequence[bool] = (False, True),
    told: Callable[[str], None] = lambda what: None,
    budgets: Sequence[int] = (),
    margin: float = MARGIN,
) -> Plan:
    """Trace every order of a model.

    Args:
        subject: the model.
        work: the participation.
        estimators: that are considered for a bottom.
        checkpointing: whether to consider the plain step, the recomputing one, or both.
        told: called with what is traced next.
        budgets: bytes; where the backbone alone is larger than one, only the least order is traced.
        margin: see :data:`MARGIN`.

    Raises:
        ModelError: the model cannot be trained as asked; one line.
        ConfigError: the same, or the backbone is larger than a budget.
    """
    with staged(subject, work) as stage:
        costs = Costs.of(stage, work)
        if any(budget < costs.backbone for budget in budgets):
            least = tuple(least_orders(stage, costs, estimators, told))
            few = Plan(subject, work, costs, least or _all(stage, costs, estimators, checkpointing, told))
            for budget in budgets:
                require_backbone(few, budget, margin)
        return Plan(subject, work, costs, _all(stage, costs, estimators, checkpointing, told))


def _all(
    stage: Stage,
    costs: Costs,
    estimators: Sequence[str],
    checkpointing: Sequence[bool],
    told: Callable[[str], None],
) -> tuple[Order, ...]:
    """Every order, the most exact first."""
    rows = [
        *first_orders(stage, costs, checkpointing, told),
        *hybrids(stage, costs, estimators, checkpointing, told),
        *zeroth_orders(stage, costs, estimators, told),
    ]
    return tuple(marked(sorted(rows, key=lambda row: row.exactness)))


def marked(rows: Sequence[Order]) -> list[Order]:
    """The rows with their frontier; they are in order of exactness."""
    return [
        replace(row, frontier=not any(_beats(other, row) for other in rows[:place]))
        for place, row in enumerate(rows)
    ]


def _beats(other: Order, row: Order) -> bool:
    """Whether a more exact order costs no more anywhere."""
    costs = ("peak_bytes", "forward_equivalents", "uplink_bytes")
    return all(getattr(other, name) <= getattr(row, name) for name in costs)


def needed(found: Plan, margin: float = MARGIN) -> int:
    """Bytes of the least budget that any order fits."""
    return math.ceil(found.least.peak_bytes * margin)


def require_backbone(found: Plan, budget: int, margin: float = MARGIN) -> None:
    """Refuse a budget that no change of the workload can make do.

    Raises:
        ConfigError: the backbone alone is larger; says how much is needed.
    """
    if budget < found.backbone:
        raise ConfigError(
            f"budget {size(budget)}: the backbone of {found.subject.name} takes {size(found.backbone)}; at "
            f"least {size(needed(found, margin))} are needed ({found.least.label}, margin {margin:g})"
        )


def recommend(found: Plan, budget: int, margin: float = MARGIN) -> dict[str, Any]:
    """The most exact order that fits a budget, and what is left; or what to change.

    Args:
        found: of :func:`plan`.
        budget: bytes.
        margin: see :data:`MARGIN`.

    Returns:
        Plain values: ``budget_bytes``, ``fits``, and either the order's own with ``left_bytes`` and the
        ``smallest_boundary`` of each estimator, or ``needed_bytes`` and ``change``.
    """
    fits = found.fitting(budget, margin)
    facts: dict[str, Any] = {"budget_bytes": budget, "margin": margin, "fits": bool(fits)}
    if not fits:
        least = {"needed_bytes": needed(found, margin), "needed_order": found.least.label}
        return facts | least | {"change": change(found, budget, margin)}
    best = fits[0]
    boundaries = {
        estimator: found.smallest_boundary(budget, estimator, best.checkpointing, margin)
        for estimator in dict.fromkeys(row.estimator for row in found.rows if row.order == "hybrid")
        if estimator
    }
    left = {"left_bytes": budget - best.peak_bytes, "smallest_boundary": boundaries}
    return {**to_json(best), "label": best.label, **facts, **left}


def change(found: Plan, budget: int, margin: float = MARGIN) -> list[dict[str, Any]]:
    """What to change so that something fits: each alone, as far as it helps, traced for the least order."""
    if budget < found.backbone:
        return []
    work, subject, room = found.work, found.subject, budget / margin
    text, least = subject.sample is None, found.least

    def at(name: str, value: int | str) -> int:
        """The least order's peak where one thing is changed."""
        if name == "rank":
            return peak_of(subject.with_rank(int(value)), work, least)
        changed: dict[str, Any] = {name: value}
        return peak_of(subject, replace(work, **changed), least)

    tried = [("batch", *_largest(partial(at, "batch"), work.batch, least.peak_bytes, room))]
    if text:
        tried.append(("length", *_largest(partial(at, "length"), work.length, least.peak_bytes, room)))
    if text and subject.adapters.train == "lora" and subject.adapters.rank > 1:
        tried.append(("rank", 1, at("rank", 1)))
    if text and work.attention == "mask":
        tried.append(("attention", "causal", at("attention", "causal")))
    return [
        {
            "change": name,
            "to": value,
            "peak_bytes": peak,
            "needed_bytes": math.ceil(peak * margin),
            "fits": peak <= room,
        }
        for name, value, peak in tried
        if peak < least.peak_bytes
    ]


def _largest(at: Callable[[int], int], whole: int, peak: int, room: float) -> tuple[int | str, int]:
    """The largest number below ``whole`` whose peak fits, and that peak; 1 if none does.

    Peaks grow in a line or faster, so the line from 1 to ``whole`` lies above them and errs safely.
    """
    least = at(1) if whole > 1 else peak
    guess = 1 + math.floor((whole - 1) * (room - least) / max(1, peak - least))
    if guess <= 1:
        return 1, least
    return guess, at(guess)


def peak_of(subject: Subject, work: Workload, order: Order) -> int:
    """Bytes of one order, for another model or workload.

    Raises:
        ModelError, ConfigError: as :func:`plan`.
    """
    with staged(subject, work) as stage:
        return single(stage, Costs.of(stage, work), order).peak_bytes
