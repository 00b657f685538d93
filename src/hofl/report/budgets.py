# SPDX-License-Identifier: Apache-2.0
"""What runs cost, and how far each is where all have spent the same: examples, or bytes both ways.

Rounds are no budget: in one a method takes E local steps of each client, in another a single step.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hofl.report.groups import Group, mean, metric_name, sd
from hofl.report.labels import flatten
from hofl.report.rows import RunData, curve, spent
from hofl.report.tables import Table, count, size, spread
from hofl.theory.computation import COSTS, Step, client

APART = 10
"""A budget this many times the last one is another question, and gets a column of its own."""

_KINDS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("examples_seen", " examples", count),
    ("bytes_total", "", size),
)


class Reached(NamedTuple):
    """Where the finished runs of a group are at a budget: their metrics, and what they had spent there."""

    values: list[float]
    spent: list[float]


def ladder(groups: Sequence[Group], against: str) -> list[float]:
    """The largest budget that all groups have spent, then the next over ``APART`` times as large, and so on.

    A method that sends scalars is done before others have sent a single update: at its budget they are
    where they started, so the table also shows them at one of their own. A group is done where the first of
    its finished runs is; those that spend nothing do not count.

    Args:
        groups: what is compared.
        against: ``examples_seen``, or ``bytes_total`` for bytes both ways.
    """
    ends = [min((spent(r, against)[-1] for r in g.finished if r.rows), default=0.0) for g in groups]
    budgets: list[float] = []
    for end in sorted(end for end in ends if end):
        if not budgets or end > APART * budgets[-1]:
            budgets.append(end)
    return budgets


def reached(group: Group, against: str, budget: float, metric: str) -> Reached:
    """The last measurement at or below a budget, of each finished run that has one.

    Args:
        group: the runs.
        against: what is spent, see :func:`hofl.report.rows.spent`.
        budget: examples, or bytes.
        metric: a name in the rows' ``metrics``.
    """
    found = []
    for run in group.finished:
        places, values = curve(run, against, metric)
        within = [(x, y) for x, y in zip(places, values, strict=True) if x <= budget]
        found += within[-1:]
    return Reached([y for _, y in found], [x for x, _ in found])


def budget_table(groups: Sequence[Group]) -> Table:
    """Each group's last measurement within the same number of examples, and of bytes both ways."""
    metric, columns = metric_name(groups), ["runs of"]
    cells = [[g.label] for g in groups]
    for against, unit, shown in _KINDS:
        for budget in ladder(groups, against):
            columns += [f"within {shown(budget)}{unit}", "measured at"]
            for row, g in zip(cells, groups, strict=True):
                at = reached(g, against, budget, metric)
                row += [spread(mean(at.values), sd(at.values)), shown(mean(at.spent))]
    title = f"Equal budgets: the last {metric} within so many examples, and so many bytes up and down"
    return Table(title, tuple(columns), tuple(map(tuple, cells)))


def budget_values(groups: Sequence[Group]) -> dict[str, Any]:
    """The same as plain values: for each kind its budgets, and for each label what was reached."""
    metric = metric_name(groups)
    return {
        against: [
            {"budget": b, "groups": {g.label: reached(g, against, b, metric)._asdict() for g in groups}}
            for b in ladder(groups, against)
        ]
        for against, _, _ in _KINDS
    }


def client_forwards(run: RunData) -> float | None:
    """Forward passes of the whole model, on one example, that all clients together computed.

    Examples times :func:`hofl.theory.computation.client`, averaged over the boundaries of a round's cohort.
    None where the method is not known, or the run folder does not say how many blocks the model has.
    """
    flat, blocks = flatten(run.config), run.manifest.get("blocks")
    name, total, seen = str(flat.get("algorithm")), 0.0, 0
    if name not in COSTS:
        return None
    for row in run.rows:
        examples, seen = row.get("examples_seen", 0) - seen, row.get("examples_seen", 0)
        boundaries = row.get("boundaries") or [0]
        if any(boundaries) and not blocks:
            return None
        shares = [b / blocks if b else 0.0 for b in boundaries]
        total += examples * statistics.fmean(client(name, _step(flat, share)) for share in shares)
    return total


def _step(flat: dict[str, Any], share: float) -> Step:
    return Step(
        share=share,
        estimator=flat.get("zo.estimator", "none"),
        probes=flat.get("zo.probes", 1),
        checkpointing=bool(flat.get("model.checkpointing", False)),
    )
