# SPDX-License-Identifier: Apache-2.0
"""Every order a participation can be trained in, with the peak of its memory.

A participation has four phases, each with a peak of its own: the anchor pass, the backward pass of the top
while the bottom waits, the probes with the feedback, and the update in NumPy. The largest counts, on top of
the model and of what is kept through all steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hofl.core.directions import BLOCK
from hofl.memory import lines
from hofl.memory.fake import Bottom, bottom, pure, top
from hofl.memory.subject import Stage, Workload
from hofl.runtime.tracked import resident_bytes
from hofl.theory import computation
from hofl.theory.traffic import Sizes, of

Kind = Literal["first_order", "hybrid", "zeroth_order"]
FLOAT = 4
"""Bytes of a trainable, of a moment and of a coordinate of a direction."""

EXACTNESS = ("sketch", "tangent", "central", "forward", "none")
"""Estimators, those that come nearest to the gradient first."""
_SAME = {"central": "forward", "none": "forward"}
"""Estimators whose phases are another's."""


@dataclass(frozen=True)
class Order:
    """One way to train, and what it costs.

    Attributes:
        order: backpropagation through all, above the boundary, or nowhere.
        boundary: 0 for first order, L for zeroth order.
        estimator: of what is probed; None for first order.
        checkpointing: whether blocks that are backpropagated are recomputed.
        peak_bytes: of one participation.
        forward_equivalents: of one local step, in forward passes of the whole model.
        uplink_bytes: of one participation.
        frontier: whether no other order is at least as exact and as cheap in memory, compute and uplink.
        parts: where the peak comes from: backbone, trainables, state, and the largest phase by its name.
    """

    order: Kind
    boundary: int
    estimator: str | None
    checkpointing: bool
    peak_bytes: int
    forward_equivalents: float
    uplink_bytes: int
    frontier: bool = False
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def exactness(self) -> tuple[int, int, int, bool]:
        """Sorts orders from the most exact; what is recomputed is as exact but costs more."""
        kind = ("first_order", "hybrid", "zeroth_order").index(self.order)
        rank = EXACTNESS.index(self.estimator) if self.estimator else 0
        return kind, self.boundary, rank, self.checkpointing

    @property
    def label(self) -> str:
        """Such as ``hybrid, boundary 12, tangent, checkpointed``."""
        words = {
            "first_order": ["first order"],
            "hybrid": ["hybrid", f"boundary {self.boundary}"],
            "zeroth_order": ["zeroth order"],
        }[self.order]
        return ", ".join(
            [*words, *([self.estimator] if self.estimator else []), *_CHECKPOINTED[self.checkpointing]]
        )


_CHECKPOINTED: dict[bool, list[str]] = {False: [], True: ["checkpointed"]}


@dataclass(frozen=True)
class Costs:
    """Compute, traffic and what is kept in NumPy, of one model and workload.

    Attributes:
        work: the participation.
        blocks: L.
        sizes: d_zo by boundary, of 0 .. L; the trainables d after them.
        resident: bytes of the module.
    """

    work: Workload
    blocks: int
    sizes: tuple[int, ...]
    resident: int

    @classmethod
    def of(cls, stage: Stage, work: Workload) -> "Costs":
        """Those of a stage."""
        layout = stage.model.layout
        sizes = tuple(layout.bottom_size(b) for b in range(layout.blocks + 1))
        return cls(work, layout.blocks, (*sizes, layout.size), resident_bytes(stage.model, None))

    @property
    def trainables(self) -> int:
        """d."""
        return self.sizes[-1]

    @property
    def backbone(self) -> int:
        """Bytes of the frozen weights and buffers."""
        return self.resident - FLOAT * self.trainables

    def state(self, d_zo: int) -> int:
        """Bytes kept through all steps: the weights received, those trained, the top's start, the moments."""
        d, (above, below) = self.trainables, self.work.moments
        return FLOAT * (2 * d + (d - d_zo) + above * (d - d_zo) + below * d_zo)

    def order(
        self, kind: Kind, boundary: int, estimator: str | None, checkpointing: bool, phases: dict[str, int]
    ) -> Order:
        """The row of an order from the peaks of its phases."""
        d_zo = self.trainables if kind == "zeroth_order" else self.sizes[boundary]
        phases = {**phases, "update": 2 * FLOAT * (self.trainables - d_zo)}
        largest = max(phases, key=lambda name: phases[name])
        kept = {"backbone": self.backbone, "trainables": FLOAT * self.trainables}
        parts = kept | {"state": self.state(d_zo), largest: phases[largest]}
        step = computation.Step(boundary / self.blocks, estimator or "none", self.work.probes, checkpointing)
        sizes = Sizes(self.trainables, d_zo, steps=self.work.steps, probes=self._probes(estimator))
        method, traffic = {
            "first_order": ("fedavg", "fedavg"),
            "hybrid": ("ho_fl", "ho_fl"),
            "zeroth_order": ("decomfl", "decomfl"),
        }[kind]
        return Order(
            kind,
            boundary,
            estimator,
            checkpointing,
            sum(parts.values()),
            round(computation.client(method, step), 6),
            sum(of(traffic, sizes)["up"].values()),
            parts=parts,
        )

    def _probes(self, estimator: str | None) -> int:
        return 0 if estimator in (None, "none") else self.work.probes

    def probing(self, estimator: str, found: Bottom, size: int) -> dict[str, int]:
        """The phases of an estimator, with the block of a direction that it holds in NumPy."""
        block = min(size, BLOCK) if estimator in ("forward", "central") else 0
        phases = {"anchor": found.anchor}
        return phases if estimator == "none" else phases | {"probes": found.probes + FLOAT * block}


