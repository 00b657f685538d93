# SPDX-License-Identifier: Apache-2.0
"""What a sweep runs: configurations times a grid times seeds, each checked and named before any starts.

No PyTorch here, so that what is wrong is said at once.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from hofl import presets
from hofl.config import Config, load, parse, read
from hofl.errors import ConfigError
from hofl.report.labels import flatten
from hofl.runtime.start import CONFIG, refuse_folder

Status = Literal["new", "resume", "done"]
_PLACES = (
    "task.train=",
    "task.evaluation=",
    "model.source=",
    "model.device=",
    "run.",
    "fleet.",
    "evaluation.",
)
"""Settings that are no part of a name: where things are, and how they are run and measured."""
_LONGEST = 200


@dataclass(frozen=True)
class Source:
    """A configuration that was asked for.

    Attributes:
        name: what its runs' folders begin with.
        place: the file, or the preset's name.
        text: of the TOML.
    """

    name: str
    place: str
    text: str


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: folder of the run below the sweep's, ``NAME[+key=value ...]/SEED``.
        source: its configuration.
        overrides: of its settings, the seed's last.
        folder: where it goes.
        status: whether it is to be started, resumed, or done.
    """

    name: str
    source: Source
    overrides: tuple[str, ...]
    folder: Path
    status: Status


def planned(
    given: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[str]],
    overrides: Sequence[str],
    out: Path,
) -> list[Run]:
    """Every run, seed by seed, each with a folder of its own.

    Args:
        given: files, folders of files, presets and patterns of presets.
        seeds: of each configuration.
        grid: setting -> its values.
        overrides: ``section.key=value`` for all.
        out: the sweep's folder.

    Raises:
        ConfigError: nothing to run, a setting is wrong, two runs have one name, or a folder holds another
            run; nothing was started.
    """
    found = [source for place in given for source in sources(place)]
    if not found or not seeds:
        raise ConfigError("nothing to run; name a configuration, a folder of them or a preset, and seeds")
    picks = list(itertools.product(*([f"{key}={value}" for value in grid[key]] for key in grid)))
    runs = [
        _run(source, (*overrides, *pick), seed, out) for seed in seeds for source in found for pick in picks
    ]
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two runs would be called {', '.join(twice[:3])}; give each file and value once, or the folder "
            "above files of one name"
        )
    return runs


def sources(place: str) -> list[Source]:
    """The configurations at a place: a file, all files below a folder, a preset, or those of a pattern.

    Raises:
        ConfigError: there is none.
    """
    path = Path(place)
    if path.is_dir():
        files = sorted(path.rglob("*.toml"))
        if not files:
            raise ConfigError(f"{place}: nothing to run, the folder holds no .toml file")
        return [_file(file, str(file.relative_to(path).with_suffix(""))) for file in files]
    if not place.startswith("papers/") or path.exists():
        return [_file(path, path.stem)]
    if not any(sign in place for sign in "*?["):
        return [_preset(presets.find(place))]
    wanted = [
        preset
        for name, preset in presets.presets().items()
        if fnmatchcase(name, place) and (not preset.recommended or "recommended" in place)
    ]
    if not wanted:
        raise ConfigError(f"{place}: no preset fits; hofl list presets shows all")
    return [_preset(preset) for preset in wanted]


def _file(path: Path, name: str) -> Source:
    """A file; one of ``configs/papers`` is called as its preset is."""
    tail = path.with_suffix("").as_posix().rpartition("papers/")
    if tail[1] and tail[1] + tail[2] in presets.presets():
        name = tail[2]
    return Source(name, str(path), read(path))


def _preset(preset: presets.Preset) -> Source:
    return Source(preset.name.removeprefix("papers/"), preset.name, presets.text(preset))


def values(text: str) -> list[str]:
    """``a,[1, 2],b`` at the commas that are in no brackets and no quotes."""
    return re.findall(r"(?:\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,\[\"'])+", text)


def _run(source: Source, overrides: Sequence[str], seed: int, out: Path) -> Run:
    given = (*overrides, f"seed={seed}")
    config = parse(source.text, source.place, given)
    name = f"{_named(source.name, overrides)}/{seed}"
    folder = out / name
    return Run(name, source, given, folder, _status(folder, config))


def _named(name: str, overrides: Sequence[str]) -> str:
    """The configuration's name and what is changed of it, without what a path cannot have."""
    given = ("=".join(part.strip() for part in override.split("=", 1)) for override in overrides)
    told = [each for each in given if not each.startswith(_PLACES)]
    whole = "+".join([name, *(re.sub(r"[^\w=.,-]+", "", each) for each in told)])
    longest = max(map(len, whole.split("/")))
    if longest > _LONGEST:
        raise ConfigError(
            f"{whole[:60]}...: a name of {longest} letters is too long; set fewer things at once"
        )
    return whole


def _status(folder: Path, config: Config) -> Status:
    """What is left to do in a folder.

    Raises:
        ConfigError: it holds something else than this run.
    """
    if not (folder / CONFIG).is_file():
        refuse_folder(folder, False)
        return "new"
    stored = load(folder / CONFIG)
    for key, was, now in _changed(stored, config):
        if key != "rounds":
            raise ConfigError(
                f"{folder} holds a run with {key} = {was!r}, and {now!r} is asked for; give another --out"
            )
    finished = (folder / "summary.json").is_file()
    return "done" if finished and stored.rounds == config.rounds else "resume"


def _changed(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """Settings, beside ``[run]``, ``[fleet]`` and the seed, that are not the same."""
    old, new = (flatten(config.model_dump(mode="json")) for config in (one, other))
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)
