# SPDX-License-Identifier: Apache-2.0
"""The plan: every order's memory, compute and uplink, and for a budget the most exact order that fits.

It is about a client that holds the whole model and trains it as HO-FL, FedAvg or DeComFL do. Nothing of the
model's size is allocated, so a laptop plans for any model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hofl.errors import ConfigError
from hofl.memory.orders import EXACTNESS, Costs, Order, first_orders, hybrids, single, to_json, zeroth_orders
from hofl.memory.subject import Subject, Workload, staged
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
        return self.rows[0].parts["backbone"]

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
) -> Plan:
    """Trace every order of a model.

    Args:
        subject: the model.
        work: the participation.
        estimators: that are considered for a bottom.
        checkpointing: whether to consider the plain step, the recomputing one, or both.
        told: called with what is traced next.

    Raises:
        ModelError, ConfigError: the model cannot be trained as asked; one line.
    """
    with staged(subject, work) as stage:
        costs = Costs.of(stage, work)
        rows = [
            *first_orders(stage, costs, checkpointing, told),
            *hybrids(stage, costs, estimators, checkpointing, told),
            *zeroth_orders(stage, costs, estimators, told),
        ]
    return Plan(subject, work, costs, tuple(marked(sorted(rows, key=lambda row: row.exactness))))


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


def recommend(found: Plan, budget: int, margin: float = MARGIN) -> dict[str, Any]:
    """The most exact order that fits a budget, and what is left; or what to change.

    Args:
        found: of :func:`plan`.
        budget: bytes.
        margin: see :data:`MARGIN`.

    Returns:
        Plain values: ``budget_bytes``, ``fits``, and either the order's own with ``left_bytes`` and the
        ``smallest_boundary`` of each estimator, or ``needed_bytes`` and ``change``.

    Raises:
        ConfigError: the backbone alone is larger; says how much is needed.
    """
    least = found.least
    needed = -int(-least.peak_bytes * margin // 1)
    if budget < found.backbone:
        raise ConfigError(
            f"budget {size(budget)}: the backbone of {found.subject.name} takes {size(found.backbone)}; "
            f"at least {size(needed)} are needed ({least.label}, margin {margin:g})"
        )
    fits = found.fitting(budget, margin)
    facts: dict[str, Any] = {"budget_bytes": budget, "margin": margin, "fits": bool(fits)}
    if not fits:
        return facts | {
            "needed_bytes": needed,
            "needed_order": least.label,
            "change": change(found, budget, margin),
        }
    best = fits[0]
    boundaries = {
        estimator: found.smallest_boundary(budget, estimator, best.checkpointing, margin)
        for estimator in dict.fromkeys(row.estimator for row in found.rows if row.order == "hybrid")
        if estimator
    }
    return {
        **to_json(best),
        "label": best.label,
        **facts,
        "left_bytes": budget - best.peak_bytes,
        "smallest_boundary": boundaries,
    }


def change(found: Plan, budget: int, margin: float = MARGIN) -> list[dict[str, Any]]:
    """What to change so that something fits: each alone, as far as it helps, traced for the least order."""
    work, subject = found.work, found.subject
    text = subject.sample is None
    tries: list[tuple[str, list[tuple[Any, Subject, Workload]]]] = [
        ("batch", [(n, subject, replace(work, batch=n)) for n in _halves(work.batch)]),
        ("length", [(n, subject, replace(work, length=n)) for n in _halves(work.length) if text]),
        ("rank", [(n, subject.with_rank(n), work) for n in _halves(subject.adapters.rank)[-1:] if text]),
        (
            "attention",
            [("causal", subject, replace(work, attention="causal"))] if work.attention == "mask" else [],
        ),
    ]
    return [
        _tried(name, values, found.least, int(budget / margin), margin) for name, values in tries if values
    ]


def _halves(number: int) -> list[int]:
    """n/2, n/4, ... 1."""
    return [number >> k for k in range(1, number.bit_length())]


def _tried(
    name: str, values: list[tuple[Any, Subject, Workload]], least: Order, room: int, margin: float
) -> dict[str, Any]:
    """The first value that fits, or the last one tried."""
    peaks: dict[Any, int] = {}
    for value, subject, work in values:
        peaks[value] = peak_of(subject, work, least)
        if peaks[value] <= room:
            break
    value, peak = list(peaks.items())[-1]
    needed = -int(-peak * margin // 1)
    return {"change": name, "to": value, "peak_bytes": peak, "needed_bytes": needed, "fits": peak <= room}


def peak_of(subject: Subject, work: Workload, order: Order) -> int:
    """Bytes of one order, for another model or workload.

    Raises:
        ModelError, ConfigError: as :func:`plan`.
    """
    with staged(subject, work) as stage:
        return single(stage, Costs.of(stage, work), order).peak_bytes
