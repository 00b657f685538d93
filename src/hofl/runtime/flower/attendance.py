# SPDX-License-Identifier: Apache-2.0
"""Which clients are connected: nodes are greeted, let in or refused, and forgotten when they leave."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hofl.errors import RecordError
from hofl.protocol.base import shown
from hofl.runtime.flower import internal
from hofl.runtime.flower.wire import MESSAGE_TYPE, Envelope, seal, unseal
from hofl.runtime.local import redact

ROLL_CALL = 1.0
"""Seconds between two looks for new nodes."""

PACE, QUICKEST = 0.02, 0.05
"""Seconds between a node's looks for a message: for each node of a run, as one server serves them all, and
at least."""

LATE = 30.0
"""Seconds past its deadline that an answer may come and be called late; after them it is not taken in."""

NAMED = 8
"""Clients named in one line."""

Say = Callable[[str], None]


@dataclass
class Attendance:
    """The nodes of a run.

    Attributes:
        grid: Flower's.
        clients: ids; a client's number is its place.
        run: the run's id.
        greeting: blob of the invitation.
        accept: (node, answer to the invitation) -> client number; raises RecordError to refuse.
        owner: node -> the client that its key is of; None where nodes have no keys, and are believed.
        patience: seconds that a greeting waits for its answer.
        say: shows a line.
        whole: whether the SuperLink passes on small messages whole.
        nodes: Flower's node of each client that has joined.
        refused: by node, the client it says it is and why it is not let in.
        begun: whether the wait for the first clients is over; from then on each that comes has a line.
    """

    grid: Grid
    clients: tuple[str, ...]
    run: str
    greeting: bytes
    accept: Callable[[int, Envelope], int]
    owner: Callable[[int], str | None]
    patience: float
    say: Say
    whole: bool = False
    nodes: dict[int, int] = field(default_factory=dict)
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    begun: bool = False
    _hellos: dict[int, str] = field(default_factory=dict)
    _present: dict[int, str] = field(default_factory=dict)
    _counted: float = -1e9
    _quick: set[int] = field(default_factory=set)

    @property
    def hellos(self) -> dict[str, int]:
        """Greetings without an answer: Flower's id of the message -> node."""
        return {message: node for node, message in self._hellos.items() if message}

    @property
    def pace(self) -> float:
        """Seconds that a node should let go by between two looks for a message, so that all get theirs."""
        return max(QUICKEST, PACE * len(self.nodes))

    def unwelcome(self, client: int) -> str | None:
        """Why a client that is not connected will not be: a node that calls itself so was refused."""
        name = self.clients[client]
        if client in self.nodes:
            return None
        return next((why for said, why in self.refused.values() if said == name), None)

    def listed(self) -> str:
        """Who is connected, for one line."""
        names = [self.clients[client] for client in sorted(self.nodes)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more

    def roll_call(self) -> None:
        """Greet nodes that are new, and forget those that have left; at most once in ``ROLL_CALL``."""
        now = time.monotonic()
        if now - self._counted < ROLL_CALL:
            return
        self._counted = now
        present = internal.activations(self.grid)
        for node, came in self._present.items():
            if present.get(node) != came:  # it has left, or another process has come in its place
                self.gone(node)
                self.refused.pop(node, None)
        self._present = present
        greeted = {node for node, message in self._hellos.items() if message}
        new = sorted(set(present) - set(self.nodes.values()) - set(self.refused) - greeted)
        header: dict[str, str | float] = {
            "kind": "hello",
            "run": self.run,
            "id": f"hello-{self.run}",
            "pace": self.pace,
        }
        letters = [(node, seal(header, self.greeting)) for node in new]
        self._hellos |= dict(zip(new, self.post(letters, self.patience), strict=True))

    def post(self, letters: Sequence[tuple[int, RecordDict]], seconds: float) -> list[str]:
        """Give messages to Flower -> their ids, empty where one was not taken: its node has just left."""
        messages = [Message(content, node, MESSAGE_TYPE, ttl=seconds + LATE) for node, content in letters]
        names = [""] * len(letters)
        small = self._quick if self.whole else set[int]()
        whole = [
            i for i, (node, content) in enumerate(letters) if node in small and not content.array_records
        ]
        parts = sorted({*range(len(letters))} - {*whole})
        for places, push in (
            (whole, partial(internal.push_whole, self.grid)),
            (parts, self.grid.push_messages),
        ):
            taken = push([messages[i] for i in places]) if places else ()
            for place, name in zip(places, taken, strict=False):  # of none, if the whole is too large
                names[place] = str(name or "")
        for (node, _), name in zip(letters, names, strict=True):
            if not name:
                self.gone(node)
        return names

    def heard(self, node: int, message: Message) -> None:
        """A node's answer to the greeting: let it in, or not."""
        self._hellos.pop(node, None)
        if message.has_error():
            return  # it was lost on the way: the next roll call greets it again
        name = ""
        try:
            envelope = unseal(message.content)
            name = shown(envelope.header.get("client"))
            if envelope.header.get("status") != "ok":
                raise RecordError(f"{name}: {said(envelope)}")
            client = self.accept(node, envelope)
            before = self.nodes.get(client)
            if before not in (None, node) and before in self._present:
                raise RecordError(f"{name}: is connected already, by another node")
        except RecordError as error:
            owner = self.owner(node)  # who is refused must not speak for another, who would not be waited for
            self.refused[node] = name if owner is None else owner, f"refused: {error}"
            self.say(f"refused: {error}")
            return
        self.nodes[client] = node
        if envelope.header.get("whole") is True:
            self._quick.add(node)
        if self.begun:
            self.say(f"{name}: connected")

    def gone(self, node: int) -> None:
        """Forget a node: it is greeted anew when it is there."""
        self.nodes = {client: other for client, other in self.nodes.items() if other != node}
        self._hellos.pop(node, None)
        self._quick.discard(node)
        self._counted = min(self._counted, time.monotonic() - ROLL_CALL / 2)


def said(envelope: Envelope) -> str:
    """What a client says went wrong, fit for a line of a failure."""
    why = envelope.header.get("why")
    return redact(why[:2000]) if isinstance(why, str) and why else "it failed and does not say why"
