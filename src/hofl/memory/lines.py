# SPDX-License-Identifier: Apache-2.0
"""Bytes as a function of the boundary: a few boundaries are traced, between them blocks are alike."""

from collections.abc import Callable, Sequence

Trace = Callable[[int], tuple[int, ...]]
"""Boundary -> a few counts of bytes."""

STRAIGHT = 0.002
"""What a traced point may lie beside the line through its neighbours, as a share of its size."""
FEW = 6
"""Models of so many blocks are traced at every boundary."""


def shallow(blocks: int) -> list[int]:
    """Where bottoms are traced: the first boundary, and a quarter and half of the way up."""
    return sorted({1, max(1, blocks // 4), max(1, blocks // 2)})


def deep(blocks: int) -> list[int]:
    """Where tops are traced: from half of the way up to the last block but one."""
    return sorted({max(1, blocks // 2), max(1, 3 * blocks // 4), max(1, blocks - 1)})


def line(trace: Trace, points: Sequence[int], blocks: int, last: bool = False) -> tuple[Trace, float]:
    """A trace of all boundaries ``1 .. blocks`` from that of a few.

    A cut between two blocks that are alike adds the bytes of one and takes those of another, so each
    count is a straight line. That is checked on three points; where it is not so, all are traced.

    Args:
        trace: what is asked of a boundary.
        points: three boundaries, ascending; fewer in models with few blocks.
        blocks: L.
        last: whether boundary L is traced too, since above it there is no block.

    Returns:
        The trace, and how far off the middle point was as a share of its size.
    """
    if blocks <= FEW:
        points = range(1, blocks + 1)
    found = {b: trace(b) for b in points}
    off = 0.0
    if blocks > FEW and len(points) > 2:
        low, middle, high = points
        there = _between(found, low, high, middle)
        gaps = zip(found[middle], there, strict=True)
        off = max((abs(a - b) / max(a, b, 1) for a, b in gaps), default=0.0)
        if off > STRAIGHT:
            found |= {b: trace(b) for b in range(1, blocks + 1) if b not in found}
    if last and blocks not in found:
        found[blocks] = trace(blocks)
    straight = [b for b in points if b in found]

    def at(boundary: int) -> tuple[int, ...]:
        """The counts of any boundary."""
        if boundary in found:
            return found[boundary]
        return _between(found, straight[0], straight[-1], boundary)

    return at, off


def _between(found: dict[int, tuple[int, ...]], low: int, high: int, boundary: int) -> tuple[int, ...]:
    """On the line through two traced boundaries, rounded up."""
    run = high - low
    pairs = zip(found[low], found[high], strict=True)
    return tuple(max(0, a + -((a - b) * (boundary - low) // run)) for a, b in pairs)
