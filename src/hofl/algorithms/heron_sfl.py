# SPDX-License-Identifier: Apache-2.0
"""HERON-SFL: clients probe a local loss of their own, through an auxiliary head; the server backpropagates.

arXiv 2601.09076. Clients hold the bottom theta_c and an auxiliary head theta_a, the server the top theta_s.
A client takes h zeroth-order steps on the loss of its head, theta_c and theta_a perturbed together, and
every k steps sends the current smashed data and labels. The server trains theta_s on one upload after
another and returns nothing. After h steps theta_l = (theta_c, theta_a) is averaged.

Symbols: h ``steps`` (E), k ``split.upload_every``, theta_l [d_c + d_a], u ``directions``, mu ``radius``, q
``probes`` (the paper's is 1), L the auxiliary loss, ``s_j = (L(theta_l + mu u_j) - L(theta_l)) / mu``. The
paper's unit sphere with factor d_l is ``zo.directions = "sphere"`` at radius mu / sqrt(d_l).

Deviations: uploads are the activations at steps 0, k, 2k, ..., ceil(h / k) a round, each before that step,
so a k above h gives one and not none; the head is a layer norm and one linear layer on pooled features for
every task (the paper's has blocks for text); scalars are rounded to float32 before they are used; optimizers
of theta_l are new in each round, the server's persists; the server takes the uploads of a step in random
order; any q, ``central`` and ``none`` (theta_l frozen, the control) are choices. A client that is lost is
left out of the mean; what its uploads taught theta_s stays, unless the round is void.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hofl.core.estimators import ESTIMATORS, agreement
from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, replay_
from hofl.errors import ClientError, RecordError
from hofl.models.auxiliary import AuxiliarySurrogate, features, start_head
from hofl.protocol import aggregate, learner
from hofl.protocol import split as messages
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.learner import Learner
from hofl.protocol.probing import Probing, checks, root_key, step_directions, zo_signal
from hofl.protocol.split import Split, ask, identity, opened
from hofl.tasks.base import Task

_HEAD = int.from_bytes(b"head", "big")
"""Coordinate of the stream that the head starts from."""

LOCAL = ("weights/bottom", "weights/auxiliary")
"""theta_c and theta_a in a message."""


def heron_sfl(
    layout: Layout, boundaries: Sequence[int], training: Training, probing: Probing, split: Split
) -> Algorithm:
    """HERON-SFL over ``layout`` and a head; ``boundaries`` are all the same cut."""

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        failures: dict[int, str] = {}
        cut, d_c = boundaries[0], layout.bottom_size(boundaries[0])
        top = learner.restored(state, split.top(cut, training.batch), training.optimizer, d_c)
        plans = {}
        for i in cohort:
            asked = learner.plan(state, i, training, layout, cut, split.wire)
            values = {**asked.values, **probing.to_values(), "every": split.upload_every}
            root = root_key(training.seed, i, values["round"]).array()
            plans[i] = Record({"seeds/root": root} if values["probes"] else {}, values)
        # 1. theta_c and theta_a to all;  2. h local steps, uploads;  3. theta_s learns;  4. theta_l returns
        weights = dict(zip(LOCAL, np.split(local_of(state, d_c), [d_c]), strict=True))
        entries = exchange(call, plans, weights, top, training.seed, failures)
        if len(entries) < training.quorum:
            raise RoundVoid(failures)
        book = [learner.server_entry(top), *entries]
        sums = [e.reply.arrays["metrics/agreement"] for e in entries if e.plan.values["probes"]]
        row = aggregate.loss_row(entries) | {"zo_signal": zo_signal(sums, probing.estimator)}
        return Outcome(rebuild(state, book), tuple(book), learner.row(row, cut, cohort), failures)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries: theta_l is averaged, theta_s as the server left it."""
        clients = [e for e in entries if e.client != SERVER]
        d_c = layout.bottom_size(clients[0].plan.values["boundary"])
        mean = learner.averaged(local_of(state, d_c), clients)
        moved = learner.advance(state, entries, mean[:d_c])
        return Record({**moved.arrays, "weights/auxiliary": mean[d_c:]}, moved.values)

    start = partial(init, layout, boundaries, training, split)
    return Algorithm(start, play, rebuild, {"local_steps": local_steps, "finish": finish})


def init(
    layout: Layout, boundaries: Sequence[int], training: Training, split: Split, vector: Vector
) -> Record:
    """Round 0: the model, a new head as ``weights/auxiliary`` float32 [d_a], zero moments of the top."""
    start, task = learner.begin(training, layout, boundaries, vector), split.task
    assert task is not None
    batch = task.batch(next(i for i, shard in enumerate(task.shards) if len(shard)), 0, 1)
    width = features(task.model.bottom(batch.inputs, boundaries[0]), batch.inputs).shape[1]
    head = start_head(Key.of(training.seed, "init", _HEAD), width, len(task.facts["labels"]))
    return Record({**start.arrays, "weights/auxiliary": head}, start.values)


