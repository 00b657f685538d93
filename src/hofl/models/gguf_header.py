# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, read within bounds.

It is checked here before any reader of a library sees the file: those trust the counts it states.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hofl.errors import ModelError

COUNT, KEY, TEXT, ITEMS, DIMENSIONS = 2**16, 2**10, 2**24, 2**23, 4
"""Most tensors or settings, bytes of a name, bytes of a string, items of all arrays, dimensions."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
OUTPUT = "output.weight"
_FLOAT32 = 4


@dataclass(frozen=True)
class Tensor:
    """One tensor's entry.

    Attributes:
        elements: numbers in it.
        dimensions: how many dimensions.
        kind: ggml type number.
        start: first byte, counted from the end of the header.
        stored: bytes in the file.
    """

    elements: int
    dimensions: int
    kind: int
    start: int
    stored: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its weights.

    Attributes:
        values: single numbers and short strings of its settings.
        tensors: by name.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """As in "llama"."""
        return str(self.values["general.architecture"])

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def dequantised(self) -> int:
        """Bytes of all tensors as float32, which is what they are unpacked to."""
        return _FLOAT32 * self.elements


class _Cursor:
    """Reads forward through bytes and never past their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place, self.items = path, data, 0, 0

    def skip(self, size: int) -> int:
        """Pass over ``size`` bytes; where they begin. ModelError where the file has fewer."""
        start, self.place = self.place, self.place + size
        if self.place > len(self.data):
            raise refusal(self.path, f"cut off: {size} bytes announced at byte {start} of {len(self.data)}")
        return start

    def number(self, code: str) -> Any:
        """The next number, by its ``struct`` code."""
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def bounded(self, code: str, most: int, what: str) -> int:
        """The next number as a count. ModelError naming ``what`` where it is over ``most``."""
        count = int(self.number(code))
        if count > most:
            raise refusal(self.path, f"{what} = {count}: at most {most}")
        return count

    def text(self, most: int, what: str) -> str:
        """The next string of at most ``most`` bytes. ModelError where it could upset a terminal."""
        size = self.bounded("Q", most, f"bytes of {what}")
        start = self.skip(size)
        text = self.data[start : start + size].decode("utf-8", errors="replace")
        if not text.isprintable():
            raise refusal(self.path, f"{what} {text[:40]!a} is not printable")
        return text

    def value(self, kind: int) -> Any:
        """A number, a short string, or None for what is only passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            size = self.bounded("Q", TEXT, "bytes of a string")
            start = self.skip(size)
            return self.data[start : start + size].decode("utf-8", errors="replace") if size <= KEY else None
        if kind != _ARRAY:
            raise refusal(self.path, f"a setting of unknown type {kind}")
        inner = self.number("I")
        count = self.bounded("Q", ITEMS - self.items, "items of arrays")
        self.items += count
        if inner in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.bounded("Q", TEXT, "bytes of a string"))
        else:
            raise refusal(self.path, f"an array of type {inner}")
        return None


def refusal(path: Path, why: str) -> ModelError:
    """The error of a file that is no GGUF model."""
    return ModelError(f"{path}: not a GGUF model that can be read ({why})")


def read_header(path: Path) -> Header:
    """A GGUF file's header; no weight is read and nothing is allocated by a count it states.

    Raises:
        ModelError: not GGUF, cut off, or beyond a bound; the message names the count and the bound.
    """
    if path.stat().st_size < 24:
        raise refusal(path, "shorter than any header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if data[cursor.skip(4) : 4] != b"GGUF":
            raise refusal(path, "it does not begin with GGUF")
        if (version := cursor.number("I")) not in (2, 3):
            raise refusal(path, f"version {version}: 2 and 3 can be read")
        count = cursor.bounded("Q", COUNT, "number of tensors")
        values: dict[str, Any] = {}
        for _ in range(cursor.bounded("Q", COUNT, "number of settings")):
            key = cursor.text(KEY, "the name of a setting")
            values[key] = cursor.value(cursor.number("I"))
        tensors: dict[str, Tensor] = {}
        for _ in range(count):
            name, tensor = _entry(cursor)
            if name in tensors:
                raise refusal(path, f"two tensors are named {name}")
            tensors[name] = tensor
        _check(cursor, values, tensors)
    return Header(values, tensors)


def _entry(cursor: _Cursor) -> tuple[str, Tensor]:
    from gguf.constants import GGML_QUANT_SIZES

    name = cursor.text(KEY, "the name of a tensor")
    count = cursor.bounded("I", DIMENSIONS, f"dimensions of {name}")
    shape = [cursor.number("Q") for _ in range(count)]
    kind, start = cursor.number("I"), cursor.number("Q")
    if kind not in GGML_QUANT_SIZES:
        raise refusal(cursor.path, f"{name} has the unknown type {kind}")
    block, width = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if not shape or elements < 1 or elements >= 2**63 or shape[0] % block:
        raise refusal(cursor.path, f"{name} has the impossible shape {shape} for its type {kind}")
    return name, Tensor(elements, count, kind, start, elements // block * width)


def _check(cursor: _Cursor, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse tensors outside the file, or overlapping, and what would make a reader build without end."""
    path, room = cursor.path, len(cursor.data)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture.isprintable():
        raise refusal(path, "general.architecture is missing")
    if sum(tensor.stored for tensor in tensors.values()) + cursor.place > room:
        raise refusal(path, f"cut off: its tensors need more than the file's {room} bytes")
    for name, tensor in tensors.items():
        if cursor.place + tensor.start + tensor.stored > room:
            raise refusal(path, f"cut off: {name} ends after the file's {room} bytes")
    blocks = values.get(f"{architecture}.block_count")
    if not isinstance(blocks, int) or not 0 < blocks <= len(tensors):
        raise refusal(path, f"{architecture}.block_count = {blocks} for {len(tensors)} tensors")
    if values.get(f"{architecture}.tie_word_embeddings") is False and OUTPUT not in tensors:
        raise ModelError(
            f"{path} lacks tensors: {OUTPUT}, and says that its output is not tied to its embedding"
        )


def within_budget(path: Path, budget: int) -> None:
    """Refuse a file whose float32 weights are more than ``budget`` bytes; reads the header only.

    Raises:
        ModelError: with both numbers.
    """
    needed = read_header(path).dequantised
    if needed > budget:
        raise ModelError(
            f"{path}: its weights take {needed / 1e6:.0f} MB dequantised to float32, the budget is "
            f"{budget / 1e6:.0f} MB: take a smaller model or a larger budget"
        )
