# SPDX-License-Identifier: Apache-2.0
"""Runs beside the numbers that papers report: what was measured here, and whatever was done differently."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hofl.algorithms import ALGORITHMS
from hofl.memory.named import MODELS, known
from hofl.presets.published import EXAMPLES, Published
from hofl.report.groups import Group, mean, sd
from hofl.report.labels import flatten
from hofl.report.rows import RunData
from hofl.report.tables import Table, number, spread

Flat = Mapping[str, Any]
Key = tuple[Any, ...]
_PLACES = {"model.source", "model.device", "task.train", "task.evaluation", "task.text", "task.label"}
_COUNTED = {"task.train_rows", "task.evaluation_rows", "evaluation.every", "evaluation.batch"}
_NEITHER = frozenset({*_PLACES, *_COUNTED, "task.image", "cohort.margin", "split.history"})
"""Settings that say where things are and how they are measured; how many examples there were is counted."""


class Cell(NamedTuple):
    """What a paper ran.

    Attributes:
        name: of its preset.
        key: see :func:`key`.
        flat: makes its whole configuration by dotted key.
        published: what it reports of it.
    """

    name: str
    key: Key | None
    flat: Callable[[], Flat]
    published: tuple[Published, ...]


class Match(NamedTuple):
    """A group of runs and what a paper reports of the same method, model, data, partition and preference.

    Attributes:
        group: the runs.
        cell: the one that differs in the fewest settings.
        differs: what decides the result and is not as the paper has it, in words; none known if empty.
    """

    group: Group
    cell: Cell
    differs: tuple[str, ...]


class Beside(NamedTuple):
    """A published number and what the finished runs of a group measured, in its unit."""

    label: str
    preset: str
    published: Published
    values: tuple[float, ...]
    examples: int
    differs: tuple[str, ...]


def key(settings: Flat) -> Key | None:
    """Method, model, data, partition and preference of a configuration; None if it is no paper's."""
    algorithm, model = settings.get("algorithm", "ho_fl"), known(str(settings.get("model.source", "")))
    data = _data(settings)
    if model is None or data is None or algorithm not in ALGORITHMS:
        return None
    kind = settings.get("partition.kind", "iid")
    alpha = float(settings.get("partition.alpha", 0.5)) if "dirichlet" in kind else None
    own = ALGORITHMS[algorithm].boundary == "each"
    return algorithm, model, data, kind, alpha, settings.get("cohort.preference", 0.75) if own else None


def _data(settings: Flat) -> str | None:
    """The data set: by its template, images by their name."""
    vision = settings.get("task.name") == "vision"
    named = str(settings.get("task.evaluation" if vision else "task.template", "sst2-v1")).lower()
    return next((name for name in EXAMPLES if name in named), None)


def matches(groups: Sequence[Group], cells: Sequence[Cell]) -> list[Match]:
    """The groups that ran what a paper reports, each with the closest of its cells."""
    found = []
    for group in groups:
        flat = flatten(group.runs[0].config)
        own = key(flat)
        ours = [cell for cell in cells if own is not None and cell.key == own]
        differing = [(cell, differences(group.runs[0], cell.flat())) for cell in ours]
        if differing:
            cell, differs = min(differing, key=lambda pair: len(pair[1]))
            found.append(Match(group, cell, tuple(differs)))
    return found


def differences(run: RunData, theirs: Flat) -> list[str]:
    """What decides the result and is not the same, in words such as ``rounds 6 of 160``."""
    flat = flatten(run.config)
    names = [name for name in theirs if name not in _NEITHER and _used(name, theirs)]
    pairs = [(name, flat.get(name, theirs[name]), theirs[name]) for name in names]
    more = [
        (name, value, None)
        for name, value in flat.items()
        if name not in theirs and name.startswith("zo.optimizer.") and _used(name, theirs)
    ]
    facts, examples = run.manifest.get("facts") or {}, EXAMPLES[str(_data(theirs))]
    counted = [
        (what, facts.get(fact) or examples[place], examples[place])
        for place, (what, fact) in enumerate((("training examples", "n_train"), ("n", "n_evaluation")))
    ]
    said = [_said(*pair) for pair in (*pairs, *more, *counted) if pair[1] != pair[2]]
    return [*said, *_another_size(facts, theirs)]