def local_of(state: Record, d_c: int) -> Vector:
    """theta_l: float32 [d_c + d_a]."""
    return np.concatenate([state.arrays["weights/vector"][:d_c], state.arrays["weights/auxiliary"]])


def exchange(
    call: Call, plans: Mapping[int, Record], weights: dict[str, Vector], top: Learner, seed: int,
    failures: dict[int, str],
) -> list[Entry]:  # fmt: skip
    """The clients' h steps from ``weights``, and what ``top`` learns of their uploads -> their entries."""
    plan = next(iter(plans.values())).values
    losses: dict[int, list[tuple[float, int]]] = {i: [] for i in plans}
    asked = {i: Record({**weights, **p.arrays}, p.values) for i, p in plans.items()}
    for e in range(0, plan["steps"], plan["every"]):
        # up to k local steps and the smashed data of the first; theta_s learns from one after another
        sent = ask(call, "local_steps", asked, failures)
        for i in learner.seeded_order(seed, plan["round"], e, sent):
            try:
                loss, feedback = top.learn(sent[i])
                losses[i].append((loss, len(feedback)))
            except RecordError as error:
                failures[i] = f"refused: {error}"
        after = min(e + plan["every"], plan["steps"])
        asked = {i: Record({}, identity(plans[i].values, after)) for i in sent if i not in failures}
    replies = ask(call, "finish", asked, failures)
    return learner.collected(plans, replies, losses, sum(map(len, weights.values())), failures)


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """The client: up to k steps on the auxiliary loss -> z and labels of the first of them."""
    if "weights/bottom" in request.arrays:
        memory.open = started(task, request)
    held, memory.open = opened(memory, request), {}  # a step that fails is not tried again
    plan, local, first = held["plan"].values, held["local"], held["step"]
    d_c, q = task.model.layout.bottom_size(plan["boundary"]), plan["probes"]
    root = Key.from_array(held["plan"].array("seeds/root", "uint64", (2,))) if q else Key(0, 0)
    optimizer, estimator = Optimizer.from_values(plan["bottom_optimizer"]), ESTIMATORS[plan["estimator"]]
    last, reply = min(first + plan["every"], plan["steps"]), Record()
    for e in range(first, last if q else first + 1):
        batch = task.batch(plan["client"], plan["position"] + e, plan["batch"])
        task.model.write(local[:d_c])
        surrogate = AuxiliarySurrogate(task.model, batch.inputs, plan["boundary"], local[d_c:], batch.targets)
        directions = step_directions(plan, root, e, len(local))
        loss, probe = estimator(surrogate, directions, plan["radius"], checks(plan, e))
        if e == first and surrogate.z is not None:
            values = messages.sent_values(plan, e, batch, surrogate.z)
            reply = Record(messages.smashed(task, batch, surrogate.z, plan["wire"]), values)
        # g = (1/q) sum_j s_j u_j over theta_c and theta_a together
        learnt = probe(torch.ones_like(loss))
        with np.errstate(over="ignore"):
            s = learnt.values.astype(np.float32)
        if not (bool(torch.isfinite(loss).all()) and np.isfinite(s).all()):
            raise ClientError(f"non-finite loss or scalar in local step {e + 1}")
        if q:
            replay_(local, [Step(directions, s)], optimizer, held["moments"], first=e + 1)
            held["agreed"] += agreement(learnt)
    memory.open = {**held, "step": last}
    return reply


def started(task: Task, request: Record) -> dict[str, Any]:
    """What a client holds that loads theta_c and theta_a, with a new optimizer."""
    plan, layout = request.values, task.model.layout
    aggregate.check_layout(task, request)
    sizes = (layout.bottom_size(plan["boundary"]), len(request.arrays.get(LOCAL[1], ())))
    local = np.concatenate([request.array(n, "float32", (k,)) for n, k in zip(LOCAL, sizes, strict=True)])
    moments = Optimizer.from_values(plan["bottom_optimizer"]).init(len(local))
    return identity(plan) | {"plan": request, "local": local, "moments": moments, "agreed": np.zeros(3)}


def finish(task: Task, request: Record, memory: Memory) -> Record:
    """The client after h steps: the delta of theta_l, float32 [d_c + d_a]."""
    held = opened(memory, request)
    memory.open = {}
    start = np.concatenate([held["plan"].arrays[name] for name in LOCAL])
    proof = {"metrics/agreement": held["agreed"]} if held["plan"].values["probes"] else {}
    return Record({"weights/delta": held["local"] - start, **proof}, request.values)
