# SPDX-License-Identifier: Apache-2.0
"""MeZO: memory-efficient zeroth-order fine-tuning in one place; a whole run is keys and scalars.

Malladi, Gao, Nichani, Damian, Lee, Chen, Arora, "Fine-Tuning Language Models with Just Forward Passes",
NeurIPS 2023, Algorithms 1 and 2 (n-SPSA). One trainer holds all the data. A round is E of its steps; what
crosses is the round's key one way and the steps' scalars the other, and the server's replay of them, proved
by a digest, is the trajectory. Weights are sent once, and again only to a trainer that lost its memory.

Symbols: theta the trainables, eps ``radius``, n ``probes`` q, z ``directions``, projected_grad ``scalars``,
eta the learning rate. This is DeComFL with one client.

Deviations: one key a round in place of a seed a step; scalars are rounded to float32 before they are used;
theta is restored from a copy, not by adding the perturbation back, so rounding cannot drift; one forward
pass more a step, for the loss in the row; weight decay, if any, is on all trainables, biases and norms
included; any normative optimizer, whose state persists over rounds; the estimator is a choice (``central`` is
the paper's).
"""

from collections.abc import Sequence

import numpy as np

from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.core.replay import digest
from hofl.errors import RecordError
from hofl.protocol import aggregate, history
from hofl.protocol.base import Algorithm, Call, Entry, Memory, Outcome, RoundVoid, Vector, recorded
from hofl.protocol.probing import SHARED, Probing, agreement_of, loss_steps_, root_key, zo_signal
from hofl.tasks.base import Task


def mezo(layout: Layout, training: aggregate.Training, probing: Probing) -> Algorithm:
    """MeZO over all d trainables of ``layout``, for a task with one client."""

    def init(vector: Vector) -> Record:
        """Round 0: the trainer holds nothing; zero optimizer state."""
        start, clients = aggregate.initial_state(training, vector), len(training.sizes)
        kept = history.begin(clients, 1, len(vector), training.steps, probing.probes, probing.optimizer)
        return Record({**start.arrays, **kept}, start.values)

    def plan(state: Record, client: int) -> Record:
        """What the trainer is asked: settings and the round's key."""
        values = aggregate.plan_values(state, client, training) | probing.to_values()
        values |= {"layout": layout.fingerprint, "recipe": history.recipe_of(probing, probing.optimizer)}
        return Record({"seeds/root": root_key(training.seed, SHARED, values["round"]).array()}, values)

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """One round: E steps of the trainer, and their replay."""
        failures: dict[int, str] = {}
        plans = {i: plan(state, i) for i in cohort}
        replies = history.ask(call, "local_steps", state, plans, state.arrays["weights/vector"], failures)
        for i, reply in replies.items():
            entry = Entry(i, plans[i], recorded(reply))
            try:
                moved, agreed = proved(state, entry), agreement_of(reply)
            except RecordError as error:
                failures[i] = f"refused: {error}"
                continue
            row = {"boundaries": [0], "replay_ok": True, "zo_signal": zo_signal([agreed], probing.estimator)}
            return Outcome(moved, (entry,), row | aggregate.loss_row([entry]), failures)
        raise RoundVoid(failures)

    return Algorithm(init, play, rebuild, {"local_steps": local_steps})


def proved(state: Record, entry: Entry) -> Record:
    """The state after a reply's steps; raises RecordError where the trainer is elsewhere."""
    aggregate.check_identity(entry.plan, entry.reply)
    moved = rebuild(state, [entry])
    here = digest(moved.arrays["weights/vector"])
    if not np.array_equal(here, entry.reply.array("digests/bottom", "uint8", (32,))):
        raise RecordError(aggregate.MISMATCH)
    return moved


def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
    """The round again from its entry: ``theta <- theta - eta (1/n) sum_j s_j z_j``, E times."""
    (entry,), plan = entries, entries[0].plan.values
    scalars = entry.reply.array("scalars/s", "float32", (plan["steps"], plan["probes"]))
    root, vector = entry.plan.array("seeds/root", "uint64", (2,)), state.arrays["weights/vector"].copy()
    arrays, values = history.advance(state, vector, root, scalars, plan["recipe"])
    cursors = state.arrays["cursors/next"].copy()
    cursors[entry.client] = plan["position"] + plan["steps"]
    arrays |= {"weights/vector": vector, "cursors/next": cursors}
    now = plan["round"] + 1
    moved = Record({**state.arrays, **arrays}, {**state.values, **values, "round": now})
    return history.marked(moved, {entry.client: now})


def local_steps(task: Task, request: Record, memory: Memory) -> Record:
    """E times Algorithm 1, the trainer's half -> scalars float32 [E, n] and a digest of theta after them.

    For each z_j of a step: the loss at theta + eps z_j and at theta - eps z_j,
    ``s_j = (loss+ - loss-) / (2 eps)``; then theta moves by the very lines that the server replays.
    """
    plan, layout = request.values, task.model.layout
    aggregate.check_layout(task, request)
    kept = history.catch_up(memory, request, layout.size)
    if kept is None:
        return history.behind(request)
    theta, moments = kept.arrays["weights/bottom"].copy(), kept.arrays["weights/moments"].copy()
    root = Key.from_array(request.array("seeds/root", "uint64", (2,)))
    first = plan["round"] * plan["steps"] + 1
    learnt = loss_steps_(task, plan, root, theta, list(moments), first)
    memory.kept = Record({"weights/bottom": theta, "weights/moments": moments}, {"round": plan["round"] + 1})
    return Record({**learnt.arrays, "digests/bottom": digest(theta)}, learnt.values)