def _another_size(facts: Flat, theirs: Flat) -> Iterator[str]:
    """Whether what was loaded has another number of parameters than the model it is named for."""
    expected = MODELS[known(theirs["model.source"]) or ""].parameters
    found = (facts.get("model") or {}).get("parameters") or expected
    if abs(found - expected) > 0.02 * expected:
        yield _said("model parameters", found, expected)


def _used(name: str, theirs: Flat) -> bool:
    """Whether the method, or the partition, has a use for a setting."""
    method, kind = ALGORITHMS[theirs["algorithm"]], theirs["partition.kind"]
    uses = {
        "zo.": bool(method.estimators),
        "split.": method.split,
        "cohort.preference": method.boundary == "each",
        "local.proximal": method.name == "fedprox",
        "local.steps": not method.local_steps.startswith("1"),
        "partition.alpha": "dirichlet" in kind,
        "partition.minimum": kind == "dirichlet",
        "partition.size": kind == "fixed_dirichlet",
        "partition.labels_per_client": False,
        "zo.curvature": method.name == "hiso",
        "zo.average": method.name == "decomfl",
    }
    return all(use for start, use in uses.items() if name.startswith(start))


def _said(name: str, ours: Any, theirs: Any) -> str:
    counts = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (ours, theirs))
    if counts:
        return f"{name} {ours:,} of {theirs:,}" if isinstance(ours, int) else f"{name} {ours} of {theirs}"
    return f"{name} {ours}" if theirs is None else f"{name} {ours}, not {theirs}"


def beside(groups: Sequence[Group], cells: Sequence[Cell]) -> list[Beside]:
    """Each published number for which there is a finished run; those of one seed stand beside that seed."""
    return [line for match in matches(groups, cells) for line in _lines(match)]


def _lines(match: Match) -> Iterator[Beside]:
    for published in match.cell.published:
        runs = [run for run in match.group.finished if published.seeds != 1 or run.seed == 42]
        measured = [(_final(run, published.metric), _count(run)) for run in runs]
        values = [(value * published.factor, n) for value, n in measured if value is not None]
        if values:
            shown = tuple(value for value, _ in values)
            yield Beside(match.group.label, match.cell.name, published, shown, values[0][1], match.differs)


def _final(run: RunData, metric: str) -> float | None:
    """A metric of the final model."""
    value = (run.rows[-1].get("metrics") or {}).get(metric) if run.rows else None
    return float(value) if isinstance(value, int | float) else None


def _count(run: RunData) -> int:
    return int((run.summary or {}).get("metric", {}).get("n") or 0)


def published_table(lines: Sequence[Beside]) -> Table:
    """One line a published number."""
    columns = ("runs of", "published in", "metric", "published", "here", "seeds", "difference", "n")
    rows = tuple((*_cells(line), "; ".join(line.differs) or "nothing known") for line in lines)
    title = (
        "Beside the published values, in percent and points; what differs decides the result, so that such "
        "a line is no reproduction"
    )
    return Table(title, (*columns, "one example", "differs"), rows, frozenset({0, 1, 2, 9}))


def _cells(line: Beside) -> tuple[str, ...]:
    published, average = line.published, mean(line.values)
    digits = 4 if published.metric == "loss" else 2
    loss = published.metric == "loss"
    gap = None if average is None or published.value is None else average - published.value
    return (
        *(line.label, f"{published.paper} {published.table}", published.metric, published.shown),
        spread(average, sd(line.values)) if loss else _spread(average, sd(line.values)),
        *(str(len(line.values)), "–" if gap is None else f"{gap:+.{digits}f}", f"{line.examples:,}"),
        "–" if loss or not line.examples else number(100 / line.examples),
    )


def _spread(average: float | None, deviation: float | None) -> str:
    shown = number(average, 2)
    return shown if deviation is None else f"{shown} ± {number(deviation, 2)}"


def published_values(lines: Sequence[Beside]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [
        {"label": line.label, "preset": line.preset, "published": line.published._asdict()}
        | {"values": list(line.values), "mean": mean(line.values), "sd": sd(line.values)}
        | {"evaluation_examples": line.examples, "differs": list(line.differs)}
        for line in lines
    ]
