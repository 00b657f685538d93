# SPDX-License-Identifier: Apache-2.0
"""Bytes as a function of the boundary: a few boundaries are traced, between them blocks are alike."""

from collections.abc import Callable, Sequence

Trace = Callable[[int], tuple[int, ...]]
"""Boundary -> a few counts of bytes."""

STRAIGHT = 0.002
"""What a traced point may lie beside the line through its neighbours, as a share of the whole peak."""
FEW = 8
"""Models of so many blocks are traced at every boundary."""


def shallow(blocks: int) -> tuple[list[int], list[int]]:
    """Where bottoms are traced: on the way up to a third; and alone the first, where nothing waits yet."""
    return [2, 1 + blocks // 6, blocks // 3], [1]


def deep(blocks: int) -> tuple[list[int], list[int]]:
    """Where tops are traced: from two thirds upwards; and alone the last two, of one block and of none."""
    low, high = blocks - blocks // 3 - 1, blocks - 2
    return [low, (low + high) // 2, high], [blocks - 1, blocks]


def line(trace: Trace, points: tuple[list[int], list[int]], blocks: int, floor: int) -> Trace:
    """A trace of all boundaries ``1 .. blocks`` from that of a few.

    A cut between two blocks that are alike adds the bytes of one and takes those of another, so each
    count is a straight line. That is checked on three points; where it is not so, all are traced.

    Args:
        trace: what is asked of a boundary.
        points: three boundaries on the line, ascending, and those off it.
        blocks: L.
        floor: bytes that every peak has besides.
    """
    on, alone = points
    if blocks <= FEW:
        on, alone = [], list(range(1, blocks + 1))
    found = {b: trace(b) for b in (*on, *alone)}
    if on and _bent(found, on, floor):
        found |= {b: trace(b) for b in range(1, blocks + 1) if b not in found}

    def at(boundary: int) -> tuple[int, ...]:
        """The counts of any boundary."""
        return found[boundary] if boundary in found else _on_line(found, on, boundary)

    return at


def _bent(found: dict[int, tuple[int, ...]], on: Sequence[int], floor: int) -> bool:
    """Whether the middle point is off the line through the others."""
    there = _on_line(found, on, on[1])
    return any(abs(a - b) > STRAIGHT * (floor + max(a, b)) for a, b in zip(found[on[1]], there, strict=True))


def _on_line(found: dict[int, tuple[int, ...]], on: Sequence[int], boundary: int) -> tuple[int, ...]:
    """On the line through the first and the last point, rounded up."""
    low, high = on[0], on[-1]
    pairs = zip(found[low], found[high], strict=True)
    return tuple(max(0, a - (a - b) * (boundary - low) // (high - low)) for a, b in pairs)
