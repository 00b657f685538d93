# SPDX-License-Identifier: Apache-2.0
"""A task whose model has two parameters, so that a step can be worked out on paper.

The model is ``o = w_1 x_1 + w_2 x_2``, a client has one example (x, y), its loss is ``(o - y)^2 / 2`` with
the gradient ``(o - y) x``.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hofl.models.boundary import cut
from hofl.tasks.base import Batch, Task
from hofl.tasks.metrics import Sums

START = (1.0, 2.0)
"""w at the start."""


def pair_task(examples: Sequence[tuple[float, float, int]], seed: int = 7) -> Task:
    """One client an example ``(x_1, x_2, y)``."""
    linear = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([START]))
    network = nn.Sequential(OrderedDict(blocks=nn.Sequential(linear), head=nn.Identity()))
    model = cut(network, blocks="blocks")
    points, targets = torch.tensor([e[:2] for e in examples]), torch.tensor([e[2] for e in examples])

    def collate(numbers: np.ndarray) -> Batch:
        return Batch({"input": points[numbers]}, targets[numbers])

    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return ((output[:, 0] - batch.targets) ** 2 / 2).mean()

    @torch.no_grad()
    def evaluate() -> Sums:
        o = model.full({"input": points})
        return Sums.from_logits(torch.cat([-o, o], 1), (targets > 0).long())  # classes by the sign of o

    ids = tuple(f"client-{i}" for i in range(len(examples)))
    shards = [np.array([i]) for i in range(len(examples))]
    return Task("pair", model, ids, shards, collate, loss, evaluate, seed)
