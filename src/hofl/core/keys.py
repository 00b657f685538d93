# SPDX-License-Identifier: Apache-2.0
"""Keys: the only source of randomness, folded from names and integers to a counter RNG.

A key is 128 bits. Two keys made from different seeds, domains or coordinates are
unrelated, and a key's stream has random access: word ``i`` depends on nothing else.
The bits are NumPy's Philox4x64-10 raw output, guaranteed across NumPy versions.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Domain = Literal[
    "directions",
    "cohort_order",
    "cohort_coins",
    "batches",
    "init",
    "partition",
    "tie_break",
    "evaluation",
]


def _digest(parts: bytes) -> "Key":
    raw = hashlib.blake2b(parts, digest_size=16, person=b"hofl-key-v1").digest()
    return Key(*struct.unpack("<QQ", raw))


@dataclass(frozen=True, slots=True)
class Key:
    """128 key bits as two unsigned 64-bit words."""

    high: int
    low: int

    @classmethod
    def of(cls, seed: int, domain: Domain, *coordinates: int) -> "Key":
        """The key of one stream of a run, e.g. ``Key.of(42, "directions", client, round)``.

        Args:
            seed: The run's seed, any 64-bit signed integer.
            domain: What the stream is for; streams of two domains never meet.
            coordinates: Client, round, step, ... each a 64-bit signed integer.
        """
        tag = domain.encode()
        return _digest(
            struct.pack(f"<B{len(tag)}s{1 + len(coordinates)}q", len(tag), tag, seed, *coordinates)
        )

    def fold(self, *coordinates: int) -> "Key":
        """A key below this one: who holds a key can derive its children, never its parent."""
        return _digest(struct.pack(f"<QQ{len(coordinates)}q", self.high, self.low, *coordinates))

    def words(self, start: int, count: int) -> NDArray[np.uint64]:
        """Words ``start .. start+count-1`` of the stream: uint64 [count]."""
        skip = start % 4  # Philox yields four words a counter
        counter = np.array([start // 4, 0, 0, 0], dtype=np.uint64)
        bits = np.random.Philox(key=self.array(), counter=counter)
        raw: NDArray[np.uint64] = bits.random_raw(skip + count)
        return raw[skip:]

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1), 53 bits each: float64 [count]."""
        return (self.words(0, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def permutation(self, count: int) -> NDArray[np.int64]:
        """A uniformly random order of ``0 .. count-1``: int64 [count]."""
        return np.argsort(self.words(0, count), kind="stable").astype(np.int64)

    def generator(self) -> np.random.Generator:
        """A NumPy generator, for laws such as Dirichlet that NumPy may change between versions."""
        return np.random.Generator(np.random.Philox(key=self.array()))

    def array(self) -> NDArray[np.uint64]:
        """The key as it travels: uint64 [2], 16 bytes."""
        return np.array([self.high, self.low], dtype=np.uint64)

    @classmethod
    def from_array(cls, words: NDArray[np.uint64]) -> "Key":
        """The inverse of :meth:`array`."""
        return cls(int(words[0]), int(words[1]))
