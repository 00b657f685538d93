# SPDX-License-Identifier: Apache-2.0
"""Bottom recovery against probes: whether it is the number of scalars that a bottom learns by.

    python benchmarks/coverage.py docs/results/study runs/study/minilm-sst2 runs/study/smollm2-sst2 ...

The first argument is where ``coverage.json`` and ``coverage.png`` go, the others are folders of sweeps. Of
every hybrid run whose frozen control and FedAvg are there too it takes the bottom recovery and c, the run's
probes for each number of the deepest bottom. The sum of n steps' exact estimates of one gradient in d
dimensions has a squared cosine of c / (1 + c) with it, c = n q / d: that is the line. Where FedAvg is less
than ``LEAD`` ahead of the control there is nothing to recover, and the point is left out.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hofl import read_run
from hofl.report.groups import Group, group
from hofl.report.labels import flatten
from hofl.report.plots import look
from hofl.report.recovery import recovery, standing
from hofl.runtime import checkpoint
from hofl.runtime.folder import INITIAL

LEAD = 0.05


def coverage(of: Group) -> float:
    """Probes of a run for each number of its deepest bottom, the mean over the seeds."""
    found = []
    for run in of.finished:
        _, layout = checkpoint.load_final(run.folder / INITIAL)
        asked = sum(len([b for b in row["boundaries"] if b]) for row in run.rows if row["round"])
        each = run.config["local"]["steps"] * run.config["zo"]["probes"]
        found.append(asked * each / layout.bottom_size(max(of.boundaries)))
    return float(np.mean(found))


def points(sweep: Path) -> list[dict[str, Any]]:
    """One for each hybrid group of a sweep that has something to recover."""
    groups = group([read_run(file.parent) for file in sorted(sweep.glob("*/*/summary.json"))])
    found = []
    for one in groups:
        rho, stands = recovery(one, groups), standing(one, groups)
        if rho is None or stands is None:
            continue
        lead = abs(stands[2] - stands[1])
        if lead < LEAD:
            continue
        flat = flatten(one.runs[0].config)
        named = {"sweep": sweep.name, "label": one.label, "estimator": flat["zo.estimator"]}
        told = {"q": flat["zo.probes"], "n": len(one.values), "lead": lead, "recovery": rho}
        found.append({**named, **told, "c": coverage(one)})
    return sorted(found, key=lambda point: point["c"])


def draw(found: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """All sweeps in one picture, a colour each, over the line of an ideal sum."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel: Any = figure.subplots()
    line = np.logspace(-3, 2.5, 200)
    panel.plot(line, line / (1 + line), color="#777777", linestyle="--", label="c / (1 + c)")
    for place, (name, rows) in enumerate(found.items()):
        style = look(place)
        form = {"color": style["color"], "marker": style["marker"]}
        panel.plot([r["c"] for r in rows], [r["recovery"] for r in rows], linestyle="", label=name, **form)
    panel.set_xscale("log")
    panel.set_xlabel("c: probes of the run for each number of the bottom")
    panel.set_ylabel("bottom recovery, mean over seeds")
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def main(out: Path, sweeps: list[Path]) -> None:
    """Measure, print, write."""
    found = {sweep.name: points(sweep) for sweep in sweeps}
    for rows in found.values():
        for r in rows:
            told = f"c = {r['c']:8.4f}, c / (1 + c) = {r['c'] / (1 + r['c']):.3f}"
            print(f"{told}, recovered {r['recovery']:6.3f}, lead {r['lead']:.3f}: {r['sweep']} {r['label']}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "coverage.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(found, out / "coverage.png")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(given) for given in sys.argv[2:]])
