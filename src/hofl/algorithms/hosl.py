# SPDX-License-Identifier: Apache-2.0
"""HOSL: hybrid-order split learning of one client and one server; the loss itself is probed.

As HO-FL (Chen, Wu, Ma, Chen, arXiv 2609.39074), App. A, describes it. The client holds the bottom theta_c,
the server the top theta_s. In a step the client sends z, labels and 2q perturbed activations, and the server
returns the 2q losses at theta_s; the client steps by ``s_j = (l+_j - l-_j) / (2 mu)``, the server by its
gradient at z, which is of the same theta_s.

Symbols: q ``probes``, mu ``radius``, u_j ``directions``, z+_j and z-_j the activations at theta_c +- mu u_j,
d_c = d_zo the bottom's trainables, E ``steps``; a round is E steps.

Deviations: losses and scalars are rounded to float32 before they are used; the 2q + 1 activations of a step
are one message, and the losses come with the question for the next step; both optimizers persist; the bottom
travels once, and again only where its digest differs, since the server knows the scalars and replays it; a
client lost on the way voids the round, and both halves are as before it. All q directions are probed at one
point (public code moves after each of them and has no clean pass).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from hofl.core.estimators import Doubles, Scalars, agreement
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.core.replay import digest
from hofl.errors import RecordError
from hofl.protocol import aggregate, history, learner, two_sided
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.learner import Learner
from hofl.protocol.probing import SHARED, Probing, root_key, zo_signal
from hofl.protocol.setup import Setup
from hofl.protocol.split import Split, ask, identity, proves
from hofl.protocol.two_sided import Floats, part
from hofl.tasks.base import Task


class Learnt(NamedTuple):
    """What the server learnt of one upload; ``losses`` float32 [2, q], ``s`` float32 [q]."""

    loss_sum: float
    examples: int
    losses: Floats
    s: Floats
    agreement: Doubles


def hosl(
    layout: Layout, boundaries: Sequence[int], training: aggregate.Training, probing: Probing, split: Split
) -> Algorithm:
    """HOSL over ``layout``; ``boundaries`` has the one client's cut."""
    setup = Setup(layout, tuple(boundaries), training, probing, split)
    actions = {"activate": activate, "advance": advance}
    return Algorithm(partial(init, setup), partial(play, setup), partial(rebuild, layout), actions)


def init(setup: Setup, vector: Vector) -> Record:
    """Round 0: the client holds nothing; zero optimizer state on both sides of the cut."""
    training, probing = setup.training, setup.probing
    start = learner.begin(training, setup.layout, setup.boundaries, vector)
    sizes = setup.d_c, training.steps, probing.to_values()["probes"]
    bottom = history.begin(len(training.sizes), setup.split.history, *sizes, probing.optimizer)
    return Record({**start.arrays, **bottom}, start.values)


def play(setup: Setup, state: Record, cohort: Sequence[int], call: Call) -> Outcome:
    """One round, the server's half."""
    (client,), training, failures = cohort, setup.training, dict[int, str]()
    recipe = history.recipe_of(setup.probing, setup.probing.optimizer)
    root = root_key(training.seed, SHARED, state.values["round"])
    plan = setup.plan(state, client, root, clean=True, recipe=recipe)
    server = learner.restored(state, setup.top, training.optimizer, setup.d_c)
    bottom = history.bottom_of(state, setup.d_c)
    # 1. z, z+_j, z-_j and labels of the first batch up
    sent, learnt = history.ask(call, "activate", state, {client: plan}, bottom, failures), list[Learnt]()
    for _ in range(training.steps):
        if client not in sent:
            break
        # the server: 2q losses, then its step by the gradient at z; nothing has moved before
        try:
            learnt.append(learn(server, plan, sent[client]))
        except RecordError as error:
            raise RoundVoid({client: f"refused: {error}"}) from error
        # 2. the losses down; the client's step, and what its next one needs or, at last, a digest
        losses = {"scalars/losses": learnt[-1].losses} if plan.values["probes"] else {}
        sent = ask(call, "advance", {client: two_sided.answer(sent[client], losses)}, failures)
    if client not in sent:
        raise RoundVoid(failures)
    book = [learner.server_entry(server), entry(plan, learnt)]
    return ended(setup, step(setup.layout, state, book), book, sent[client])


