# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling --pilot``: successive halving over the preference, on the real partition and boundaries.

HO-FL App. D.2: short runs that keep the partition, the tiers and who has which device; scored by the mean
over clients of the loss on examples that each client holds back; where that is inconclusive, the smaller
preference. Candidates share their coins, minibatches and directions, so that differences are the policy's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.algorithms import ALGORITHMS
from hofl.build_task import build_task
from hofl.commands.output import print_table, say
from hofl.commands.segments import alone, say_segment
from hofl.config import Config
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.core.sampling import Policy
from hofl.errors import ConfigError
from hofl.protocol.base import Call, RoundVoid
from hofl.report.tables import Table, number
from hofl.runtime.local import local_call
from hofl.session import Session, prepare
from hofl.tasks.base import Task
from hofl.theory.schedules import policy_of_round

Floats = NDArray[np.float64]

HELD_OUT = 5
"""One example in so many is held back, and at least one of a client with two."""
SCORED = 64
"""Held-back examples of a client that are scored."""
SHORT, LEAST = 8, 4
"""The first rung has one round in so many of the run's, and at least so many; later ones twice as many."""
ATTEMPTS = 3
CONCLUSIVE = 2.0
"""Standard errors by which a difference counts."""


@dataclass
class Candidate:
    """One preference and its runs.

    Attributes:
        beta: the preference.
        policy: its shares.
        states: of each run, None for one that was lost.
        losses: of each run and client after the last rung, [seeds, clients].
    """

    beta: float
    policy: Policy
    states: list[Record | None]
    losses: Floats

    @property
    def loss(self) -> float:
        """Mean over runs and clients; infinite if a run was lost."""
        return float(self.losses.mean())


