# SPDX-License-Identifier: Apache-2.0
"""C75: a run is extended to the same bits, forked with other settings, and stopped without loss."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hofl import read_run
from hofl.cli import main
from hofl.report.groups import group
from hofl.runtime import ledger

CONFIG = Path(__file__).parents[2] / "configs" / "synthetic" / "ho_fl.toml"
SMALL = ("task.train_rows=240", "partition.clients=6", "cohort.size=2", "evaluation.every=2")


def hofl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("old") / "run"
    assert hofl("run", CONFIG, *SMALL, "rounds=4", "--out", where) == 0
    return where


def told(where: Path, name: str = "summary.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((where / name).read_bytes())
    return found


def _wait_for_rows(rows: Path) -> None:
    end = time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b"\n") > 2) and time.monotonic() < end:
        time.sleep(0.1)


def contents(where: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in where.iterdir() if not p.name.startswith("ledger.sqlite-")}


def test_a_fork_without_a_change_is_the_straight_run(old: Path, tmp_path: Path) -> None:
    straight, forked, before = tmp_path / "straight", tmp_path / "forked", contents(old)
    assert hofl("run", CONFIG, *SMALL, "rounds=8", "--out", straight) == 0
    assert hofl("run", "--resume", old, "--fork", forked, "rounds=8") == 0
    assert told(forked)["final_sha256"] == told(straight)["final_sha256"]
    assert contents(old) == before


def test_other_settings_are_refused_but_in_a_fork(old: Path, tmp_path: Path, capsys) -> None:
    forked = tmp_path / "forked"
    assert hofl("run", "--resume", old, "rounds=8", "optimizer.lr=0.5") == 2
    assert "go on in one with --fork" in capsys.readouterr().err
    assert hofl("run", "--resume", old, "--fork", forked, "rounds=8", "optimizer.lr=0.5", "zo.probes=4") == 0
    (first, _) = told(forked, "manifest.json")["sessions"]
    assert first["forked"]["run"] == "run" and first["forked"]["round"] == 4
    assert first["forked"]["state_sha256"] == told(old)["final_sha256"]
    changed = first["forked"]["changed"]
    assert changed["zo.probes"] == [2, 4] and changed["rounds"] == [4, 8]
    for round_number in (3, 6, 8):  # before the fork and after it
        assert hofl("replay", forked, "--round", round_number) == 0
    rows = [json.loads(line) for line in (forked / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(9))


def test_a_forked_run_is_no_seed_of_the_straight_one(old: Path, tmp_path: Path) -> None:
    forked = tmp_path / "forked"
    assert hofl("run", "--resume", old, "--fork", forked, "rounds=5") == 0
    straight = tmp_path / "straight"
    assert hofl("run", CONFIG, *SMALL, "rounds=5", "seed=7", "--out", straight) == 0
    labels = [g.label for g in group([read_run(straight), read_run(forked)])]
    assert len(labels) == 2 and labels[0].endswith("forked=unset") and labels[1].endswith("forked=4")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["task.train_rows=200"], "task.train_rows = 200 was given, this run has 240; a fork keeps"),
        (["seed=7"], "seed = 7 was given"),
        (["run.ledger=scalars"], "run.ledger = 'scalars' was given"),
    ],
)
def test_what_a_fork_keeps(old: Path, tmp_path: Path, capsys, given: list[str], said: str) -> None:
    assert hofl("run", "--resume", old, "--fork", tmp_path / "new", *given) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_where_a_fork_cannot_begin(old: Path, tmp_path: Path, capsys) -> None:
    assert hofl("run", CONFIG, "--fork", tmp_path / "new") == 2
    assert "--fork needs --resume" in capsys.readouterr().err
    assert hofl("run", "--resume", old, "--fork", old) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(old / "config.toml", bare)
    assert hofl("run", "--resume", bare, "--fork", tmp_path / "new") == 2
    assert "no round is saved" in capsys.readouterr().err


def test_sigterm_saves_as_ctrl_c_does(tmp_path: Path) -> None:
    where = tmp_path / "run"
    command = [sys.executable, "-m", "hofl", "run", str(CONFIG), *SMALL, "rounds=100000"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's & leaves it
    try:
        process = subprocess.Popen([*command, "--out", str(where)], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    rows = where / "rounds.jsonl"
    _wait_for_rows(rows)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "saved; resume with: hofl run --resume" in said
    done = rows.read_bytes().count(b"\n")
    assert hofl("run", "--resume", where, f"rounds={done}") == 0
    assert hofl("run", CONFIG, *SMALL, f"rounds={done}", "--out", tmp_path / "straight") == 0
    assert told(where)["final_sha256"] == told(tmp_path / "straight")["final_sha256"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["rounds=3"], "rounds = 3, but 4 are done"),
        (["optimizer.name=sgd"], "with optimizer.name changed, weights/top_moments of the saved state"),
    ],
)
def test_what_the_saved_state_does_not_allow(tmp_path: Path, capsys, changed: list[str], said: str) -> None:
    """Refused before the new folder is made, and the old one is as it was."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert hofl("run", CONFIG.with_name("ho_sfl.toml"), *SMALL, "rounds=4", "--out", old) == 0
    before = contents(old)
    assert hofl("run", "--resume", old, "--fork", new, *changed) == 2
    assert said in capsys.readouterr().err and not new.exists() and contents(old) == before
    assert hofl("run", "--resume", old, "--fork", old / "in") == 2
    assert "is inside" in capsys.readouterr().err and contents(old) == before


