# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: grouped by everything but the seed, and a winner only where there is one."""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hofl.errors import DataError
from hofl.report.rows import RunData, amount
from hofl.report.tables import Table, number, seconds, size, spread

_NO_PART = {"seed", "run"}

FEW_SEEDS = "not separable: needs two seeds or more on each side"
"""How a verdict ends that cannot be given."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only, and the final metric of each that finished."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def values(self) -> list[float]:
        """Final metric of the runs that finished."""
        return [float(r.summary["metric"]["value"]) for r in self.runs if r.summary and r.status == "done"]

    @property
    def troubles(self) -> list[str]:
        """Statuses of the runs that did not finish, such as ``diverged@r2``."""
        return [r.status for r in self.runs if r.status != "done"]

    @property
    def mean(self) -> float | None:
        """Mean over the seeds, None where no run finished."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over the seeds, None below two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def average(self, key: str) -> float | None:
        """Mean of a summary field over the runs that have it; objects count as their sum."""
        found = [amount(r.summary[key]) for r in self.runs if r.summary and r.summary.get(key) is not None]
        return statistics.fmean(found) if found else None


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
        groups.setdefault(_identity(run), []).append(run)
    members = [tuple(found) for found in groups.values()]
    return [Group(label, found) for label, found in zip(_labels(members), members, strict=True)]


def verdicts(groups: Sequence[Group]) -> list[str]:
    """One sentence for each pair; no winner is named where the mean ± SD intervals overlap.

    With one seed everywhere there is nothing to say of a pair, and one sentence says so.
    """
    if len(groups) > 1 and not any(group.troubles or len(group.runs) > 1 for group in groups):
        return [f"no pair: {FEW_SEEDS}"]
    found = [_verdict(a, b) for a, b in itertools.combinations(groups, 2)]
    few = [line for line in found if line.endswith(FEW_SEEDS)]
    if len(few) <= 3:
        return found
    return [*(line for line in found if line not in few), f"{len(few)} other pairs: {FEW_SEEDS}"]


def metric_name(groups: Sequence[Group]) -> str:
    """The metric all runs report."""
    named = (r.summary["metric"]["name"] for g in groups for r in g.runs if r.summary)
    return str(next(named, "metric"))


def summary_table(groups: Sequence[Group]) -> Table:
    """One line a group: the metric, what it is compared with, and what it cost."""
    columns = ("runs of", "n", metric_name(groups), "balanced", "zero-shot", "majority", "frozen control")
    costs = ("examples seen", "uplink", "downlink", "peak memory", "time", "status")
    rows = tuple(_line(g, control(g, groups)) for g in groups)
    return Table(f"Final model, mean ± sample SD over seeds; {_scale(groups)}", columns + costs, rows)


def seed_table(groups: Sequence[Group]) -> Table:
    """One line a run."""
    rows = []
    for g in groups:
        for run in sorted(g.runs, key=lambda r: r.seed):
            value = float(run.summary["metric"]["value"]) if run.summary and run.status == "done" else None
            sha = str((run.summary or {}).get("final_sha256") or "–")[:12]
            shown = number(value) if value is not None else run.status
            rows.append((g.label, str(run.seed), shown, sha, str(run.folder)))
    columns = ("runs of", "seed", metric_name(groups), "final model", "folder")
    return Table("Every run", columns, tuple(rows), frozenset({0, 3, 4}))


def to_json(groups: Sequence[Group]) -> dict[str, Any]:
    """The comparison as plain values."""
    quality = ("balanced_accuracy", "zero_shot", "majority_class")
    fields = (*quality, "examples_seen", "bytes_up", "bytes_down", "peak_bytes", "seconds")
    listed = []
    for g in groups:
        base = control(g, groups)
        listed.append(
            {"label": g.label, "n": len(g.values), "mean": g.mean, "sd": g.sd, "values": g.values}
            | {"frozen_control": base.mean if base else None, "not_finished": g.troubles}
            | {key: g.average(key) for key in fields}
            | {"runs": [{"folder": str(r.folder), "seed": r.seed, "status": r.status} for r in g.runs]}
        )
    return {
        "metric": metric_name(groups),
        "evaluation_examples": evaluation_examples(groups),
        "groups": listed,
        "verdicts": verdicts(groups),
    }


def evaluation_examples(groups: Sequence[Group]) -> int:
    """How many examples the metric was measured on; 0 where no run finished."""
    counts = (int(r.summary["metric"].get("n") or 0) for g in groups for r in g.runs if r.summary)
    return next(counts, 0)


