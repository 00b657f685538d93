# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: a tuple of functions over records, and the one seam to any runtime.

A round is ``round(state, cohort, call)``: it asks clients through ``call`` and returns the next
state with the entries that rebuild it. ``rebuild`` is the server's half without the clients, so
``hofl replay`` and the round itself run the same lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hofl.core.record import Record
from hofl.tasks.base import Task

Vector = NDArray[np.float32]
SERVER = -1
"""The client number of an entry that holds the server's own part of a round."""


@dataclass
class Memory:
    """What one client keeps between two requests; the runtime holds one for each client.

    Attributes:
        kept: what outlives a round, such as its bottom and the round that is of; a node may store it.
        open: what the round in progress needs, such as the batch that waits for feedback; it is gone
            with the process, and with it this client's part of the round.
    """

    kept: Record | None = None
    open: dict[str, Any] = field(default_factory=dict)


Action = Callable[[Task, Record, Memory], Record]
"""``action(task, request, memory) -> reply``; what it keeps goes into the memory."""


class Replies(NamedTuple):
    """What came back from a call: records by client, and why the others are absent."""

    records: dict[int, Record]
    failures: dict[int, str]


Call = Callable[[str, Mapping[int, Record], float | None], Replies]
"""``call(action, {client: request}, deadline in seconds or None)``."""


class Entry(NamedTuple):
    """One client's part of a round: what it was asked, less the weights, and what it answered."""

    client: int
    plan: Record
    reply: Record


LARGEST = 1e12
"""What no scalar, delta, gradient or weight of a run that learns comes near; beyond it lie sabotage and
divergence, which must not reach a state on their way to infinity."""


def usable(values: Vector) -> bool:
    """Whether all of these numbers are finite and at most ``LARGEST`` in size."""
    return not values.size or bool(values.max() <= LARGEST and values.min() >= -LARGEST)


KEPT = (
    "scalars/s", "weights/delta", "digests/bottom", "metrics/agreement",
    "run", "round", "client", "step", "batch_id", "loss_sum", "examples",
)  # fmt: skip
"""Arrays and values of a client's replies that a replay or a row reads."""


def recorded(reply: Record) -> Record:
    """A client's reply as its entry has it: whatever else it sent never reaches the ledger."""
    arrays = {name: reply.arrays[name] for name in KEPT if name in reply.arrays}
    return Record(arrays, {name: reply.values[name] for name in KEPT if name in reply.values})


def shown(value: Any) -> str:
    """What a client said, fit for one line of a failure: at most 40 printable characters."""
    plain = value is None or isinstance(value, str | int | float)
    text = str(value) if plain else f"a {type(value).__name__}"
    return "".join(c if c.isprintable() else "?" for c in text[:40])


@dataclass(frozen=True)
class Outcome:
    """A finished round: the next state, what rebuilds it, and its row's own columns."""

    state: Record
    entries: tuple[Entry, ...]
    row: dict[str, Any]
    failures: dict[int, str] = field(default_factory=dict)


class RoundVoid(Exception):
    """Fewer clients than the quorum returned: the round is repeated with a fresh cohort."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("too few clients returned")
        self.failures = failures


class Algorithm(NamedTuple):
    """A federated method.

    Attributes:
        init: initial vector float32 [d] -> state.
        round: (state, cohort, call) -> outcome; raises RoundVoid below the quorum.
        rebuild: (state, entries) -> the state after that round, without any client.
        actions: what a client can be asked, by name: (task, request, memory) -> reply.
    """

    init: Callable[[Vector], Record]
    round: Callable[[Record, Sequence[int], Call], Outcome]
    rebuild: Callable[[Record, Sequence[Entry]], Record]
    actions: Mapping[str, Action]
