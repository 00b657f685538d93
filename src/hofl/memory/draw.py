# SPDX-License-Identifier: Apache-2.0
"""The plan as a picture: peak memory by boundary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hofl.memory.plan import Plan
from hofl.report.plots import look

_GIB = 2**30


def draw(found: Plan, budgets: Mapping[str, int], file: Path) -> None:
    """One line for each estimator with and without checkpointing, and one across for each budget.

    Args:
        found: the plan.
        budgets: name -> bytes.
        file: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    first = {row.checkpointing: row.peak_bytes / _GIB for row in found.rows if row.order == "first_order"}
    lines: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for row in found.rows:
        if row.order == "hybrid" and row.estimator:
            line = lines.setdefault((row.estimator, row.checkpointing), [(0, first[row.checkpointing])])
            line.append((row.boundary, row.peak_bytes / _GIB))
    for place, ((estimator, recompute), points) in enumerate(sorted(lines.items())):
        name = f"{estimator}, checkpointed" if recompute else estimator
        x, y = zip(*sorted(points), strict=True)
        style: dict[str, Any] = {**look(place), "markersize": 4}
        panel.plot(x, y, **style, markevery=max(1, len(x) // 8), label=name)
    for name, size in budgets.items():
        panel.axhline(size / _GIB, color="#777777", linewidth=1, linestyle=(0, (6, 4)))
        panel.annotate(name, (0, size / _GIB), fontsize=8, color="#555555", va="bottom")
    panel.axhline(found.backbone / _GIB, color="#bbbbbb", linewidth=1, label="backbone")
    panel.set_xlabel("boundary: blocks trained by probes (0: first order)")
    panel.set_ylabel("peak of one participation, GiB")
    panel.set_ylim(bottom=0)
    panel.set_title(f"{found.subject.name}, {found.work.batch} x {found.work.length}", fontsize=10)
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120, metadata={"Software": None})
