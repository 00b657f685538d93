# SPDX-License-Identifier: Apache-2.0
"""What a method sends, by formula: bytes of one client in one round, by category, headers excluded.

The formulas are those of HO-FL App. E, with what this library adds to a message: a 32-byte digest and three
float64 of diagnostics where there is a bottom, and one 16-byte root key in place of E q seeds. The law suite
holds them equal to the bytes metered from serialised records.
"""

from typing import TypedDict

WEIGHT = 4
"""Bytes of a trainable, w."""
SCALAR = 4
"""Bytes of a probe's scalar, s."""
KEY = 16
DIGEST = 32
DIAGNOSTICS = 24


class Traffic(TypedDict):
    """Bytes by category, up from and down to one client in one round."""

    up: dict[str, int]
    down: dict[str, int]


def fedavg(d: int) -> Traffic:
    """``w d`` each way.

    >>> fedavg(294_912)["up"]["weights"]
    1179648
    """
    return {"up": {"weights": WEIGHT * d}, "down": {"weights": WEIGHT * d}}


def ho_fl(d: int, d_zo: int, steps: int, probes: int) -> Traffic:
    """Up ``s E q + w d_fo``, down ``w d`` and the root key; without probes or a bottom, FedAvg's top.

    Args:
        d: trainables.
        d_zo: of them below the client's boundary.
        steps: E.
        probes: q; 0 for the frozen-bottom control.

    >>> ho_fl(294_912, 147_456, steps=5, probes=2)["up"]
    {'weights': 589824, 'scalars': 40, 'digests': 32, 'metrics': 24}
    """
    up, down = {"weights": WEIGHT * (d - d_zo)}, {"weights": WEIGHT * d}
    if d_zo and probes:
        up |= {"scalars": SCALAR * steps * probes, "digests": DIGEST, "metrics": DIAGNOSTICS}
        down |= {"seeds": KEY}
    return {"up": up, "down": down}
