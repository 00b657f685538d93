# SPDX-License-Identifier: Apache-2.0
"""What is changed in a SuperLink that hofl starts: its calls stay, and cost less.

As it comes, a message of one record takes some twenty requests, each of which waits for SQLite's one writing
lock, and a node learns of it by asking again and again. Here a small message travels whole in the request
that announces it, the database is used by one thread at a time, and who asks in vain is answered when there
is something (:mod:`hofl.runtime.flower.bell`). A stock SuperNode or grid talks to it as to any other.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from hofl.errors import RunFailed

SERVER = 1
"""Flower's number of the SuperLink as a node: messages to it are answers."""

EXPIRED = 1.0
"""Seconds between two looks for tasks whose process has died."""

Ring = Callable[[int], None]
"""Told the node for which there is something new."""


def run_superlink(ring: Ring, *layers: Any) -> None:
    """Be ``flower-superlink``, with this process's arguments and ASGI middlewares before everything.

    Args:
        ring: called from any thread.
        layers: the first is the outermost.

    Raises:
        RunFailed: this Flower has no place for one.
    """
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    others = getattr(extensions, "get_middleware", None)
    if others is None:
        raise RunFailed("this flwr has no get_middleware: install the version that hofl asks for")
    extensions.get_middleware = lambda: (*(Middleware(layer) for layer in layers), *others())
    _one_at_a_time()
    _carry_whole(ring)
    flower_superlink()


def who_pulls(body: bytes) -> int:
    """The node that a request for messages is from; 0 where that cannot be read."""
    try:
        return int(PullMessagesRequest.FromString(body).node.node_id)
    except DecodeError:
        return 0


def _one_at_a_time() -> None:
    """Let threads use the database one after the other, and look for expired tasks seldom.

    Requests that only read look for expired tasks as well, which takes the writing lock; who finds that
    taken sleeps up to a tenth of a second at a time. Waiting for a lock of this process costs nothing.
    """
    from flwr.supercore.corestate.sql_corestate import SqlCoreState
    from flwr.supercore.sql_mixin import SqlMixin

    every: Any = SqlMixin
    state: Any = SqlCoreState
    session, look = every.session, state._cleanup_expired_task_tokens
    lock, last = threading.RLock(), [-EXPIRED]

    @contextmanager
    def _session(self: Any) -> Iterator[Any]:
        with lock, session(self) as opened:
            yield opened

    def _seldom(self: Any) -> None:
        now = time.monotonic()
        if now - last[0] >= EXPIRED:
            last[0] = now
            look(self)

    every.session = _session
    state._cleanup_expired_task_tokens = _seldom


def _carry_whole(ring: Ring) -> None:
    """Let a message that is pushed with its content be stored and pulled with it, without any objects."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.object_store import NoObjectInStoreError
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    state: Any = SqlLinkState
    store: Any = SqlObjectStore
    in_parts, put, tree_of = state.store_message_and_object_tree, state.store_object, store.get_object_tree

    def _stored(self: Any, message: Any, tree: Any, session: str) -> tuple[bool, list[str]]:
        answer = bool(message.metadata.reply_to_message_id)
        if message.has_content() and message.content:
            with self.session():
                keep = self.store_message_res if answer else self.store_message_ins
                found = keep(message) is not None, list[str]()
                self._cleanup_push_session(session, cleanup_messages=False)
        else:
            found = in_parts(self, message, tree, session)
        ring(SERVER if answer else message.metadata.dst_node_id)
        return found

    def _put(self: Any, *args: Any) -> bool:
        stored = bool(put(self, *args))
        ring(SERVER)  # perhaps the last part of an answer
        return stored

    def _tree_of(self: Any, name: str) -> Any:
        try:
            return tree_of(self, name)
        except NoObjectInStoreError:  # of a message that came whole; of another, its parts are found missing
            return ObjectTree(object_id=name)

    state.store_message_and_object_tree = _stored
    state.store_object = _put
    store.get_object_tree = _tree_of
