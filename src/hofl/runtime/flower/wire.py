# SPDX-License-Identifier: Apache-2.0
"""A hofl message inside a Flower message: one ConfigRecord, and one flat ArrayRecord where it is large.

Flower makes one HTTP call for each record and two for each array, so a :class:`~hofl.core.record.Record`
travels as the one blob that it serialises to: in the ConfigRecord up to ``INLINE`` bytes, beyond that as one
array of uint8, which Flower cuts into chunks. bfloat16 needs no care: it is uint16 bits in the blob already.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from hofl.core.record import Record
from hofl.errors import RecordError

VERSION = 1
"""Of this layout; both ends must have the same."""

INLINE = 1 << 20
"""Bytes of a blob up to which it travels in the ConfigRecord."""

MESSAGE_TYPE = "query.hofl"
"""The one type of Flower message; what is asked stands in the header."""

_RECORD, _BLOB = "hofl", "blob"


class Envelope(NamedTuple):
    """A message as it came: the header's plain values, and the blob of its record, not parsed yet."""

    header: dict[str, Any]
    blob: bytes

    def record(self, limit: int | None = None) -> Record:
        """Parse the blob.

        Args:
            limit: bytes it may have; a larger one is refused unread.

        Raises:
            RecordError: it is larger, or no record.
        """
        if limit is not None and len(self.blob) > limit:
            raise RecordError(f"message of {len(self.blob)} bytes, where at most {limit} are due")
        return Record.from_bytes(self.blob)


def seal(header: Mapping[str, str | int | float], blob: bytes) -> RecordDict:
    """What a Flower message carries for a header and a serialised record."""
    values: dict[str, Any] = {"version": VERSION, **header}
    if len(blob) <= INLINE:
        return RecordDict({_RECORD: ConfigRecord({**values, _BLOB: blob})})
    array = Array("uint8", (len(blob),), "hofl", blob)
    return RecordDict({_RECORD: ConfigRecord(values), _BLOB: ArrayRecord({_BLOB: array})})


def unseal(content: RecordDict) -> Envelope:
    """The inverse of :func:`seal`.

    Raises:
        RecordError: it is no message of ours, or of another version.
    """
    config = content.config_records.get(_RECORD)
    if config is None:
        raise RecordError("not a message of hofl: it has no record 'hofl'")
    header: dict[str, Any] = dict(config)
    version = header.pop("version", None)
    if version != VERSION:
        raise RecordError(
            f"message of version {version!r:.20}, this hofl speaks {VERSION}: install the same one"
        )
    blob = header.pop(_BLOB, None)
    if blob is None:
        arrays = content.array_records.get(_BLOB)
        array = None if arrays is None else arrays.get(_BLOB)
        blob = b"" if array is None else array.data
    if not isinstance(blob, bytes):
        raise RecordError("not a message of hofl: its blob is no bytes")
    return Envelope(header, blob)
