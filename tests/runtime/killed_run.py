# SPDX-License-Identifier: Apache-2.0
"""Runs that SIGKILL themselves, one fork each: ``killed_run.py FOLDER ROUNDS``; prints the signal of each."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_run

from hofl.core.record import Record
from hofl.runtime import checkpoint, files, folder, ledger, loop

PLACES = (
    "client",
    "before_ledger",
    "in_ledger",
    "before_row",
    "in_row",
    "before_save",
    "in_save",
    "unrenamed",
    "after_save",
)
CASES = [*((place, number) for place in PLACES for number in (1, 3)), ("in_row", 0), ("before_summary", 4)]
"""Where to die, and in which round."""

FIRST = ("config.toml", "ledger.sqlite", "manifest.json", "rounds.jsonl", "initial.safetensors")
"""Files that are made before round 0; to die in the middle of the first write of each."""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data[: len(data) // 2])
    die()


def dying_once(
    function: Callable[..., Any], when: Callable[..., bool], action: Callable[..., Any] = die
) -> Any:
    """``function``, but ``action`` in its stead when ``when(*arguments)``."""
    return lambda *a, **k: action(*a, **k) if when(*a, **k) else function(*a, **k)


def arm(place: str, number: int) -> None:
    """Replace one function by one that dies in round ``number``."""
    at = [0]
    original_append = ledger.Ledger.append

    def append(self: ledger.Ledger, round: int, entries: Any) -> None:
        at[0] = round
        if place == "before_ledger" and round == number:
            die()
        if place == "in_ledger" and round == number:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("INSERT INTO rounds VALUES (?, 1)", (round,))
            die()
        original_append(self, round, entries)

    ledger.Ledger.append = append  # type: ignore[method-assign]
    write, save = files.write_synced, checkpoint.save

    def now(*_: Any) -> bool:
        return at[0] == number

    if place in ("before_row", "in_row"):
        inside = half_written if place == "in_row" else die
        files.append = patched_append(files.append, now, inside, write)  # type: ignore[assignment]
    elif place in ("before_save", "after_save"):

        def saving(path: Path, state: Record, facts: Any) -> None:
            chosen = path.name == folder.CHECKPOINT and facts["round"] == number
            if chosen and place == "before_save":
                die()
            save(path, state, facts)
            if chosen:
                die()

        checkpoint.save = saving  # type: ignore[assignment]
    elif place in ("in_save", "unrenamed"):
        arm_replace(place, now, write)
    elif place == "ledger.sqlite":
        ledger.Ledger.__init__ = die  # type: ignore[method-assign]
    elif place in FIRST:
        arm_replace(place, lambda: True, write, place)
    elif place == "before_summary":
        folder.write_json = dying_once(folder.write_json, lambda path, _: path.name == folder.SUMMARY)


def patched_append(original: Any, now: Any, inside: Any, write: Any) -> Any:
    def append(path: Path, data: bytes) -> None:
        files.write_synced = inside if now() else write  # type: ignore[assignment]
        original(path, data)

    return append


def arm_replace(place: str, now: Any, write: Any, name: str = folder.CHECKPOINT) -> None:
    original = files.replace

    def replace(path: Path, data: bytes) -> None:
        if path.name == name and now():
            if place == "unrenamed":
                os.replace = die  # type: ignore[assignment]
            else:
                files.write_synced = half_written  # type: ignore[assignment]
        original(path, data)

    files.replace = replace  # type: ignore[assignment]


def dying_client(number: int) -> Callable[[Any], Any]:
    """A call whose middle client's action dies in round ``number``."""

    def wrap(call: Any) -> Any:
        def asked(action: str, requests: Any, deadline: Any) -> Any:
            if requests[min(requests)].values["round"] + 1 == number:
                call(action, dict(sorted(requests.items())[:1]), deadline)
                die()
            return call(action, requests, deadline)

        return asked

    return wrap


def doomed(where: Path, rounds: int, place: str, number: int) -> None:
    """A run that dies; it returns only if it did not."""
    arm(place, number)
    made = tiny_run.parts(wrap=dying_client(number) if place == "client" else lambda call: call)
    for _ in loop.run(made, where, tiny_run.settings(rounds)):
        pass


def forked(where: Path, rounds: int, place: str, number: int) -> int:
    """The number of the signal that ended the run, 0 if none did."""
    if not (child := os.fork()):
        try:
            doomed(where, rounds, place, number)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    folder_of_runs, rounds = Path(sys.argv[1]), int(sys.argv[2])
    cases = [*CASES, *((name, 0) for name in FIRST)]
    print(json.dumps({f"{p}-{n}": forked(folder_of_runs / f"{p}-{n}", rounds, p, n) for p, n in cases}))
