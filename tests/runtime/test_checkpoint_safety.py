# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from strangers: no code runs, nothing big is read, no link is followed."""

import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.runtime import checkpoint, files, ledger
from hofl.runtime.memory import high_water


class Bomb:
    """Touches a marker file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["checkpoint", "ledger.sqlite"])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    where, marker = tmp_path / "run", tmp_path / "marker"
    tiny_run.finish(where, 2)
    (where / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(RecordError, match="not a"):
        tiny_run.finish(where, 3, resume=True)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "its header claims"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "its header claims"),
        (b"x", "not a record"),
        (b"", "not a record"),
        ((2).to_bytes(8, "little") + b"{}", "not a record"),
    ],
)
def test_malformed_headers(tmp_path: Path, blob: bytes, message: str) -> None:
    (tmp_path / "checkpoint").write_bytes(blob)
    with pytest.raises(RecordError, match=message):
        checkpoint.load(tmp_path / "checkpoint")


VECTOR = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weights/vector": VECTOR, "weights/extra": VECTOR}, "'weights/extra' is unknown to"),
        ({"scalars/x": VECTOR}, "array '(scalars/x|weights/vector)' is"),
        ({"weights/vector": VECTOR[:5]}, r"'weights/vector' is float32\[5\], expected float32\[6\]"),
        ({"weights/vector": VECTOR.astype(np.float64)}, r"'weights/vector' is float64\[6\]"),
        ({"weights/vector": np.full(6, np.nan, np.float32)}, "'weights/vector' has non-finite values"),
    ],
)
def test_states_of_another_run(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = tmp_path / "checkpoint"
    files.replace(path, Record(arrays, {"format": checkpoint.FORMAT, "facts": {}, "state": {}}).to_bytes())
    with pytest.raises(RecordError, match=message):
        checkpoint.load(path, Record({"weights/vector": VECTOR}))


def test_a_checkpoint_too_big_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(RecordError, match="has at most"):
        checkpoint.load(path, Record({"weights/vector": VECTOR}))


@pytest.mark.parametrize("name", ["checkpoint", "ledger.sqlite"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    (where / name).rename(tmp_path / "outside")
    (where / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RecordError, match="links are not followed"):
        tiny_run.finish(where, 3, resume=True)


def test_a_partial_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "checkpoint.partial").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        files.replace(tmp_path / "checkpoint", b"x")
    assert (tmp_path / "outside").read_text() == "mine"


def test_save_refuses_what_is_not_finite_and_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.save(path, Record({"weights/vector": VECTOR}, {"round": 3}), {"round": 3})
    with pytest.raises(RecordError, match="non-finite"):
        checkpoint.save(path, Record({"weights/vector": np.full(6, np.inf, np.float32)}), {})
    state, facts = checkpoint.load(path)
    assert state.values == {"round": 3} == facts and np.array_equal(state.arrays["weights/vector"], VECTOR)


NAMES = ("checkpoint", "initial.safetensors", "ledger.sqlite", "manifest.json", "rounds.jsonl")


def contents(where: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in where.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_file_is_named_and_nothing_is_touched(tmp_path: Path, name: str) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    (where / name).unlink()
    before = contents(where)
    with pytest.raises(RecordError, match=f"{name}: missing, but .*; put it back from a copy, or"):
        tiny_run.finish(where, 3, resume=True)
    assert contents(where) == before


@pytest.mark.parametrize("statement", ["rounds WHERE round = 2", "entries WHERE round = 2 AND place = 1"])
def test_a_short_ledger_is_refused(tmp_path: Path, statement: str) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 3)
    with closing(sqlite3.connect(where / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute(f"DELETE FROM {statement}")
    before = {name: blob for name, blob in contents(where).items() if not name.startswith("ledger")}
    with pytest.raises(RecordError, match=r"round 2 is missing or not whole, the checkpoint is of round 3"):
        tiny_run.finish(where, 4, resume=True)
    assert before.items() <= contents(where).items()


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_short_rows_are_refused(tmp_path: Path, kept: int) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 3)
    lines = (where / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (where / "rounds.jsonl").write_bytes(b"".join(lines[:kept]))
    with pytest.raises(RecordError, match=f"row of round {kept} is missing, the checkpoint is of round 3"):
        tiny_run.finish(where, 4, resume=True)
    assert (where / "rounds.jsonl").read_bytes() == b"".join(lines[:kept])
    assert (where / "final.safetensors").exists()


@pytest.mark.parametrize("name", ["mode", "algorithm"])
def test_a_ledger_is_of_one_mode_and_algorithm(tmp_path: Path, name: str) -> None:
    ledger.create(tmp_path / "l", "full", "ho_fl").close()
    given = {"mode": "full", "algorithm": "ho_fl"} | {name: "scalars" if name == "mode" else "fedavg"}
    with pytest.raises(RecordError, match=r"it was made with (run.ledger|algorithm) = "):
        ledger.create(tmp_path / "l", **given)


def test_high_water() -> None:
    assert high_water("VmPeak:\t 9 kB\nVmHWM:\t    2012 kB\n") == 2012 * 1024
    with pytest.raises(StopIteration):
        high_water("Name: x\n")


def test_peak_is_reset(tmp_path: Path) -> None:
    import torch

    from hofl.runtime.memory import peak_bytes, reset_peak

    cpu = torch.device("cpu")
    big = np.ones(32 << 20, dtype=np.uint8)
    high = peak_bytes(cpu)
    del big
    if not reset_peak(cpu) or high is None:
        pytest.skip("the high-water mark cannot be set back on this platform")
    low = peak_bytes(cpu)
    assert low is not None and high - low > 24 << 20
