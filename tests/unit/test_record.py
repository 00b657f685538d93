# SPDX-License-Identifier: Apache-2.0
"""Records and layouts: round trips, strict parsing, byte counts, no code execution (C71, C73, C79)."""

import os
import pickle
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from hofl.core.layout import EMBED, Layout
from hofl.core.record import Record, bytes_by_category
from hofl.errors import ConfigError, RecordError

RECORD = Record(
    {
        "weights/vector": np.arange(5, dtype=np.float32),
        "scalars/s": np.float32([[1.5, -0.0], [1e-45, 3.4e38]]),
        "seeds/root": np.array([2**64 - 1, 0], dtype=np.uint64),
        "digests/bottom": np.arange(32, dtype=np.uint8),
        "metrics/none": np.zeros((3, 0)),
    },
    {"round": 3, "lr": 0.1, "betas": [0.9, 0.999], "text": "a\u2028b", "deep": {"x": None}},
)


def test_round_trip_keeps_bits() -> None:
    again = Record.from_bytes(RECORD.to_bytes())
    assert again.values == RECORD.values and set(again.arrays) == set(RECORD.arrays)
    for name, array in RECORD.arrays.items():
        assert again.arrays[name].dtype == array.dtype and again.arrays[name].shape == array.shape
        assert again.arrays[name].tobytes() == array.tobytes()


def test_serialising_is_deterministic_and_counts_every_byte() -> None:
    blob = RECORD.to_bytes()
    assert blob == Record(dict(reversed(RECORD.arrays.items())), RECORD.values).to_bytes()
    counts = bytes_by_category(RECORD, len(blob))
    assert counts.total() == len(blob)
    assert (counts["weights"], counts["scalars"], counts["seeds"], counts["digests"]) == (20, 16, 16, 32)
    assert 0 < counts["headers"] < 1024


def test_two_hundred_scalars_fit_two_kibibytes() -> None:
    blob = Record({"scalars/s": np.zeros((20, 10), dtype=np.float32)}, {"round": 1, "client": 2}).to_bytes()
    assert len(blob) - 800 <= 1024


@pytest.mark.parametrize("values", [{"x": float("nan")}, {"x": float("inf")}, {"x": b"raw"}, {"x": {1, 2}}])
def test_values_must_be_finite_json(values: dict) -> None:
    with pytest.raises(RecordError, match="finite JSON"):
        Record({}, values).to_bytes()


@pytest.mark.parametrize("said", ["NaN", "-Infinity", "1e999", "[" * 900 + "NaN" + "]" * 900])
def test_a_blob_whose_values_are_no_finite_json_is_no_record(said: str) -> None:
    blob = save({}, {"values": f'{{"x":{said}}}'})
    with pytest.raises(RecordError, match="not a record"):
        Record.from_bytes(blob)


def test_arrays_need_a_category() -> None:
    with pytest.raises(RecordError, match="no category"):
        Record({"vector": np.zeros(1)}).to_bytes()


class Payload:
    def __reduce__(self):
        return os.mkdir, ("marker-of-executed-pickle",)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"x",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{}",
        RECORD.to_bytes()[:-1],
        RECORD.to_bytes()[:40],
        pickle.dumps(Payload()),
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 28) + b'{"__metadata__":{"values":1}}'[:28],
    ],
)
def test_malformed_blobs_are_refused_and_run_nothing(blob: bytes, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match="not a record"):
        Record.from_bytes(blob)
    assert list(tmp_path.iterdir()) == []


def test_mutations_never_escape_as_other_errors() -> None:
    blob, rng = bytearray(RECORD.to_bytes()), np.random.Generator(np.random.Philox(key=7))
    for _ in range(500):
        bad = bytearray(blob)
        for place in rng.integers(0, len(bad), 3):
            bad[place] = rng.integers(0, 256)
        try:
            Record.from_bytes(bytes(bad))
        except RecordError:
            continue


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "word"),
    [
        ("weights/vector", "float32", (4,), "expected float32"),
        ("weights/vector", "float64", (5,), "expected float64"),
        ("weights/other", "float32", (5,), "missing"),
    ],
)
def test_array_checks(name: str, dtype: str, shape: tuple[int, ...], word: str) -> None:
    with pytest.raises(RecordError, match=word):
        RECORD.array(name, dtype, shape)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_arrays_are_refused(bad: float) -> None:
    with pytest.raises(RecordError, match="non-finite"):
        Record({"scalars/s": np.float32([1, bad, 3])}).array("scalars/s", "float32", (3,))
    Record({"scalars/s": np.float32([-0.0, 1e-45, 3e38])}).array("scalars/s", "float32", (3,))


TRAINABLES = [
    ("head.weight", (2, 4), 3),
    ("layers.1.q.lora_B", (4, 2), 1),
    ("layers.1.q.lora_A", (2, 4), 1),
    ("layers.0.q.lora_A", (2, 4), 0),
    ("embed.weight", (7, 4), EMBED),
]


def test_layout_orders_by_block_then_name_whatever_the_input_order() -> None:
    layout = Layout.build(TRAINABLES, 3)
    assert [s.name for s in layout.slots] == [
        "embed.weight", "layers.0.q.lora_A", "layers.1.q.lora_A", "layers.1.q.lora_B", "head.weight"
    ]  # fmt: skip
    assert [s.offset for s in layout.slots] == [0, 28, 36, 44, 52] and layout.size == 60
    again = Layout.build(reversed(TRAINABLES), 3)
    assert again == layout and again.fingerprint == layout.fingerprint
    assert Layout.from_json(layout.to_json()) == layout


def test_boundaries_are_offsets() -> None:
    layout = Layout.build(TRAINABLES, 3)
    # 0: everything is first order; from 1 on the embedding belongs to the bottom; L leaves the head on top
    assert [layout.bottom_size(b) for b in range(4)] == [0, 36, 52, 52]
    for bad in (-1, 4):
        with pytest.raises(ConfigError, match=r"outside 0\.\.3"):
            layout.bottom_size(bad)


@pytest.mark.parametrize("change", ["rename", "shape", "block", "blocks"])
def test_fingerprint_tells_layouts_apart(change: str) -> None:
    name, shape, block = TRAINABLES[3]
    other = {
        "rename": (name + "x", shape, block),
        "shape": (name, (4, 2), block),
        "block": (name, shape, 1),
        "blocks": (name, shape, block),
    }[change]
    layout = Layout.build([*TRAINABLES[:3], other, TRAINABLES[4]], 4 if change == "blocks" else 3)
    assert layout.fingerprint != Layout.build(TRAINABLES, 3).fingerprint
