# SPDX-License-Identifier: Apache-2.0
"""What a server asks of Flower beside its public API."""

from collections.abc import Sequence
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import InMemoryGrid

NODE_GONE = int(ErrorCode.NODE_UNAVAILABLE)
"""Flower's error where a node left with a question."""

Backend = BackendConfig
"""Settings of a simulation's processes."""

TRANSPORT = (httpx.TransportError, httpx.HTTPStatusError)
"""What a grid raises when the SuperLink is away for good, or no longer knows the run."""


def public_keys(grid: Grid) -> dict[int, bytes]:
    """The public key of every node of a grid that has keys, by node id."""
    nodes = getattr(grid, "get_nodes", None)
    return {} if nodes is None else {node.node_id: bytes(node.public_key) for node in nodes()}


def activations(grid: Grid) -> dict[int, str]:
    """The nodes that are there, and when each came in last, where the grid says so."""
    nodes = getattr(grid, "get_nodes", None)
    if nodes is None:
        return dict.fromkeys(grid.get_node_ids(), "")
    return {node.node_id: str(node.last_activated_at) for node in nodes()}


def simulated(grid: Grid) -> bool:
    """Whether a grid's nodes are virtual ones of this machine."""
    return isinstance(grid, InMemoryGrid)


def enter(run: int, node: int) -> None:
    """Say of which run and node the messages are that this process makes."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 0


def push_whole(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Push messages with their content, in one request -> their ids, empty where one was not taken.

    Only a SuperLink that :mod:`hofl.runtime.flower.internal.link` runs passes them on.
    """
    client: Any = getattr(grid, "_runtime_client")  # noqa: B009
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    protos = [message_to_proto(message) for message in messages]
    trees = [ObjectTree(object_id=message.metadata.message_id) for message in messages]
    request = PushAppMessagesRequest(messages_list=protos, message_object_trees=trees)
    return list(client.PushMessages(request).message_ids)
