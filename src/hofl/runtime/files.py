# SPDX-License-Identifier: Apache-2.0
"""Files of a run folder: replaced whole or appended to, synced, read without trusting them."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hofl.core.record import Record
from hofl.errors import HoflError, RecordError

HEADER_LIMIT = 100_000_000
"""Bytes of a record's header: the safetensors library's own limit."""

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def storage(folder: Path, advice: str) -> Iterator[None]:
    """Turn a full disk, a missing right or a locked ledger into one line that says what to do.

    Args:
        folder: what is read or written.
        advice: what holds after a failure and what to do, such as ``nothing is lost: mend this``.

    Raises:
        HoflError: an operation inside failed.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if "locked" in why:
            raise HoflError(
                f"{folder}: another process is writing to this run; wait until it ends"
            ) from error
        raise HoflError(f"{folder}: {why}; {advice}") from error


def write_synced(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` and wait until the device has it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Make ``data`` the whole of ``path``, or leave the old file: there is no state between."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_FOLLOW, 0o644)
    try:
        try:
            write_synced(descriptor, data)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add ``data`` to the end of ``path`` and wait until the device has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_FOLLOW, 0o644)
    try:
        write_synced(descriptor, data)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """A rename outlives a power cut only once its folder is synced; Windows cannot and need not."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_record(path: Path, limit: int | None = None) -> Record:
    """The record in a file of at most ``limit`` bytes; nothing big is read before it is checked.

    Raises:
        RecordError: a link, too big, or no record.
    """
    if path.is_symlink() or not path.is_file():
        raise RecordError(f"{path}: no such file of its own; links are not followed")
    size = path.stat().st_size
    if limit is not None and size > limit:
        raise RecordError(f"{path}: {size} bytes, this run's has at most {limit}; it is not of this run")
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if size < 8 or header > min(size - 8, HEADER_LIMIT):
            raise RecordError(f"{path}: not a record: its header claims {header} of {size} bytes")
        file.seek(0)
        blob = file.read()
    try:
        return Record.from_bytes(blob)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
