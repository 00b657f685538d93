# SPDX-License-Identifier: Apache-2.0
"""What a participation of a run needs at each boundary: planned on fake copies of its model, or measured.

The plan is about the run's own method, estimator, batch and optimizers. A client of a split method holds
the bottom alone, so it needs more the larger its boundary is; of the others it is the other way round.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from hofl.algorithms import ALGORITHMS
from hofl.build import OUT, build_algorithm, optimizer_of, steps_of
from hofl.checks import TEXTS
from hofl.config import Config
from hofl.errors import ModelError
from hofl.memory.configured import of_config
from hofl.memory.fake import bottom
from hofl.memory.orders import FLOAT, Costs, Order, first_orders, hybrids, zeroth_orders
from hofl.memory.subject import Adapters, Stage, Subject, Workload, staged
from hofl.protocol.base import RoundVoid
from hofl.report.tables import size
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.runtime.tracked import Tracked, resident_bytes
from hofl.tasks.base import Task


@dataclass(frozen=True)
class Needs:
    """Bytes by boundary.

    Attributes:
        planned: peak of a participation, by boundary ascending.
        backbone: of what is frozen; of split methods 0, for a client holds a part of it.
        margin: that planned peaks are multiplied by.
        measured: what a dry participation took, of boundaries that were tried.
    """

    planned: dict[int, int]
    backbone: int
    margin: float
    measured: dict[int, int] = field(default_factory=dict)

    def of(self, boundary: int) -> int:
        """Bytes that a budget must have: the plan with its margin, or what was measured if that is more.

        >>> needs = Needs({0: 900, 1: 500}, 100, 1.1, {1: 600})
        >>> needs.of(0), needs.of(1)
        (990, 600)
        """
        needed = round(self.planned[boundary] * self.margin, 3)  # 800 * 1.1 is a little more than 880
        return max(math.ceil(needed), self.measured.get(boundary, 0))

    def smallest(self, budget: int) -> int:
        """The smallest boundary that fits; ``OUT`` where none does.

        >>> needs = Needs({0: 900, 1: 500, 2: 300}, 100, 1.0)
        >>> [needs.smallest(budget) for budget in (900, 899, 300, 299)]
        [0, 1, 2, -1]
        """
        return next((b for b in self.planned if self.of(b) <= budget), OUT)

    def lacking(self, budget: int) -> str:
        """Why nothing fits a budget, and what would.

        >>> Needs({0: 9000, 1: 5000}, 3000, 1.0).lacking(2048)
        "2.0 KiB is less than the backbone's own 2.9 KiB; boundary 1 needs 4.9 KiB (5000 bytes) at least"
        """
        least = min(self.planned, key=self.of)
        needed = f"boundary {least} needs {size(self.of(least))} ({self.of(least)} bytes) at least"
        if budget < self.backbone:
            return f"{size(budget)} is less than the backbone's own {size(self.backbone)}; {needed}"
        return f"{size(budget)} is not enough: {needed}"


def plan_needs(config: Config, task: Task, margin: float) -> Needs:
    """What the run's method needs at every boundary that a client may have, without allocating it.

    Args:
        config: of the run.
        task: as the method sees it; its loaded model is what the plan is about.
        margin: see :class:`Needs`.

    Raises:
        ModelError: the model cannot be planned for.
    """
    method, layout = ALGORITHMS[config.algorithm], task.model.layout
    subject, work = _subject(config, task)
    with staged(subject, work) as stage:
        if stage.model.layout.fingerprint != layout.fingerprint:
            raise ModelError(
                f"no plan for this model: it has {layout.size} trainables, the one planned for has others "
                f"({stage.model.layout.size}); name boundaries in cohort.boundaries"
            )
        costs = Costs.of(stage, work)
        if method.split:
            peaks, backbone = dict(_split_peaks(stage, costs, config)), 0
        else:
            rows = list(_orders(stage, costs, config))
            peaks = {row.boundary if method.hybrid else 0: row.peak_bytes for row in rows}
            backbone = rows[0].parts["backbone"]
    able = {b: peak for b, peak in sorted(peaks.items()) if not task.model.separates(b)}
    return Needs(able, backbone, margin)


def _orders(stage: Stage, costs: Costs, config: Config) -> Iterator[Order]:
    """The orders that a client which holds the whole model may have under the run's method."""
    method, recompute = ALGORITHMS[config.algorithm], (config.model.checkpointing,)
    estimators = (str(config.zo.estimator),)
    if method.hybrid or not method.estimators:
        yield from first_orders(stage, costs, recompute, _silent)
    if method.hybrid:
        yield from hybrids(stage, costs, estimators, recompute, _silent)
    elif method.estimators:
        yield from zeroth_orders(stage, costs, estimators, _silent)


