# SPDX-License-Identifier: Apache-2.0
"""Answers as they arrive at a ServerApp, without waiting for any and without trusting one.

Flower's own grid waits up to two hours for the parts of an answer whose sender has gone, holds all of it
whatever its size, and lets what cannot be parsed end the run. Here each look takes what is there; an answer
that is too large, broken, or in another's name becomes an error message of its question.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

LOG = logging.getLogger("hofl.server")

PARTS, ROOM = 32, 1 << 20
"""Objects of a small answer, and bytes of everything in it that is not its blob."""

TRIES, MOMENT = 4, 0.01
"""How often in one look a part that is on its way is asked for again, and after how many seconds."""

BROKEN = 900
"""Error code of an answer that is no use to ask for again; none of Flower's."""

CHUNK = 1 << 20
"""Bytes an object of a large answer has at least, on the average."""


class Broken(Exception):
    """An answer that cannot be one."""


@dataclass
class Parcel:
    """An answer of which some parts may be on their way.

    Attributes:
        question: Flower's id of what it answers.
        message: Flower's id of the answer.
        missing: ids of the objects still to come.
        contents: bytes of those that are here.
        size: of them together.
    """

    question: str
    message: str
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Inbox:
    """The answers to a run's questions.

    Args:
        grid: Flower's; one that is not HTTP's is asked as it is.
        limit: bytes that any answer's blob may have.
    """

    def __init__(self, grid: Grid, limit: int = ROOM) -> None:
        self._grid, self.limit = grid, limit
        self._parcels: dict[str, Parcel] = {}

    def look(self, questions: Collection[str]) -> Iterator[tuple[str, Message]]:
        """(id of the question, its answer) for each that is complete now, or will never be."""
        client: Any = getattr(self._grid, "_runtime_client", None)
        if client is None:
            for message in self._grid.pull_messages(list(questions)) if questions else ():
                yield message.metadata.reply_to_message_id, message
            return
        for name in [name for name in self._parcels if name not in questions]:
            self._discard(client, self._parcels.pop(name).message)
        fresh = [name for name in questions if name not in self._parcels]
        if fresh:
            yield from self._announced(client, fresh)
        for name, parcel in list(self._parcels.items()):
            opened = self._tried(client, parcel)
            if opened is not None:
                del self._parcels[name]
                yield name, opened

    def _tried(self, client: Any, parcel: Parcel) -> Message | None:
        """The answer, or an error in its place; None while it is on its way."""
        try:
            return self._opened(client, parcel)
        except Broken as error:
            self._discard(client, parcel.message)
            return _failed(parcel.question, str(error))

    def _discard(self, client: Any, message: str) -> None:
        """Let the SuperLink delete what it stores of a message; it may have none of it."""
        with contextlib.suppress(httpx.HTTPStatusError):
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(message_object_id=message, **self._where)
            )

    @property
    def _where(self) -> dict[str, Any]:
        return {"node": getattr(self._grid, "node", None), "run_id": self._grid.run.run_id}

    def _announced(self, client: Any, fresh: list[str]) -> Iterator[tuple[str, Message]]:
        """Note what is on its way; Flower's own errors have no parts."""
        answer = client.PullMessages(PullAppMessagesRequest(message_ids=fresh))
        for proto, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            name = proto.metadata.reply_to_message_id
            if name not in fresh:
                continue
            if proto.HasField("error"):
                self._discard(client, name)  # the question's own parts, which nobody fetched
                yield name, message_from_proto(proto)
                continue
            if proto.content.items:
                yield name, self._whole(name, proto)
                continue
            parts = list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))
            self._parcels[name] = Parcel(name, proto.metadata.message_id, parts)

    def _whole(self, name: str, proto: Any) -> Message:
        """An answer that came with its content, or an error in its place."""
        try:
            if (size := proto.ByteSize()) > self.limit + ROOM:
                raise Broken(f"message of {size} bytes, where at most {self.limit} are due")
            return message_from_proto(proto)
        except Exception as error:  # of any kind, as its sender chose
            why = str(error) if isinstance(error, Broken) else f"cannot be read: {type(error).__name__}"
            return _failed(name, why)

    def _opened(self, client: Any, parcel: Parcel) -> Message | None:
        """The message once all its parts are here; None while one is on its way.

        Raises:
            Broken: it is too large, a part will never come, or they are no message.
        """
        if len(parcel.missing) + len(parcel.contents) > PARTS + self.limit // CHUNK:
            raise Broken(f"an answer of {len(parcel.missing)} parts")
        where = self._where
        tries = TRIES
        while parcel.missing:
            name = parcel.missing[-1]
            part = client.PullObject(PullObjectRequest(object_id=name, **where))
            if not part.object_found:
                raise Broken("a part of an answer is gone")
            if not part.object_available and not tries:
                return None
            if not part.object_available:  # its sender is at it: a moment is less than another look
                tries -= 1
                time.sleep(MOMENT)
                continue
            parcel.contents[name] = part.object_content
            parcel.size += len(part.object_content)
            if parcel.size > self.limit + ROOM:
                raise Broken(f"message of {parcel.size} bytes, where at most {self.limit} are due")
            parcel.missing.pop()
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(message_object_id=parcel.message, **where)
        )
        return _inflated(parcel)


def _inflated(parcel: Parcel) -> Message:
    """The message that the parts are of.

    Raises:
        Broken: none, or one that answers another question.
    """
    try:
        message = inflate_object_from_contents(parcel.message, parcel.contents)
    except Exception as error:  # of any kind, as its sender chose
        raise Broken(f"an answer that cannot be read: {type(error).__name__}") from error
    if not isinstance(message, Message) or message.metadata.reply_to_message_id != parcel.question:
        raise Broken("an answer in the name of another")
    message.metadata.__dict__["_message_id"] = parcel.message
    return message


def _failed(question: str, why: str) -> Message:
    """An answer's place, taken by the reason why there is none."""
    LOG.warning("an answer is dropped: %s", why)
    metadata = Metadata(0, "", 0, 0, question, "", 0.0, 0.0, "system")
    return make_message(metadata, error=Error(BROKEN, why))
