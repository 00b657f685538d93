# SPDX-License-Identifier: Apache-2.0
"""A run killed anywhere and resumed is the straight run: rows, ledger, summary and final bits."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import killed_run
import pytest
import tiny_run

from hofl.errors import ConfigError
from hofl.runtime import checkpoint, ledger
from hofl.runtime.loop import run

ROUNDS = 4


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("straight") / "run"
    tiny_run.finish(where, ROUNDS)
    assert tiny_run.timeless(where)[1]["failures"] == 0
    return where


def blobs(where: Path) -> list[Any]:
    with closing(ledger.read(where / "ledger.sqlite")) as book:
        return [
            [(e.client, e.plan.to_bytes(), e.reply.to_bytes()) for e in book.entries(r)]
            for r in range(1, book.last + 1)
        ]


def same(a: Path, b: Path) -> None:
    (rows, summary), (other_rows, other) = tiny_run.timeless(a), tiny_run.timeless(b)
    assert summary == other
    for row, other_row in zip(rows, other_rows, strict=True):
        assert row == other_row
    assert blobs(a) == blobs(b)
    for name in ("final.safetensors", "initial.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, each killed at another place by a process of its own."""
    where = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(Path(killed_run.__file__)), str(where), str(ROUNDS)]
    child = subprocess.run(command, capture_output=True)
    assert set(json.loads(child.stdout).values()) == {-signal.SIGKILL}, child.stderr.decode()
    return where


@pytest.mark.parametrize(("place", "number"), killed_run.CASES)
def test_killed_and_resumed_is_the_straight_run(
    straight: Path, killed: Path, tmp_path: Path, place: str, number: int
) -> None:
    """C13."""
    where = tmp_path / "run"
    shutil.copytree(killed / f"{place}-{number}", where)
    assert not (where / "summary.json").exists()
    tiny_run.finish(where, ROUNDS, resume=True)
    same(straight, where)
    assert not list(where.glob("*.partial"))


@pytest.mark.parametrize("name", killed_run.FIRST)
def test_killed_while_the_folder_is_made(straight: Path, killed: Path, tmp_path: Path, name: str) -> None:
    """Before there is a configuration a new run starts in what is left, after it a resume does."""
    where = tmp_path / "run"
    shutil.copytree(killed / f"{name}-0", where)
    assert not (where / name).exists() or name == "ledger.sqlite"
    resume = (where / "config.toml").exists()
    assert resume == (name != "config.toml")
    tiny_run.finish(where, ROUNDS, resume=resume)
    same(straight, where)
    assert not list(where.glob("*.partial"))


@pytest.mark.parametrize(("place", "last"), [("in_ledger-3", 2), ("before_save-3", 3)])
def test_a_killed_run_can_be_replayed_before_it_is_resumed(
    killed: Path, tmp_path: Path, place: str, last: int
) -> None:
    where = tmp_path / "run"
    shutil.copytree(killed / place, where)
    state = ledger.replay(where, last, tiny_run.parts().algorithm)
    assert checkpoint.state_sha256(state) == tiny_run.timeless_rows(where)[last]["state_sha256"]