def _silent(what: str) -> None:
    """Say nothing of what is traced."""


def _split_peaks(stage: Stage, costs: Costs, config: Config) -> Iterator[tuple[int, int]]:
    """Boundary and peak of a client that holds the bottom alone, probed or backpropagated."""
    probed = bool(ALGORITHMS[config.algorithm].estimators)
    for boundary in range(1, costs.blocks):
        if probed:
            found = bottom(stage.model, stage.inputs, boundary, str(config.zo.estimator), costs.work.probes)
            step = max(found.anchor, found.probes)
        else:
            step = _backpropagated(stage, boundary)
        state = FLOAT * (2 + costs.work.moments[probed]) * costs.sizes[boundary]
        yield boundary, resident_bytes(stage.model, boundary) + state + step


def _backpropagated(stage: Stage, boundary: int) -> int:
    """Most bytes alive in a backward pass from the boundary through the bottom."""
    with torch.enable_grad(), Tracked() as tracked:
        z = stage.model.stop(stage.inputs, boundary, stage.model.checkpointing)
        below = stage.model.bottom_parameters(boundary)
        kept = torch.autograd.grad(z, below, torch.ones_like(z), allow_unused=True)
        del kept
    peak: int = tracked.peak
    return peak


def _subject(config: Config, task: Task) -> tuple[Subject, Workload]:
    """The run's model and participation; a network is copied, for of its shapes there is no other record."""
    if config.task.name in TEXTS:
        return of_config(config)
    above, below = (
        len(optimizer_of(section).init(0)) for section in (config.optimizer, config.bottom_optimizer)
    )
    work = Workload(
        batch=config.local.batch,
        steps=steps_of(config),
        probes=config.zo.probes,
        moments=(above, below),
        checkpointing=config.model.checkpointing,
    )
    first = next(client for client, shard in enumerate(task.shards) if len(shard))
    module, block = task.model.module, task.model.elements[0]
    path = next(name for name, part in module.named_modules() if part is block).rpartition(".")[0]

    def build(classes: int) -> tuple[nn.Module, bool]:
        """A copy each time, for it is changed."""
        return copy.deepcopy(module), True

    sample = task.batch(first, 0, 1).inputs
    adapters = Adapters(train="full", blocks=path)
    return Subject(task.name, build, torch.float32, adapters, sample), work


def dry_run(config: Config, task: Task, boundary: int) -> int:
    """Bytes of a dry participation at a boundary, counted as a run counts a client's; it changes nothing.

    It is a round of the run's own method with the client that has the most examples, from its first
    minibatch, of two local steps: in the second the first one's gradient is still there. One that fails
    counts as far as it came.

    Args:
        config: of the run.
        task: as the method sees it, with the data.
        boundary: any that the model has.
    """
    single = {
        "quorum": 1,
        "local": config.local.model_copy(update={"steps": min(2, config.local.steps)}),
        "split": config.split.model_copy(update={"upload_every": 1}),
    }
    client = max(range(len(task.shards)), key=lambda number: len(task.shards[number]))
    cuts = [boundary] * len(task.shards)
    algorithm = build_algorithm(config.model_copy(update=single), task, cuts)
    meter, before = Meter(), task.model.read()
    meter.memory.on = True
    held = cuts if ALGORITHMS[config.algorithm].split else None
    try:
        call = local_call(task, algorithm.actions, meter, held)
        algorithm.round(algorithm.init(before), [client], call)
    except RoundVoid:
        pass  # a client that cannot finish is told of in the run, as any that fails
    finally:
        task.model.write(before)
    return meter.memory.take()[0] or 0
