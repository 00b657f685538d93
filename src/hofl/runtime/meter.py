# SPDX-License-Identifier: Apache-2.0
"""Bytes by category and direction, counted on the very blobs that crossed, and a call kept in order.

Whoever serialises a message reports it here, with its blob's length; nothing is estimated and
nothing is serialised a second time to be counted. ``down`` is server to client, ``up`` the reverse.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hofl.core.record import Record, bytes_by_category
from hofl.protocol.base import Call, Replies
from hofl.runtime.files import append
from hofl.runtime.tracked import ClientMemory


@dataclass
class Meter:
    """Counts since the last ``take``: the values of each counter sum to the blobs' lengths.

    ``seconds`` is the time that calls made through :func:`metered` took. ``memory`` measures clients where
    it is asked to and the runtime can. ``traces`` are those of clients that failed in this process.
    """

    down: Counter[str] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: ClientMemory = field(default_factory=ClientMemory)
    traces: list[str] = field(default_factory=list)

    def keep_traces(self, file: Path, number: int) -> None:
        """Move the traces, if there are any, to the end of a file."""
        if self.traces:
            append(file, "\n\n".join([f"round {number}", *self.traces, ""]).encode())
            self.traces.clear()

    def sent(self, record: Record, size: int) -> None:
        """A request of ``size`` serialised bytes went to a client."""
        self.down += bytes_by_category(record, size)

    def received(self, record: Record, size: int) -> None:
        """A reply of ``size`` serialised bytes came back."""
        self.up += bytes_by_category(record, size)

    def take(self) -> tuple[dict[str, int], dict[str, int], float]:
        """(up, down, seconds): bytes by category, names in order; counting starts again at zero."""
        taken = dict(sorted(self.up.items())), dict(sorted(self.down.items())), self.seconds
        self.up, self.down, self.seconds = Counter(), Counter(), 0.0
        return taken


def metered(call: Call, meter: Meter) -> Call:
    """The call, timed, with its replies in client order whatever order a runtime returns them in.

    A reply of a client that was not asked is dropped and explained; a client that neither answered
    nor failed is explained as absent.
    """

    def ordered(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        """Ask through the runtime, then put its answers in order."""
        begun = time.perf_counter()
        try:
            answered = call(action, requests, deadline)
        finally:
            meter.seconds += time.perf_counter() - begun
        records = {
            client: answered.records[client] for client in sorted(requests) if client in answered.records
        }
        silent = {client: "no reply" for client in requests if client not in records}
        foreign = {
            client: "not asked: its reply is dropped" for client in answered.records if client not in requests
        }
        failures = silent | foreign | {c: why for c, why in answered.failures.items() if c not in records}
        return Replies(records, dict(sorted(failures.items())))

    return ordered
