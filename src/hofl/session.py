# SPDX-License-Identifier: Apache-2.0
"""A run from a configuration, without a terminal: prepare it, then take its rows one by one."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hofl import budgets
from hofl.algorithms import ALGORITHMS
from hofl.build import (
    OUT,
    Draw,
    boundaries_of,
    build_algorithm,
    check_probes,
    leaves_device,
    pooled,
    preference_of,
    probes_of,
    require_local_data,
    steps_of,
)
from hofl.build_task import build_task
from hofl.config import Config, about, dump
from hofl.core.record import Record
from hofl.core.sampling import Policy
from hofl.protocol.base import Algorithm, Call
from hofl.protocol.measuring import Preferred
from hofl.protocol.split import smashed
from hofl.rebuilding import bare as bare
from hofl.rebuilding import rebuild as rebuild
from hofl.runtime import folder, loop, prints
from hofl.runtime.folder import Settings
from hofl.runtime.fork import fork
from hofl.runtime.local import IN_PROCESS, local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task
from hofl.theory.traffic import Sizes

_PROOF = 2
"""Examples in the batch on which a model's cut is checked against the whole."""


class Engine(NamedTuple):
    """Where the clients of a session are.

    Attributes:
        says: what the manifest says of it, after the method's paradigm.
        call: (session, meter) -> what the rounds ask through.
        apart: whether clients are on machines of their own, so that what the server sees matters.
    """

    says: str
    call: "Callable[[Session, Meter], Call]"
    apart: bool = False


