# SPDX-License-Identifier: Apache-2.0
"""HO-SFL: hybrid-order split federated learning; clients neither backpropagate nor move a parameter vector.

arXiv 2603.14773. Clients hold the bottom theta_c (the same cut for all), the server the top theta_s. A
round is one step in four stages. All clients probe along the same directions, so averaging their scalars
averages their gradient estimates, and everyone takes the same step.

Symbols: M clients, K cohort, T rounds, P ``probes``, mu ``radius``, lambda ``feedback`` (dloss/dz at the
boundary), u_p ``directions``, v_p ``scalars`` times mu, d_c = d_zo the bottom's trainables.

Deviations: the scalar is s = v / mu, rounded to float32 before it is averaged; one key in place of P seeds;
lambda is of a client's own mean loss and both averages are taken once (the public runners divide by K
twice); optimizer state persists, shared, and is replayed (SGD is the paper's); the estimator is a choice
(``forward`` is the paper's; with ``tangent`` a client has dot products left when the feedback arrives);
digests before and after the step, so a copy that differs is replaced by a snapshot; a client lost on the
way is left out.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from hofl.core.estimators import ESTIMATORS, agreement
from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import digest
from hofl.errors import ClientError
from hofl.models.forward_mode import DeferredSurrogate
from hofl.protocol import aggregate, history, learner
from hofl.protocol import split as messages
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.probing import SHARED, Probing, checks, root_key, step_directions, zo_signal
from hofl.protocol.setup import Setup
from hofl.protocol.split import Split, about, ask
from hofl.tasks.base import Task


def ho_sfl(
    layout: Layout, boundaries: Sequence[int], training: aggregate.Training, probing: Probing, split: Split
) -> Algorithm:
    """HO-SFL over ``layout``; ``boundaries`` are all the same cut."""
    setup = Setup(layout, tuple(boundaries), training, probing, split)
    actions = {"activate": activate, "probe": probe, "settle": settle}
    return Algorithm(partial(init, setup), partial(play, setup), partial(rebuild, layout), actions)


def init(setup: Setup, vector: Vector) -> Record:
    """Round 0: nobody holds anything; zero optimizer state on both sides of the cut."""
    start, training, d_c = aggregate.initial_state(setup.training, vector), setup.training, setup.d_c
    clients, q = len(training.sizes), setup.probing.to_values()["probes"]
    shared = history.begin(clients, setup.split.history, d_c, 1, q, setup.probing.optimizer)
    moments = learner.moments_of(training.optimizer, len(vector) - d_c)  # [k, d_s]
    return Record({**start.arrays, **shared, "weights/top_moments": moments}, start.values)


def play(setup: Setup, state: Record, cohort: Sequence[int], call: Call) -> Outcome:
    """One round, the server's half."""
    failures, d_c, probing = dict[int, str](), setup.d_c, setup.probing
    recipe, q = history.recipe_of(probing, probing.optimizer), probing.to_values()["probes"]
    root = root_key(setup.training.seed, SHARED, state.values["round"])
    plans = {i: setup.plan(state, i, root, clean=True, steps=1, recipe=recipe) for i in cohort}
    bottom, top = history.bottom_of(state, d_c), state.arrays["weights/vector"][d_c:]
    # 1. the key of the round, and what a client lacks;  2. it answers with z and labels
    sent = history.ask(call, "activate", state, plans, bottom, failures)
    # the server, for each client: loss of its batch, gradient at theta_s^t, lambda = dloss/dz
    served = setup.top.serve(top, sent, failures)
    # 3. lambda down;  4a. the scalars up
    requests = {i: about(sent[i], {"feedback/delta": delta}) for i, (_, _, delta) in served.items()}
    replies = ask(call, "probe", requests, failures) if q else {i: about(sent[i], {}) for i in served}
    entries = [messages.counted(i, plans[i], replies[i], sent[i], served[i][0]) for i in replies]
    entries = [e for e in entries if history.accepted(e, (1, q), failures)]
    if len(entries) < setup.training.quorum:
        raise RoundVoid(failures)
    gradient = aggregate.mean((plans[i].values["weight"], g) for i, (_, g, _) in served.items())
    server = Record({}, {"client": SERVER, "optimizer": setup.training.optimizer.to_values()})
    book = [Entry(SERVER, server, Record({"weights/gradient": gradient})), *entries]
    moved = step(setup.layout, state, book)
    # 4b. the average down; each client takes the step and proves it
    book[1:] = settled(moved, entries, d_c, call, failures)
    row = {"boundaries": [setup.boundaries[0]] * len(cohort), **aggregate.loss_row(book)}
    row["replay_ok"] = not any(aggregate.MISMATCH in why for why in failures.values())
    row["zo_signal"] = zo_signal(
        (e.reply.arrays["metrics/agreement"] for e in entries if q), probing.estimator
    )
    return Outcome(history.in_step(moved, book), tuple(book), row, failures)


