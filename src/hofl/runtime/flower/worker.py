# SPDX-License-Identifier: Apache-2.0
"""The process of a resident node: it keeps the model loaded, answers, and runs no code that was sent.

``hofl node`` starts it again when it dies. What must outlive it (what the client keeps of a run, its last
answer, the invitation, the salt of its data's hash) lies in the node's folder.
"""

import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from flwr.app import Message

from hofl.errors import HoflError
from hofl.runtime.flower import internal, keys
from hofl.runtime.flower.node_config import NodeConfig
from hofl.runtime.flower.places import FolderStore, self_of
from hofl.runtime.flower.role import SLOWEST, Role

LOG = logging.getLogger("hofl.node")

FAST, PATIENT = 0.05, 20.0
"""Seconds between two looks for a message while a conversation is on, and of silence for each second more."""

AGAIN = 2.0
"""Seconds before a node that was not let in, or lost its server, tries again."""


class _Stop(Exception):
    """Someone asked this process to end."""


def serve(role: Role, connection: internal.Connection) -> None:
    """Answer questions until the server forgets this node.

    Raises:
        Refused, Unreachable: the connection is no good any more.
    """
    quiet = time.monotonic()
    while True:
        try:
            asked = time.monotonic()
            message = connection.receive()
            if message is None:
                now = time.monotonic()  # a SuperLink of ours has let us wait already
                pause = min(SLOWEST, max(FAST, role.pace, (now - quiet) / PATIENT))
                time.sleep(max(0.0, pause - (now - asked)))
                continue
            answer(role, connection, message)
        except internal.Ended as ended:
            LOG.info("dropped: %s", ended)
        quiet = time.monotonic()


def answer(role: Role, connection: internal.Connection, message: Message) -> None:
    """One message and its reply."""
    begun = time.monotonic()
    internal.enter(message.metadata.run_id, connection.node)
    reply = Message(role.answer(message.content), reply_to=message)
    connection.send(reply, time.monotonic() - begun)


def run(config: NodeConfig) -> None:
    """Connect, serve, and connect again, for as long as the process lives.

    Raises:
        ConfigError: what no waiting mends: a key, a certificate, a folder.
    """
    key = keys.load_private(Path(config.key)) if config.key else None
    ca = Path(config.ca) if config.ca else None
    if ca:
        keys.check_certificate(ca)
    role = Role(self_of(config, resident=True), FolderStore(Path(config.folder)))
    told, refused = "", False
    while True:
        connection = internal.Connection(config.server, ca, key)
        try:
            node = connection.open()
            if refused:  # leave once in good order, so that the server asks again what a crash has lost
                refused = False
            else:
                told = ""
                LOG.info("connected to %s as %s (node %d)", config.server, config.client, node)
                serve(role, connection)
        except (internal.Refused, internal.Unreachable) as error:
            refused = isinstance(error, internal.Refused)
            line = f"waiting for {config.server}: {error}"
            if line != told:
                LOG.info("%s", line)
            told = line
        finally:
            connection.close()
        time.sleep(AGAIN)


def main() -> int:
    """Read the node's settings from standard input and serve."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    for noisy in ("httpx", "flwr"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

    def _stop(number: int, frame: FrameType | None) -> None:
        raise _Stop

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        run(NodeConfig.model_validate_json(sys.stdin.read()))
    except HoflError as error:
        LOG.error("hofl: %s", error)
        return 2
    except _Stop:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
