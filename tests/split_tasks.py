# SPDX-License-Identifier: Apache-2.0
"""Tasks for split methods: a chain of two linear maps, small enough for paper, and a tiny text model."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from families import adapted
from hofl.core.record import Record
from hofl.models.boundary import cut
from hofl.models.tiny import HashTokenizer
from hofl.protocol.base import Call, Replies
from hofl.tasks.base import Batch, Task
from hofl.tasks.metrics import Sums
from hofl.tasks.partition import Partition
from hofl.tasks.text import text_task
from hofl.tasks.text_data import read_text

Examples = Sequence[tuple[float, int]]


def halves_squared(output: Tensor, batch: Batch) -> Tensor:
    """(o - y)^2 / 2, with the gradient o - y."""
    return ((output[:, 0] - batch.targets) ** 2 / 2).mean()


def chain_task(
    examples: Examples,
    bottom: Sequence[Sequence[float]],
    top: Sequence[Sequence[float]],
    loss: Callable[[Tensor, Batch], Tensor] = halves_squared,
    labels: Sequence[str] = (),
) -> Task:
    """``o = W^S W^C x`` without biases; client i has the one example (x, y) = ``examples[i]``; cut at 1."""
    layers = [nn.Linear(len(weight[0]), len(weight), bias=False).requires_grad_() for weight in (bottom, top)]
    for layer, weight in zip(layers, (bottom, top), strict=True):
        layer.weight.data = torch.tensor(weight)
    points, targets = torch.tensor([[x] for x, _ in examples]), torch.tensor([y for _, y in examples])

    def collate(numbers: np.ndarray) -> Batch:
        return Batch({"input": points[numbers]}, targets[numbers])

    ids = tuple(f"client-{i}" for i in range(len(examples)))
    shards = [np.array([i]) for i in range(len(examples))]
    facts = {"labels": list(labels)} if labels else {}
    return Task("chain", cut(nn.Sequential(*layers)), ids, shards, collate, loss, Sums, 7, facts)


def text_of(family: str, clients: int = 3) -> Task:
    """Short reviews of unequal lengths and a tiny model with adapters: label words, or a head for BERT."""
    rows = [
        {
            "text": " ".join([("dull", "fine")[i % 2], *(["film", "and", "plot", "the", "a"][: i % 6])]),
            "label": i % 2,
        }
        for i in range(30)
    ]
    template, head = ("head-v1", 2) if family == "bert" else ("sst2-v1", None)
    data = read_text(rows, rows[:6], Partition(clients=clients), template_id=template, seed=1)
    return text_task(data, cut(adapted(family, head=head)), HashTokenizer(), length=16)


def losing(call: Call, client: int, action: str, number: int) -> Call:
    """A call in which a client is gone from the ``number``-th request (from 0) for an action on."""
    seen = {"count": 0, "gone": 0}

    def partial(asked: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        seen["gone"] |= int(asked == action and seen["count"] == number)
        seen["count"] += int(asked == action)
        if not seen["gone"] or client not in requests:
            return call(asked, requests, deadline)
        replies = call(asked, {i: r for i, r in requests.items() if i != client}, deadline)
        return Replies(replies.records, {**replies.failures, client: "gone"})

    return partial
