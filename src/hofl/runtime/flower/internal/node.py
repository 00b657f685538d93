# SPDX-License-Identifier: Apache-2.0
"""A node's link to a SuperLink.

A stock SuperNode sleeps three seconds between two looks and starts a new process for every message. This
connection speaks the same Fleet protocol from a process that stays: it activates the node, keeps it alive
with heartbeats, pulls one message at a time and pushes its reply.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from hofl.errors import ConfigError

HEARTBEAT = 10.0
"""Seconds that a heartbeat is good for, times two; the least that Flower allows."""

EVERY = 3.0
"""Seconds between two heartbeats."""

PATIENCE = 60.0
"""Seconds for which an exchange that has begun is tried again while the server is away."""

BACKOFF = 0.02
"""Seconds before an object that is not there yet is asked for again; Flower waits a second."""


NOT_LET_IN = (
    "not let in: either its key is not registered, or its last session counts as alive still, which ends "
    f"{2 * HEARTBEAT:.0f} s after a crash"
)

_CALLS = ("PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages", "PushObject")


class Refused(Exception):
    """The server does not let this node in: it is unknown, or its last session counts as alive still."""


class Unreachable(Exception):
    """The server cannot be reached, or fails for now: try again.

    Attributes:
        heard: whether the server may have heard what was asked of it.
    """

    def __init__(self, why: str, heard: bool = True) -> None:
        super().__init__(why)
        self.heard = heard


class Ended(Exception):
    """What was asked is of a run that has ended: nothing to do."""


class Connection:
    """A node's link to a SuperLink, from activation to deactivation.

    Args:
        address: ``host:port``.
        ca: of the server's certificate; None speaks plain HTTP.
        key: the node's private key; None registers as a nobody, where the server lets it.
    """

    def __init__(self, address: str, ca: Path | None, key: ec.EllipticCurvePrivateKey | None) -> None:
        self._own = key is None  # a nobody registers itself, and leaves no trace
        private = generate_key_pairs()[0] if key is None else key
        self._public = public_key_to_bytes(private.public_key())
        self._client = FleetHttpClient.from_server_address(
            address,
            ca is None,
            None if ca is None else ca.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )
        self._calls = {name: self._steady(getattr(self._client, name)) for name in _CALLS}
        self._stop = threading.Event()
        self._alive, self._doubt, self._whole = True, False, False
        self.node = 0

    def _steady(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A call of the protocol that outlasts a server's restart."""

        def _tried(request: Any) -> Any:
            begun, pause = time.monotonic(), BACKOFF
            while True:
                try:
                    with _explained():
                        return call(request)
                except Unreachable as error:
                    self._doubt |= error.heard
                    if time.monotonic() - begun > PATIENCE or self._stop.wait(pause):
                        raise
                pause = min(2 * pause, 1.0)

        return _tried

    def open(self) -> int:
        """Activate this node and keep it alive -> its id.

        Raises:
            Refused, Unreachable: see there.
            ConfigError: the server's certificate is not one that ``ca`` signed.
        """
        with _explained():
            if self._own:
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
            try:
                self.node = self._client.ActivateNode(request).node_id
            except httpx.HTTPStatusError as error:
                if error.response.status_code >= 500:
                    raise
                raise Refused(NOT_LET_IN) from error
        threading.Thread(target=self._beat, daemon=True).start()
        return self.node

    def _beat(self) -> None:
        request = SendNodeHeartbeatRequest(node=Node(node_id=self.node), heartbeat_interval=HEARTBEAT)
        while not self._stop.wait(EVERY):
            try:
                with _explained():
                    self._alive = self._client.SendNodeHeartbeat(request).success
            except Unreachable:
                continue  # it may come back within the patience of two heartbeats
            except (Refused, Ended, ConfigError):
                self._alive = False

    def receive(self) -> Message | None:
        """The next message for this node, if there is one.

        Raises:
            Refused: the server has forgotten this node, so it must be activated again.
            Unreachable: it has been away for a minute.
            Ended: there was one, of a run that has ended meanwhile.
        """
        if not self._alive:
            raise Refused("the server no longer counts this node as its own")
        node, calls = Node(node_id=self.node), self._calls
        self._doubt = False
        answer = calls["PullMessages"](PullMessagesRequest(node=node))
        if not answer.messages_list:
            if (
                self._doubt
            ):  # it counts a message as delivered that was lost on the way: let it be asked again
                raise Refused("the server was away in the middle of an answer")
            return None
        proto, tree = answer.messages_list[0], answer.message_object_trees[0]
        run, self._whole = proto.metadata.run_id, bool(proto.content.items)
        if self._whole:
            return message_from_proto(proto)
        try:
            pulled = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(calls["PullObject"], node, run),
                make_confirm_message_received_fn_protobuf(calls["ConfirmMessageReceived"], node, run),
                return_type=Message,
                initial_backoff=BACKOFF,
            )
        except (ObjectPullError, ValueError) as error:
            raise Ended(f"a message came in part only: {error}") from error
        pulled.metadata.__dict__["_message_id"] = tree.object_id
        return pulled

    def send(self, reply: Message, seconds: float = 0.0) -> None:
        """Push a reply, with the seconds that it took to make; whole, where the question was and it is small.

        Raises:
            Refused, Unreachable, Ended: as :meth:`receive`.
        """
        reply.metadata.__dict__["_message_id"] = reply.object_id
        whole = self._whole and not reply.content.array_records
        with no_object_id_recompute():
            tree = ObjectTree(object_id=reply.object_id) if whole else get_object_tree(reply)
            proto = message_to_proto(reply if whole else remove_content_from_message(reply))
            node, run = Node(node_id=self.node), reply.metadata.run_id
            answer = self._calls["PushMessages"](
                PushMessagesRequest(
                    node=node,
                    messages_list=[proto],
                    message_object_trees=[tree],
                    clientapp_runtime_list=[seconds],
                )
            )
            if whole:
                return
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(self._calls["PushObject"], node, run, answer.session_id),
                object_ids_to_push=set(answer.objects_to_push),
            )

    def close(self) -> None:
        """Say goodbye: a node that does may come back at once."""
        self._stop.set()
        with contextlib.suppress(Refused, Unreachable, Ended, ConfigError), _explained():
            if self.node:
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node))
                if self._own:
                    self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node))
        self._client._client.close()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what the HTTP client raises into the two things that a node can do: wait, or come in anew."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        code, text = error.response.status_code, _reason(error)
        if code >= 500 or code == 429:
            raise Unreachable(f"the server answered {code}: {text}") from error
        raise (Ended if code == httpx.codes.FORBIDDEN else Refused)(text) from error
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise ConfigError(
                "the server's certificate is not signed by this node's ca: "
                f"get ca.crt from whoever made the keys ({error})"
            ) from error
        raise Unreachable(str(error), heard=False) from error
    except (httpx.TransportError, ValueError) as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error


def _reason(error: httpx.HTTPStatusError) -> str:
    try:
        found: Any = FlowerError.from_json(error.response.text)
    except ValueError:
        found = None
    return f"{found.message} (Flower's code {found.code})" if found else error.response.text[:200]
