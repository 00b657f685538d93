# SPDX-License-Identifier: Apache-2.0
"""The server's half where it learns from one client's upload after another (SplitFed, SplitLoRA, HERON-SFL).

State of a top that outlives a round: ``weights/top_moments`` float32 [k, d_s] and the value ``top_steps``,
the steps it has taken in the whole run (bias correction counts them). A round's entries begin with the
server's own, which has the top, its moments and its steps after the round: ``rebuild`` needs neither model
nor uploads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol import aggregate
from hofl.protocol.aggregate import Training
from hofl.protocol.base import LARGEST, SERVER, Entry, Vector, recorded, usable
from hofl.protocol.probing import agreement_of
from hofl.protocol.split import Top

Floats = NDArray[np.float32]


@dataclass
class Learner:
    """A copy of the top with one optimizer, whose state lives as long as it does.

    Attributes:
        half: runs it.
        optimizer: what moves it.
        weights: float32 [d_s].
        moments: float32 [k, d_s].
        steps: taken so far.
    """

    half: Top
    optimizer: Optimizer
    weights: Vector
    moments: Floats
    steps: int = 0

    def learn(self, sent: Record) -> tuple[float, NDArray[Any]]:
        """One step on one upload -> its mean loss and feedback, both from before the step.

        Args:
            sent: a client's activations and labels.

        Raises:
            RecordError: the upload does not fit, or the step is not finite; then nothing has moved.
        """
        loss, gradient, feedback = self.half.first_order(self.weights, sent)
        weights, moments = self.weights.copy(), self.moments.copy()
        self.optimizer.update_(weights, gradient, list(moments), self.steps + 1)
        if not usable(weights):
            raise RecordError(f"the server's step on it is not finite, or beyond {LARGEST:g}")
        self.weights, self.moments, self.steps = weights, moments, self.steps + 1
        return loss, feedback


def moments_of(optimizer: Optimizer, size: int) -> Floats:
    """An optimizer's state before its first step: float32 [k, size]."""
    moments = optimizer.init(size)
    return np.array(moments, dtype=np.float32).reshape(len(moments), size)


def begin(training: Training, layout: Layout, boundaries: Sequence[int], vector: Vector) -> Record:
    """Round 0 of a method with one top: the vector float32 [d], the cursors, and the top's zero moments."""
    start = aggregate.initial_state(training, vector)
    moments = moments_of(training.optimizer, len(vector) - layout.bottom_size(boundaries[0]))
    return Record({**start.arrays, "weights/top_moments": moments}, {**start.values, "top_steps": 0})


def restored(state: Record, half: Top, optimizer: Optimizer, bottom: int) -> Learner:
    """The top as the round before left it, with its moments."""
    weights, moments = state.arrays["weights/vector"][bottom:], state.arrays["weights/top_moments"]
    return Learner(half, optimizer, weights, moments, state.values["top_steps"])


def seeded_order(seed: int, round: int, step: int, clients: Iterable[int]) -> list[int]:
    """A random order, new in each step; who else is there does not change which of two clients is first."""
    places = {i: int(Key.of(seed, "cohort_order", round, step, i).words(0, 1)[0]) for i in clients}
    return sorted(places, key=lambda i: (places[i], i))


def plan(state: Record, client: int, training: Training, layout: Layout, boundary: int, wire: str) -> Record:
    """What a client is asked in a round: everything but the weights."""
    values = aggregate.plan_values(state, client, training)
    values |= {"boundary": boundary, "layout": layout.fingerprint, "wire": wire, "step": 0}
    return Record({}, values)


def collected(
    plans: Mapping[int, Record],
    replies: Mapping[int, Record],
    losses: Mapping[int, Sequence[tuple[float, int]]],
    size: int,
    failures: dict[int, str],
) -> list[Entry]:
    """The clients' entries, in client order: their deltas, checked, and what the server counted.

    Args:
        plans: what each was asked.
        replies: the last of each that got there.
        losses: (mean loss, examples) of each of its uploads; the batches between them are of that size too.
        size: numbers of a delta.
        failures: filled with why others are refused.
    """
    entries = []
    for i, reply in sorted(replies.items()):
        try:
            delta = aggregate.require_usable(reply.array("weights/delta", "float32", (size,)))
            arrays: dict[str, NDArray[Any]] = {"weights/delta": delta}
            if plans[i].values.get("probes"):
                arrays["metrics/agreement"] = agreement_of(reply)
        except RecordError as error:
            failures[i] = f"refused: {error}"
            continue
        uploaded = sum(count for _, count in losses[i])
        loss = sum(loss * count for loss, count in losses[i]) / uploaded
        examples = uploaded // len(losses[i]) * plans[i].values["steps"]
        values = {**recorded(reply).values, "loss_sum": loss * examples, "examples": examples}
        entries.append(Entry(i, plans[i], Record(arrays, values)))
    return entries


def server_entry(learner: Learner) -> Entry:
    """The server's part of a round: its top, moments and steps after it."""
    arrays = {"weights/top": learner.weights, "weights/top_moments": learner.moments}
    asked = Record({}, {"client": SERVER, "optimizer": learner.optimizer.to_values()})
    return Entry(SERVER, asked, Record(arrays, {"client": SERVER, "top_steps": learner.steps}))


def averaged(start: Vector, entries: Iterable[Entry]) -> Vector:
    """``start + sum_i a_i delta_i / sum_i a_i`` with the plans' weights, in float64, rounded once."""
    total, weight = np.zeros(len(start)), 0.0
    for entry in entries:
        delta = entry.reply.array("weights/delta", "float32", start.shape)
        total += entry.plan.values["weight"] * delta.astype(np.float64)
        weight += entry.plan.values["weight"]
    with np.errstate(over="ignore"):  # the loop refuses a state that is not finite
        moved: Vector = (start + total / weight).astype(np.float32)
    return moved


def advance(state: Record, entries: Sequence[Entry], bottom: Vector) -> Record:
    """The next state of a method with one top: the mean ``bottom`` float32 [d_c], and the server's part."""
    (server,) = (e.reply for e in entries if e.client == SERVER)
    top = server.array("weights/top", "float32", (len(state.arrays["weights/vector"]) - len(bottom),))
    moments = server.array("weights/top_moments", "float32", state.arrays["weights/top_moments"].shape)
    cursors = state.arrays["cursors/next"].copy()
    for e in entries:
        if e.client != SERVER:
            cursors[e.client] = e.plan.values["position"] + e.plan.values["steps"]
    arrays = {"weights/vector": np.concatenate([bottom, top]), "cursors/next": cursors}
    values = {"round": state.values["round"] + 1, "top_steps": server.values["top_steps"]}
    return Record({**state.arrays, **arrays, "weights/top_moments": moments}, {**state.values, **values})


def row(training_loss: dict[str, Any], boundary: int, cohort: Sequence[int]) -> dict[str, Any]:
    """A round's columns where nothing is replayed and nothing probed."""
    return {"boundaries": [boundary] * len(cohort), "replay_ok": None, "zo_signal": None, **training_loss}
