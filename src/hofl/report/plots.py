# SPDX-License-Identifier: Apache-2.0
"""Curves of compared runs: the metric against rounds, examples and uplink bytes, one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hofl.report.compare import Group, evaluation_examples, metric_name
from hofl.report.rows import RunData, cumulative

# Okabe & Ito's palette, told apart under every common colour blindness; line styles repeat the message.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":")
_PANELS = (("rounds", "round"), ("examples seen", "examples_seen"), ("uplink, MiB", "bytes_up"))


def curve(run: RunData, against: str, metric: str) -> tuple[list[float], list[float]]:
    """Where a run was evaluated, and the metric there.

    Args:
        run: a run folder.
        against: ``round``, ``examples_seen`` or ``bytes_up`` (MiB, summed over the rounds so far).
        metric: a name in the rows' ``metrics``.
    """
    if against == "round":
        places = [float(row["round"]) for row in run.rows]
    elif against == "bytes_up":
        places = [count / 2**20 for count in cumulative(run.rows, "bytes_up")]
    else:
        places = [float(row.get(against) or 0) for row in run.rows]
    measured = [(row.get("metrics") or {}).get(metric) for row in run.rows]
    found = [(x, float(y)) for x, y in zip(places, measured, strict=True) if y is not None]
    return [x for x, _ in found], [y for _, y in found]


def plot(groups: Sequence[Group], file: Path) -> None:
    """Draw all runs: one colour and line style a group, a thin line a seed, zero-shot dashed.

    Args:
        groups: what ``compare.group`` made.
        file: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    metric = metric_name(groups)
    for panel, (title, key) in zip(axes, _PANELS, strict=True):
        for place, members in enumerate(groups):
            _draw(panel, members, place, key, metric)
        _zero_shot(panel, groups)
        panel.set_xlabel(title)
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=key != "bytes_up"))
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"{metric} (n = {evaluation_examples(groups)})")
    handles, names = axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def _draw(panel: Any, members: Group, place: int, key: str, metric: str) -> None:
    colour, style = _COLOURS[place % len(_COLOURS)], _STYLES[place % len(_STYLES)]
    label = f"{members.label} ({len(members.runs)} seeds)" if len(members.runs) > 1 else members.label
    for run in members.runs:
        x, y = curve(run, key, metric)
        panel.plot(
            x, y, style, color=colour, linewidth=1.4, marker="o", markersize=3, alpha=0.85, label=label
        )


def _zero_shot(panel: Any, groups: Sequence[Group]) -> None:
    starts = [g.average("zero_shot") for g in groups]
    known = [s for s in starts if s is not None]
    if known:
        level = sum(known) / len(known)
        panel.axhline(level, linestyle=(0, (6, 4)), color="#777777", linewidth=1, label="zero-shot")