def control(of: Group, groups: Sequence[Group]) -> Group | None:
    """The frozen-bottom control of a group: ``zo.estimator = "none"``, all else outside ``[zo]`` the same.

    None for a control itself and where no client has a bottom.
    """
    flat = _flat(of.runs[0])
    if flat.get("zo.estimator") in (None, "none") or not any(flat.get("cohort.boundaries", ())):
        return None
    frozen = [g for g in groups if _flat(g.runs[0]).get("zo.estimator") == "none"]
    return next((g for g in frozen if _unprobed(_flat(g.runs[0])) == _unprobed(flat)), None)


def _unprobed(flat: dict[str, Any]) -> dict[str, Any]:
    """What is not about probes: a frozen bottom has no use for ``[zo]``."""
    return {key: value for key, value in flat.items() if not key.startswith("zo.")}


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


def _identity(run: RunData) -> str:
    return json.dumps(_flat(run), sort_keys=True)


def _flat(run: RunData) -> dict[str, Any]:
    """The configuration by dotted key, without what is no part of a group's identity.

    What ``[zo.optimizer]`` has in common with ``[optimizer]`` is left out: it says nothing new.
    """
    flat: dict[str, Any] = {}

    def _walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                _walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    _walk("", {k: v for k, v in run.config.items() if k not in _NO_PART})
    return {k: v for k, v in flat.items() if not k.startswith("zo.optimizer.") or flat.get(k[3:]) != v}


def _labels(groups: Sequence[tuple[RunData, ...]]) -> list[str]:
    """Algorithm, estimator and boundaries; where two agree, also every key that tells them apart."""
    flats = [_flat(found[0]) for found in groups]
    names = [_name(flat) for flat in flats]
    keys = sorted({key for flat in flats for key in flat})
    labels = []
    for name, flat in zip(names, flats, strict=True):
        twins = [f for n, f in zip(names, flats, strict=True) if n == name]
        telling = [k for k in keys if any(f.get(k) != flat.get(k) for f in twins)]
        labels.append(" ".join([name, *(f"{k}={_short(flat.get(k))}" for k in telling)]))
    return labels


def _name(flat: dict[str, Any]) -> str:
    boundaries = flat.get("cohort.boundaries", ())
    name = str(flat.get("algorithm", "?"))
    shown = ",".join(map(str, boundaries))
    return f"{name} {flat.get('zo.estimator', '?')} b={shown}" if any(boundaries) else name


def _short(value: Any) -> str:
    return "unset" if value is None else str(value).replace(" ", "")


def _line(g: Group, base: Group | None) -> tuple[str, ...]:
    trouble = f" ({', '.join(sorted(set(g.troubles)))})" if g.troubles else ""
    shown = (spread(g.mean, g.sd) if g.values else "–") + trouble
    examples = g.average("examples_seen")
    return (
        *(g.label, str(len(g.values)), shown),
        *(number(g.average(key)) for key in ("balanced_accuracy", "zero_shot", "majority_class")),
        *(spread(base.mean, base.sd) if base else "–", "–" if examples is None else f"{examples:.0f}"),
        *(size(g.average("bytes_up")), size(g.average("bytes_down")), size(g.average("peak_bytes"))),
        *(seconds(g.average("seconds")), f"{len(g.values)} of {len(g.runs)} done"),
    )


def _scale(groups: Sequence[Group]) -> str:
    n = evaluation_examples(groups)
    return f"{n} evaluation examples, one is {1 / n:.4f}" if n else "no run has finished"


def _verdict(a: Group, b: Group) -> str:
    pair = f"{a.label} / {b.label}"
    if a.troubles or b.troubles:
        return f"{pair}: not separable: {', '.join(sorted({*a.troubles, *b.troubles}))}"
    if a.mean is None or b.mean is None or a.sd is None or b.sd is None:
        return f"{pair}: {FEW_SEEDS}"
    best, other = (a, b) if a.mean > b.mean else (b, a)
    if abs(a.mean - b.mean) <= a.sd + b.sd:
        return f"{pair}: not separable: their mean ± SD intervals overlap"
    gap = f"by {abs(a.mean - b.mean):.3f}; their mean ± SD intervals do not overlap"
    return f"{pair}: {best.label} is ahead of {other.label} {gap}"
