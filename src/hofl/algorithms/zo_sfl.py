# SPDX-License-Identifier: Apache-2.0
"""ZO-SFL: split federated learning in which nobody backpropagates; both halves are perturbed together.

The pure zeroth-order baseline of HO-SFL, arXiv 2603.14773. K clients load the global bottom, and the server a
replica of the top for each. In each of E local steps both halves of a client are at ``theta + mu u_j``, then
at ``theta - mu u_j``, with directions of their own; the two losses give one scalar that moves both.

Symbols: K cohort, E ``steps``, P = q ``probes``, mu ``radius``, z+_j and z-_j the activations at
theta_c +- mu u_j, s_j = (l+_j - l-_j) / (2 mu), d_c = d_zo the bottom's trainables.

Deviations: the 2q activations of a step are one message, and the scalars come with the question for the
next step; scalars are rounded to float32 before they are used; 1/q is in the step, once (the original has
it in the scalar); clients weigh the same by default; the uploaded bottom is compared with the replay of its
scalars, and a client that differs or is lost is left out with its replica; the training loss is the mean over
both sides, since there is no clean pass. Optimizers are new in each round, as in the original.
"""

from collections.abc import Sequence
from functools import partial

from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol import aggregate, two_sided
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid
from hofl.protocol.probing import Probing
from hofl.protocol.replicas import BOTTOM, agreeing, delta, half_key, replicas_of, server_entry
from hofl.protocol.setup import Setup
from hofl.protocol.split import Split, ask
from hofl.tasks.base import Task


def zo_sfl(
    layout: Layout, boundaries: Sequence[int], training: aggregate.Training, probing: Probing, split: Split
) -> Algorithm:
    """ZO-SFL over ``layout``; ``boundaries`` are all the same cut."""
    setup = Setup(layout, tuple(boundaries), training, probing, split)
    init = partial(aggregate.initial_state, training)
    actions = {"activate": activate, "advance": advance}
    return Algorithm(init, partial(play, setup), partial(rebuild, layout), actions)


def play(setup: Setup, state: Record, cohort: Sequence[int], call: Call) -> Outcome:
    """One round, the server's half."""
    failures, vector, d_c = dict[int, str](), state.arrays["weights/vector"], setup.d_c
    seed, t, q = setup.training.seed, state.values["round"], setup.probing.probes
    plans = {i: setup.plan(state, i, half_key(seed, i, t, BOTTOM), clean=False) for i in cohort}
    replicas = replicas_of(setup, plans, setup.probing.optimizer, vector[d_c:])
    # 1. the bottom down; 2. z+_j, z-_j and labels up
    asked = {i: Record({"weights/bottom": vector[:d_c], **p.arrays}, p.values) for i, p in plans.items()}
    sent = ask(call, "activate", asked, failures)
    for _ in range(setup.training.steps):
        # 3. z+_j meets theta_s + mu u_j, z-_j meets theta_s - mu u_j: losses, scalars, the replica's step
        asked = {}
        for i, message in sent.items():
            try:
                loss = replicas[i].step(message, lambda side, j: side * q + j)
            except RecordError as error:
                failures[i] = f"refused: {error}"
                continue
            replicas[i].count(message, loss)
            # 4. the scalars down; the client's step, and its next activations or, at last, its bottom's delta
            asked[i] = two_sided.answer(message, {"scalars/s": replicas[i].scalars[-1]})
        sent = ask(call, "advance", asked, failures)
    # 5. both halves of those that are left, averaged
    book = [server_entry({i: replicas[i] for i in sent}, setup.probing.optimizer)]
    found = [replicas[i].entry(replicas[i].scalars) for i in sent]
    parts = agreeing(found, partial(delta, vector, d_c, book[0]), sent, d_c, book, failures)
    moved = aggregate.advance(state, parts)
    if len(book) - 1 < setup.training.quorum:
        raise RoundVoid(failures)
    row = {"boundaries": [setup.boundaries[0]] * len(cohort), "zo_signal": None, **aggregate.loss_row(book)}
    row["replay_ok"] = not any(aggregate.MISMATCH in why for why in failures.values())
    return Outcome(moved, tuple(book), row, failures)


def rebuild(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entries: keys and scalars are all it needs."""
    (server,) = (e for e in entries if e.client == SERVER)
    clients = [e for e in entries if e.client != SERVER]
    vector, d_c = state.arrays["weights/vector"], layout.bottom_size(clients[0].plan.values["boundary"])
    return aggregate.advance(state, ((e, delta(vector, d_c, server, e)) for e in clients))


def activate(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half of the first step: load the bottom, then z+_j and z-_j without a graph."""
    return two_sided.upload(task, memory, two_sided.started(task, request), 0)


def advance(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half of a step: move by its scalars; then the next activations, or the bottom's delta."""
    held = two_sided.answered(memory, request)
    plan, number = held["plan"].values, request.values["step"]
    held = two_sided.moved(held, request.array("scalars/s", "float32", (plan["probes"],)))
    if number < plan["steps"]:
        return two_sided.upload(task, memory, held, number)
    return two_sided.finished(memory, held, request)
