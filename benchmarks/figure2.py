# SPDX-License-Identifier: Apache-2.0
"""HO-FL's Figure 2 from a plan: a client's peak by boundary, and what a round's cohort needs together.

    hofl plan Qwen2.5-1.5B --batch 16 --length 1024 --json > plan.json
    python benchmarks/figure2.py plan.json figure2       # writes figure2.json and figure2.png

Without arguments it reads docs/results/memory/plan_qwen2.5-1.5b.json and writes beside it. Nothing is
trained: 30 clients are dealt to boundaries 8, 16 and 24 by seed 42, and 160 cohorts of 6 are drawn for each
preference (HO-FL App. E.5). FedAvg and DeComFL are six times one client. Seconds on one core.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hofl.build import deal
from hofl.core.keys import Key
from hofl.core.sampling import dimension_aware
from hofl.memory.planned import peaks, read_plan, zeroth_order_peak
from hofl.report.plots import look
from hofl.theory.sampling_policy import round_averages

HERE = Path(__file__).parents[1] / "docs" / "results" / "memory"
GIB = 2**30
SEED, CLIENTS, COHORT, DRAWS, PROBES = 42, 30, 6, 160, 2
TIERS, BETAS, ESTIMATOR = (8, 16, 24), (0.0, 0.25, 0.5, 0.75), "forward"

PUBLISHED: dict[str, dict[Any, float]] = {
    "single": {0: 40.26, 24: 9.08},
    "round": {"FedAvg": 241.57, 0.0: 117.32, 0.75: 163.78},
}
"""GiB, as the paper has them; it gives no others."""


def beside(ours: float, published: float | None) -> dict[str, float | None]:
    """A number in bytes as GiB, the paper's, and how far apart they are in percent."""
    gib = ours / GIB
    off = None if published is None else round(100 * (gib / published - 1), 3)
    return {"gib": round(gib, 3), "published_gib": published, "off_percent": off}


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Both panels as JSON values."""
    by_cut, recomputed = (peaks(plan, ESTIMATOR, checkpointing=each) for each in (False, True))
    pure = zeroth_order_peak(plan, ESTIMATOR)
    assert pure is not None, f"the plan has no zeroth order with {ESTIMATOR}"
    cuts = deal(SEED, TIERS, CLIENTS)
    scores = [plan["trainables"] * cut / plan["blocks"] / PROBES for cut in cuts]
    policy = dimension_aware(scores, COHORT, 0.0, Key.of(SEED, "tie_break"))
    averages = round_averages(by_cut, cuts, policy, BETAS, seed=SEED, draws=DRAWS)
    single, rounds = PUBLISHED["single"], PUBLISHED["round"]
    return {
        **{name: plan[name] for name in ("model", "batch", "length", "dtype", "attention")},
        "estimator": ESTIMATOR,
        "clients": CLIENTS,
        "cohort": COHORT,
        "tiers": TIERS,
        "draws": DRAWS,
        "seed": SEED,
        "preferred": policy.preferred,
        "single": [
            {"boundary": cut, **beside(peak, single.get(cut)), "checkpointed_gib": _gib(recomputed[cut])}
            for cut, peak in sorted(by_cut.items())
        ],
        "single_zeroth_order_gib": _gib(pure),
        "cut_percent": {"ours": round(100 * (by_cut[24] / by_cut[0] - 1), 2), "published": -77.4},
        "rounds": [
            {"method": "FedAvg", "preference": None, **beside(COHORT * by_cut[0], rounds["FedAvg"])},
            *(
                {"method": "HO-FL", "preference": a.preference, **beside(a.drawn, rounds.get(a.preference))}
                | {"expected_gib": _gib(a.expected), "largest_round_gib": _gib(a.largest)}
                for a in averages
            ),
            {"method": "DeComFL", "preference": None, **beside(COHORT * pure, None)},
        ],
    }


def _gib(size: float) -> float:
    return round(size / GIB, 3)


def draw(found: dict[str, Any], file: Path) -> None:
    """Both panels into a PNG."""
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _left(left, found)
    _right(right, found)
    for panel in (left, right):
        panel.set_ylim(bottom=0)
        panel.grid(True, axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=9, loc="upper right")
    figure.suptitle(
        f"{found['model']}, {found['batch']} x {found['length']} tokens, {found['dtype']} backbone, "
        "planned without a model in memory",
        fontsize=11,
    )
    figure.savefig(file, dpi=120, metadata={"Software": None})


_THEIRS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 8,
    "markerfacecolor": "none",
    "markeredgecolor": "#D55E00",
    "markeredgewidth": 1.6,
    "zorder": 5,
}


def _left(panel: Any, found: dict[str, Any]) -> None:
    """Peak of one client at every boundary."""
    rows = found["single"]
    cuts = [row["boundary"] for row in rows]
    panel.plot(cuts, [r["gib"] for r in rows], **look(0), markersize=3.5, label="hofl plan")
    style = {**look(2), "marker": "none"}
    panel.plot(cuts, [r["checkpointed_gib"] for r in rows], **style, label="the same, checkpointed")
    known = [(r["boundary"], r["published_gib"]) for r in rows if r["published_gib"] is not None]
    panel.plot(*zip(*known, strict=True), **_THEIRS, label="the paper's")
    for row in rows:
        if row["boundary"] in (0, *TIERS):
            theirs = "" if row["published_gib"] is None else f"\n(paper {row['published_gib']:.2f})"
            where, text = (row["boundary"], row["gib"]), f"{row['gib']:.2f}{theirs}"
            panel.annotate(text, where, (9, 1), textcoords="offset points", fontsize=9, va="bottom")
    panel.set_xticks(range(0, cuts[-1] + 1, 4))
    panel.set_xlabel(f"boundary: blocks trained by probes, of {cuts[-1]} (0: backpropagation through all)")
    panel.set_ylabel("peak of one participation, GiB")
    panel.set_ylim(top=46)
    panel.set_title("one client", fontsize=10)


def _right(panel: Any, found: dict[str, Any]) -> None:
    """What a round's six clients need together."""
    rows = found["rounds"]
    names = [
        r["method"] if r["preference"] is None else f"HO-FL\n$\\beta$ = {r['preference']:g}" for r in rows
    ]
    colours = ["#0072B2" if r["method"] == "HO-FL" else "#9aa5b1" for r in rows]
    panel.bar(range(len(rows)), [r["gib"] for r in rows], width=0.62, color=colours)
    expected = [(k, r["expected_gib"]) for k, r in enumerate(rows) if "expected_gib" in r]
    places, values = zip(*expected, strict=True)
    ends = [[place + side for place in places] for side in (-0.31, 0.31)]
    panel.hlines(values, *ends, color="black", linewidth=1.6, label="expected, no draws")
    known = [(k, r["published_gib"]) for k, r in enumerate(rows) if r["published_gib"] is not None]
    panel.plot(*zip(*known, strict=True), **_THEIRS, label="the paper's")
    for place, row in enumerate(rows):
        theirs = "" if row["published_gib"] is None else f"\n(paper {row['published_gib']:.2f})"
        top = max(row["gib"], row["published_gib"] or 0, row.get("expected_gib", 0))
        text = f"{row['gib']:.2f}{theirs}"
        panel.annotate(
            text, (place, top), (0, 8), textcoords="offset points", fontsize=9, ha="center", va="bottom"
        )
    panel.set_xticks(range(len(rows)), names)
    panel.set_ylabel(f"a round's {found['cohort']} clients together, GiB")
    panel.set_ylim(top=290)
    panel.set_title(
        f"a round: bars are the mean of {found['draws']} drawn cohorts, or {found['cohort']} times a client",
        fontsize=10,
    )


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "plan_qwen2.5-1.5b.json"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "figure2"
    result = measure(read_plan(source))
    out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, out.with_suffix(".png"))
    print(f"one client: {result['cut_percent']['ours']}% at boundary 24, published -77.4%")
    for row in result["rounds"]:
        beta = "" if row["preference"] is None else f" {row['preference']:g}"
        print(f"{row['method']}{beta}: {row['gib']} GiB a round, published {row['published_gib']}")
