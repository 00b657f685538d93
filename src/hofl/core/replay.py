# SPDX-License-Identifier: Apache-2.0
"""Replay: (start, directions, scalars, optimizer) -> end.

The one function by which a bottom moves. The client calls it after each local step, the server to
rebuild a client's bottom, a resumed or late party to catch up, and ``hofl replay`` to audit a run.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hofl.core.directions import BLOCK, Directions, blocks
from hofl.core.optimizers import Update

Floats = NDArray[np.float32]


class Step(NamedTuple):
    """What moved the bottom once: its directions and their scalars float32 [q]."""

    directions: Directions
    scalars: Floats


def replay_(
    weights: Floats,
    steps: Sequence[Step],
    optimizer: Update,
    state: Sequence[Floats] | None = None,
    first: int = 1,
    block: int = BLOCK,
) -> None:
    """Apply ``steps`` to ``weights`` in place, block by block.

    Each step is ``g = (1/q) sum_j s_j u_j`` and one optimizer update. A block goes through all
    steps before the next block begins, and since everything is elementwise the bits do not depend on
    the block size. Extra memory is a few blocks whatever d_zo is; ``hadamard``, whose transform needs
    all coordinates at once, keeps one vector [d_zo] a step and two of size n while it is formed.

    Args:
        weights: float32 [d_zo], overwritten.
        steps: in order; none leaves the weights as they are (a frozen bottom).
        optimizer: the bottom's.
        state: float32 [d_zo] arrays of ``optimizer.init``, overwritten; None starts from zero and drops it.
        first: the number of the first step within the participation, from 1.
        block: coordinates at a time.
    """
    combine = [step.directions.combination(step.scalars) for step in steps]
    for start, stop in blocks(len(weights), block):
        here = optimizer.init(stop - start) if state is None else [s[start:stop] for s in state]
        for number, combination in enumerate(combine, start=first):
            optimizer.update_(weights[start:stop], combination(start, stop), here, number)


def digest(weights: Floats) -> NDArray[np.uint8]:
    """SHA-256 of a float32 vector's little-endian bytes: uint8 [32]."""
    return np.frombuffer(hashlib.sha256(weights.astype("<f4", copy=False).tobytes()).digest(), dtype=np.uint8)


def hex_digest(weights: Floats) -> str:
    """:func:`digest` as 64 hexadecimal digits."""
    return digest(weights).tobytes().hex()
