# SPDX-License-Identifier: Apache-2.0
"""For split methods: a model of two numbers, ``output = w1 (w0 x)``, cut between them, and tiny texts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from families import numbers
from hofl.algorithms import ALGORITHMS
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.models.boundary import cut
from hofl.models.load import load, restrict_head
from hofl.models.lora import add_lora
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Call, Outcome
from hofl.protocol.probing import Probing
from hofl.protocol.split import Split
from hofl.tasks.base import Batch, Task
from hofl.tasks.metrics import Sums
from hofl.tasks.partition import Partition
from hofl.tasks.text import text_task
from hofl.tasks.text_data import read_text
from hofl.tasks.tokens import word_tokens

W0, W1 = 0.5, 3.0
"""Where the two numbers start."""
X, Y = (2.0, 1.0), (1, 0)
"""Client i has the one example (X[i], Y[i]); its loss is ``(output - y)^2 / 2``."""


def two_numbers(clients: Sequence[int] = (0,)) -> Task:
    """The task of these clients, numbered from 0 in the order given; a client may come twice."""
    with torch.random.fork_rng():
        layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    for layer, weight in zip(layers, (W0, W1), strict=True):
        layer.weight.data.fill_(weight)
    x = torch.tensor([[X[i]] for i in clients])
    y = torch.tensor([Y[i] for i in clients])
    return Task(
        "two numbers",
        cut(nn.Sequential(*layers)),
        tuple(f"c{place}" for place in range(len(clients))),
        [np.array([place]) for place in range(len(clients))],
        lambda rows: Batch({"input": x[rows]}, y[rows]),
        lambda output, batch: ((output[:, 0] - batch.targets) ** 2).mean() / 2,
        lambda: Sums.zero(2),
        seed=0,
    )


def texts(family: str, template: str = "sst2-v1", layers: int = 4) -> Task:
    """Two clients with texts of one to six words; adapters on a tiny model, their B not zero.

    ``sst2-v1`` pads on the left and scores label words; ``head-v1`` pads on the right, if the family allows.
    """
    rest = ("film", "and", "plot", "the", "a")
    rows = [{"text": " ".join([("fine", "dull")[i % 2], *rest[: i % 6]]), "label": i % 2} for i in range(30)]
    data = read_text(rows, rows[:5], Partition(clients=2), template_id=template, seed=1)
    loaded = load(f"tiny:{family}", head=2 if data.template.head else None)
    if not data.template.head:
        restrict_head(loaded.module, word_tokens(loaded.tokenizer, data.template))
    module = add_lora(loaded.module, key=Key.of(5, "init"), rank=2, alpha=4.0)
    for place, (name, parameter) in enumerate(module.named_parameters()):
        if "lora_B" in name:
            parameter.data.copy_(0.3 * numbers(*parameter.shape, key=place))
    return text_task(data, cut(module), loaded.tokenizer, length=24)


def built(
    name: str,
    task: Task,
    boundary: int = 1,
    *,
    rates: tuple[float, float] = (0.01, 0.1),
    optimizer: str = "sgd",
    top_optimizer: str = "",
    estimator: str = "central",
    probes: int = 1,
    radius: float = 0.25,
    directions: str = "rademacher",
    seed: int = 3,
    steps: int = 1,
    batch: int = 1,
    **split: Any,
) -> Algorithm:
    """A method on a task; ``rates`` of the bottom and of the top.

    A direction of one coordinate is +1 or -1, and ``s u`` is the same for both: a step can be worked out.
    """
    below, above = Optimizer(optimizer, rates[0]), Optimizer(top_optimizer or optimizer, rates[1])
    training = Training(seed, steps, batch, above, tuple(map(len, task.shards)), run="two")
    probing = Probing(estimator, probes, radius, directions, below)
    cuts = (boundary,) * len(task.clients)
    halves = Split(task, **split)
    given = {"layout": task.model.layout, "boundaries": cuts, "training": training, "probing": probing}
    return ALGORITHMS[name].build(**given, split=halves, preferred=None)


def played(
    algorithm: Algorithm, task: Task, call: Call, number: int, cohort: Sequence[int] = (0,)
) -> Iterator[Outcome]:
    """Rounds from the task's start on."""
    state = algorithm.init(task.model.read())
    for _ in range(number):
        outcome = algorithm.round(state, cohort, call)
        yield outcome
        state = outcome.state