def learn(server: Learner, plan: Record, sent: Record) -> Learnt:
    """The server's part of a step: the losses and the gradient at one theta_s, then its move.

    Raises:
        RecordError: what was sent does not fit the top, or a loss, scalar or the move is not finite.
    """
    q, radius, most = (plan.values[name] for name in ("probes", "radius", "batch"))
    stacked = [part(sent, place, 2 * q + 1, most) for place in range(2 * q + 1)]
    losses = two_sided.measured(
        q, lambda side, j: server.half.loss(server.weights, stacked[1 + side * q + j])
    )
    s = two_sided.slopes(losses, radius)
    loss, _ = server.learn(stacked[0])
    ahead, behind = losses.astype(np.float64)
    halves = (ahead - loss) / radius, (loss - behind) / radius
    examples = len(sent.arrays["labels/targets"])
    return Learnt(loss * examples, examples, losses, s, agreement(Scalars(s.astype(np.float64), halves)))


def entry(plan: Record, learnt: Sequence[Learnt]) -> Entry:
    """The client's, for the ledger: the scalars of its losses, float32 [E, q], and no activation."""
    arrays = {"scalars/s": np.stack([n.s for n in learnt])}
    arrays |= {"metrics/agreement": np.sum([n.agreement for n in learnt], axis=0)}
    counts = {"loss_sum": sum(n.loss_sum for n in learnt), "examples": sum(n.examples for n in learnt)}
    reply = Record(arrays if plan.values["probes"] else {}, {**identity(plan.values), **counts})
    return Entry(plan.values["client"], plan, reply)


def ended(setup: Setup, moved: Record, book: Sequence[Entry], last: Record) -> Outcome:
    """The outcome; the client is in step if its digest is that of the server's replay."""
    server, (client, plan, reply) = book
    agrees = proves(last, digest(history.bottom_of(moved, setup.d_c)))
    failures = {} if agrees else {client: f"refused: {aggregate.MISMATCH}"}
    entries = server, Entry(client, plan, Record(reply.arrays, {**reply.values, "in_step": agrees}))
    row = {"boundaries": [setup.boundaries[0]], "replay_ok": agrees, **aggregate.loss_row(entries)}
    sums = [reply.arrays["metrics/agreement"]] if plan.values["probes"] else []
    row["zo_signal"] = zo_signal(sums, setup.probing.estimator)
    return Outcome(history.in_step(moved, entries), entries, row, failures)


def step(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """Both halves after the round: the bottom by its scalars, the top as the server left it."""
    (client,) = (e for e in entries if e.client != SERVER)
    plan, bottom = client.plan, history.bottom_of(state, layout.bottom_size(client.plan.values["boundary"]))
    shape = plan.values["steps"], plan.values["probes"]
    # theta_c <- theta_c - eta (1/q) sum_j s_j u_j, E times
    s = client.reply.array("scalars/s", "float32", shape) if shape[1] else np.zeros(shape, dtype=np.float32)
    root = plan.arrays.get("seeds/root", np.zeros(2, dtype=np.uint64))
    arrays, values = history.advance(state, bottom, root, s, plan.values["recipe"])
    moved = learner.advance(state, entries, bottom)
    return Record({**moved.arrays, **arrays}, {**moved.values, **values})


def rebuild(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entries."""
    return history.in_step(step(layout, state, entries), entries)


def activate(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half of the first step: catch up, then z, z+_j and z-_j without a graph."""
    aggregate.check_layout(task, request)
    plan = request.values
    kept = history.catch_up(memory, request, task.model.layout.bottom_size(plan["boundary"]))
    if kept is None:
        return history.behind(request)
    memory.kept = kept
    held = {"plan": request, "bottom": kept.arrays["weights/bottom"]}
    held |= {"moments": kept.arrays["weights/moments"], "first": plan["round"] * plan["steps"] + 1}
    return two_sided.upload(task, memory, held, 0)


def advance(task: Task, request: Record, memory: Memory) -> Record:
    """The client's half of a step: losses, scalars, the move; then the next activations, or a digest."""
    held = two_sided.answered(memory, request)
    plan, number = held["plan"].values, request.values["step"]
    shape = 2, plan["probes"]
    none = np.zeros(shape, dtype=np.float32)
    losses = request.array("scalars/losses", "float32", shape) if shape[1] else none
    held = two_sided.moved(held, two_sided.slopes(losses, plan["radius"]))
    if number < plan["steps"]:
        return two_sided.upload(task, memory, held, number)
    arrays = {"weights/bottom": held["bottom"], "weights/moments": held["moments"]}
    memory.kept, memory.open = Record(arrays, {"round": plan["round"] + 1}), {}
    return Record({"digests/bottom": digest(held["bottom"])}, identity(request.values, number))
