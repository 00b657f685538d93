# SPDX-License-Identifier: Apache-2.0
"""FedProx: FedAvg whose clients are held near the weights they were sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2. A client lowers ``h(w) = loss(w) + (mu/2) ||w - w_t||^2``.

Symbols: mu ``proximal``, w_t the broadcast vector, K cohort, E ``steps``, d trainables.

Deviations: E optimizer steps in place of a gamma-inexact minimiser, and partial work (fewer epochs from a
slow client) is not used: a client that does not finish is left out of the mean. Clients are drawn uniformly,
not by their share of the data, and weighted as in FedAvg. Under AdamW the term is part of the gradient, so it
goes through both moments, and not of the decoupled decay.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from hofl.algorithms.fedavg import descend
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.protocol import aggregate
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, Vector
from hofl.tasks.base import Task


def fedprox(layout: Layout, training: aggregate.Training, proximal: float) -> Algorithm:
    """FedProx over all d trainables of ``layout``; with ``proximal`` 0 it is FedAvg."""

    def plan(state: Record, client: int) -> Record:
        """What a client is asked: FedAvg's plan, and mu."""
        values = aggregate.plan_values(state, client, training)
        return Record({}, values | {"layout": layout.fingerprint, "proximal": proximal})

    def delta(entry: Entry) -> Vector:
        """A client's delta float32 [d], checked."""
        return entry.reply.array("weights/delta", "float32", (layout.size,))

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        # send w_t;  each of the cohort minimises h(w; w_t) by E steps and returns w_i - w_t
        # w_{t+1} = w_t + mean of the deltas
        plans = {i: plan(state, i) for i in cohort}
        return aggregate.mean_of_deltas(state, plans, call, delta, training.quorum)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        return aggregate.advance(state, ((e, delta(e)) for e in entries))

    return Algorithm(partial(aggregate.initial_state, training), play, rebuild, {"local_steps": local_steps})


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """A client's half: E steps on h from w_t -> delta float32 [d]."""
    mu = np.float32(request.values["proximal"])

    def pull_(gradient: Vector, w: Vector, w_t: Vector) -> None:
        """``grad h(w) = grad loss(w) + mu (w - w_t)``."""
        gradient += mu * (w - w_t)

    return descend(task, request, pull_ if mu else None)
