# SPDX-License-Identifier: Apache-2.0
r"""The flat layout: every trainable has a place in one vector, from the input to the output.

    flat:  [ embed | block 0 | block 1 | ... | block L-1 | head ]      d coordinates
           \___ bottom: flat[:d_zo] ___/\___ top: flat[d_zo:] ___/

A boundary ``b`` is the number of blocks below the cut, so it is an offset into the vector.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hofl.errors import ConfigError

EMBED = -1
"""The block number of trainables below block 0."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One trainable tensor: its name, shape, block and first coordinate in the vector."""

    name: str
    shape: tuple[int, ...]
    block: int
    offset: int

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The slots in vector order, and the number of blocks L that can be cut between."""

    slots: tuple[Slot, ...]
    blocks: int

    @classmethod
    def build(cls, trainables: Iterable[tuple[str, tuple[int, ...], int]], blocks: int) -> "Layout":
        """Order trainables by (block, name) and give each its offset.

        Args:
            trainables: ``(name, shape, block)``; block is ``EMBED``, ``0 .. L-1``, or ``L`` for the head.
            blocks: L.
        """
        slots, offset = [], 0
        for name, shape, block in sorted(trainables, key=lambda t: (t[2], t[0])):
            slots.append(Slot(name, tuple(shape), block, offset))
            offset += math.prod(shape)
        return cls(tuple(slots), blocks)

    @cached_property
    def size(self) -> int:
        """d, the number of trainable coordinates."""
        return sum(slot.size for slot in self.slots)

    def bottom_size(self, boundary: int) -> int:
        """d_zo, the offset of a boundary: 0 at b=0, else all slots of blocks below ``boundary``.

        Raises:
            ConfigError: the boundary is not in ``0 .. L``.
        """
        if not 0 <= boundary <= self.blocks:
            raise ConfigError(f"boundary {boundary} is outside 0..{self.blocks}, the blocks of this model")
        if boundary == 0:
            return 0
        return sum(slot.size for slot in self.slots if slot.block < boundary)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, blocks and offsets: equal layouts, equal fingerprints."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The layout as JSON text, enough to rebuild it without the model."""
        slots = [[s.name, list(s.shape), s.block] for s in self.slots]
        return json.dumps({"blocks": self.blocks, "slots": slots}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """The inverse of :meth:`to_json`."""
        data = json.loads(text)
        return cls.build(((n, tuple(shape), b) for n, shape, b in data["slots"]), data["blocks"])
