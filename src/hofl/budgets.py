# SPDX-License-Identifier: Apache-2.0
"""From the memory that each client has to the boundary it trains at, segment by segment of a run.

A client gets the smallest boundary whose planned peak, times a margin, fits its budget. A dry participation
at each boundary so given is then measured. Where it takes more than the budget, the client moves on to the
next boundary that fits. Where none fits it is left out. Methods with one boundary take the smallest for all.

Budgets may change between rounds as the configuration says, so the segments of a run are known when it
starts: boundaries, and with them the sampling policy, are functions of (configuration, round).
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.algorithms.ho_fl import Boundaries
from hofl.build import OUT, Draw, active, boundaries_of, build_draw, build_policy, deal
from hofl.config import Config
from hofl.core.record import Record
from hofl.core.sampling import Policy
from hofl.errors import ConfigError, RecordError
from hofl.memory.units import bytes_of
from hofl.needs import Needs, dry_run, plan_needs
from hofl.report.tables import size
from hofl.runtime.folder import MANIFEST, read_manifest
from hofl.tasks.base import Task

Bytes = tuple[int, ...]
"""The budget of each client; 0 where its boundary does not follow from one."""
Cuts = tuple[int, ...]
"""The boundary of each client; ``OUT`` where it is left out."""


@dataclass(frozen=True)
class Assigned:
    """What budgets came to.

    Attributes:
        needs: bytes by boundary, planned and measured.
        firsts: the first round of each segment, ascending from 1.
        budgets: of each segment.
        planned: boundaries of each segment by the plan alone.
        cuts: boundaries of each segment in the run.
    """

    needs: Needs
    firsts: tuple[int, ...]
    budgets: tuple[Bytes, ...]
    planned: tuple[Cuts, ...]
    cuts: tuple[Cuts, ...]

    def left_out(self, clients: Sequence[str], segment: int = 0) -> dict[str, str]:
        """Client -> why no boundary fits its budget in a segment."""
        rows = zip(clients, self.budgets[segment], self.cuts[segment], strict=True)
        return {name: self.needs.lacking(budget) for name, budget, cut in rows if cut == OUT}

    def moved(self, clients: Sequence[str], segment: int = 0) -> dict[str, tuple[int, int, str]]:
        """Client -> the boundary by the plan, the one it has, and why."""
        rows = zip(clients, self.budgets[segment], self.planned[segment], self.cuts[segment], strict=True)
        measured = self.needs.measured
        return {
            name: (was, now, f"a dry run took {size(measured[was])}, more than its {size(budget)}")
            for name, budget, was, now in rows
            if OUT not in (was, now) and was != now
        }

    def facts(self, clients: Sequence[str]) -> dict[str, Any]:
        """For the manifest: bytes by boundary, and who has which, has moved or is out in each segment."""
        return {
            "margin": self.needs.margin,
            "planned_bytes": {str(b): peak for b, peak in self.needs.planned.items()},
            "measured_bytes": {str(b): peak for b, peak in sorted(self.needs.measured.items())},
            "segments": [
                {
                    "first_round": first,
                    "budgets": list(self.budgets[k]),
                    "boundaries": [None if cut == OUT else cut for cut in self.cuts[k]],
                    "moved": {name: list(how) for name, how in self.moved(clients, k).items()},
                    "left_out": self.left_out(clients, k),
                }
                for k, first in enumerate(self.firsts)
            ],
        }


@dataclass(frozen=True)
class Segment:
    """Rounds in which nobody's boundary moves.

    Attributes:
        first: the round it begins with.
        boundaries: one a client; ``OUT`` where it is left out.
        able: numbers of the clients that can be drawn.
        policy: selection shares over ``able``.
    """

    first: int
    boundaries: Cuts
    able: list[int]
    policy: Policy


def stated(config: Config, clients: Sequence[str]) -> tuple[tuple[int, Bytes], ...]:
    """The first round and the budgets of every segment that the configuration has, in order.

    Raises:
        ConfigError: more budgets than clients, or a change of an unknown client's.
    """
    given, count = config.cohort.budgets, len(clients)
    if len(given) > count:
        raise ConfigError(f"cohort.budgets names {len(given)} sizes for {count} clients; name one each")
    tiers = tuple(range(len(given)))
    places = tiers if len(given) == count else deal(config.seed, tiers, count)
    now = [bytes_of(given[place]) for place in places]
    found = {1: tuple(now)}
    for first, which, text in sorted(config.cohort.budget_changes, key=lambda change: change[0]):
        keys: Sequence[int | str] = places if isinstance(which, int) else clients
        if which not in keys:
            raise ConfigError(
                f'cohort.budget_changes: there is no client "{which}"; there are {", ".join(clients[:12])}'
                + ", ..." * (count > 12)
            )
        now = [bytes_of(text) if key == which else kept for key, kept in zip(keys, now, strict=True)]
        found[first] = tuple(now)
    return tuple(found.items())


def fitted(needs: Needs, budgets: Bytes, fixed: Cuts, *, shared: bool = False) -> Cuts:
    """The smallest boundary that fits each budget.

    Args:
        needs: bytes by boundary.
        budgets: of each client.
        fixed: the boundary of a client without a budget.
        shared: whether all that can take part get one boundary, the smallest that fits them all.
    """
    own = [needs.smallest(budget) if budget else cut for budget, cut in zip(budgets, fixed, strict=True)]
    if shared:
        least = min((b for b, cut in zip(budgets, own, strict=True) if cut != OUT), default=0)
        own = [cut if cut == OUT else needs.smallest(least) for cut in own]
    return tuple(own)


def settle(
    needs: Needs,
    segments: Sequence[tuple[int, Bytes]],
    fixed: Cuts,
    *,
    shared: bool = False,
    dry: Callable[[int], int] | None = None,
) -> Assigned:
    """Boundaries for all segments, a dry participation at each of them measured.

    What was measured counts from then on, so a client that would take more than its budget gets the next
    boundary that fits; that one is measured too.

    Args:
        needs: of the plan.
        segments: the first round and the budgets of each.
        fixed, shared: see :func:`fitted`.
        dry: boundary -> bytes that a dry participation took; None where nothing can be run.
    """
    firsts, budgets = (tuple(column) for column in zip(*segments, strict=True))

    def all_of(needs: Needs) -> tuple[Cuts, ...]:
        """Boundaries of every segment."""
        return tuple(fitted(needs, each, fixed, shared=shared) for each in budgets)

    def untried(needs: Needs, cuts: tuple[Cuts, ...]) -> list[int]:
        """Boundaries that a budget led to and nobody has tried."""
        pairs = [
            pair for each, own in zip(cuts, budgets, strict=True) for pair in zip(each, own, strict=True)
        ]
        return sorted({cut for cut, budget in pairs if budget and cut != OUT} - needs.measured.keys())

    planned = cuts = all_of(needs)
    while dry and (new := untried(needs, cuts)):
        needs = replace(needs, measured=needs.measured | {boundary: dry(boundary) for boundary in new})
        cuts = all_of(needs)
    return Assigned(needs, firsts, budgets, planned, cuts)


def assign(
    config: Config,
    task: Task,
    declared: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    margin: float | None = None,
) -> Assigned | None:
    """What the budgets of a run come to; None where no boundary follows from one.

    Args:
        config: its method, ``[cohort]`` and all that a participation depends on.
        task: as the method sees it.
        declared: the boundary that each client said it can afford, -1 for none.
        memory: bytes that each said it has, 0 for none; read where it declares no boundary.
        margin: on planned peaks; None for ``cohort.margin``.

    Raises:
        ConfigError: a budget is wrong, or nobody can take part; says how much is needed.
    """
    fixed = boundaries_of(config, task.model.layout, len(task.clients), declared, memory)
    if OUT not in fixed:
        return None
    own = tuple(b if cut == OUT else 0 for b, cut in zip(memory or (), fixed, strict=False))
    segments = stated(config, task.clients) if config.cohort.assign == "budgets" else ((1, own),)
    needs = plan_needs(config, task, config.cohort.margin if margin is None else margin)
    here = config.partition.kind != "nodes"  # a dry run needs the data
    shared = ALGORITHMS[config.algorithm].split
    found = settle(
        needs, segments, fixed, shared=shared, dry=(lambda b: dry_run(config, task, b)) if here else None
    )
    sizes = [len(shard) for shard in task.shards]
    for first, budgets, cuts in zip(found.firsts, found.budgets, found.cuts, strict=True):
        if not active(sizes, cuts):
            since = f" from round {first} on" if first > 1 else ""
            key = "cohort.budgets" if config.cohort.assign == "budgets" else "cohort.assign = 'declared'"
            raise ConfigError(f"{key}: no client can take part{since}: {found.needs.lacking(max(budgets))}")
    return found


def segments_of(config: Config, task: Task, found: Assigned | Cuts) -> tuple[Segment, ...]:
    """The segments of a run with their policies.

    Raises:
        ConfigError: the cohort, or the quorum, is larger than those that can take part in one.
    """
    pairs = zip(found.firsts, found.cuts, strict=True) if isinstance(found, Assigned) else [(1, found)]
    sizes, made = [len(shard) for shard in task.shards], []
    for first, cuts in pairs:
        try:
            policy = build_policy(config, task.model.layout, cuts, sizes)
        except ConfigError as error:
            raise ConfigError(f"{error} from round {first} on" if first > 1 else str(error)) from None
        made.append(Segment(first, cuts, active(sizes, cuts), policy))
    return tuple(made)


def at(segments: Sequence[Segment], round_number: int) -> Segment:
    """The segment that a round belongs to; round 0 belongs to the first."""
    return segments[max(0, bisect_right([s.first for s in segments], round_number) - 1)]


def draw_of(config: Config, task: Task, segments: Sequence[Segment]) -> Draw:
    """Who takes part in a round: a pure function of (seed, round, attempt, state before it)."""
    sizes = [len(shard) for shard in task.shards]
    draws = {s.first: build_draw(config, s.policy, sizes, s.boundaries) for s in segments}

    def draw(round_number: int, attempt: int = 0, state: Record | None = None) -> list[int]:
        """The cohort by the policy of the round's segment."""
        return draws[at(segments, round_number).first](round_number, attempt, state)

    return draw


def cuts_of(config: Config, segments: Sequence[Segment]) -> Boundaries:
    """The boundaries as the algorithm takes them."""
    cuts = segments[0].boundaries
    if ALGORITHMS[config.algorithm].split:  # all have the same, and those left out no other
        return (max(cuts),) * len(cuts)

    def cut_of(t: int, client: int) -> int:
        """The boundary of a client in round t, counted from 0."""
        return at(segments, t + 1).boundaries[client]

    return cut_of if len(segments) > 1 else cuts


def require_same_segments(where: Path, facts: dict[str, Any]) -> None:
    """Hold a resumed run to the boundaries it had: another machine may measure otherwise.

    Raises:
        RecordError: they are others now.
    """
    if not (where / MANIFEST).exists() or "budgets" not in facts:
        return
    stored = read_manifest(where).get("facts", {}).get("budgets", {}).get("segments")
    was, now = (
        [(s["first_round"], s["boundaries"]) for s in each or ()]
        for each in (stored, json.loads(json.dumps(facts["budgets"]["segments"])))
    )
    if was != now:
        raise RecordError(
            f"{where}: the boundaries that fit the budgets are not those this run had: a dry run takes "
            "another size here; resume it on the machine it began on, or start a new folder"
        )
