# SPDX-License-Identifier: Apache-2.0
"""MU-SplitFed: the server takes tau zeroth-order steps on a client's activations instead of waiting for it.

arXiv 2510.21155. A round of an active client m is one batch: it sends h, h+_j and h-_j, the bottom at x_c and
at x_c +- lambda u_j. The server's replica of the top takes tau steps on h alone, along fresh directions;
then ``delta_c = F(x_s^tau, h+) - F(x_s^tau, h-)`` moves the bottom. Both halves move at a global rate.

Symbols: M cohort, tau ``server_steps``, lambda ``radius``, h ``z``, eta_s the rate of ``training.optimizer``,
eta_c that of ``probing.optimizer``, eta_g ``global_lr``, d_c = d_zo the bottom's trainables.

Deviations: q ``probes`` on both halves (the paper has 1, from the family ``sphere``); the 2q + 1 activations
are one message; what returns is s = delta_c / (2 lambda), rounded to float32 before it is used; weight
decay where the settings have it; the uploaded bottom is compared with the replay of its scalars, and a
client that differs or is lost is left out with its tau steps. Delays are simulated in the row, nobody waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol import aggregate, two_sided
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.probing import Probing
from hofl.protocol.replicas import (
    BOTTOM,
    DELAY,
    Replica,
    agreeing,
    delta,
    half_key,
    replicas_of,
    server_entry,
)
from hofl.protocol.setup import Setup
from hofl.protocol.split import Split, ask
from hofl.protocol.two_sided import Floats, measured, slopes
from hofl.tasks.base import Task


def mu_splitfed(
    layout: Layout, boundaries: Sequence[int], training: aggregate.Training, probing: Probing, split: Split
) -> Algorithm:
    """MU-SplitFed over ``layout``; ``boundaries`` are all the same cut."""
    setup = Setup(layout, tuple(boundaries), training, probing, split)
    init = partial(aggregate.initial_state, training)
    actions = {"activate": activate, "finish": finish}
    return Algorithm(init, partial(play, setup), partial(rebuild, layout), actions)


def play(setup: Setup, state: Record, cohort: Sequence[int], call: Call) -> Outcome:
    """One round, the server's half."""
    failures, vector, d_c = dict[int, str](), state.arrays["weights/vector"], setup.d_c
    training, split, t = setup.training, setup.split, state.values["round"]
    above = replace(setup.probing.optimizer, lr=training.optimizer.lr)  # eta_s
    roots = {i: half_key(training.seed, i, t, BOTTOM) for i in cohort}
    plans = {i: setup.plan(state, i, roots[i], clean=True, steps=1) for i in cohort}
    replicas = replicas_of(setup, plans, above, vector[d_c:])
    # 1. x_c down; h, h+_j, h-_j and labels up
    asked = {i: Record({"weights/bottom": vector[:d_c], **p.arrays}, p.values) for i, p in plans.items()}
    sent, scalars, answers = ask(call, "activate", asked, failures), dict[int, Floats](), dict[int, Record]()
    for i, message in sent.items():
        # 2. x_s,m takes tau steps on h;  3. the scalars of x_c, at x_s^tau
        try:
            scalars[i] = served(replicas[i], message, split.server_steps)
        except RecordError as error:
            failures[i] = f"refused: {error}"
            continue
        answers[i] = two_sided.answer(message, {"scalars/s": scalars[i]})
    # 4. they go down; the client's step, and its bottom's delta up
    last = ask(call, "finish", answers, failures)
    # 5. x <- x + eta_g mean_m (x_m - x)
    book = [server_entry({i: replicas[i] for i in last}, above, global_lr=split.global_lr)]
    found = [replicas[i].entry([scalars[i]]) for i in last]
    parts = agreeing(found, partial(delta, vector, d_c, book[0]), last, d_c, book, failures)
    moved = aggregate.advance(state, scaled(parts, split.global_lr))
    if len(book) - 1 < training.quorum:
        raise RoundVoid(failures)
    row = {"boundaries": [setup.boundaries[0]] * len(cohort), "zo_signal": None, **aggregate.loss_row(book)}
    row["replay_ok"] = not any(aggregate.MISMATCH in why for why in failures.values())
    row |= simulated(setup, t, [e.client for e in book[1:]])
    return Outcome(moved, tuple(book), row, failures)


def rebuild(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entries: keys and scalars are all it needs."""
    (server,) = (e for e in entries if e.client == SERVER)
    clients = [e for e in entries if e.client != SERVER]
    vector, d_c = state.arrays["weights/vector"], layout.bottom_size(clients[0].plan.values["boundary"])
    parts = ((e, delta(vector, d_c, server, e)) for e in clients)
    return aggregate.advance(state, scaled(parts, server.plan.values["global_lr"]))


def scaled(parts: Iterable[tuple[Entry, Vector]], rate: float) -> Iterable[tuple[Entry, Vector]]:
    """The deltas float32 [d] times the global rate eta_g."""
    return ((entry, np.float32(rate) * both) for entry, both in parts)


def served(replica: Replica, sent: Record, tau: int) -> Floats:
    """The server's part of a round for one client: tau steps of its replica -> the bottom's s, float32 [q].

    Raises:
        RecordError: what was sent does not fit the top, or a loss or scalar is not finite.
    """
    q, radius = replica.plan.values["probes"], replica.plan.values["radius"]
    losses = [replica.step(sent, lambda side, j: 0) for _ in range(tau)]
    replica.count(sent, losses[0])
    at_tau = measured(q, lambda side, j: replica.loss(replica.weights, sent, 1 + side * q + j))
    return slopes(at_tau, radius)


def simulated(setup: Setup, round: int, clients: Sequence[int]) -> dict[str, Any]:
    """The round's time in steps of the server: its tau steps overlap the wait for a client, or follow it.

    A client's delay is exponential with mean ``split.delay``; no columns where that is 0.
    """
    mean, tau = setup.split.delay, setup.split.server_steps
    if not mean:
        return {}
    keys = [half_key(setup.training.seed, i, round, DELAY) for i in clients]
    longest = max(-mean * float(np.log1p(-key.uniforms(1)[0])) for key in keys)
    return {"simulated_time": max(longest, float(tau)), "simulated_time_waiting": longest + tau}


def activate(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half, first: load the bottom, then h, h+_j and h-_j without a graph."""
    return two_sided.upload(task, memory, two_sided.started(task, request), 0)


def finish(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half, second: x_c <- x_c - eta_c (1/q) sum_j s_j u_j -> the bottom's delta."""
    held = two_sided.answered(memory, request)
    s = request.array("scalars/s", "float32", (held["plan"].values["probes"],))
    return two_sided.finished(memory, two_sided.moved(held, s), request)
