# SPDX-License-Identifier: Apache-2.0
"""What federated methods share: settings, the check of a reply, and the mean of the clients' deltas."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.protocol.base import (
    LARGEST,
    SERVER,
    Call,
    Entry,
    Outcome,
    Replies,
    RoundVoid,
    Vector,
    recorded,
    shown,
    usable,
)
from hofl.tasks.base import Task

MISMATCH = "its bottom differs from the replay of its scalars"
"""Why a client whose digest disagrees is refused."""


@dataclass(frozen=True)
class Training:
    """Settings every federated method has.

    Attributes:
        seed: the run's.
        steps: E, local steps a participation; the most where ``epochs`` is given.
        batch: examples a local step.
        optimizer: of backpropagated coordinates; its state is new in each participation.
        sizes: examples each client registered, one number a client; a reply cannot change them.
        quorum: replies below which a round is void.
        run: the run's id, in every message.
        weighting: of the mean over clients: ``equal`` (the papers') or by ``examples`` in the shard.
        epochs: passes over a client's own examples, so that clients differ in their steps; None for the same.
    """

    seed: int
    steps: int
    batch: int
    optimizer: Optimizer
    sizes: Sequence[int]
    quorum: int = 1
    weighting: Literal["equal", "examples"] = "equal"
    run: str = ""
    epochs: float | None = None

    def steps_of(self, client: int) -> int:
        """A client's local steps in a participation: ceil(epochs n / batch), at least 1 and at most E."""
        return steps_of_epochs(self.epochs, self.sizes[client], self.batch, self.steps)


def steps_of_epochs(epochs: float | None, examples: int, batch: int, most: int) -> int:
    """Local steps of a client with ``examples``: ceil(epochs n / batch), 1 to ``most``; without epochs that.

    >>> steps_of_epochs(0.5, 10, 4, most=7), steps_of_epochs(None, 10, 4, most=7)
    (2, 7)
    """
    if epochs is None:
        return most
    passes = min(float(most), epochs * examples / batch)  # before it is whole: the product may be infinite
    return max(1, math.ceil(round(passes, 9)))  # 0.1 x 120 / 4 is 3, not 3 + 4e-16


def initial_state(training: Training, vector: Vector) -> Record:
    """Round 0: the vector float32 [d], and each client's next minibatch, int64 [clients]."""
    cursors = np.zeros(len(training.sizes), dtype=np.int64)
    return Record({"weights/vector": vector.copy(), "cursors/next": cursors}, {"round": 0})


def plan_values(state: Record, client: int, training: Training) -> dict[str, Any]:
    """What every request says: who, when, how long, from which minibatch on, with which optimizer."""
    return {
        "run": training.run,
        "round": state.values["round"],
        "client": client,
        "position": int(state.arrays["cursors/next"][client]),
        "steps": training.steps_of(client),
        "batch": training.batch,
        "optimizer": training.optimizer.to_values(),
        "weight": float(training.sizes[client]) if training.weighting == "examples" else 1.0,
    }


def request(state: Record, plan: Record) -> Record:
    """What travels: the plan and the weights."""
    return Record({"weights/vector": state.arrays["weights/vector"], **plan.arrays}, plan.values)


def check_layout(task: Task, request: Record) -> None:
    """The client's check that its trainables are the server's, number by number.

    Raises:
        ClientError: the layouts differ, or the request has none.
    """
    if request.values.get("layout") != task.model.layout.fingerprint:
        raise ClientError("this client's model has another layout than the server's")


def check_identity(plan: Record, reply: Record) -> None:
    """Refuse an answer to another question.

    Raises:
        RecordError: the reply is for another run, round or client, or its counts make no sense.
    """
    for name in ("run", "round", "client"):
        if reply.values.get(name) != plan.values[name]:
            found = shown(reply.values.get(name))
            raise RecordError(f"reply is for {name} {found}, expected {plan.values[name]}")
    count, most = reply.values.get("examples"), plan.values["steps"] * plan.values["batch"]
    if type(count) is not int or not 0 < count <= most:
        raise RecordError(f"reply counts {shown(count)} examples, expected 1 to {most}")
    loss = reply.values.get("loss_sum")
    if type(loss) is not float or not np.isfinite(loss):
        raise RecordError("reply has a non-finite loss")


def require_usable(values: Vector) -> Vector:
    """The scalars or the delta that a client sent, as they are.

    Raises:
        RecordError: one is beyond any use.
    """
    if not usable(values):
        raise RecordError(f"its scalars or its update are not finite, or beyond {LARGEST:g}")
    return values


def advance(state: Record, parts: Iterable[tuple[Entry, Vector]]) -> Record:
    """The next state: ``w + sum_i a_i delta_i / sum_i a_i``, with the plans' weights a_i.

    Deltas are added in float64 in client order, divided and rounded once, so neither the order of
    arrival nor the number of clients in memory matters (HO-FL Alg. 1, line 8).

    Args:
        state: the current one.
        parts: accepted entries with their deltas float32 [d], in client order; consumed one by one.
    """
    vector = state.arrays["weights/vector"]
    total, weight = np.zeros(len(vector)), 0.0
    cursors = state.arrays["cursors/next"].copy()
    for entry, delta in parts:
        plan = entry.plan.values
        total += plan["weight"] * delta.astype(np.float64)
        weight += plan["weight"]
        cursors[entry.client] = plan["position"] + plan["steps"]
    with np.errstate(over="ignore"):  # the loop refuses a state that is not finite
        moved = (vector + total / weight).astype(np.float32) if weight else vector.copy()
    values = {**state.values, "round": state.values["round"] + 1}
    return Record({**state.arrays, "weights/vector": moved, "cursors/next": cursors}, values)


def mean_of_deltas(
    state: Record, plans: Mapping[int, Record], call: Call, delta: Callable[[Entry], Vector], quorum: int
) -> Outcome:
    """A round of the methods whose clients return deltas: ``w_t`` to each, its ``local_steps``, the mean.

    Args:
        state: the current one; its vector goes out with each plan.
        plans: what each of the cohort is asked.
        call: the runtime's.
        delta: a reply's delta float32 [d]; raises RecordError for one that must not count.
        quorum: replies below which the round is void.

    Raises:
        RoundVoid: fewer clients than the quorum count.
    """
    replies = call("local_steps", {i: request(state, plan) for i, plan in plans.items()}, None)
    entries: list[Entry] = []
    failures = dict(replies.failures)
    moved = advance(state, verified(plans, replies, delta, entries, failures))
    if len(entries) < quorum:
        raise RoundVoid(failures)
    row = {"boundaries": [0] * len(plans), "replay_ok": None, "zo_signal": None, **loss_row(entries)}
    return Outcome(moved, tuple(entries), row, failures)


def mean(parts: Iterable[tuple[float, Vector]]) -> Vector:
    """The weighted mean of float32 vectors of one length, added in float64 in order, rounded once."""
    total, weight = np.zeros(1), 0.0
    for share, vector in parts:
        total = total + share * vector.astype(np.float64)
        weight += share
    averaged: Vector = (total / weight).astype(np.float32)
    return averaged


def loss_row(entries: Sequence[Entry]) -> dict[str, Any]:
    """Columns every row has: the mean training loss over the clients' examples, and their number."""
    entries = [e for e in entries if e.client != SERVER]
    examples = sum(e.reply.values["examples"] for e in entries)
    loss = sum(e.reply.values["loss_sum"] for e in entries)
    return {"loss": loss / examples, "examples": examples}


def verified(
    plans: Mapping[int, Record],
    replies: Replies,
    delta: Callable[[Entry], Vector],
    entries: list[Entry],
    failures: dict[int, str],
) -> Iterator[tuple[Entry, Vector]]:
    """Replies with their deltas, one at a time and by client number: arrival order is forgotten here.

    Args:
        plans: what each client was asked.
        replies: what came back.
        delta: a reply's delta float32 [d]; raises RecordError for one that must not count.
        entries: filled with the accepted replies.
        failures: filled with why the others were refused.
    """
    for client in sorted(plans):
        if client not in replies.records:
            continue
        entry = Entry(client, plans[client], recorded(replies.records[client]))
        try:
            check_identity(entry.plan, entry.reply)
            change = require_usable(delta(entry))
        except RecordError as error:
            failures[client] = f"refused: {error}"
            continue
        entries.append(entry)
        yield entry, change