Told = Callable[[str], None]


def hybrids(
    stage: Stage, costs: Costs, estimators: Sequence[str], checkpointing: Sequence[bool], told: Told
) -> Iterator[Order]:
    """The rows of all boundaries ``1 .. L``."""
    tops = {}
    for recompute in checkpointing:
        told("top, checkpointed" if recompute else "top")
        stage.model.checkpointing = recompute
        tops[recompute] = _tops(stage, costs)
    for traced in dict.fromkeys(_SAME.get(e, e) for e in estimators):
        told(f"bottom, {traced}")
        at = _bottoms(stage, costs, traced)
        for boundary in range(1, costs.blocks + 1):
            found = Bottom(*at(boundary))
            for recompute, above in tops.items():
                for estimator in (e for e in estimators if _SAME.get(e, e) == traced):
                    yield _hybrid(costs, boundary, estimator, recompute, found, above(boundary)[0])


def _hybrid(costs: Costs, boundary: int, estimator: str, recompute: bool, found: Bottom, above: int) -> Order:
    """A row from the two halves: what waits below the boundary, and the backward pass above it."""
    size = costs.sizes[boundary]
    phases = costs.probing(estimator, found, size) | {"top": found.held + above}
    if "probes" in phases:
        phases["probes"] += FLOAT * (costs.trainables - size)  # the top's gradient
    return costs.order("hybrid", boundary, estimator, recompute, phases)


def single(stage: Stage, costs: Costs, like: Order) -> Order:
    """One order alone, of this stage; the same row as among all."""
    stage.model.checkpointing = like.checkpointing
    if like.order == "first_order":
        return next(first_orders(stage, costs, (like.checkpointing,), lambda _: None))
    if like.order == "zeroth_order":
        return next(zeroth_orders(stage, costs, (str(like.estimator),), lambda _: None))
    estimator = str(like.estimator)
    found = bottom(
        stage.model, stage.inputs, like.boundary, _SAME.get(estimator, estimator), costs.work.probes
    )
    above = top(stage.model, stage.inputs, like.boundary, stage.loss)
    return _hybrid(costs, like.boundary, estimator, like.checkpointing, found, above)


def _tops(stage: Stage, costs: Costs) -> lines.Trace:
    z = stage.model.bottom(stage.inputs, 1) if stage.alike else None

    def _trace(boundary: int) -> tuple[int, ...]:
        return (top(stage.model, stage.inputs, boundary, stage.loss, z),)

    return lines.line(_trace, lines.deep(costs.blocks), costs.blocks, costs.resident)


def _bottoms(stage: Stage, costs: Costs, estimator: str) -> lines.Trace:
    def _trace(boundary: int) -> tuple[int, ...]:
        found = bottom(stage.model, stage.inputs, boundary, estimator, costs.work.probes)
        return found.anchor, found.held, found.probes

    return lines.line(_trace, lines.shallow(costs.blocks), costs.blocks, costs.resident)


def first_orders(stage: Stage, costs: Costs, checkpointing: Sequence[bool], told: Told) -> Iterator[Order]:
    """Backpropagation through everything."""
    for recompute in checkpointing:
        told("first order, checkpointed" if recompute else "first order")
        stage.model.checkpointing = recompute
        peak = top(stage.model, stage.inputs, 0, stage.loss)
        yield costs.order("first_order", 0, None, recompute, {"top": peak})


def zeroth_orders(stage: Stage, costs: Costs, estimators: Sequence[str], told: Told) -> Iterator[Order]:
    """Probes of the loss itself; there is nothing to sketch."""
    wanted = [e for e in estimators if e in ("tangent", "central", "forward")]
    for traced in dict.fromkeys(_SAME.get(e, e) for e in wanted):
        told(f"zeroth order, {traced}")
        found = pure(stage.model, stage.inputs, stage.loss, traced, costs.work.probes)
        for estimator in (e for e in wanted if _SAME.get(e, e) == traced):
            phases = costs.probing(estimator, found, costs.trainables)
            yield costs.order("zeroth_order", costs.blocks, estimator, False, phases)


def least_orders(stage: Stage, costs: Costs, estimators: Sequence[str], told: Told) -> Iterator[Order]:
    """The orders that run forward passes alone: the least of all is among them, where there are any."""
    passes = [e for e in estimators if e in ("central", "forward")]
    yield from zeroth_orders(stage, costs, passes, told)
    if "none" in estimators:
        told("bottom, none")
        yield single(stage, costs, Order("hybrid", costs.blocks, "none", False, 0, 0.0, 0))


def to_json(order: Order) -> dict[str, Any]:
    """A row as plain values."""
    row = {name: getattr(order, name) for name in Order.__dataclass_fields__}
    return {k: row[k] for k in _FIRST} | {k: v for k, v in row.items() if k not in _FIRST}


_FIRST = ("boundary", "estimator", "checkpointing", "peak_bytes", "forward_equivalents", "uplink_bytes")
