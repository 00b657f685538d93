# SPDX-License-Identifier: Apache-2.0
"""DeComFL: dimension-free federated learning by shared directions and averaged scalars.

Li, Ying, Liu, Dong, Yang, "Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order
Optimization", ICLR 2025. All clients of a round take E probed steps on the loss itself along the same
directions, send E P scalars and revert; everyone applies the averages, late or not.

Symbols: r round, m cohort, K or E ``steps``, P ``probes`` q, mu ``radius``, g ``scalars``, z ``directions``,
x the vector of all d trainables; the authors' seeds [E] are one root key, shared by the cohort.

After round r a client holds x_r, not x_{r+1}: it reverts its own steps and applies the round with the next
news, by replay or, at first contact and after long absence, from a snapshot. Hence its mark is r.

Deviations: scalars are rounded to float32 before they are averaged; momentum is shared, persistent, replayed,
and where local steps start from; rounds are recorded with their learning rate, in a window and not since the
longest absence; digests, so that a copy that differs is replaced; a forward pass more a step, for its loss.
``tangent`` is ours: the exact derivative of the loss by forward mode. ``average = "models"`` averages the
replayed models, for AdamW, whose steps are not linear in the scalars: as in HO-FL with every block below the
boundary, directions are private, optimizer state is new in each round, and d numbers go down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Floats
from hofl.core.record import Record
from hofl.core.replay import digest
from hofl.errors import RecordError
from hofl.protocol import aggregate, history
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, Replies, RoundVoid, Vector
from hofl.protocol.probing import (
    SHARED,
    Law,
    Probing,
    Shared,
    agreement_of,
    loss_steps_,
    root_key,
    zo_signal,
)
from hofl.tasks.base import Task


def decomfl(layout: Layout, training: Training, probing: Probing, shared: Shared) -> Algorithm:
    """DeComFL over all d trainables of ``layout``."""
    return protocol(layout, training, probing, shared, Law(probing.optimizer))


def protocol(layout: Layout, training: Training, probing: Probing, shared: Shared, law: Law) -> Algorithm:
    """DeComFL's rounds under any law of the update."""
    scalars = shared.average == "scalars"

    def init(vector: Vector) -> Record:
        """Round 0; with averaged scalars nobody holds anything, and the update is at its start."""
        start, q = aggregate.initial_state(training, vector), probing.to_values()["probes"]
        sizes = (len(training.sizes), shared.history, layout.size, training.steps, q)
        return Record(start.arrays | (history.begin(*sizes, law.update) if scalars else {}), start.values)

    def plan(state: Record, client: int) -> Record:
        """What a client is asked, less what it lacks."""
        values = aggregate.plan_values(state, client, training) | probing.to_values()
        values |= {"layout": layout.fingerprint, "average": shared.average}
        values |= {"recipe": history.recipe_of(probing, law.update)}
        root = root_key(training.seed, SHARED if scalars else client, values["round"])
        return Record({"seeds/root": root.array()}, values)

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round, the server's half."""
        plans = {i: plan(state, i) for i in cohort}
        outcome = (by_scalars if scalars else by_models)(state, plans, call, training.quorum, law)
        sums = (agreement_of(entry.reply) for entry in outcome.entries)
        return replace(outcome, row=outcome.row | {"zo_signal": zo_signal(sums, probing.estimator)})

    return Algorithm(init, play, partial(rebuild, law), {"local_steps": partial(local_steps, law)})


def by_scalars(state: Record, plans: Mapping[int, Record], call: Call, quorum: int, law: Law) -> Outcome:
    """Clients catch up and send scalars; the averages join the ledger and move the server's vector."""
    failures: dict[int, str] = {}
    entries: list[Entry] = []
    # 1.-2. the round's key, and what each client lacks, down;  5. E P scalars up
    answers = history.ask(call, "local_steps", state, plans, state.arrays["weights/vector"], failures)
    for _ in aggregate.verified(plans, Replies(answers, {}), learnt, entries, failures):
        pass
    if len(entries) < quorum:
        raise RoundVoid(failures)
    # A copy that differs is replaced within the round, so there is no replay that could fail.
    row = {"boundaries": [0] * len(plans), "replay_ok": None, **aggregate.loss_row(entries)}
    return Outcome(averaged(state, entries, law), tuple(entries), row, failures)


