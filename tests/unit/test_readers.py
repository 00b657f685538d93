# SPDX-License-Identifier: Apache-2.0
import json
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hofl.errors import DataError
from hofl.tasks import readers
from hofl.tasks.files import count, read_table

ROWS = {
    "text": ["a, b", 'quoted "c"', "two\nlines", "é"],
    "label": [0, 1, 1, 0],
    "source": ["x", "y", "x", "x"],
}


WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "parquet": lambda frame, path: pq.write_table(pa.table(frame.to_dict("list")), path),
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "json": lambda frame, path: frame.to_json(path, orient="records"),
}


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _write(folder: Path, suffix: str, rows: dict[str, list[Any]] = ROWS, stem: str = "data") -> Path:
    path = folder / f"{stem}.{suffix}"
    WRITERS[suffix](pd.DataFrame(rows), path)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_rows_without_a_socket(
    tmp_path: Path, suffix: str, no_socket: None
) -> None:
    table = read_table(str(_write(tmp_path, suffix)), ["label", "text"])
    assert list(table) == ["label", "text"] and table["text"] == ROWS["text"]
    assert [int(label) for label in table["label"]] == ROWS["label"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_three_hundred_rows_of_four_columns(tmp_path: Path, suffix: str, no_socket: None) -> None:
    """C42."""
    rows: dict[str, list[Any]] = {name: [f"{name} {i}" for i in range(300)] for name in "abcd"}
    table = read_table(_write(tmp_path, suffix, rows), list("abcd"))
    assert count(table) == 300 and table == rows


def test_a_text_file_is_one_column(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\n\n two \nthree", encoding="utf-8")
    assert read_table(path, ["text"]) == {"text": ["one", " two ", "three"]}


def test_a_word_that_looks_like_nothing_stays_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nNA,0\nnull,1\n1e3,0\n", encoding="utf-8-sig")
    assert read_table(path, ["text"])["text"] == ["NA", "null", "1e3"]


BROKEN = {
    "empty.csv": b"",
    "header.csv": b"text,label\n",
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "ragged.csv": b"text,label\na,1\nb\n",
    "twice.csv": b"text,text\na,b\n",
    "latin.csv": b"text,label\n\xe9t\xe9,1\n",
    "quote.csv": b'text,label\n"open,1\n',
    "cut.parquet": b"PAR1\x00\x00\x00",
    "not.parquet": b"hello",
    "not.jsonl": b'{"text": "a"\n',
    "list.jsonl": b'["text"]\n',
    "deep.jsonl": b"[" * 200_000 + b"\n",
    "not.json": b"\xff\xfe{",
    "data.xlsx": b"PK\x03\x04",
    "noending": b"text\n",
    "pickle.pkl": b"\x80\x04\x95",
    "wide.csv": b",".join(b"c%d" % i for i in range(5000)) + b"\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_one_line_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(DataError, match=name) as caught:
        read_table(str(tmp_path / name), ["text"])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("suffix", WRITERS)
def test_any_damage_is_rows_or_our_error(tmp_path: Path, suffix: str, seed: int) -> None:
    path = _write(tmp_path, suffix)
    rng = np.random.Generator(np.random.Philox(seed))
    for _ in range(15):
        raw = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
        raw[rng.integers(0, len(raw), 1 + seed)] = rng.integers(0, 256, 1 + seed)
        damaged = tmp_path / f"damaged.{suffix}"
        damaged.write_bytes(raw[: len(raw) - int(rng.integers(0, 3))].tobytes())
        try:
            assert count(read_table(damaged, ["text"])) > 0
        except DataError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt", "json"])
def test_a_line_of_a_gigabyte_is_refused_before_it_is_held(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"one.{suffix}"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="16 MiB"):
        read_table(path, ["text"])
    assert time.perf_counter() - start < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_line_just_under_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 100}) + "\n"
    path.write_text(line * 2, encoding="utf-8")
    monkeypatch.setattr(readers, "LINE_LIMIT", len(line))
    assert count(read_table(path, ["text"])) == 2
    monkeypatch.setattr(readers, "LINE_LIMIT", len(line) - 1)
    with pytest.raises(DataError, match="line 1 is over"):
        read_table(path, ["text"])
