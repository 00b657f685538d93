# SPDX-License-Identifier: Apache-2.0
"""A task in two halves, where the training data is at the nodes and never on the server.

The server's half knows the clients' ids, and their sizes once they have joined; where it needs an example
to measure a shape or a message by, it takes one of the evaluation set. A node's half has the examples of
its own client and nobody else's, and no evaluation set. A batch follows from the client's number, its
position and the size of its shard (:meth:`hofl.tasks.base.Task.batch`), so both halves together compute
what one process with all the files would.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.errors import ClientError, ConfigError
from hofl.tasks.base import Batch, Keep, Task
from hofl.tasks.metrics import Sums
from hofl.tasks.partition import Shards


def unknown(clients: Sequence[str]) -> Shards:
    """Shards of one example each: what the server has until it is told the sizes."""
    return [np.arange(1) for _ in clients]


def alone(clients: Sequence[str], client: str, examples: int) -> Shards:
    """Shards on a node: all examples here are its client's, the others have none.

    Raises:
        ConfigError: the run does not list the client.
    """
    number = number_of(clients, client)
    return [np.arange(examples if place == number else 0) for place in range(len(clients))]


def number_of(clients: Sequence[str], client: str) -> int:
    """A client's number.

    Raises:
        ConfigError: the run does not list it.
    """
    if client not in clients:
        few = ", ".join(clients[:5]) + ", ..." * (len(clients) > 5)
        raise ConfigError(f"client = {client!a}: this run's clients are {few}")
    return clients.index(client)


def server_half(task: Task) -> Task:
    """The server's half of a task whose ``collate`` serves the evaluation set: it never runs out."""
    collate, there = task.collate, int(task.facts["n_evaluation"])

    def stand_in(numbers: NDArray[np.int64]) -> Batch:
        """Examples of the evaluation set, as many as asked for."""
        return collate(np.asarray(numbers) % there)

    return replace(task, collate=stand_in)


def node_half(task: Task) -> Task:
    """A node's half: it cannot evaluate."""

    def evaluate(keep: Keep | None = None) -> Sums:
        """Refused.

        Raises:
            ClientError: always.
        """
        raise ClientError("a node has no evaluation set: only the server evaluates")

    return replace(task, evaluate=evaluate)


def with_sizes(task: Task, sizes: Sequence[int], digests: Sequence[str] = ()) -> Task:
    """The server's half, told how many examples each client has.

    Args:
        task: from ``build_task``, its data at the nodes.
        sizes: one a client, in the order of ``task.clients``; 0 for one that is idle or not there.
        digests: what names each client's data, in the same order, for the data's fingerprint; none to leave
            the contents out of it.

    Raises:
        ConfigError: sizes or digests do not fit the clients, or nobody has an example.
    """
    clients, told = task.clients, [int(size) for size in sizes]
    if len(told) != len(clients) or (digests and len(digests) != len(clients)):
        raise ConfigError(
            f"{len(told)} sizes and {len(digests)} digests for {len(clients)} clients: one each"
        )
    if min(told) < 0 or not any(told):
        raise ConfigError("partition.names: no node has an example to train on")
    facts = dict(task.facts)
    facts["n_train"] = sum(told)
    facts["partition"] = [
        {"client": client, "examples": size, "classes": {}}
        for client, size in zip(clients, told, strict=True)
    ]
    named = dict(zip(clients, digests, strict=True)) if digests else {}
    facts["data_sha256"] = {**facts["data_sha256"], "nodes": named}
    return replace(task, shards=[np.arange(size) for size in told], facts=facts)


def told(task: Task) -> dict[str, Any]:
    """What the server tells a node beside the configuration, as plain values: arguments of ``node_task``.

    Returns:
        ``names`` of the classes, and of images ``images``: what :func:`image_facts` reads.
    """
    facts = {"names": [str(name) for name in task.facts["labels"]]}
    if task.name != "vision":
        return facts
    return {**facts, "images": {name: list(task.facts[name]) for name in ("shape", "mean", "std")}}


def image_facts(images: Mapping[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """Shape [channels, height, width], and mean and deviation a channel, that a server told.

    Raises:
        ConfigError: they are no such thing.
    """
    told = [images.get(name) for name in ("shape", "mean", "std")]
    shape, mean, std = (list(values) if isinstance(values, list | tuple) else [] for values in told)
    if len(shape) != 3 or not len(mean) == len(std) == shape[0]:
        raise ConfigError("the server did not tell the shape, mean and deviation of the run's images")
    numbers = [*shape, *mean, *std]
    known = all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
    if not known or min(*shape, *std) <= 0:
        raise ConfigError("the server told a shape, mean or deviation that no images have")
    return [int(size) for size in shape], [float(m) for m in mean], [float(s) for s in std]
