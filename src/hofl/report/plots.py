# SPDX-License-Identifier: Apache-2.0
"""Curves of compared runs: the metric against examples, uplink and traffic both ways, one PNG."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hofl.report.groups import Group, evaluation_examples, metric_name
from hofl.report.rows import curve, spent

# Okabe & Ito's palette, told apart under every common colour blindness; line styles and markers repeat the
# message. Lengths without a common factor: 7 x 4 pairs of colour and style before one comes again.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_PANELS = (
    ("examples seen", "examples_seen", 1),
    ("uplink, MiB", "bytes_up", 2**20),
    ("uplink + downlink, MiB", "bytes_total", 2**20),
)
_WIDE = 20
"""Ends that lie further apart than this are drawn on a logarithmic axis."""


def look(place: int) -> dict[str, str]:
    """Colour, line style and marker of group number ``place``: no two of the first 28 are alike."""
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": _STYLES[place % len(_STYLES)],
        "marker": _MARKERS[place % len(_MARKERS)],
    }


def average(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The mean curve: evaluation by evaluation, as far as all curves go."""
    points = list(zip(*(zip(x, y, strict=True) for x, y in curves), strict=False))
    return (
        [statistics.fmean(x for x, _ in point) for point in points],
        [statistics.fmean(y for _, y in point) for point in points],
    )


def logarithmic(groups: Sequence[Group], against: str) -> bool:
    """Whether the ends of runs lie so far apart that most would be a dot on a plain axis."""
    ends = [end for g in groups for run in g.runs if run.rows and (end := spent(run, against)[-1])]
    return bool(ends) and max(ends) > _WIDE * min(ends)


def plot(groups: Sequence[Group], file: Path) -> None:
    """Draw all runs: a pale line a seed, a strong one their mean; one look a group, zero-shot in grey.

    A logarithmic axis has no place for the start, nor for a method that sends nothing.

    Args:
        groups: what ``groups.group`` made.
        file: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = 3 if max(len(_legend(g)) for g in groups) < 45 else 2
    lines = -(-(len(groups) + 1) // columns)
    figure = Figure(figsize=(15, 5 + 0.22 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    metric = metric_name(groups)
    for panel, (title, against, unit) in zip(axes, _PANELS, strict=True):
        for place, members in enumerate(groups):
            _draw(panel, members, look(place), metric, against, unit)
        _zero_shot(panel, groups)
        if logarithmic(groups, against):
            panel.set_xscale("log", nonpositive="mask")
        else:
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=unit == 1))
        panel.set_xlabel(title)
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"{metric} (n = {evaluation_examples(groups)})")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, frameon=False, handlelength=4, fontsize=9
    )
    figure.savefig(file, dpi=120, metadata={"Software": None})


def _legend(members: Group) -> str:
    return f"{members.label} ({len(members.runs)} seeds)" if len(members.runs) > 1 else members.label


def _draw(panel: Any, members: Group, style: dict[str, str], metric: str, against: str, unit: int) -> None:
    curves = {}
    for run in members.runs:
        x, y = curve(run, against, metric)
        curves[run.folder] = [place / unit for place in x], y
    for x, y in curves.values() if len(curves) > 1 else ():
        panel.plot(x, y, color=style["color"], linestyle=style["linestyle"], linewidth=0.7, alpha=0.35)
    x, y = average([curves[run.folder] for run in members.finished or members.runs])
    every = max(1, len(x) // 8)
    panel.plot(x, y, **style, linewidth=1.5, markersize=4.5, markevery=every, label=_legend(members))


def _zero_shot(panel: Any, groups: Sequence[Group]) -> None:
    starts = [g.average("zero_shot") for g in groups]
    known = [s for s in starts if s is not None]
    if known:
        level = sum(known) / len(known)
        panel.axhline(level, linestyle=(0, (6, 4)), color="#777777", linewidth=1, label="zero-shot")