def settled(
    moved: Record, entries: list[Entry], d_c: int, call: Call, failures: dict[int, str]
) -> list[Entry]:
    """Stage 4b: the averaged scalars go down -> the entries, with who is in step."""
    t, past = moved.values["round"] - 1, moved.arrays["scalars/history"]
    if not past.shape[2]:  # the frozen-bottom control has no step to take
        return [Entry(i, p, Record(r.arrays, {**r.values, "in_step": True})) for i, p, r in entries]
    requests = {e.client: about(e.reply, {"scalars/mean": past[t % len(past)]}) for e in entries}
    replies = ask(call, "settle", requests, failures)
    expected, found = digest(history.bottom_of(moved, d_c)), []
    for i, asked, reply in entries:
        agrees = i in replies and messages.proves(replies[i], expected)
        if i in replies and not agrees:
            failures[i] = f"refused: {aggregate.MISMATCH}"
        found.append(Entry(i, asked, Record(reply.arrays, {**reply.values, "in_step": agrees})))
    return found


def step(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """Both halves take their step: the bottom by the averaged scalars, the top by its gradient."""
    clients = [e for e in entries if e.client != SERVER]
    (server,) = (e for e in entries if e.client == SERVER)
    asked, t = clients[0].plan, state.values["round"]
    d_c, q = layout.bottom_size(asked.values["boundary"]), asked.values["probes"]
    vector, moments = state.arrays["weights/vector"].copy(), state.arrays["weights/top_moments"].copy()
    # theta_c <- theta_c - eta (1/P) sum_p s_p u_p
    mean = history.mean_scalars(clients, (1, q)) if q else np.zeros((1, 0), dtype=np.float32)
    root = asked.arrays.get("seeds/root", np.zeros(2, dtype=np.uint64))
    arrays, values = history.advance(state, vector[:d_c], root, mean, asked.values["recipe"])
    # theta_s <- theta_s - eta mean_m grad_m
    gradient = server.reply.array("weights/gradient", "float32", (layout.size - d_c,)).copy()
    optimizer = Optimizer.from_values(server.plan.values["optimizer"])
    optimizer.update_(vector[d_c:], gradient, list(moments), t + 1)
    cursors = state.arrays["cursors/next"].copy()
    for e in clients:
        cursors[e.client] = e.plan.values["position"] + 1
    arrays |= {"weights/vector": vector, "weights/top_moments": moments, "cursors/next": cursors}
    return Record({**state.arrays, **arrays}, {**state.values, **values, "round": t + 1})


def rebuild(layout: Layout, state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entries."""
    return history.in_step(step(layout, state, entries), entries)


def activate(task: Task, request: Record, memory: Memory) -> Record:
    """Stages 1 and 2, the client's half: catch up, then z = f_bottom(x; theta_c) without a graph."""
    plan, model = request.values, task.model
    aggregate.check_layout(task, request)
    d_c = model.layout.bottom_size(plan["boundary"])
    kept = history.catch_up(memory, request, d_c)
    if kept is None:
        return history.behind(request)
    memory.kept = kept if plan["probes"] else Record(kept.arrays, {"round": plan["round"] + 1})
    model.write(kept.arrays["weights/bottom"])
    batch = task.batch(plan["client"], plan["position"], plan["batch"])
    surrogate = DeferredSurrogate(model, batch.inputs, plan["boundary"])
    q = plan["probes"]
    root = Key.from_array(request.array("seeds/root", "uint64", (2,))) if q else Key(0, 0)
    directions = step_directions(plan, root, 0, d_c)
    estimator = ESTIMATORS[plan["estimator"] if q else "none"]
    z, scalars = estimator(surrogate, directions, plan["radius"], checks(plan, 0))
    values = messages.sent_values(plan, 0, batch, z)
    memory.open = {**values, "z": z, "scalars": scalars, "plan": request}
    return Record(messages.smashed(task, batch, z, plan["wire"]), values)


def probe(task: Task, request: Record, memory: Memory) -> Record:
    """Stage 4a, the client's half: s_p = <lambda, f_bottom(x; theta_c + mu u_p) - z> / mu, float32 [1, P]."""
    step = messages.opened(memory, request)
    learnt = step["scalars"](messages.feedback_of(request, step["z"]))
    with np.errstate(over="ignore"):
        s = learnt.values.astype(np.float32)[None]
    if not np.isfinite(s).all():
        raise ClientError("non-finite scalar")
    return about(request, {"scalars/s": s, "metrics/agreement": agreement(learnt)})


def settle(task: Task, request: Record, memory: Memory) -> Record:
    """Stage 4b, the client's half: the step that all take -> a digest of the bottom after it."""
    step = messages.opened(memory, request)
    if memory.kept is None:
        raise ClientError("this client holds no bottom")
    plan: Record = step["plan"]
    mean = request.array("scalars/mean", "float32", (1, plan.values["probes"]))
    memory.kept = history.moved(memory.kept, Record({**plan.arrays, "scalars/mean": mean}, plan.values))
    memory.open = {}
    return Record({"digests/bottom": digest(memory.kept.arrays["weights/bottom"])}, request.values)
