# SPDX-License-Identifier: Apache-2.0
"""What a server asks of Flower beside its public API."""

from typing import Any

import httpx
from flwr.common.constant import ErrorCode
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import InMemoryGrid

from hofl.errors import RunFailed

NODE_GONE = int(ErrorCode.NODE_UNAVAILABLE)
"""Flower's error where a node left with a question."""

Backend = BackendConfig
"""Settings of a simulation's processes."""

TRANSPORT = (httpx.TransportError, httpx.HTTPStatusError)
"""What a grid raises when the SuperLink is away for good, or no longer knows the run."""


def run_superlink(guard: Any) -> None:
    """Be ``flower-superlink``, with this process's arguments and an ASGI middleware before everything.

    Raises:
        RunFailed: this Flower has no place for one.
    """
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    others = getattr(extensions, "get_middleware", None)
    if others is None:
        raise RunFailed("this flwr has no get_middleware: install the version that hofl asks for")
    extensions.get_middleware = lambda: (Middleware(guard), *others())
    flower_superlink()


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
