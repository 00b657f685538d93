# SPDX-License-Identifier: Apache-2.0
"""``hofl sweep``: what it runs, what it refuses before anything starts, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import tomli_w

from hofl import presets, sweeps
from hofl.config import load
from hofl.errors import ConfigError

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
SHORT = ("rounds=1", "evaluation.every=1", "task.train_rows=120", "task.evaluation_rows=20")


def hofl_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return int(left.value.code or 0)


def config(folder: Path, name: str = "net", **changes: object) -> Path:
    settings = {"algorithm": "fedavg", "task": {"name": "synthetic"}, "partition": {"clients": 3}}
    file = folder / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps(settings | {"cohort": {"size": 2}, "local": {"steps": 1}} | changes))
    return file


def names(runs: list[sweeps.Run]) -> list[str]:
    return [run.name for run in runs]


def test_a_grid_times_seeds(tmp_path) -> None:
    file = config(tmp_path, algorithm="ho_fl", cohort={"size": 2, "boundaries": [1]})
    grid = {"zo.estimator": ["forward", "tangent"], "cohort.boundaries": ["[1, 2]", "[3]"]}
    runs = sweeps.planned([str(file)], [7, 8], grid, ["task.train=x", "rounds=3"], tmp_path / "out")
    assert len(runs) == 8 and len(set(names(runs))) == 8
    assert runs[1].name == "net+rounds=3+zo.estimator=forward+cohort.boundaries=3/7"
    assert runs[-1].name == "net+rounds=3+zo.estimator=tangent+cohort.boundaries=3/8"
    assert runs[0].overrides[-1] == "seed=7" and runs[0].folder == tmp_path / "out" / runs[0].name
    assert {run.status for run in runs} == {"new"} and not (tmp_path / "out").exists()


def test_values_are_parted_outside_of_brackets() -> None:
    assert sweeps.values('1e-3,[1, 2],"a,b",none') == ["1e-3", "[1, 2]", '"a,b"', "none"]


def test_a_folder_names_its_files_by_their_paths(tmp_path) -> None:
    config(tmp_path, "a/net")
    config(tmp_path, "b/net")
    assert names(sweeps.planned([str(tmp_path)], [1], {}, [], tmp_path / "o")) == ["a/net/1", "b/net/1"]


def test_presets_by_name_pattern_and_file(tmp_path) -> None:
    one = "papers/ho_fl/opt-125m/sst2/fedavg"
    there = names(sweeps.planned([one], [42], {}, [], tmp_path))
    assert there == ["ho_fl/opt-125m/sst2/fedavg/42"]
    assert names(sweeps.planned([str(CONFIGS / f"{one}.toml")], [42], {}, [], tmp_path)) == there
    found = [source.place for source in sweeps.sources("papers/ho_fl/opt-125m/*/fedprox")]
    assert len(found) == 5 and all(place in presets.presets() for place in found)
    assert len(sweeps.sources("papers/ho_fl/qwen2.5-1.5b/ag_news-iid/*")) == 4
    assert len(sweeps.sources("papers/ho_fl/qwen2.5-1.5b/ag_news-iid/*-recommended")) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["zo.probez=2"], "command line: zo.probez is unknown, did you mean zo.probes?"),
        (["--grid", "zo.estimator=forward,wrong"], "command line: zo.estimator = "),
        (["--grid", "zo.probes=2,2"], "two runs would be called net+zo.probes=2/42"),
        (["--grid", "zo.probes"], "Invalid value for --grid: 'zo.probes': write section.key=value,value"),
        (["--seeds", ""], "nothing to run; name a configuration, a folder of them or a preset, and seeds"),
        (["--seeds", "4,x"], "Invalid value for --seeds: '4,x': write whole numbers"),
        (["--seeds", "42,42"], "two runs would be called net/42"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_bad_input_starts_nothing(capsys, tmp_path, given, expected) -> None:
    file, out = config(tmp_path), tmp_path / "out"
    assert hofl_command("sweep", file, *given, "--out", out) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"hofl: {expected}") and said.err.count("\n") == 1
    assert not said.out and not out.exists()


def test_nothing_at_a_place(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for place, message in (
        (str(tmp_path / "no.toml"), "No such file"),
        (str(tmp_path / "empty"), "holds no .toml"),
        ("papers/ho_fl/nobody/*", "no preset fits"),
        ("papers/ho_fl/nobody", "no preset of that name"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweeps.sources(place)


def test_what_is_left_to_do(tmp_path) -> None:
    file = config(tmp_path)
    folder = tmp_path / "net" / "1"
    folder.mkdir(parents=True)

    def status(*overrides: str) -> str:
        return sweeps.planned([str(file)], [1], {}, overrides, tmp_path)[0].status

    assert status() == "new"
    (folder / "config.toml").write_text(tomli_w.dumps(load(file, ["seed=1"]).model_dump(exclude_none=True)))
    assert status() == "resume"
    (folder / "summary.json").write_text("{}")
    assert status() == "done" and status("run.threads=2") == "done"
    (folder / "config.toml").write_text(file.read_text() + "[optimizer]\nlr = 0.5\n")
    with pytest.raises(ConfigError, match=r"holds a run with optimizer\.lr = 0\.5, and 1e-05 is asked for"):
        status()
    (folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        status()


def test_one_that_fails_does_not_stop_the_rest(capsys, tmp_path) -> None:
    """The boundary 9 is known to be wrong only once there is a model: that run alone fails."""
    good = config(tmp_path, "good")
    bad = config(tmp_path, "bad", algorithm="ho_fl", cohort={"size": 2, "boundaries": [9]})
    out = tmp_path / "out"
    command = ("sweep", bad, good, *SHORT, "--seeds", "1", "--out", out, "--jobs", "2")
    assert hofl_command(*command) == 1
    said = capsys.readouterr()
    ended = "+".join(("", *SHORT[:1], *SHORT[2:]))
    lines = said.out.splitlines()
    assert lines[0] == "2 runs: 0 done, 0 to resume, 2 to start"
    assert any(f"bad{ended}/1: failed: {bad}" in line and "9 is outside 0..4" in line for line in lines)
    assert any(f"good{ended}/1: accuracy 0." in line for line in lines)
    assert said.err == f"hofl: 1 of 2 runs failed: bad{ended}/1 (not started)\n"
    assert (out / "compare" / "compare.md").exists() and "Final model" in said.out
    assert hofl_command("sweep", good, *SHORT, "--seeds", "1", "--out", out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"][0]["status"] == "done" and result["compared"][0]["groups"][0]["n"] == 1


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(tmp_path) -> None:
    """SIGTERM is passed on; the run saves, nothing is left behind, and the same command ends it.

    A script's ``&`` leaves SIGINT ignored, in the sweep and in its runs: that changes nothing.

    Half a minute: ``pytest -m slow tests/unit/test_sweep.py``.
    """
    file, out = config(tmp_path, algorithm="ho_fl", cohort={"size": 2, "boundaries": [2]}), tmp_path / "out"
    command = [sys.executable, "-m", "hofl", "sweep", str(file), "evaluation.every=500", "--seeds", "1"]
    command += ["--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen([*command, "rounds=100000"], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    rows = out / "net+rounds=100000" / "1" / "rounds.jsonl"
    end = time.monotonic() + 300
    while not (rows.exists() and rows.read_bytes().count(b"\n") > 2) and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130
    assert process.stderr is not None and "interrupted; 1 runs are left" in process.stderr.read()
    process.stderr.close()
    done = rows.read_bytes().count(b"\n")
    time.sleep(1)
    assert rows.read_bytes().count(b"\n") == done > 2
    os.rename(out / "net+rounds=100000", out / f"net+rounds={done + 1}")
    ended = subprocess.run([*command, f"rounds={done + 1}"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "1 runs: 0 done, 1 to resume, 0 to start" in ended.stdout
