# SPDX-License-Identifier: Apache-2.0
"""Flower's simulation of a run, by hofl and by flwr: the same rows and final model as in one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import ENVIRONMENT, comparable, free_port, hofl

from hofl.config import dump, load
from hofl.runtime.flower.processes import alive, environment, script, stop_pid

SETTINGS = (
    "rounds=3",
    "partition.kind=iid",
    "partition.clients=4",
    "cohort.size=3",
    "evaluation.every=1",
    "run.threads=1",
)
SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
ENGINE = ("--engine", "flower-simulation")


def run(place: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command of hofl, with a home of its own for Flower."""
    env = {**ENVIRONMENT, "FLWR_HOME": str(place / "flwr")}
    command = hofl(*arguments)
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=400)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name",
    ["ho_sfl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ho_fl", "fedavg", "hosl"))],
)
def test_a_simulation_gives_the_very_rows_of_one_process(tmp_path: Path, alone, name: str) -> None:
    config = SYNTHETIC / f"{name}.toml"
    done = run(tmp_path, "run", config, *SETTINGS, *ENGINE, "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    summary, expected = json.loads(done.stdout), alone(config, *SETTINGS)
    assert summary["final_sha256"] == expected.final
    assert comparable(rows_of(tmp_path / "run")) == comparable(expected.rows)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert manifest["mode"].endswith("Flower simulation: all clients run on this machine; "
                                     "no privacy is provided or measured")  # fmt: skip


HIDDEN = """
import importlib.util, sys
from unittest import mock
found = importlib.util.find_spec
hidden = lambda name, *more: None if name == "ray" else found(name, *more)
with mock.patch.object(importlib.util, "find_spec", hidden):
    from hofl.cli import main
    sys.exit(main())
"""
"""hofl where Ray is not installed."""


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HIDDEN, "run", str(SYNTHETIC / "ho_fl.toml"), *ENGINE, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr == "hofl: this needs ray, which is not installed: pip install 'hofl[simulation]'\n"
    assert not done.stdout and not (tmp_path / "run").exists()


def test_data_that_is_at_the_nodes_is_not_simulated(tmp_path: Path) -> None:
    config = tmp_path / "nodes.toml"
    config.write_text(
        'algorithm = "ho_fl"\nrounds = 1\n[task]\nname = "text"\nevaluation = "test.csv"\n'
        '[partition]\nkind = "nodes"\nnames = ["a", "b"]\n[cohort]\nsize = 2\nboundaries = [1]\n'
        '[model]\nsource = "model"\n'
    )
    done = run(tmp_path, "run", config, *ENGINE, "--out", "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "run it with hofl server" in done.stderr
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Flwr:
    """``flwr`` with a home and ports of its own, so that its local SuperLink is this test's."""

    place: Path
    ports: tuple[int, int]

    @property
    def env(self) -> dict[str, str]:
        names = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
        ports = dict(zip(names, map(str, self.ports), strict=True))
        return {**environment(self.place / "flwr"), "OMP_NUM_THREADS": "1", **ports}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it; again where its SuperLink was not up within Flower's own 15 s: this machine is busy."""
        command = [script("flwr"), *arguments]
        for _ in range(5):
            done = subprocess.run(
                command, cwd=self.place, env=self.env, capture_output=True, text=True, timeout=400
            )
            if "Failed to start local SuperLink within" not in done.stdout + done.stderr:
                break
        return done

    def daemons(self) -> list[int]:
        """Processes that have this home in their environment and are not ours to wait for."""
        found, mark = [], f"FLWR_HOME={self.place / 'flwr'}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return [pid for pid in found if pid != os.getpid() and alive(pid)]


@pytest.fixture
def flwr(tmp_path: Path) -> Iterator[Flwr]:
    """Afterwards the SuperLink that ``flwr run`` leaves behind is gone."""
    made = Flwr(tmp_path, (free_port(), free_port()))
    try:
        yield made
    finally:
        for pid in made.daemons():
            stop_pid(pid)
    assert not made.daemons()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cores"), [("ho_fl", 1), ("ho_sfl", os.cpu_count())])
def test_flwr_run_of_the_app_gives_the_same_model(flwr: Flwr, alone, name: str, cores: int) -> None:
    """What a user of Flower types: the app's folder, how many nodes, the configuration and the run folder.

    Methods whose clients keep something need all cores for a node: then one process answers for all nodes.
    """
    config, out = flwr.place / "run.toml", flwr.place / "run"
    config.write_text(dump(load(SYNTHETIC / f"{name}.toml", list(SETTINGS))))
    app = subprocess.check_output([sys.executable, "-m", "hofl.runtime.flower.app"], text=True).strip()
    done = flwr(
        "run", app, "local", "--stream",
        "--federation-config", f"num-supernodes=4 client-resources-num-cpus={cores}",
        "-c", f"config='{config}' out='{out}'",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert flwr.daemons()  # the SuperLink that this command has started stays
    assert (out / "summary.json").is_file(), done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_bytes())
    expected = alone(SYNTHETIC / f"{name}.toml", *SETTINGS)
    assert summary["final_sha256"] == expected.final
    assert comparable(rows_of(out)) == comparable(expected.rows)
    assert "Flower simulation" in json.loads((out / "manifest.json").read_bytes())["mode"]