def test_a_fork_may_move_the_boundaries_that_follow_from_budgets(tmp_path: Path) -> None:
    """By hand: the fourth tier fits nowhere in 20 KiB and at boundary 3 in 36 KiB."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert hofl("run", CONFIG.with_name("budgets.toml"), *SMALL, "rounds=2", "--out", old) == 0
    richer = 'cohort.budgets=["40KiB", "37KiB", "35KiB", "36KiB"]'
    assert hofl("run", "--resume", old, "--fork", new, "rounds=6", richer) == 0
    was, now = (
        told(where, "manifest.json")["facts"]["budgets"]["segments"][0]["boundaries"] for where in (old, new)
    )
    (place,) = (k for k, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
    assert was[place] is None and now[place] == 3
    assert hofl("replay", new, "--round", 6) == 0 and hofl("run", "--resume", new, "rounds=7") == 0


def test_a_killed_run_is_forked_and_one_under_way_is_not(tmp_path: Path, capsys) -> None:
    """SIGKILL leaves rows or entries past the checkpoint; the fork ends with the straight run's bits."""
    old, new = tmp_path / "old", tmp_path / "new"
    process = subprocess.Popen(
        [sys.executable, "-m", "hofl", "run", str(CONFIG), *SMALL, "rounds=100000", "--out", str(old)],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for_rows(old / "rounds.jsonl")
        assert hofl("run", "--resume", old, "--fork", new) == 2
        assert "another process is writing to this run" in capsys.readouterr().err and not new.exists()
    finally:
        process.kill()
        process.wait()
    more = (old / "rounds.jsonl").read_bytes().count(b"\n") + 1
    assert hofl("run", "--resume", old, "--fork", new, f"rounds={more}") == 0
    assert hofl("run", CONFIG, *SMALL, f"rounds={more}", "--out", tmp_path / "straight") == 0
    assert told(new)["final_sha256"] == told(tmp_path / "straight")["final_sha256"]


def test_nobody_goes_on_with_a_run_whose_ledger_is_read(old: Path) -> None:
    """So that what a fork copies belongs together."""
    with closing(ledger.read(old / "ledger.sqlite")), pytest.raises(sqlite3.OperationalError, match="locked"):
        ledger.create(old / "ledger.sqlite", "full", "ho_fl")


def test_sigterm_before_the_first_round_ends_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While data and model are loaded nothing is written yet; the exit status is that of Ctrl-C."""
    from hofl import session

    monkeypatch.setattr(session, "prepare", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert hofl("run", CONFIG, "--out", tmp_path / "run") == 130
    assert signal.getsignal(signal.SIGTERM) is before and not (tmp_path / "run").exists()
