# SPDX-License-Identifier: Apache-2.0
"""Presets: a configuration for every cell of the papers' tables, made from one table of differences.

A name is ``papers/PAPER/MODEL/DATA/METHOD``, as in ``papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75``, and with
``-recommended`` at its end the variant that hofl recommends. ``configs/papers`` has the files of the papers'
own, which :func:`text` writes.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from hofl.config import Config, parse
from hofl.errors import ConfigError
from hofl.memory.named import MODELS, known
from hofl.presets import table
from hofl.presets.beside import Cell, key
from hofl.presets.published import PUBLISHED, Published
from hofl.presets.table import Settings
from hofl.presets.toml import dumps
from hofl.report.labels import flatten

RECOMMENDED = "-recommended"
"""End of the name of a recommended variant."""


@dataclass(frozen=True)
class Preset:
    """A run of a paper.

    Attributes:
        name: as said.
        title: what it is, in words.
        paper: a name of ``table.PAPERS``.
        settings: that differ from the defaults, by dotted key.
        published: what the paper reports of it.
        recommended: whether it is the variant that hofl recommends.
    """

    name: str
    title: str
    paper: str
    settings: Settings
    published: tuple[Published, ...]
    recommended: bool = False

    @property
    def tables(self) -> str:
        """Where the paper reports it."""
        return "; ".join(dict.fromkeys(f"{p.paper} {p.table}" for p in self.published))


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its name, each paper's own before the recommended variant."""
    cells: dict[tuple[str, str], list[Published]] = {}
    for number in PUBLISHED:
        cells.setdefault((number.paper, number.cell), []).append(number)
    return {
        preset.name: preset
        for (paper, cell), found in cells.items()
        for preset in _variants(paper, cell, tuple(found))
    }


def find(name: str) -> Preset:
    """The preset of a name, with or without ``.toml``.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    wanted = name.removesuffix(".toml")
    found = presets().get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, presets(), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}: no preset of that name{hint} (hofl list presets shows all)")
    return found


def config(preset: Preset) -> Config:
    """The checked configuration."""
    return parse(dumps(preset.settings), preset.name)


def text(preset: Preset) -> str:
    """The preset as a TOML file: what it is, its numbers and command, and what differs from the defaults."""
    changed = " ".join(f"{name}={value}" for name, value in table.RECOMMENDED.items())
    other = [f"Recommended instead: {changed}"] if f"{preset.name}{RECOMMENDED}" in presets() else []
    lines = [
        *(_reported(number) for number in preset.published),
        f"  hofl sweep configs/{preset.name}.toml --seeds 42,43,44 --out runs/papers",
        *other,
        "What is not set is hofl's default, which is HO-FL's own setting. The paper does not give",
        f"{table.PAPERS[preset.paper].silent}.",
    ]
    if preset.recommended:
        lines = ["Not the paper's settings, and so none of its numbers."]
    return "".join(f"# {line}\n" for line in (f"{preset.title}.", *lines)) + dumps(preset.settings)


def cells() -> tuple[Cell, ...]:
    """The papers' own presets, for runs to be laid beside their numbers."""
    own = [preset for preset in presets().values() if not preset.recommended]
    return tuple(Cell(p.name, key(p.settings), partial(_flat, p), p.published) for p in own)


def _flat(preset: Preset) -> Settings:
    return flatten(config(preset).model_dump(mode="json"))


def _reported(number: Published) -> str:
    where = f"{number.paper} {number.table}: {number.metric} {number.shown}"
    if number.value is None or number.metric == "loss":
        return where
    return f"{where}; one of its {number.examples:,} examples is {100 / number.examples:.3f} points"


def _variants(paper: str, cell: str, published: tuple[Published, ...]) -> Iterator[Preset]:
    """The paper's own and, of the method that the paper introduces, the recommended."""
    model, data, method = cell.split("/")
    name, settings = f"papers/{table.PAPERS[paper].folder}/{cell}", _settings(paper, model, data, method)
    kind, _, partition = data.partition("-")
    dealt = f"Dir({partition[3:]})" if partition.startswith("dir") else "IID"
    title = f"{paper}: {method} with {known(model)} on {table.DATA[kind].title}, {dealt}"
    yield Preset(name, title, paper, settings, published)
    if settings["algorithm"] == table.PAPERS[paper].own:
        other = settings | table.RECOMMENDED
        yield Preset(name + RECOMMENDED, f"{title}, as recommended", paper, other, published, True)


def _settings(paper: str, model: str, data: str, method: str) -> Settings:
    """Everything that a cell sets, the more particular last."""
    kind, _, partition = data.partition("-")
    algorithm, *variants = method.split("-", 1)
    entry, vision = MODELS[known(model) or model], kind == "cifar10"
    dealt = table.VISION_PARTITIONS if vision else table.PARTITIONS
    found = {**table.PAPERS[paper].settings, **(table.VISION if vision else {})}
    found |= {"model.source": entry.source, **table.DATA[kind].settings, **dealt[partition]}
    if algorithm == "ho_fl":
        found["cohort.boundaries"] = list(entry.boundaries)
    found |= table.METHODS[algorithm]
    for variant in _parts(variants[0] if variants else ""):
        found |= table.VARIANTS[variant]
    rounds = found.get("rounds", Config.model_fields["rounds"].default)
    found["evaluation.every"] = rounds if kind == "squad" else max(1, rounds // 4)
    return found


def _parts(variants: str) -> list[str]:
    """``beta0.5-radius1e-4`` in its parts; a dash in a number separates none."""
    found: list[str] = []
    for part in variants.split("-") if variants else ():
        if found and found[-1] not in table.VARIANTS:
            found[-1] += f"-{part}"
        else:
            found.append(part)
    return found
