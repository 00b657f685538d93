# SPDX-License-Identifier: Apache-2.0
"""SplitFed V1 and V2: split learning whose clients work side by side; both halves are backpropagated.

Thapa, Arachchige, Camtepe, Sun, "SplitFed: When Federated Learning Meets Split Learning", AAAI 2022,
Algorithms 1 and 2. In a local step a client sends z and labels, the server takes a step of its half and
returns dloss/dz, and the client takes a step of its half. After E steps the bottoms are averaged. In V1 the
server keeps one replica of the top for each client and averages these too, which makes it FedAvg of the
whole network; in V2 all clients train one top, one after another.

Symbols: W^C bottom, W^S top, A_k ``z``, Y_k labels, dA_k ``feedback``, E ``steps``, d_c = d_zo the bottom's
trainables, d_s the top's.

Deviations: a client runs its bottom again for the backward pass, one forward more, so that no graph waits
for a message. V2 interleaves: all clients' step e, in an order drawn anew for each step, before anyone's
step e + 1 (public code finishes one client first). V2's server optimizer persists over steps and rounds;
all others are new in each round (public code makes the server's anew for each batch). A client that is lost
is left out of the averages with its replica (V1: cohort x d_s numbers of replicas); in V2 the steps that
the top took on its batches stay, unless the round is void.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.models.forward_mode import bottom_gradient
from hofl.protocol import aggregate, learner
from hofl.protocol import split as messages
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector
from hofl.protocol.learner import Learner
from hofl.protocol.split import Split, about, ask, identity, opened
from hofl.tasks.base import Task

Turns = Callable[[int, Sequence[int]], Iterable[tuple[int, Learner]]]
"""(step, clients that sent something) -> the clients in turn, each with the top that learns from it."""


def splitfed_v1(layout: Layout, boundaries: Sequence[int], training: Training, split: Split) -> Algorithm:
    """SplitFed V1 over ``layout``; ``boundaries`` are all the same cut."""

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        failures: dict[int, str] = {}
        cut, d_c = boundaries[0], layout.bottom_size(boundaries[0])
        plans = {i: learner.plan(state, i, training, layout, cut, split.wire) for i in cohort}
        bottom, top = np.split(state.arrays["weights/vector"], [d_c])
        # 1. W^C to all; a replica of W^S for each, with an optimizer of its own
        half = split.top(cut, training.batch)
        moments = learner.moments_of(training.optimizer, len(top))
        replicas = {i: Learner(half, training.optimizer, top, moments) for i in cohort}
        # 2. E steps of each client with its replica;  3. the bottoms come back
        entries = exchange(call, plans, bottom, lambda _, sent: [(i, replicas[i]) for i in sent], failures)
        if len(entries) < training.quorum:
            raise RoundVoid(failures)
        moved = {i: {"weights/replica": replica.weights - top} for i, replica in replicas.items()}
        entries = [
            Entry(i, plan, Record(reply.arrays | moved[i], reply.values)) for i, plan, reply in entries
        ]
        # 4. both halves are averaged
        row = learner.row(aggregate.loss_row(entries), cut, cohort)
        return Outcome(rebuild(state, entries), tuple(entries), row, failures)

    def whole(entry: Entry) -> Vector:
        """A client's delta of both halves: float32 [d]."""
        d_c = layout.bottom_size(entry.plan.values["boundary"])
        replica = entry.reply.array("weights/replica", "float32", (layout.size - d_c,))
        return np.concatenate([entry.reply.array("weights/delta", "float32", (d_c,)), replica])

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        return aggregate.advance(state, ((e, whole(e)) for e in entries))

    return Algorithm(partial(aggregate.initial_state, training), play, rebuild, ACTIONS)