def test_killed_then_stopped(straight: Path, killed: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    shutil.copytree(killed / "in_row-1", where)
    for row in run(tiny_run.parts(), where, tiny_run.settings(ROUNDS), resume=True):
        if row["round"] == 3:
            break
    tiny_run.finish(where, ROUNDS, resume=True)
    same(straight, where)


def test_stopped_at_a_row_and_extended(straight: Path, tmp_path: Path) -> None:
    """CASES C75, 5 -> 10 rounds: the shorter run's last round was evaluated, the straight one's was not."""
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    assert [r["round"] for r in tiny_run.finish(where, ROUNDS, resume=True)] == [3, 4]
    (rows, summary), (expected_rows, expected) = tiny_run.timeless(where), tiny_run.timeless(straight)
    assert summary == expected
    assert [r["state_sha256"] for r in rows] == [r["state_sha256"] for r in expected_rows]
    assert (where / "config.toml").read_text() == tiny_run.settings(ROUNDS).config
    sessions = json.loads((where / "manifest.json").read_text())["sessions"]
    assert [s["first_round"] for s in sessions] == [0, 3]


def test_resume_of_a_finished_run_adds_nothing(straight: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, ROUNDS)
    assert tiny_run.finish(where, ROUNDS, resume=True) == []
    same(straight, where)


def test_a_run_that_goes_on_has_no_final_model(straight: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    assert (where / "final.safetensors").exists()
    going = run(tiny_run.parts(), where, tiny_run.settings(ROUNDS), resume=True)
    next(going)
    assert not (where / "final.safetensors").exists() and not (where / "summary.json").exists()
    assert [row["round"] for row in going] == [4]
    assert (where / "final.safetensors").read_bytes() == (straight / "final.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changed", "count"), [({}, 0), ({"threads": 7}, 1), ({"threads": 7, "device": "cuda:0"}, 2)]
)
def test_other_threads_or_device_warn(tmp_path: Path, changed: dict[str, Any], count: int) -> None:
    where, said = tmp_path / "run", list[str]()
    tiny_run.finish(where, 2)
    manifest = json.loads((where / "manifest.json").read_text())
    manifest["sessions"][-1]["hardware"] |= changed
    (where / "manifest.json").write_text(json.dumps(manifest))
    list(run(tiny_run.parts(warn=said.append), where, tiny_run.settings(3), resume=True))
    assert [line.split(" in the last session")[0] for line in said] == [
        f"{k}: {v}" for k, v in changed.items()
    ]
    assert len(said) == count


def test_interrupt_passes_and_can_be_resumed(straight: Path, tmp_path: Path) -> None:
    where, calls = tmp_path / "run", [0]

    def wrap(call: Any) -> Any:
        def interrupted(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt
            return call(*arguments)

        return interrupted

    with pytest.raises(KeyboardInterrupt):
        list(run(tiny_run.parts(wrap=wrap), where, tiny_run.settings(ROUNDS)))
    assert not (where / "summary.json").exists()
    tiny_run.finish(where, ROUNDS, resume=True)
    same(straight, where)


@pytest.mark.parametrize("tail", [b'{"round": 3, "loss"', b'{"round": 3, "loss": 0}\n{"ro', b"\x00\xff"])
def test_torn_last_line(straight: Path, tmp_path: Path, tail: bytes) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    with (where / "rounds.jsonl").open("ab") as file:
        file.write(tail)
    tiny_run.finish(where, ROUNDS, resume=True)
    assert tiny_run.timeless(where)[1] == tiny_run.timeless(straight)[1]
    assert [r["round"] for r in tiny_run.timeless(where)[0]] == [0, 1, 2, 3, 4]


def test_duplicated_rows_are_dropped(tmp_path: Path) -> None:
    tiny_run.finish(tmp_path / "run", 2)
    rows = tmp_path / "run" / "rounds.jsonl"
    rows.write_bytes(rows.read_bytes() + rows.read_bytes().splitlines(keepends=True)[1])
    tiny_run.finish(tmp_path / "run", 3, resume=True)
    assert [r["round"] for r in tiny_run.timeless(tmp_path / "run")[0]] == [0, 1, 2, 3]


def test_fewer_rounds_than_are_done(tmp_path: Path) -> None:
    tiny_run.finish(tmp_path / "run", 3)
    with pytest.raises(ConfigError, match="rounds = 2, but 3 are done"):
        tiny_run.finish(tmp_path / "run", 2, resume=True)
    assert "rounds = 3" in (tmp_path / "run" / "config.toml").read_text()


def test_stopping_short_evaluates_the_last_round(tmp_path: Path) -> None:
    where = tmp_path / "run"
    for row in run(tiny_run.parts(), where, tiny_run.settings(ROUNDS)):
        if row["round"] == 2:
            break
    tiny_run.finish(where, 2, resume=True)
    expected = tmp_path / "expected"
    tiny_run.finish(expected, 2)
    assert tiny_run.timeless(where)[1] == tiny_run.timeless(expected)[1]
