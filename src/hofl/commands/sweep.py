# SPDX-License-Identifier: Apache-2.0
"""``hofl sweep``: configurations times a grid times seeds, each run in a process of its own."""

import json as encoder
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from hofl.commands.output import print_json, say, warn
from hofl.errors import ConfigError, DataError, HoflError, RunFailed
from hofl.runtime.signals import interruptible

if TYPE_CHECKING:
    from hofl.report.rows import RunData
    from hofl.sweeps import Run

_LOOK = 0.1
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Child:
    """A run that is under way.

    Attributes:
        run: the run.
        process: its process.
        errors: the file of what it writes to standard error.
    """

    run: "Run"
    process: subprocess.Popen[bytes]
    errors: Path


def sweep(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG ... [section.key=value ...]",
            help="TOML files, folders of them, presets or a pattern such as 'papers/ho_fl/*/sst2/*'; then "
            "settings that override all of them.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the sweep; a run is OUT/NAME/SEED.")],
    seeds: Annotated[str, typer.Option("--seeds", help="With commas between.")] = "42,43,44",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="section.key=value,value ...: every value; may be repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON at the end and nothing else.")] = False,
) -> None:
    """Run a grid of configurations and seeds; what is done is skipped, what broke off is resumed."""
    from hofl.sweeps import planned

    places = [given for given in arguments if "=" not in given or Path(given).exists()]
    overrides = [given for given in arguments if given not in places]
    runs = planned(places, _seeds(seeds), _grid(grid or []), overrides, out)
    tell = _nothing if json else say
    todo = [run for run in runs if run.status != "done"]
    resumed = sum(run.status == "resume" for run in todo)
    tell(
        f"{len(runs)} runs: {len(runs) - len(todo)} done, {resumed} to resume, {len(todo) - resumed} to start"
    )
    _play(todo, jobs, _progress(tell, len(todo)))
    found = {run.name: _read(run) for run in runs}
    compared = _compare([data for data in found.values() if data and data.rows], out, json)
    statuses = {name: data.status if data else "not started" for name, data in found.items()}
    if json:
        listed = [{"name": r.name, "folder": str(r.folder), "status": statuses[r.name]} for r in runs]
        print_json({"runs": listed, "compared": compared})
    bad = [f"{name} ({status})" for name, status in statuses.items() if status != "done"]
    if bad:
        raise RunFailed(f"{len(bad)} of {len(runs)} runs failed: {', '.join(bad)}")


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",") if seed.strip()]
    except ValueError:
        raise click.BadParameter(
            f"'{text}': write whole numbers, such as 42,43,44", param_hint="--seeds"
        ) from None


def _grid(given: Sequence[str]) -> dict[str, list[str]]:
    """Setting -> values of each ``key=value,value``."""
    from hofl.sweeps import values

    found: dict[str, list[str]] = {}
    for item in given:
        key, _, text = item.partition("=")
        if not key.strip() or not values(text) or key.strip() in found:
            raise click.BadParameter(
                f"'{item}': write section.key=value,value, each setting once", param_hint="--grid"
            )
        found[key.strip()] = [value.strip() for value in values(text)]
    return found


def _nothing(text: object) -> None:
    """Show nothing: only JSON goes to standard output."""


def _progress(tell: Callable[[object], None], total: int) -> Callable[["Run", str], None]:
    """One line a run, as it ends."""
    ended: list[str] = []

    def _ended(run: "Run", said: str) -> None:
        ended.append(run.name)
        tell(f"[{len(ended)}/{total}] {run.name}: {said}")

    return _ended


def _play(runs: Sequence["Run"], jobs: int, ended: Callable[["Run", str], None]) -> None:
    """Run them all, so many at a time; one that fails does not stop the rest."""
    waiting, active = deque(runs), list[Child]()
    with tempfile.TemporaryDirectory(prefix="hofl-sweep-") as scratch, interruptible():
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    active.append(_start(waiting.popleft(), jobs, Path(scratch)))
                for child in [child for child in active if child.process.poll() is not None]:
                    active.remove(child)
                    ended(child.run, _said(child))
                time.sleep(_LOOK)
        except KeyboardInterrupt:
            warn(f"hofl: interrupted; {len(active) + len(waiting)} runs are left: the same command goes on")
            raise typer.Exit(130) from None
        finally:
            _stop(active)


def _start(run: "Run", jobs: int, scratch: Path) -> Child:
    """A process in a session of its own: a Ctrl-C reaches it once, from here."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    where = ["--resume" if run.status == "resume" else "--out", str(run.folder)]
    command = [sys.executable, "-m", "hofl", "run", run.source.place, *run.overrides, *where, "--json"]
    errors = scratch / f"{len(list(scratch.iterdir()))}.errors"
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            command,
            env=_environment(jobs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
    return Child(run, process, errors)


def _environment(jobs: int) -> Mapping[str, str]:
    """Ours, with the cores shared out where several run at a time."""
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    return {**share, **os.environ}


def _said(child: Child) -> str:
    """The result of a run that is done, or the last line that it wrote to standard error."""
    if child.process.returncode:
        lines = child.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1].removeprefix("hofl: ") if lines else f"exit status {child.process.returncode}"
        return f"failed: {reason[:600]}"
    from hofl.report.rows import amount
    from hofl.report.tables import number, seconds

    summary = encoder.loads((child.run.folder / "summary.json").read_bytes())
    metric = summary["metric"]
    return f"{metric['name']} {number(metric['value'])}, {seconds(amount(summary.get('seconds')))}"


def _stop(active: Sequence[Child]) -> None:
    """Let each save and end. Not by SIGINT: they ignore it if a script started us in the background."""
    for child in active:
        if child.process.poll() is None:
            child.process.terminate()
    for child in active:
        child.process.wait()


def _read(run: "Run") -> "RunData | None":
    """A run's folder; None where it is none yet."""
    from hofl import read_run

    try:
        return read_run(run.folder)
    except DataError:
        return None


def _compare(runs: Sequence["RunData"], out: Path, quiet: bool) -> list[dict[str, Any]]:
    """What ``hofl compare`` shows of the runs, those on one task and partition together."""
    from hofl.commands.compare import show, write
    from hofl.report.groups import group

    sets: dict[str, list[RunData]] = {}
    for run in runs:
        data = [run.config.get("task"), run.config.get("partition")]
        sets.setdefault(encoder.dumps(data, sort_keys=True), []).append(run)
    found = []
    for place, members in enumerate(sets.values(), 1):
        where = out / "compare" if len(sets) == 1 else out / "compare" / str(place)
        try:
            result, tables = write(group(members), where)
        except HoflError as error:
            if isinstance(error, ConfigError):
                raise
            warn(f"hofl: not compared: {error}")
            continue
        found.append(result)
        if not quiet:
            say("")
            show(tables, result["verdicts"], where)
    return found
