# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from strangers: no code runs, nothing big is read, no link is followed."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.runtime import checkpoint, files
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


@pytest.mark.parametrize("what", ["layout", "data"])
def test_other_data_or_model_than_the_run_had(tmp_path: Path, what: str) -> None:
    where = tmp_path / "run"
    tiny_run.finish(where, 2)
    manifest = (where / "manifest.json").read_text()
    task = tiny_run.tiny_task()
    prints = {"layout": task.model.layout.fingerprint, "data": task.fingerprint}
    (where / "manifest.json").write_text(manifest.replace(prints[what], "0" * 64))
    with pytest.raises(RecordError, match=f"the {what} is not what this run was started with"):
        tiny_run.finish(where, 3, resume=True)


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
