# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a state as one safetensors record, replaced whole, and checked before it is used.

A state keeps the trainables as the array ``VECTOR``. Three files of a run folder hold states:
``initial.safetensors`` (before round 1, so that a replay needs no model), ``checkpoint`` (after
the last finished round, with the counters a resume needs) and ``final.safetensors`` (the vector).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.core.replay import hex_digest
from hofl.errors import RecordError
from hofl.protocol.base import Vector
from hofl.runtime import files

VECTOR = "weights/vector"
"""The array of every algorithm's state that is the flat vector of trainables, float32 [d]."""

FORMAT = "hofl-state-1"
SPARE = 16 << 20
"""Bytes that names and values of a checkpoint may take beside its arrays."""


def vector_of(state: Record) -> Vector:
    """The trainables of a state: float32 [d].

    Raises:
        RecordError: the state has no such array.
    """
    if VECTOR not in state.arrays:
        raise RecordError(f"a state needs the trainables as array '{VECTOR}'; it has {sorted(state.arrays)}")
    return state.arrays[VECTOR]


def state_sha256(state: Record) -> str:
    """SHA-256 of the trainables' little-endian float32 bytes, in hexadecimal."""
    return hex_digest(vector_of(state))


def is_finite(state: Record) -> bool:
    """Whether every floating-point array of the state is finite throughout."""
    return all(bool(np.isfinite(a).all()) for a in state.arrays.values() if a.dtype.kind == "f")


def save(path: Path, state: Record, facts: Mapping[str, Any]) -> None:
    """Replace ``path`` by this state and the facts that go with it (JSON values).

    Raises:
        RecordError: the state is not finite; the old file stays.
        OSError: it cannot be written; the old file stays.
    """
    if not is_finite(state):
        raise RecordError(f"{path}: the state has non-finite values and is not saved")
    values = {"format": FORMAT, "facts": dict(facts), "state": state.values}
    files.replace(path, Record(state.arrays, values).to_bytes())


def load(path: Path, expected: Record | None = None) -> tuple[Record, dict[str, Any]]:
    """The state and the facts in ``path``.

    Args:
        path: written by :func:`save`.
        expected: a state whose arrays' names, dtypes and shapes the file must have, exactly.

    Raises:
        RecordError: it is no state, not finite, or not like ``expected``; the message names the array.
    """
    size = None if expected is None else SPARE + sum(a.nbytes for a in expected.arrays.values())
    record = files.read_record(path, size)
    facts, values = record.values.get("facts"), record.values.get("state")
    if record.values.get("format") != FORMAT or not isinstance(facts, dict) or not isinstance(values, dict):
        raise RecordError(f"{path}: not a state of format {FORMAT}")
    state = Record(record.arrays, values)
    _check(path, state, state if expected is None else expected)
    return state, facts


def _check(path: Path, state: Record, expected: Record) -> None:
    for name in state.arrays.keys() ^ expected.arrays.keys():
        what = "is unknown to" if name in state.arrays else "is missing for"
        raise RecordError(f"{path}: array '{name}' {what} this algorithm and model; it is of another run")
    for name, array in expected.arrays.items():
        try:
            state.array(name, str(array.dtype), array.shape)
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error


def save_final(path: Path, state: Record, layout: Layout, round: int) -> str:
    """Write the trainables and their layout, enough to load them without hofl; returns their SHA-256."""
    sha = state_sha256(state)
    save(
        path, Record({VECTOR: vector_of(state)}), {"layout": layout.to_json(), "round": round, "sha256": sha}
    )
    return sha


def load_final(path: Path) -> tuple[Vector, Layout]:
    """What :func:`save_final` or the start of a run wrote: float32 [d] and its layout.

    Raises:
        RecordError: it is no such file, or layout and vector disagree.
    """
    state, facts = load(path)
    try:
        layout = Layout.from_json(facts["layout"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: it has no layout: {error}") from error
    try:
        return state.array(VECTOR, "float32", (layout.size,)), layout
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
