# SPDX-License-Identifier: Apache-2.0
"""Record: named arrays and plain values. A message, a client's state, a checkpoint.

On the wire and on disk a record is one safetensors blob whose metadata holds the values as
strict JSON, so reading one can run no code. Arrays are named ``category/name``; bytes are
counted from the serialised blob, by category, with the rest under ``headers``.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hofl.errors import RecordError

CATEGORIES = (
    "weights", "scalars", "seeds", "activations", "feedback", "labels", "digests", "metrics", "cursors"
)  # fmt: skip
"""What bytes are counted as; everything that is no array is ``headers``."""


@dataclass(frozen=True)
class Record:
    """Arrays by ``category/name`` and JSON values by name. Treat both as read-only."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serialise.

        Raises:
            RecordError: an array has no known category, or a value is not finite JSON.
        """
        for name in self.arrays:
            if name.partition("/")[0] not in CATEGORIES:
                raise RecordError(
                    f"array '{name}' has no category; name it one of {', '.join(CATEGORIES)} + '/...'"
                )
        try:
            text = json.dumps(self.values, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RecordError(f"values of a record must be finite JSON: {error}") from error
        return bytes(save({k: np.ascontiguousarray(a) for k, a in self.arrays.items()}, {"values": text}))

    @classmethod
    def from_bytes(cls, blob: bytes) -> "Record":
        """Parse.

        Raises:
            RecordError: the blob is no record.
        """
        try:
            arrays = load(blob)
            head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
            values = json.loads(head["__metadata__"]["values"])
            json.dumps(
                values, allow_nan=False
            )  # Python's parser takes NaN and 1e999, which no reply may have
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordError(f"not a record: {error}") from error
        if not isinstance(values, dict):
            raise RecordError("not a record: its values are no object")
        return cls(arrays, values)

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The array ``name``, checked: dtype, shape, and finite if it is a float.

        Raises:
            RecordError: it is missing or is not what was asked for.
        """
        a = self.arrays.get(name)
        if a is None:
            raise RecordError(f"array '{name}' is missing")
        if a.dtype != np.dtype(dtype) or a.shape != shape:
            raise RecordError(f"array '{name}' is {a.dtype}{list(a.shape)}, expected {dtype}{list(shape)}")
        if a.dtype.kind == "f" and not np.isfinite(a).all():
            raise RecordError(f"array '{name}' has non-finite values")
        return a


def bytes_by_category(record: Record, serialised: int) -> Counter[str]:
    """Bytes of each category of a record whose blob is ``serialised`` bytes long; they sum to it."""
    counts: Counter[str] = Counter()
    for name, a in record.arrays.items():
        counts[name.partition("/")[0]] += a.nbytes
    counts["headers"] = serialised - counts.total()
    return counts
