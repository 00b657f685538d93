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
from hofl.tasks.metric_names import LOWER_IS_BETTER
from hofl.theory.computation import HYBRID


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
        groups.setdefault(json.dumps(flatten(run.config), sort_keys=True), []).append(run)
    found = [Group("", tuple(members)) for members in groups.values()]
    names = labels([flatten(g.runs[0].config) for g in found], [g.boundaries for g in found])
    return [replace(g, label=label) for g, label in zip(found, names, strict=True)]


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


def control(of: Group, groups: Sequence[Group]) -> Group | None:
    """The frozen-bottom control of a group: ``zo.estimator = "none"``, all else outside ``[zo]`` the same.

    None for a control itself, and for a method that does not probe bottoms under a trained top. Where budgets
    or nodes choose the boundaries, the control's clients must have got the same ones: it needs less memory,
    so a budget may allow it another.
    """
    flat = flatten(of.runs[0].config)
    hybrid = flat.get("algorithm") in HYBRID and any(of.boundaries)
    if not hybrid or flat.get("zo.estimator") in (None, "none"):
        return None
    others = [(g, flatten(g.runs[0].config)) for g in groups]
    frozen = [(g, found) for g, found in others if found.get("zo.estimator") == "none"]
    alike = (g for g, found in frozen if _unprobed(found) == _unprobed(flat))
    return next((g for g in alike if _same_boundaries(of, g)), None)


def recovery(of: Group, groups: Sequence[Group]) -> float | None:
    """rho = (hybrid - control) / (FedAvg - control): the part of what a trained bottom is worth that it got.

    Means of the final metric over the seeds that all three have. None without a control and a FedAvg run
    that are alike in all else, and where FedAvg is not ahead of the control.
    """
    frozen = control(of, groups)
    full = None if frozen is None else _full(of, groups)
    if frozen is None or full is None:
        return None
    by_seed = [
        {r.seed: float(r.summary["metric"]["value"]) for r in g.finished if r.summary}
        for g in (of, frozen, full)
    ]
    shared = set.intersection(*map(set, by_seed))
    if not shared:
        return None
    ours, least, most = (statistics.fmean(found[seed] for seed in shared) for found in by_seed)
    gained = least - most if metric_name([of]) in LOWER_IS_BETTER else most - least
    return (ours - least) / (most - least) if gained > 0 else None


def _full(of: Group, groups: Sequence[Group]) -> Group | None:
    """FedAvg on the same work: its boundary is 0, and with checkpointing its bits are the same."""
    mine = _common(flatten(of.runs[0].config))
    others = ((g, flatten(g.runs[0].config)) for g in groups)
    return next(
        (g for g, flat in others if flat.get("algorithm") == "fedavg" and _common(flat) == mine), None
    )


def _common(flat: dict[str, Any]) -> dict[str, Any]:
    """What a hybrid run and FedAvg can have in common."""
    own = ("zo.", "split.", "algorithm", "model.checkpointing", "cohort.")
    return {
        k: v for k, v in flat.items() if not k.startswith(own) or k in ("cohort.size", "cohort.weighting")
    }


def metric_name(groups: Sequence[Group]) -> str:
    """The metric all runs report."""
    named = (r.summary["metric"]["name"] for g in groups for r in g.runs if r.summary)
    return str(next(named, "metric"))


def evaluation_examples(groups: Sequence[Group]) -> int:
    """How many examples the metric was measured on; 0 where no run finished."""
    counts = (int(r.summary["metric"].get("n") or 0) for g in groups for r in g.runs if r.summary)
    return next(counts, 0)


def _unprobed(flat: dict[str, Any]) -> dict[str, Any]:
    """What is not about probes: a frozen bottom has no use for ``[zo]``."""
    return {key: value for key, value in flat.items() if not key.startswith("zo.")}


def _same_boundaries(one: Group, other: Group) -> bool:
    """Whether no client has another boundary in the other group's run of the same seed."""
    theirs = {run.seed: boundaries(run) for run in other.runs}
    pairs = ((boundaries(run), theirs[run.seed]) for run in one.runs if run.seed in theirs)
    return all(a[key] == b[key] for a, b in pairs for key in a.keys() & b.keys())


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
