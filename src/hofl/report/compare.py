# SPDX-License-Identifier: Apache-2.0
"""Groups of runs side by side: by examples and bytes, and a winner only where there is one."""

import itertools
from collections.abc import Sequence
from typing import Any

from hofl.report.budgets import budget_table, budget_values, client_forwards
from hofl.report.groups import Group, evaluation_examples, mean, metric_name
from hofl.report.recovery import control, recovery, recovery_table
from hofl.report.tables import Table, count, number, seconds, size, spread
from hofl.tasks.metric_names import LOWER_IS_BETTER, beside

FEW_SEEDS = "not separable: needs two seeds or more on each side"
"""How a verdict ends that cannot be given."""

RUNS = "Every run"
"""Title of the table with a line for each."""

_EACH = 7
"""Groups of which every pair gets a verdict."""


def verdicts(groups: Sequence[Group]) -> list[str]:
    """One sentence for each pair; no winner is named where the mean ± SD intervals overlap.

    Of more than seven groups: each with its frozen-bottom control, and with the best. With one seed
    everywhere there is nothing to say of a pair, and one sentence says so.
    """
    if len(groups) > 1 and not any(group.troubles or len(group.runs) > 1 for group in groups):
        return [f"no pair: {FEW_SEEDS}"]
    found = [_verdict(a, b) for a, b in _pairs(groups)]
    few = [line for line in found if line.endswith(FEW_SEEDS)]
    if len(few) <= 3:
        return found
    return [*(line for line in found if line not in few), f"{len(few)} other pairs: {FEW_SEEDS}"]


def tables(groups: Sequence[Group]) -> list[Table]:
    """All there is to show: final models, what bottoms contribute, equal budgets, every run."""
    recovered = recovery_table(groups)
    between = [budget_table(groups)] if len(groups) > 1 else []
    return [summary_table(groups), *([recovered] if recovered else []), *between, seed_table(groups)]


def summary_table(groups: Sequence[Group]) -> Table:
    """One line a group: the metric, what it is compared with, and what it cost."""
    metric = metric_name(groups)
    columns = (
        "runs of",
        "n",
        metric,
        beside(metric)[0],
        "zero-shot",
        "majority",
        "frozen control",
        "recovered",
    )
    spent = ("examples seen", "uplink", "downlink", "client peak memory", "client forwards", "time", "status")
    rows = tuple(_line(g, control(g, groups), recovery(g, groups), beside(metric)[1]) for g in groups)
    return Table(f"Final model, mean ± sample SD over seeds; {_scale(groups)}", columns + spent, rows)


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
    return Table(RUNS, columns, tuple(rows), frozenset({0, 3, 4}))


def to_json(groups: Sequence[Group]) -> dict[str, Any]:
    """The comparison as plain values."""
    quality = (beside(metric_name(groups))[1], "zero_shot", "majority_class")
    fields = (*quality, "examples_seen", "bytes_up", "bytes_down", "peak_bytes", "seconds")
    listed = []
    for g in groups:
        base = control(g, groups)
        listed.append(
            {"label": g.label, "n": len(g.values), "mean": g.mean, "sd": g.sd, "values": g.values}
            | {"frozen_control": base.mean if base else None, "bottom_recovery": recovery(g, groups)}
            | {"not_finished": g.troubles}
            | {key: g.average(key) for key in fields}
            | {"client_peak_bytes": _client_peak(g), "client_forwards": _forwards(g)}
            | {"runs": [{"folder": str(r.folder), "seed": r.seed, "status": r.status} for r in g.runs]}
        )
    return {
        "metric": metric_name(groups),
        "evaluation_examples": evaluation_examples(groups),
        "groups": listed,
        "equal_budgets": budget_values(groups),
        "verdicts": verdicts(groups),
    }


def _line(g: Group, base: Group | None, recovered: float | None, second: str) -> tuple[str, ...]:
    trouble = f" ({', '.join(sorted(set(g.troubles)))})" if g.troubles else ""
    shown = (spread(g.mean, g.sd) if g.values else "–") + trouble
    return (
        *(g.label, str(len(g.values)), shown),
        *(number(g.average(key)) for key in (second, "zero_shot", "majority_class")),
        *(spread(base.mean, base.sd) if base else "–", number(recovered, 2)),
        count(g.average("examples_seen")),
        *(size(g.average("bytes_up")), size(g.average("bytes_down"))),
        *(size(_client_peak(g)), count(_forwards(g))),
        *(seconds(g.average("seconds")), f"{len(g.values)} of {len(g.runs)} done"),
    )


def _client_peak(g: Group) -> float | None:
    """Of the largest client in any of the runs, bytes."""
    return max(g.found("client_peak_bytes"), default=None)


def _forwards(g: Group) -> float | None:
    """Mean over the runs with a summary: the same ones whose examples and bytes are shown."""
    return mean([f for r in g.runs if r.summary and (f := client_forwards(r)) is not None])


def _scale(groups: Sequence[Group]) -> str:
    n = evaluation_examples(groups)
    if metric_name(groups) in LOWER_IS_BETTER:
        return f"{n} evaluation texts; less is better"
    return f"{n} evaluation examples, one is {1 / n:.4f}" if n else "no run has finished"


def _pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    pairs = list(itertools.combinations(groups, 2))
    known = [g for g in groups if g.sd is not None] or [g for g in groups if g.mean is not None]
    if len(groups) <= _EACH or not known:
        return pairs
    pick = min if metric_name(groups) in LOWER_IS_BETTER else max
    best = pick(known, key=lambda g: g.mean or 0.0)
    return [(a, b) for a, b in pairs if best in (a, b) or control(a, groups) is b or control(b, groups) is a]


def _verdict(a: Group, b: Group) -> str:
    pair = f"{a.label} / {b.label}"
    if a.troubles or b.troubles:
        return f"{pair}: not separable: {', '.join(sorted({*a.troubles, *b.troubles}))}"
    if a.mean is None or b.mean is None or a.sd is None or b.sd is None:
        return f"{pair}: {FEW_SEEDS}"
    best, other = (a, b) if (a.mean > b.mean) != (metric_name([a]) in LOWER_IS_BETTER) else (b, a)
    if abs(a.mean - b.mean) <= a.sd + b.sd:
        return f"{pair}: not separable: their mean ± SD intervals overlap"
    gap = f"by {abs(a.mean - b.mean):.3f}; their mean ± SD intervals do not overlap"
    seen = [count(g.average("examples_seen")) for g in (best, other)]
    if seen[0] != seen[1]:
        gap += f"; after {seen[0]} and {seen[1]} examples"
    return f"{pair}: {best.label} is ahead of {other.label} {gap}"
