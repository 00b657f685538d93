# SPDX-License-Identifier: Apache-2.0
"""``bad_node.py THIEF.toml MISFIT.toml LIAR.toml ATTACKER.toml``: nodes that are not what they should be.

All have the real connection and the real client's half; only what they answer is spoiled. The thief has its
own key and another client's name, the misfit another model, the liar says that it draws other directions. The
attacker spoils one answer a round (:data:`ATTACKS`).
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from hofl.config import Config
from hofl.core.record import Record
from hofl.protocol.aggregate import MISMATCH
from hofl.runtime.flower import internal, keys, worker
from hofl.runtime.flower.join import Invitation
from hofl.runtime.flower.node_config import NodeConfig, load_node
from hofl.runtime.flower.places import FolderStore, self_of
from hofl.runtime.flower.role import Role, Self
from hofl.runtime.flower.wire import seal, unseal
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

Spoil = Callable[[RecordDict], RecordDict]


class Attack(NamedTuple):
    """What is spoiled in a round.

    Attributes:
        action: whose answer.
        spoil: the answer -> what is sent instead.
        why: pattern of the reason in the round's row; empty where the attack costs its sender nothing.
    """

    action: str
    spoil: Spoil
    why: str


def changed(content: RecordDict, blob: bytes | None = None, **header: str | int) -> RecordDict:
    """The same message with another header, or blob."""
    found = unseal(content)
    return seal({**found.header, **header}, found.blob if blob is None else blob)


def with_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    """Change one array of an answer."""

    def spoil(content: RecordDict) -> RecordDict:
        record = unseal(content).record()
        arrays = {**record.arrays, name: change(record.arrays[name])}
        return changed(content, Record(arrays, record.values).to_bytes())

    return spoil


def with_value(name: str, change: Callable[[object], object]) -> Spoil:
    """Change one value of an answer."""

    def spoil(content: RecordDict) -> RecordDict:
        record = unseal(content).record()
        values = {**record.values, name: change(record.values[name])}
        return changed(content, Record(record.arrays, values).to_bytes())

    return spoil


def as_it_is(content: RecordDict) -> RecordDict:
    """Not spoiled: the attack is elsewhere."""
    return content


ATTACKS = {
    1: Attack("probe", with_array("scalars/s", lambda s: s * np.float32("nan")), "not finite|non-finite"),
    2: Attack("probe", with_array("scalars/s", lambda s: s[:, :1]), "expected float32"),
    3: Attack("settle", with_array("digests/bottom", lambda d: d ^ 1), MISMATCH),
    4: Attack("probe", with_value("round", lambda t: t - 1), "reply is for round 3, not 4"),
    5: Attack("activate", with_value("run", lambda run: "0123456789abcdef"), "reply is for run 0123456789"),
    6: Attack(
        "activate",
        lambda c: changed(c, b"x" * 10_000_000),
        r"message of \d+ bytes, where at most \d+ are due",
    ),
    7: Attack("probe", as_it_is, ""),  # pushed twice, then contradicted: see Bad.pushed
    8: Attack("probe", lambda c: changed(c, id="0" * 24), "answer is to another question"),
    9: Attack("activate", as_it_is, ""),  # a bit of the bottom that it has stored: see Bad.answer
}
"""By round, counted from 0."""

TWICE, FLIPPED = 7, 9


class Bad(Role):
    """A client's half that spoils what it says, as its mode has it."""

    def __init__(self, node: NodeConfig, mode: str) -> None:
        me = self_of(node, resident=True)
        super().__init__(_other_model(me) if mode == "layout" else me, FolderStore(Path(node.folder)))
        self.mode, self.twice = mode, False

    def answer(self, content: RecordDict) -> RecordDict:
        """The true answer, spoiled."""
        envelope = unseal(content)
        if envelope.header["kind"] == "hello":
            found = super().answer(content)
            lie = with_value("prints", lambda prints: {**prints, "directions": "0" * 64})
            return lie(found) if self.mode == "directions" else found
        number = envelope.record().values["round"]
        attack = ATTACKS.get(number)
        if attack is None or attack.action != envelope.header["action"]:
            return super().answer(content)
        self.twice = number == TWICE
        if number == FLIPPED:
            self._flip()
        return attack.spoil(super().answer(content))

    def _flip(self) -> None:
        """Flip a bit of the stored bottom, and come back as after a crash."""
        stored = Record.from_bytes(self.store.get("kept"))
        bottom = stored.arrays["weights/bottom"].copy()
        bottom.view(np.uint8)[5] ^= 1
        self.store.put("kept", Record({**stored.arrays, "weights/bottom": bottom}, stored.values).to_bytes())
        self.run = None

    def pushed(self, connection: internal.Connection, message: Message, reply: Message) -> None:
        """The same answer once more, and another one to the same question."""
        if self.twice:
            self.twice = False
            connection.send(reply)
            lie = with_array("scalars/s", lambda s: -s)(reply.content)
            with contextlib.suppress(internal.Refused, internal.Ended):
                connection.send(Message(lie, reply_to=message))


def _other_model(me: Self) -> Self:
    """The same node, which loads a narrower network."""

    def build(invitation: Invitation, config: Config) -> Task:
        divided = Partition(**config.partition.model_dump())
        return replace(
            me.build(invitation, config), model=synthetic_task(divided, seed=config.seed, width=8).model
        )

    return replace(me, build=build)


def enter(file: str, mode: str) -> tuple[internal.Connection, Bad]:
    """Connect a node, once its key is known at the server."""
    node = load_node(file)
    connection = internal.Connection(node.server, Path(node.ca), keys.load_private(node.key))
    while not connection.node:
        try:
            connection.open()
        except (internal.Refused, internal.Unreachable):
            time.sleep(0.3)
    return connection, Bad(node, mode)


LOCK = threading.Lock()
"""Of the process's identity at Flower, which is one at a time."""


def serve(connection: internal.Connection, role: Bad) -> None:
    """Answer what there is to answer, until the server is gone."""
    while True:
        with contextlib.suppress(internal.Ended):
            message = connection.receive()
            if message is None:
                time.sleep(worker.FAST)
                continue
            with LOCK:
                internal.enter(message.metadata.run_id, connection.node)
                reply = Message(role.answer(message.content), reply_to=message)
                connection.send(reply)
                role.pushed(connection, message, reply)


def main(*files: str) -> None:
    """Connect all in turn, for the run waits for the last alone, and answer for each."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    modes = ("honest", "layout", "directions", "attack")
    nodes = [enter(file, mode) for file, mode in zip(files, modes, strict=True)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        for ended in [pool.submit(serve, *node) for node in nodes]:
            ended.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