def hold_out(task: Task) -> tuple[Task, list[NDArray[np.int64]]]:
    """The task with fewer examples in each shard, and those that were taken out, by client."""
    kept, held = [], []
    for client, shard in enumerate(task.shards):
        count = min(len(shard) - 1, max(1, len(shard) // HELD_OUT)) if len(shard) else 0
        order = Key.of(task.seed, "evaluation", client).permutation(len(shard))
        held.append(shard[order[:count]])
        kept.append(np.sort(shard[order[count:]]))
    return replace(task, shards=kept), held


def run_pilot(
    config: Config, betas: Sequence[float], seeds: int = 2, round_number: int = 1
) -> dict[str, Any]:
    """Run the pilot of a configuration; nothing is written.

    Args:
        config: of the run that is to come.
        betas: the candidates, ascending.
        seeds: runs of each.
        round_number: of the segment whose boundaries and clients are taken; runs start as the run does.

    Returns:
        the rungs with every candidate's mean loss, the recommended preference, and whether it was decided.

    Raises:
        ConfigError: the method has no preference, or no client has an example to hold back.
    """
    if ALGORITHMS[config.algorithm].boundary != "each":
        raise ConfigError(f"algorithm = '{config.algorithm}' samples uniformly; a preference is HO-FL's")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    task, held = hold_out(build_task(config))
    session, span = alone(prepare(config, task=task), round_number)
    scored = [client for client in session.able if len(held[client])]
    if not scored or not session.policy.preferred:
        why = "all clients cost the same" if scored else "no client has an example to hold back"
        raise ConfigError(f"a pilot would show nothing: {why}")
    start = session.algorithm.init(task.model.read())
    blank = np.zeros((seeds, len(scored)))
    pool = [Candidate(b, policy_of_round(session.policy, b), [start] * seeds, blank.copy()) for b in betas]
    found = _halve(session, pool, held, scored) | span.to_json()
    return found | {"seeds": seeds, "clients": len(scored)}


def _halve(
    session: Session, pool: list[Candidate], held: list[NDArray[np.int64]], scored: list[int]
) -> dict[str, Any]:
    """Rungs of doubling length until one candidate is left."""
    call = local_call(session.seen, session.algorithm.actions)
    done, stage, rungs = 0, max(LEAST, session.config.rounds // SHORT), []
    while True:
        for candidate in pool:
            for run in range(len(candidate.states)):
                state = _advance(session, candidate, run, range(done + 1, done + stage + 1), call)
                candidate.states[run] = state
                candidate.losses[run] = _losses(session.task, state, held, scored)
        done, stage = done + stage, 2 * stage
        level, beaten = rank(pool)
        rungs.append(_rung(done, level + beaten, session, scored))
        if len(pool) <= 2:
            return {"rungs": rungs, "recommended": level[0].beta, "conclusive": bool(beaten)}
        pool = survivors(level, beaten)


def _advance(session: Session, candidate: Candidate, run: int, rounds: range, call: Call) -> Record | None:
    """A run some rounds on; None once it is lost."""
    state = candidate.states[run]
    for round_number in rounds:
        for attempt in range(ATTEMPTS):
            if state is None:
                return None
            places = candidate.policy.draw(session.config.seed + run, round_number, attempt)
            try:
                state = session.algorithm.round(state, [session.able[p] for p in places], call).state
                break
            except RoundVoid:
                state = None if attempt == ATTEMPTS - 1 else state
    return state


@torch.no_grad()
def _losses(task: Task, state: Record | None, held: list[NDArray[np.int64]], scored: list[int]) -> Floats:
    """Mean loss of each client on what it held back; infinite for a lost run."""
    if state is None:
        return np.full(len(scored), math.inf)
    task.model.write(state.arrays["weights/vector"])
    found = []
    for client in scored:
        batch = task.collate(held[client][:SCORED])
        found.append(float(task.loss(task.model.full(batch.inputs), batch)))
    return np.array([loss if math.isfinite(loss) else math.inf for loss in found])


def conclusive(worse: Floats, better: Floats) -> bool:
    """Whether losses [seeds, clients] are above others by more than chance, client by client.

    The standard error has the spread over clients and, with two runs or more, that over runs.
    """
    if not (np.isfinite(worse).all() and np.isfinite(better).all()):
        return bool(np.isfinite(better).all())
    difference = worse - better
    square = 0.0
    for axis in (0, 1):
        means = difference.mean(axis)
        square += float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0
    return float(difference.mean()) > CONCLUSIVE * math.sqrt(square)


def rank(pool: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Those that the best does not beat conclusively, smaller preferences first; and the others by loss."""
    best = min(pool, key=lambda c: (c.loss, c.beta))
    level = [c for c in pool if c is best or not conclusive(c.losses, best.losses)]
    beaten = [c for c in pool if all(c is not other for other in level)]
    return sorted(level, key=lambda c: c.beta), sorted(beaten, key=lambda c: (c.loss, c.beta))


def survivors(level: list[Candidate], beaten: list[Candidate]) -> list[Candidate]:
    """Half of the candidates, ascending: the smallest that is not beaten, and the lowest losses.

    So the last rung holds what would be taken by default against what looks best.
    """
    by_loss = sorted(level[1:] + beaten, key=lambda c: (c.loss, c.beta))
    half = (1 + len(by_loss) + 1) // 2
    return sorted([level[0], *by_loss[: half - 1]], key=lambda c: c.beta)


def _rung(done: int, ranked: list[Candidate], session: Session, scored: list[int]) -> dict[str, Any]:
    cuts = np.array([session.boundaries[client] for client in scored])
    candidates = []
    for c in ranked:
        tiers = {str(b): _finite(float(c.losses[:, cuts == b].mean())) for b in np.unique(cuts)}
        candidates.append({"preference": c.beta, "loss": _finite(c.loss), "loss_by_boundary": tiers})
    return {"rounds": done, "candidates": candidates}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show_pilot(found: dict[str, Any]) -> None:
    """A table a rung, best first, and the recommendation."""
    say(f"pilot: {found['seeds']} runs of each, scored on what {found['clients']} clients held back")
    say_segment(found)
    for rung in found["rungs"]:
        tiers = tuple(rung["candidates"][0]["loss_by_boundary"])
        rows = []
        for c in rung["candidates"]:
            each = (number(c["loss_by_boundary"][tier], 4) for tier in tiers)
            rows.append((f"{c['preference']:g}", number(c["loss"], 4), *each))
        columns = ("preference", "mean client loss", *(f"at boundary {tier}" for tier in tiers))
        print_table(Table(f"after {rung['rounds']} rounds, best first", columns, tuple(rows)))
    chance = "the losses do not differ by more than chance, so the smaller one"
    why = "the lowest loss, by more than chance" if found["conclusive"] else chance
    say(f"recommended: cohort.preference = {found['recommended']:g} ({why}); keep it for the whole run")
