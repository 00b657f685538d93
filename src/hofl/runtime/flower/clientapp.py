# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: a stock SuperNode's, which starts anew for every message, or a simulation's.

A stock SuperNode names its node file with ``--node-config "node='/path/node.toml'"``. A simulation has
nodes without a file: the client's number is the node's ``partition-id``, and the models live as long as
the process that Flower runs several of them in.
"""

import logging
from functools import lru_cache
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from hofl.build_task import build_task
from hofl.commands.output import quiet_libraries
from hofl.config import Config, parse
from hofl.core.record import Record
from hofl.errors import ConfigError, HoflError
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.join import Invitation
from hofl.runtime.flower.node_config import load_node
from hofl.runtime.flower.places import FolderStore, self_of
from hofl.runtime.flower.role import Role, Self
from hofl.runtime.flower.wire import seal, unseal
from hofl.tasks.base import Task

LOG = logging.getLogger("hofl.node")

_ROLES: dict[int, Role] = {}
"""Of the simulated nodes that have been in this process."""


class ContextStore:
    """Bytes in Flower's state of a simulated node, which follows it from process to process."""

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def get(self, name: str) -> bytes | None:
        """What the state holds under the name."""
        record = self._state.config_records.get(name)
        value = None if record is None else record["bytes"]
        return value if isinstance(value, bytes) else None

    def put(self, name: str, data: bytes) -> None:
        """Put it into the state."""
        self._state[name] = ConfigRecord({"bytes": data})


@lru_cache(maxsize=1)
def _task(text: str) -> Task:
    """One task a process: the model serves all of its clients."""
    return build_task(parse(text, "the server's configuration"))


def _build(invitation: Invitation, config: Config) -> Task:
    return _task(invitation.config)


def _simulated(number: int, message: Message, context: Context) -> Role:
    store = ContextStore(context)
    if number not in _ROLES:
        envelope, stored = unseal(message.content), store.get("invitation")
        blob = envelope.blob if envelope.header.get("kind") == "hello" else stored
        if blob is None:  # it has never heard of this run, and will say so
            return Role(Self(f"node-{number}", Consent(split=True), _build), store)
        clients = Invitation.of(Record.from_bytes(blob)).clients
        client = clients[number] if number < len(clients) else f"node-{number}"
        _ROLES[number] = Role(Self(client, Consent(split=True), _build), store)
    _ROLES[number].store = store
    return _ROLES[number]


def role_of(message: Message, context: Context) -> Role:
    """The client that a message is for.

    Raises:
        ConfigError: the node is not told who it is.
    """
    quiet_libraries()
    named, number = context.node_config.get("node"), context.node_config.get("partition-id")
    if isinstance(named, str):
        node = load_node(named)
        return Role(self_of(node, resident=False), FolderStore(Path(node.folder)))
    if isinstance(number, int):
        return _simulated(number, message, context)
    raise ConfigError(
        "this node is not told which client it is: give flower-supernode "
        "--node-config \"node='/path/node.toml'\" (the file of hofl node, its server as it is given here)"
    )


app = ClientApp()


@app.query("hofl")
def query(message: Message, context: Context) -> Message:
    """Answer a question; a node whose own settings are wrong says so, where a crash would be asked again."""
    try:
        role = role_of(message, context)
    except HoflError as error:  # it may quote a path of this machine
        LOG.error("hofl: %s", error)
        why = "refused: this node's own settings are wrong; its log says how"
        return Message(seal({"status": "failed", "why": why}, b""), reply_to=message)
    return Message(role.answer(message.content), reply_to=message)