@dataclass(frozen=True)
class Session:
    """Everything a run is made of, checked and in memory; nothing is written yet.

    Attributes:
        config: what it was made from.
        task: clients, data and model.
        seen: the task as the method sees it: one client for a centralised one, else ``task``.
        algorithm: what a round is.
        boundaries: one a client; ``OUT`` where a client is left out.
        policy: selection shares over ``able``.
        able: numbers of the clients that can be drawn.
        draw: the cohort of a round.
        engine: where the clients are.
        segments: where budgets change; boundaries, policy and able are those of the first.
        assigned: what the clients' budgets came to; None where boundaries are given.
    """

    config: Config
    task: Task
    seen: Task
    algorithm: Algorithm
    boundaries: tuple[int, ...]
    policy: Policy
    able: list[int]
    draw: Draw
    engine: Engine
    segments: tuple[budgets.Segment, ...]
    assigned: budgets.Assigned | None

    @property
    def cuts(self) -> list[int]:
        """Every boundary that somebody has in some segment, ascending."""
        return sorted({cut for segment in self.segments for cut in segment.boundaries} - {OUT})

    def during(self, round_number: int) -> "Session":
        """The session with the boundaries, the clients and the policy of a round's segment."""
        now = budgets.at(self.segments, round_number)
        return replace(self, boundaries=now.boundaries, policy=now.policy, able=now.able)

    def alone(self, round_number: int) -> "Session":
        """The session as if a round's segment were the whole run: no budget changes."""
        now = replace(budgets.at(self.segments, round_number), first=1)
        return _session(self.config, self.task, self.seen, self.engine, (now,), self.assigned)

    def preference(self, round_number: int, state: Record) -> float | None:
        """Beta in force in a round after this state; None of a method that prefers nobody."""
        if ALGORITHMS[self.config.algorithm].boundary != "each":
            return None
        return preference_of(self.config, budgets.at(self.segments, round_number).policy, round_number, state)

    @property
    def settings(self) -> Settings:
        """What the loop and the manifest are told."""
        return settings_of(self.config, self.engine.says)

    @cached_property
    def sizes(self) -> dict[int, Sizes]:
        """What a participation moves by boundary, of a client in step; measured once, on one full batch."""
        return {boundary: self._sizes(boundary) for boundary in self.cuts}

    def _sizes(self, boundary: int) -> Sizes:
        config, layout, method = self.config, self.task.model.layout, ALGORITHMS[self.config.algorithm]
        d_c, probes = layout.bottom_size(boundary), probes_of(config)
        counts = Sizes(
            layout.size,
            d_c,
            steps=steps_of(config),
            probes=probes,
            every=config.split.upload_every,
            models=config.zo.average == "models",
        )
        if not method.split:
            return counts
        batch = self.seen.batch(self.able[0], 0, config.local.batch)
        message = smashed(self.seen, batch, self.task.model.bottom(batch.inputs, boundary), config.split.wire)
        labels = sum(a.nbytes for name, a in message.items() if name.startswith("labels/"))
        head = self.algorithm.init(self.task.model.read()).arrays.get("weights/auxiliary", np.empty(0))
        return replace(counts, d_a=head.size, activation=message["activations/z"].nbytes, labels=labels)

    def fork(self, old: Path, new: Path) -> None:
        """Begin a new folder from a run's last saved state, see :func:`hofl.runtime.fork.fork`."""
        fork(old, new, self.settings, self.task, self.algorithm.init(self.task.model.read()))

    def rows(self, where: Path, *, resume: bool, warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Run; yields each round's row once it is stored, see :func:`hofl.runtime.loop.run`."""
        if resume:
            folder.open_folder(where, self.settings.config, resume)
            budgets.require_same_segments(where, self.task.facts)
        meter = Meter()
        call = self.engine.call(self, meter)
        parts = loop.Parts(self.task, self.algorithm, call, meter, self.draw, warn, self.preference)
        return loop.run(parts, where, self.settings, resume=resume)


def _in_process(session: Session, meter: Meter) -> Call:
    cuts = session.boundaries if ALGORITHMS[session.config.algorithm].split else None
    return local_call(session.seen, session.algorithm.actions, meter, cuts)


LOCAL = Engine(IN_PROCESS.removeprefix("federated"), _in_process)
"""Every client in this process."""


def prepare(
    config: Config,
    engine: Engine = LOCAL,
    task: Task | None = None,
    declared: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
) -> Session:
    """Build the task and the algorithm and check one against the other.

    Args:
        config: of the run.
        engine: where the clients are.
        task: built already; None builds it.
        declared: the boundary that each client said it can afford, where the run leaves it to them.
        memory: bytes that each said it has, 0 for none; read where it declares -1 for a boundary.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    if engine is LOCAL:
        require_local_data(config)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    task = task or build_task(config)
    seen = pooled(config, task)
    assigned = budgets.assign(config, seen, declared, memory)
    if assigned:
        task = replace(task, facts={**task.facts, "budgets": assigned.facts(seen.clients)})
    given = assigned or boundaries_of(config, task.model.layout, len(seen.clients), declared)
    if config.cohort.assign == "declared" and isinstance(given, tuple):
        task = replace(task, facts={**task.facts, "boundaries": list(given)})
    segments = budgets.segments_of(config, seen, given)
    made = _session(config, task, seen, engine, segments, assigned)
    with about("cohort.boundaries"):
        for boundary in made.cuts:
            task.model.check_boundary(boundary)
    inputs = seen.batch(made.able[0], 0, _PROOF).inputs
    with about("model.source"):
        task.model.self_test(inputs)
        check_probes(config, task, made.cuts, inputs)
    return made


def _session(
    config: Config,
    task: Task,
    seen: Task,
    engine: Engine,
    segments: tuple[budgets.Segment, ...],
    assigned: budgets.Assigned | None,
) -> Session:
    measured = _preferred(segments) if config.cohort.schedule == "measured" else None
    algorithm = build_algorithm(config, seen, budgets.cuts_of(config, segments), measured)
    draw, first = budgets.draw_of(config, seen, segments), segments[0]
    own = (first.boundaries, first.policy, first.able)
    return Session(config, task, seen, algorithm, *own, draw, engine, segments, assigned)


def _preferred(segments: tuple[budgets.Segment, ...]) -> Preferred:
    """Whom the policy of a round prefers."""
    chosen = {s.first: frozenset(s.able[place] for place in s.policy.preferred) for s in segments}
    return lambda t, client: client in chosen[budgets.at(segments, t + 1).first]


def run_to_end(config: Config, where: Path, resume: bool) -> dict[str, Any]:
    """Run or resume without a word but Python warnings; returns the summary.

    Raises:
        HoflError: bad input. RunFailed: diverged, or too few clients.
    """
    session = prepare(config)
    for _ in session.rows(where, resume=resume, warn=warnings.warn):
        pass
    summary: dict[str, Any] = json.loads((where / folder.SUMMARY).read_bytes())
    return summary


def settings_of(config: Config, says: str = LOCAL.says) -> Settings:
    """What the loop is told of a configuration, and of the engine in words."""
    method = ALGORITHMS[config.algorithm]
    probed = probes_of(config) > 0 and config.zo.estimator in ("forward", "central")
    return Settings(
        algorithm=config.algorithm,
        model=prints.at_home(config.model.source or config.task.name),
        seed=config.seed,
        rounds=config.rounds,
        config=dump(config),
        mode=method.paradigm + says,
        leaves_device=leaves_device(config),
        labels_at="clients and server" if method.split else "clients",
        top_at=f"server: {method.top}" if method.split else "clients",
        evaluate_every=config.evaluation.every,
        dtype=config.model.dtype,
        radius=config.zo.radius if probed else None,
        ledger=config.run.ledger,
    )
