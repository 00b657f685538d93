# SPDX-License-Identifier: Apache-2.0
"""Directions: a key becomes any slice of q probe directions, the same bits on every machine.

Four families, each with ``E[u u^T] = I``, so ``(1/q) sum_j <g, u_j> u_j`` is unbiased for g:

* ``gaussian``: 16 Philox bits a coordinate index a table of normal quantiles.
* ``rademacher``: one Philox bit a coordinate, +1 or -1.
* ``hadamard``: q rows, drawn without replacement, of a Walsh-Hadamard matrix of size n (the power
  of two at or above d) whose columns carry random signs. Orthogonal over n; all q at once cost
  O(n log n), and at q = n = d the estimate is the gradient itself.
* ``sphere``: the gaussian vector scaled to length sqrt(d), uniform on that sphere. At radius mu it is the
  unit sphere with factor d (FedZO, HERON-SFL) at radius mu sqrt(d).

Coordinate i of a direction depends on its key and i alone: not on d, the block size or the device. On the
sphere it depends on d too, by one factor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.core.quantiles import normal_quantiles
from hofl.errors import ConfigError

Family = Literal["gaussian", "rademacher", "hadamard", "sphere"]
Floats = NDArray[np.float32]
BlockFunction = Callable[[int, int], Floats]

RNG_ID = "philox4x64-10/normal-quantiles-65536/v1"
"""Names the stream in ledgers and handshakes; it changes when any bit of a direction would."""

BLOCK = 1 << 16
"""Coordinates generated, used and dropped at a time."""


def blocks(size: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """The ``(start, stop)`` pairs that cover ``0 .. size``."""
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def gaussian(key: Key, start: int, stop: int) -> Floats:
    """Coordinates ``start .. stop-1`` of a standard-normal vector: float32 [stop-start]."""
    first = start // 4  # four 16-bit indices a word
    bits = key.words(first, (stop + 3) // 4 - first).astype("<u8", copy=False).view("<u2")
    return normal_quantiles().take(bits[start - 4 * first : stop - 4 * first], mode="wrap")


def signs(key: Key, start: int, stop: int) -> Floats:
    """Coordinates ``start .. stop-1`` of a vector of fair signs, +1 or -1: float32 [stop-start]."""
    first = start // 64
    words = key.words(first, (stop + 63) // 64 - first).astype("<u8", copy=False)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[start - 64 * first : stop - 64 * first]
    return 1.0 - 2.0 * bits.astype(np.float32)


def squared_norm(key: Key, size: int, block: int = BLOCK) -> float:
    """``||gaussian(key, 0, size)||^2``; the same bits whatever the block size and the machine.

    Squares of float32 are exact in float64, and a running sum adds them one by one in the order of the
    coordinates; a pairwise or vectorised sum would depend on the machine.
    """
    total = 0.0
    for start, stop in blocks(size, block):
        squares = gaussian(key, start, stop).astype(np.float64)
        squares *= squares
        squares[0] += total
        total = float(np.add.accumulate(squares)[-1])
    return total


def walsh_hadamard_(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Multiply by the unnormalised Walsh-Hadamard matrix: [n] -> [n], n a power of two.

    The butterflies run in one fixed order, so float32 results are bit-equal everywhere. The
    vector is folded to a near-square table and its axes are done in turn, to stay in the cache.
    """
    bits = values.size.bit_length() - 1
    table = values.reshape(1 << bits // 2, -1)  # [r, c]
    for _ in range(2):
        h = 1
        while h < len(table):
            pair = table.reshape(-1, 2, h, table.shape[1])
            total = pair[:, 0] + pair[:, 1]
            np.subtract(pair[:, 0], pair[:, 1], out=pair[:, 1])
            pair[:, 0] = total
            h *= 2
        table = np.ascontiguousarray(table.T)
    return table.reshape(-1)


@dataclass(frozen=True)
class Directions:
    """The q directions of one local step.

    Attributes:
        key: the step's key; direction j has its own child of it.
        family: the law of the directions.
        count: q.
        size: d_zo, coordinates of each direction.
    """

    key: Key
    family: Family
    count: int
    size: int

    def __post_init__(self) -> None:
        if self.family == "hadamard" and self.count > self._order:
            raise ConfigError(
                f"zo.probes = {self.count}: hadamard has {self._order} directions for d = {self.size}"
            )

    @property
    def _order(self) -> int:
        return 1 << max(0, self.size - 1).bit_length()

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """q distinct rows of the Hadamard matrix, uniform without replacement: int64 [q]."""
        n, q, key = self._order, self.count, self.key.fold(-2)
        if 2 * q > n:
            return key.permutation(n)[:q]
        draws = key.words(0, 4 * q + 64) & np.uint64(n - 1)
        while len(first := np.unique(draws, return_index=True)[1]) < q:
            draws = key.words(0, 2 * len(draws)) & np.uint64(n - 1)
        rows: NDArray[np.int64] = draws[np.sort(first)[:q]].astype(np.int64)
        return rows

    @cached_property
    def _scales(self) -> Floats:
        """``sqrt(d) / ||u_j||`` of the q gaussian vectors, each rounded once: float32 [q]."""
        norms = [squared_norm(self.key.fold(j), self.size) for j in range(self.count)]
        return np.array([math.sqrt(self.size / norm) if norm else 1.0 for norm in norms], dtype=np.float32)

    def block(self, probe: int, start: int, stop: int) -> Floats:
        """Coordinates ``start .. stop-1`` of direction ``probe``: float32 [stop-start]."""
        if self.family == "gaussian":
            return gaussian(self.key.fold(probe), start, stop)
        if self.family == "sphere":
            u = gaussian(self.key.fold(probe), start, stop)
            u *= self._scales[probe]
            return u
        if self.family == "rademacher":
            return signs(self.key.fold(probe), start, stop)
        parity = np.bitwise_count(self._rows[probe] & np.arange(start, stop)) & 1
        row: Floats = 1.0 - 2.0 * parity.astype(np.float32)
        return row * signs(self.key.fold(-1), start, stop)

    def combination(self, scalars: Floats) -> BlockFunction:
        """``(start, stop) -> (1/q) sum_j s_j u_j`` on that slice, a new float32 array, summed in probe order.

        Args:
            scalars: float32 [q].
        """
        share = np.float32(1.0 / self.count)
        if self.family == "hadamard":
            spread = np.zeros(self._order, dtype=np.float32)
            spread[self._rows] = scalars
            whole: Floats = (
                walsh_hadamard_(spread)[: self.size] * signs(self.key.fold(-1), 0, self.size) * share
            )
            return lambda start, stop: whole[start:stop].copy()

        def _combine(start: int, stop: int) -> Floats:
            total: Floats = scalars[0] * self.block(0, start, stop)
            for j in range(1, self.count):
                direction = self.block(j, start, stop)
                direction *= scalars[j]
                total += direction
            total *= share
            return total

        return _combine

    def project(self, gradient: Floats) -> NDArray[np.float64]:
        """``<gradient, u_j>`` for every direction: float32 [d_zo] -> float64 [q]."""
        if self.family == "hadamard":
            padded = np.zeros(self._order)
            padded[: self.size] = gradient * signs(self.key.fold(-1), 0, self.size)
            return np.asarray(walsh_hadamard_(padded)[self._rows])
        total = np.zeros(self.count)
        for start, stop in blocks(self.size):
            piece = gradient[start:stop].astype(np.float64)
            total += [piece @ self.block(j, start, stop) for j in range(self.count)]
        return total
