# SPDX-License-Identifier: Apache-2.0
"""FedZO: zeroth-order local steps along private directions, and a mean of the deltas.

Fang, Yu, Jiang, Shi, Jones, Zhou, "Communication-Efficient Stochastic Zeroth-Order Optimization for Federated
Learning", IEEE Transactions on Signal Processing 2022, Algorithm 1.

Symbols: F ``loss`` of a minibatch, x the trainables, d their number, H ``steps``, b_2 ``probes`` q, mu_p the
paper's radius, v_j on the unit sphere. The paper's estimate is

    ``(d / (mu_p q)) sum_j [F(x + mu_p v_j) - F(x)] v_j``

With ``u_j = sqrt(d) v_j`` (directions ``sphere``) and ``radius = mu_p / sqrt(d)`` the points are the same,
and it is ``(1/q) sum_j s_j u_j`` with ``s_j = [F(x + radius u_j) - F(x)] / radius``: what all methods here
compute, with the factor d inside the directions. Any other law (``gaussian``) is taken as it is set.

Deviations: scalars are rounded to float32 before they are used; any of the normative optimizers (SGD is the
paper's), whose state is new in each participation; no noisy channel (AirComp). As in the paper the delta is
sent whole: no server replays it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError
from hofl.protocol import aggregate
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, Vector
from hofl.protocol.probing import Probing, agreement_of, loss_steps_, root_key, zo_signal
from hofl.tasks.base import Task


def fedzo(layout: Layout, training: aggregate.Training, probing: Probing) -> Algorithm:
    """FedZO over all d trainables of ``layout``."""

    def plan(state: Record, client: int) -> Record:
        """What a client is asked: everything but the weights. Its key is its own in each round."""
        values = aggregate.plan_values(state, client, training) | probing.to_values()
        root = root_key(training.seed, client, values["round"]).array()
        return Record({"seeds/root": root}, values | {"layout": layout.fingerprint})

    def delta(entry: Entry) -> Vector:
        """A client's delta float32 [d], checked."""
        agreement_of(entry.reply)
        return entry.reply.array("weights/delta", "float32", (layout.size,))

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        # send x_t;  each of the cohort takes H zeroth-order steps and returns x_i - x_t
        # x_{t+1} = x_t + mean of the deltas
        plans = {i: plan(state, i) for i in cohort}
        outcome = aggregate.mean_of_deltas(state, plans, call, delta, training.quorum)
        sums = (agreement_of(entry.reply) for entry in outcome.entries)
        return replace(outcome, row=outcome.row | {"zo_signal": zo_signal(sums, probing.estimator)})

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        return aggregate.advance(state, ((e, delta(e)) for e in entries))

    return Algorithm(partial(aggregate.initial_state, training), play, rebuild, {"local_steps": local_steps})


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """A client's half: ``x <- x - eta (1/q) sum_j s_j u_j`` H times from x_t -> delta float32 [d]."""
    plan, layout = request.values, task.model.layout
    aggregate.check_layout(task, request)
    start = request.array("weights/vector", "float32", (layout.size,))
    root = Key.from_array(request.array("seeds/root", "uint64", (2,)))
    x = start.copy()
    learnt = loss_steps_(task, plan, root, x, Optimizer.from_values(plan["bottom_optimizer"]).init(len(x)))
    delta = x - start
    if not np.isfinite(delta).all():
        raise ClientError("non-finite trainables after the local steps")
    arrays = {"weights/delta": delta, "metrics/agreement": learnt.arrays["metrics/agreement"]}
    return Record(arrays, learnt.values)
