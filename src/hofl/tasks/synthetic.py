# SPDX-License-Identifier: Apache-2.0
"""A classification task of milliseconds: one cloud of points a class, a small network, all from keys."""

import hashlib
import math
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hofl.core.directions import gaussian
from hofl.core.keys import Key
from hofl.errors import ConfigError
from hofl.models.boundary import cut
from hofl.tasks import partition
from hofl.tasks.base import Batch, Keep, Task, cross_entropy
from hofl.tasks.metrics import Sums, majority_class
from hofl.tasks.predictions import classified

NOISE = np.float32(0.5)
"""Standard deviation of a point around its class centre, which lies at distance 1 a feature."""


def synthetic_task(
    divided: partition.Partition,
    *,
    seed: int,
    classes: int = 4,
    features: int = 8,
    width: int = 16,
    blocks: int = 4,
    rows: int = 480,
    evaluation_rows: int = 200,
    checkpointing: bool = False,
    device: str = "cpu",
) -> Task:
    """Clients that learn to tell clouds of points apart, with a cut network of ``blocks`` blocks.

    Args:
        divided: how the points are divided among how many clients.
        seed: of the points, the network's start, the partition and the order of batches.
        classes, features: clouds, and coordinates of a point.
        width, blocks: tanh layers of that width, each a block; the head comes after them.
        rows, evaluation_rows: points to train and to score on, as equal in class as can be.
        checkpointing: see :class:`~hofl.models.boundary.CutModel`.
        device: where the network and the points live.

    Raises:
        ConfigError: a size is too small, or the partition cannot be made.
    """
    least = {"classes": (classes, 2), "features": (features, 1), "width": (width, 1), "blocks": (blocks, 1)}
    for name, (value, lowest) in {
        **least,
        "rows": (rows, 1),
        "evaluation_rows": (evaluation_rows, 1),
    }.items():
        if value < lowest:
            raise ConfigError(f"task.{name} = {value}: allowed is {lowest} or more")
    points, labels = _clouds(seed, classes, features, rows + evaluation_rows)
    shards = divided.divide(labels[:rows], seed=seed)
    ids = tuple(f"client-{client}" for client in range(len(shards)))
    names = [f"cloud {label}" for label in range(classes)]
    network = _network(seed, [features, *[width] * blocks], classes)
    model = cut(network.to(device), blocks="blocks", checkpointing=checkpointing)
    x, y = torch.from_numpy(points).to(device), torch.from_numpy(labels).to(device)

    def collate(numbers: NDArray[np.int64]) -> Batch:
        """Points and classes by number."""
        return Batch({"input": x[numbers]}, y[numbers])

    def answers(numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Logits and classes of held-out points by number."""
        return model.full({"input": x[rows + numbers]}), y[rows + numbers]

    def evaluate(keep: Keep | None = None) -> Sums:
        """All held-out points at once."""
        return classified(answers, np.arange(evaluation_rows), evaluation_rows, names, keep)

    facts = _facts(points, labels, rows, names)
    facts["partition"] = partition.table(shards, labels[:rows], names, ids)
    return Task("synthetic", model, ids, shards, collate, cross_entropy, evaluate, seed, facts)


def _facts(
    points: NDArray[np.float32], labels: NDArray[np.int64], rows: int, names: list[str]
) -> dict[str, Any]:
    return {
        "labels": names,
        "majority_class": majority_class(labels[rows:], names),
        "n_train": rows,
        "n_evaluation": len(labels) - rows,
        "data_sha256": hashlib.sha256(points.tobytes() + labels.tobytes()).hexdigest(),
        "warnings": [],
    }


def _clouds(
    seed: int, classes: int, features: int, rows: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Points float32 [rows, features] around one Gaussian centre a class, and their classes int64 [rows]."""
    labels = Key.of(seed, "init", 0).permutation(rows) % classes
    centres = _normal(Key.of(seed, "init", 1), classes, features)
    return centres[labels] + NOISE * _normal(Key.of(seed, "init", 2), rows, features), labels


def _network(seed: int, sizes: list[int], classes: int) -> nn.Sequential:
    """Linear-tanh blocks between the sizes and a linear head, weights Gaussian over sqrt(fan-in)."""
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten below
        layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(sizes)]
        head = nn.Linear(sizes[-1], classes)
    network = nn.Sequential(OrderedDict(blocks=nn.Sequential(*layers), head=head))
    for place, parameter in enumerate(network.parameters()):
        start = np.zeros(parameter.shape, dtype=np.float32)
        if parameter.ndim == 2:
            rows, fan_in = parameter.shape
            start = _normal(Key.of(seed, "init", 3, place), rows, fan_in) / np.float32(math.sqrt(fan_in))
        parameter.data = torch.from_numpy(start)
    return network


def _normal(key: Key, rows: int, columns: int) -> NDArray[np.float32]:
    return gaussian(key, 0, rows * columns).reshape(rows, columns)
