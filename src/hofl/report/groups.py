# SPDX-License-Identifier: Apache-2.0
"""Runs that differ in nothing but their seed, as groups of one label; only runs on the same data meet."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hofl.errors import DataError
from hofl.report.labels import flatten, labels
from hofl.report.rows import RunData, amount


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, and the final metric of each that finished."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def finished(self) -> tuple[RunData, ...]:
        """The runs that are done."""
        return tuple(r for r in self.runs if r.summary and r.status == "done")

    @property
    def values(self) -> list[float]:
        """Final metric of the runs that finished."""
        return [float(r.summary["metric"]["value"]) for r in self.finished if r.summary]

    @property
    def troubles(self) -> list[str]:
        """Statuses of the runs that did not finish, such as ``diverged@r2``."""
        return [r.status for r in self.runs if r.status != "done"]

    @property
    def boundaries(self) -> set[int]:
        """All that its clients had, whoever chose them: the configuration, budgets or the nodes."""
        return {cut for run in self.runs for cut in boundaries(run).values() if cut is not None}

    @property
    def mean(self) -> float | None:
        """Mean over the seeds, None where no run finished."""
        return mean(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over the seeds, None below two."""
        return sd(self.values)

    def found(self, key: str) -> list[float]:
        """A summary field of the runs that have it; an object counts as its sum."""
        return [amount(r.summary[key]) for r in self.runs if r.summary and r.summary.get(key) is not None]

    def average(self, key: str) -> float | None:
        """Mean of a summary field over the runs that have it."""
        return mean(self.found(key))


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.fmean(values) if values else None


def sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation, None below two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def group(runs: Sequence[RunData]) -> list[Group]:
    """Group runs by their configuration without the seed, in the order given, with distinct labels.

    Raises:
        DataError: fewer than one run, a run given twice, or runs on different data.
    """
    if not runs:
        raise DataError("nothing to compare; give at least one run folder")
    if len({r.folder.resolve() for r in runs}) < len(runs):
        raise DataError("a run folder is given twice; name each once")
    _require_same_data(runs)
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(json.dumps(identity(run), sort_keys=True), []).append(run)
    found = [Group("", tuple(members)) for members in groups.values()]
    names = labels([identity(g.runs[0]) for g in found], [g.boundaries for g in found])
    return [replace(g, label=label) for g, label in zip(found, names, strict=True)]


def identity(run: RunData) -> dict[str, Any]:
    """What tells a run from others but for its seed: its settings, and after which rounds it was forked."""
    forks = [s["forked"]["round"] for s in run.manifest.get("sessions") or () if "forked" in s]
    return flatten(run.config) | ({"forked": ",".join(map(str, forks))} if forks else {})


def boundaries(run: RunData) -> dict[tuple[int, int], int | None]:
    """The boundaries of a run, by (first round of a segment, client or tier); None for who is left out.

    They are the configuration's; else what the manifest says that nodes declared, or that clients' budgets
    came to; else those of who has taken part.
    """
    given = (run.config.get("cohort") or {}).get("boundaries")
    if given:
        return {(1, tier): cut for tier, cut in enumerate(given)}
    facts = run.manifest.get("facts") or {}
    if declared := facts.get("boundaries"):
        return {(1, client): cut for client, cut in enumerate(declared)}
    segments = (facts.get("budgets") or {}).get("segments") or ()
    if segments:
        return {(s["first_round"], i): cut for s in segments for i, cut in enumerate(s["boundaries"])}
    seen = ((row.get("cohort") or (), row.get("boundaries") or ()) for row in run.rows)
    return {(1, client): cut for who, cuts in seen for client, cut in zip(who, cuts, strict=False)}


def metric_name(groups: Sequence[Group]) -> str:
    """The metric all runs report."""
    named = (r.summary["metric"]["name"] for g in groups for r in g.runs if r.summary)
    return str(next(named, "metric"))


def evaluation_examples(groups: Sequence[Group]) -> int:
    """How many examples the metric was measured on; 0 where no run finished."""
    counts = (int(r.summary["metric"].get("n") or 0) for g in groups for r in g.runs if r.summary)
    return next(counts, 0)


def _require_same_data(runs: Sequence[RunData]) -> None:
    first = runs[0]
    twins: dict[int, RunData] = {}
    for run in runs:
        twin = twins.setdefault(run.seed, run)
        _require_same(first, run, _SAME)
        _require_same(twin, run, _SAME_SEED)


def _require_same(one: RunData, other: RunData, facts: dict[str, Callable[[RunData], Any]]) -> None:
    for what, pick in facts.items():
        ours, theirs = pick(one), pick(other)
        if ours is not None and theirs is not None and ours != theirs:
            raise DataError(
                f"{other.folder} and {one.folder} differ in their {what}; compare runs on the same data"
            )


def _measured_on(run: RunData) -> Any:
    metric = (run.summary or {}).get("metric")
    return (metric["name"], metric.get("n")) if metric else None


_SAME: dict[str, Callable[[RunData], Any]] = {
    "[task]": lambda run: run.config.get("task"),
    "[partition]": lambda run: run.config.get("partition"),
    "evaluation set": _measured_on,
}
# Data may be drawn by the seed (a subset, a partition), so these are held equal seed by seed.
_SAME_SEED: dict[str, Callable[[RunData], Any]] = {
    "data fingerprint": lambda run: (run.manifest.get("fingerprints") or {}).get("data"),
    "data": lambda run: (run.manifest.get("facts") or {}).get("data_sha256"),
}