def by_models(state: Record, plans: Mapping[int, Record], call: Call, quorum: int, law: Law) -> Outcome:
    """The vector goes down; each client's scalars are replayed from it, and the models averaged."""
    delta = partial(replayed, law, state.arrays["weights/vector"])
    outcome = aggregate.mean_of_deltas(state, plans, call, delta, quorum)
    replay_ok = not any(aggregate.MISMATCH in why for why in outcome.failures.values())
    return replace(outcome, row=outcome.row | {"replay_ok": replay_ok})


def averaged(state: Record, entries: Sequence[Entry], law: Law) -> Record:
    """6. The state after the step by the averaged scalars; those who sent them stay where they were."""
    plan, vector = entries[0].plan, state.arrays["weights/vector"].copy()
    mean = history.mean_scalars(entries, (plan.values["steps"], plan.values["probes"]))
    root, recipe = plan.array("seeds/root", "uint64", (2,)), plan.values["recipe"]
    arrays, values = history.advance(state, vector, root, mean, recipe, law.update_of)
    cursors, t = state.arrays["cursors/next"].copy(), state.values["round"]
    for client, asked, _ in entries:
        cursors[client] = asked.values["position"] + asked.values["steps"]
    arrays |= {"weights/vector": vector, "cursors/next": cursors}
    moved = Record({**state.arrays, **arrays}, {**state.values, **values, "round": t + 1})
    return history.marked(moved, {entry.client: t for entry in entries})


def learnt(entry: Entry) -> Floats:
    """A client's scalars float32 [E, q], checked."""
    plan = entry.plan.values
    agreement_of(entry.reply)
    return entry.reply.array("scalars/s", "float32", (plan["steps"], plan["probes"]))


def replayed(law: Law, vector: Vector, entry: Entry) -> Vector:
    """A client's delta float32 [d]: its scalars replayed from ``vector``, its digest checked."""
    end, recipe = vector.copy(), entry.plan.values["recipe"]
    fresh, root = law.update_of(recipe["optimizer"]).init(len(end)), entry.plan.arrays["seeds/root"]
    scalars = learnt(entry)
    history.replay_rounds_(end, fresh, 0, root[None], scalars[None], [(0, recipe)], law.update_of)
    if not np.array_equal(digest(end), entry.reply.array("digests/bottom", "uint8", (32,))):
        raise RecordError(aggregate.MISMATCH)
    if not np.isfinite(end).all():
        raise RecordError("its model is not finite")
    return end - vector


def rebuild(law: Law, state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entries."""
    if entries[0].plan.values["average"] == "scalars":
        return averaged(state, entries, law)
    vector = state.arrays["weights/vector"]
    return aggregate.advance(state, ((e, replayed(law, vector, e)) for e in entries))


def local_steps(law: Law, task: Task, request: Record, memory: Memory) -> Record:
    """The client's half: catch up, then E probed steps from there -> scalars float32 [E, q].

    The moved copy is dropped: after the reply the client holds what it held before its steps.
    """
    plan, layout = request.values, task.model.layout
    aggregate.check_layout(task, request)
    root = Key.from_array(request.array("seeds/root", "uint64", (2,)))
    update = law.update_of(plan["recipe"]["optimizer"])
    if plan["average"] == "models":
        x = request.array("weights/vector", "float32", (layout.size,)).copy()
        reply = loss_steps_(task, plan, root, x, update.init(len(x)), 1, update, law.along)
        return Record({**reply.arrays, "digests/bottom": digest(x)}, reply.values)
    kept = history.catch_up(memory, request, layout.size, law.update_of)  # 3. pull
    if kept is None:
        return history.behind(request)
    memory.kept, first = kept, plan["round"] * plan["steps"] + 1
    x, state = (kept.arrays[name].copy() for name in ("weights/bottom", "weights/moments"))
    return loss_steps_(task, plan, root, x, list(state), first, update, law.along)  # 4.