def splitfed_v2(layout: Layout, boundaries: Sequence[int], training: Training, split: Split) -> Algorithm:
    """SplitFed V2 over ``layout``; ``boundaries`` are all the same cut."""

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        failures: dict[int, str] = {}
        cut, d_c, t = boundaries[0], layout.bottom_size(boundaries[0]), state.values["round"]
        plans = {i: learner.plan(state, i, training, layout, cut, split.wire) for i in cohort}
        # 1. W^C to all; the server goes on with its one top and its moments
        top = learner.restored(state, split.top(cut, training.batch), training.optimizer, d_c)

        def turns(e: int, clients: Sequence[int]) -> Iterable[tuple[int, Learner]]:
            """All of step e before anyone's e + 1, in random order."""
            return [(i, top) for i in learner.seeded_order(training.seed, t, e, clients)]

        # 2. E steps of each client with that top;  3. the bottoms come back
        entries = exchange(call, plans, state.arrays["weights/vector"][:d_c], turns, failures)
        if len(entries) < training.quorum:
            raise RoundVoid(failures)
        # 4. the bottoms are averaged; the top is what it has become
        book = [learner.server_entry(top), *entries]
        row = learner.row(aggregate.loss_row(entries), cut, cohort)
        return Outcome(rebuild(state, book), tuple(book), row, failures)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        clients = [e for e in entries if e.client != SERVER]
        d_c = layout.bottom_size(clients[0].plan.values["boundary"])
        bottom = learner.averaged(state.arrays["weights/vector"][:d_c], clients)
        return learner.advance(state, entries, bottom)

    return Algorithm(partial(learner.begin, training, layout, boundaries), play, rebuild, ACTIONS)


def exchange(
    call: Call, plans: Mapping[int, Record], bottom: Vector, turns: Turns, failures: dict[int, str]
) -> list[Entry]:
    """E local steps of all clients from ``bottom`` float32 [d_c], the server's half -> their entries."""
    losses: dict[int, list[tuple[float, int]]] = {i: [] for i in plans}
    asked = {i: Record({"weights/bottom": bottom}, plan.values) for i, plan in plans.items()}
    for e in range(max(plan.values["steps"] for plan in plans.values())):
        # z and labels up;  the server's forward, backward and step;  dloss/dz down, the client's step
        sent, returned = ask(call, "forward", asked, failures), {}
        for i, top in turns(e, list(sent)):
            try:
                loss, feedback = top.learn(sent[i])
            except RecordError as error:
                failures[i] = f"refused: {error}"
                continue
            losses[i].append((loss, len(feedback)))
            returned[i] = about(sent[i], {"feedback/delta": feedback})
        replies = ask(call, "backward", returned, failures)
        asked = {i: Record({}, identity(plans[i].values, e + 1)) for i in replies}
    return learner.collected(plans, ask(call, "finish", asked, failures), losses, len(bottom), failures)


def forward(task: Task, request: Record, memory: Memory) -> Record:
    """The client: z = f_bottom(x; W^C) without a graph; the round's first request brings W^C."""
    plan, model = request.values, task.model
    if "weights/bottom" in request.arrays:
        aggregate.check_layout(task, request)
        start = request.array("weights/bottom", "float32", (model.layout.bottom_size(plan["boundary"]),))
        moments = Optimizer.from_values(plan["optimizer"]).init(len(start))
        own = {"plan": plan, "start": start, "bottom": start.copy(), "moments": moments}
        memory.open = identity(plan) | own
    held = opened(memory, request)
    plan, e = held["plan"], held["step"]
    batch = task.batch(plan["client"], plan["position"] + e, plan["batch"])
    model.write(held["bottom"])
    z = model.bottom(batch.inputs, plan["boundary"])
    values = messages.sent_values(plan, e, batch, z)
    memory.open = {**held, **values, "batch": batch, "z": z}
    return Record(messages.smashed(task, batch, z, plan["wire"]), values)


def backward(task: Task, request: Record, memory: Memory) -> Record:
    """The client: the gradient of ``<feedback, f_bottom(x; W^C)>`` by running it again, and a step."""
    held = opened(memory, request)
    plan, model, e = held["plan"], task.model, held["step"]
    feedback = messages.feedback_of(request, held["z"])
    model.write(held["bottom"])
    gradient = bottom_gradient(model, held["batch"].inputs, plan["boundary"], feedback)
    if not np.isfinite(gradient).all():
        raise ClientError(f"non-finite gradient in local step {e + 1}")
    Optimizer.from_values(plan["optimizer"]).update_(held["bottom"], gradient, held["moments"], e + 1)
    kept = {name: held[name] for name in ("plan", "start", "bottom", "moments")}
    memory.open = {**identity(plan, e + 1), **kept}
    return about(request, {})


def finish(task: Task, request: Record, memory: Memory) -> Record:
    """The client after its E steps: the delta of its bottom, float32 [d_c]."""
    held = opened(memory, request)
    memory.open = {}
    return Record({"weights/delta": held["bottom"] - held["start"]}, request.values)


ACTIONS = {"forward": forward, "backward": backward, "finish": finish}
