# SPDX-License-Identifier: Apache-2.0
"""What a probed bottom adds to a frozen one: runs beside their control and FedAvg, as table and picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hofl.report.groups import Group, boundaries, evaluation_examples, metric_name
from hofl.report.labels import flatten, told_apart
from hofl.report.plots import look
from hofl.report.tables import Table, number, spread
from hofl.tasks.metric_names import LOWER_IS_BETTER
from hofl.theory.computation import HYBRID


@dataclass(frozen=True)
class Cut:
    """Runs that differ in nothing but how the bottom is trained.

    Attributes:
        label: method, boundaries, and what tells two of these apart.
        frozen: the control.
        full: FedAvg on the same work, None where it has not run.
        probed: what runs with probes are called, and their groups.
    """

    label: str
    frozen: Group
    full: Group | None
    probed: dict[str, Group]


def cuts(groups: Sequence[Group]) -> list[Cut]:
    """Every control that has something beside it, in the order of the groups."""
    pairs = [(g, frozen) for g in groups if (frozen := control(g, groups)) is not None]
    controls = [g for g in groups if any(g is frozen for _, frozen in pairs)]
    flats = [_unprobed(flatten(g.runs[0].config)) for g in controls]
    cut_at = [",".join(map(str, sorted(g.boundaries))) for g in controls]
    plain = [f"{flat['algorithm']} b={own}" for flat, own in zip(flats, cut_at, strict=True)]
    named = zip(controls, told_apart(plain, flats), strict=True)
    arms = dict(zip((g.label for g, _ in pairs), _arms([g for g, _ in pairs]), strict=True))
    return [
        Cut(label, frozen, _full(frozen, groups), {arms[g.label]: g for g, own in pairs if own is frozen})
        for frozen, label in named
    ]


def recovery_table(groups: Sequence[Group]) -> Table | None:
    """One line a control: the final metric, and in brackets the bottom recovery. None without a control."""
    found = cuts(groups)
    if not found:
        return None
    arms = _columns(found)
    rows = tuple(
        (
            *(cut.label, spread(cut.frozen.mean, cut.frozen.sd)),
            *(_cell(cut.probed.get(arm), groups) for arm in arms),
            spread(cut.full.mean, cut.full.sd) if cut.full else "–",
        )
        for cut in found
    )
    title = f"Bottom recovery: {metric_name(groups)}, and the part of FedAvg's lead over the frozen bottom"
    return Table(title, ("runs of", "frozen control", *arms, "fedavg"), rows)


def plot_recovery(groups: Sequence[Group], file: Path) -> bool:
    """Draw every control with what stands beside it: means, and bars of one sample SD.

    Args:
        groups: what ``groups.group`` made.
        file: the PNG to write.

    Returns:
        whether there was something to draw; nothing is written otherwise.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = cuts(groups)
    if not found:
        return False
    figure = Figure(figsize=(max(6.0, 2 + 1.6 * len(found)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel: Any = figure.subplots()
    arms = _columns(found)
    marks: list[tuple[str, dict[str, str], list[Group | None]]] = [
        ("frozen control", {"color": "#777777", "marker": "_"}, [cut.frozen for cut in found]),
        *((arm, look(i), [cut.probed.get(arm) for cut in found]) for i, arm in enumerate(arms)),
        ("fedavg", {"color": "#000000", "marker": "*"}, [cut.full for cut in found]),
    ]
    step = 0.7 / len(marks)
    for place, (name, style, members) in enumerate(marks):
        shown = [(x, g.mean, g.sd or 0.0) for x, g in enumerate(members) if g and g.mean is not None]
        if shown:
            x, mean, sd = zip(*shown, strict=True)
            left = [at + step * (place - (len(marks) - 1) / 2) for at in x]
            form = {"color": style["color"], "marker": style["marker"], "linestyle": "", "markersize": 7}
            panel.errorbar(left, mean, yerr=sd, capsize=3, label=name, **form)
    _finish(panel, found, groups)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    return True


def _columns(found: Sequence[Cut]) -> list[str]:
    """Every way to probe, by estimator and then by q."""
    first = {name: g for cut in found for name, g in cut.probed.items()}

    def _order(name: str) -> tuple[str, int]:
        zo = first[name].runs[0].config.get("zo") or {}
        return str(zo.get("estimator")), int(zo.get("probes") or 0)

    return sorted(first, key=_order)


def _finish(panel: Any, found: Sequence[Cut], groups: Sequence[Group]) -> None:
    panel.set_xticks(range(len(found)), [cut.label.replace(" ", "\n") for cut in found], fontsize=9)
    panel.set_ylabel(f"{metric_name(groups)} (n = {evaluation_examples(groups)}), ± one SD over seeds")
    panel.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _cell(probed: Group | None, groups: Sequence[Group]) -> str:
    if probed is None:
        return "–"
    rho = recovery(probed, groups)
    return spread(probed.mean, probed.sd) + (f" ({number(rho, 2)})" if rho is not None else "")


def _arms(groups: Sequence[Group]) -> list[str]:
    """Names of what their probes do, one for each group: two with the same ``[zo]`` have the same."""
    flats = [
        {k: v for k, v in flatten(g.runs[0].config).items() if k.startswith(("zo.", "optimizer."))}
        for g in groups
    ]
    own = [f"{flat.get('zo.estimator')} q={flat.get('zo.probes')}" for flat in flats]
    return told_apart(own, flats)


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

    None without a control and a FedAvg run that are alike in all else, and where FedAvg is not ahead.
    """
    found = standing(of, groups)
    if found is None:
        return None
    ours, least, most = found
    gained = least - most if metric_name([of]) in LOWER_IS_BETTER else most - least
    return (ours - least) / (most - least) if gained > 0 else None


def standing(of: Group, groups: Sequence[Group]) -> tuple[float, float, float] | None:
    """A hybrid group, its control and FedAvg: means of the final metric over the seeds they share."""
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
    return ours, least, most


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


def _unprobed(flat: dict[str, Any]) -> dict[str, Any]:
    """What is not about probes: a frozen bottom has no use for ``[zo]``."""
    return {key: value for key, value in flat.items() if not key.startswith("zo.")}


def _same_boundaries(one: Group, other: Group) -> bool:
    """Whether no client has another boundary in the other group's run of the same seed."""
    theirs = {run.seed: boundaries(run) for run in other.runs}
    pairs = ((boundaries(run), theirs[run.seed]) for run in one.runs if run.seed in theirs)
    return all(a[key] == b[key] for a, b in pairs for key in a.keys() & b.keys())
