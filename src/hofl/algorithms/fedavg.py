# SPDX-License-Identifier: Apache-2.0
"""FedAvg: local first-order training and a mean of the deltas.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1; in HO-FL's setting.

Symbols: K cohort, E local steps (here optimizer steps, not epochs), w the trainables, d their number.
Deviations from the original: equal weights by default (``weighting="examples"`` is the original's),
any of the normative optimizers, whose state is new in each participation. With the model's
checkpointing on, it is the memory-saving rival that hybrid order is compared with.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError
from hofl.protocol import aggregate
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, Vector
from hofl.tasks.base import Task

Pull = Callable[[Vector, Vector, Vector], None]
"""``pull_(gradient, w, w_t)``: what a method adds to the loss's gradient, in place; float32 [d] each."""


def fedavg(layout: Layout, training: Training) -> Algorithm:
    """FedAvg over all d trainables of ``layout``."""

    def plan(state: Record, client: int) -> Record:
        """What a client is asked: everything but the weights."""
        return Record({}, aggregate.plan_values(state, client, training) | {"layout": layout.fingerprint})

    def delta(entry: Entry) -> Vector:
        """A client's delta float32 [d], checked."""
        return entry.reply.array("weights/delta", "float32", (layout.size,))

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        # 1. broadcast w_t to the cohort;  2. each takes E steps;  3. collect the deltas
        # 4. w_{t+1} = w_t + mean of the deltas
        plans = {i: plan(state, i) for i in cohort}
        return aggregate.mean_of_deltas(state, plans, call, delta, training.quorum)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        return aggregate.advance(state, ((e, delta(e)) for e in entries))

    return Algorithm(partial(aggregate.initial_state, training), play, rebuild, {"local_steps": local_steps})


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """A client's half: E first-order steps from w_t on all trainables -> delta float32 [d]."""
    return descend(task, request)


def descend(task: Task, request: Record, pull_: Pull | None = None) -> Record:
    """E first-order steps from the request's w_t -> delta float32 [d].

    Args:
        task: the client's.
        request: a plan and w_t.
        pull_: what is added to each gradient; FedAvg adds nothing.

    Raises:
        ClientError: a loss or gradient is not finite, or the model has another layout.
    """
    aggregate.check_layout(task, request)
    plan = request.values
    model, optimizer = task.model, Optimizer.from_values(plan["optimizer"])
    start = request.array("weights/vector", "float32", (model.layout.size,))
    vector, state = start.copy(), optimizer.init(len(start))
    loss_sum, examples = 0.0, 0
    for e in range(plan["steps"]):
        batch = task.batch(plan["client"], plan["position"] + e, plan["batch"])
        model.write(vector)
        loss, gradient, _ = model.first_order(batch.inputs, 0, None, task.loss_on(batch))
        if not (np.isfinite(loss) and np.isfinite(gradient).all()):
            raise ClientError(f"non-finite loss or gradient in local step {e + 1}")
        if pull_ is not None:
            pull_(gradient, vector, start)
        optimizer.update_(vector, gradient, state, e + 1)
        loss_sum += loss * len(batch.targets)
        examples += len(batch.targets)
    sums = {"loss_sum": loss_sum, "examples": examples}
    identity = {name: plan[name] for name in ("run", "round", "client")}
    return Record({"weights/delta": vector - start}, {**identity, **sums})
