# SPDX-License-Identifier: Apache-2.0
"""Replicas of the top on the server, one a client, moved by probes of the loss (ZO-SFL, MU-SplitFed).

Every step of either half is a key and q scalars, so that is all the ledger has; the tops' are in the
server's entry. A client uploads its bottom, as the papers have it, and it is compared with the replay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, replay_
from hofl.errors import RecordError
from hofl.protocol import aggregate
from hofl.protocol.base import SERVER, Entry, Vector
from hofl.protocol.probing import root_key, step_directions
from hofl.protocol.setup import Setup
from hofl.protocol.split import Top, identity
from hofl.protocol.two_sided import Floats, measured, part, shifted, slopes

BOTTOM, TOP, DELAY = range(3)
"""Children of a participation's root key: directions of each half, and the client's simulated delay."""


def half_key(seed: int, client: int, round: int, half: int) -> Key:
    """The key of one half's directions: a client that has the bottom's cannot derive the top's."""
    return root_key(seed, client, round).fold(half)


@dataclass
class Replica:
    """One client's copy of the top.

    Attributes:
        half: runs it.
        plan: of the client.
        key: of the replica's directions.
        optimizer: its state is new in each round.
        weights: float32 [d_s], copied.
        moments: the optimizer's state.
        scalars: float32 [q] of each step so far.
        loss_sum, examples: over all uploads.
    """

    half: Top
    plan: Record
    key: Key
    optimizer: Optimizer
    weights: Vector
    moments: Sequence[Floats] = ()
    scalars: list[Floats] = field(default_factory=list)
    loss_sum: float = 0.0
    examples: int = 0

    def __post_init__(self) -> None:
        self.weights = self.weights.copy()
        self.moments = self.optimizer.init(len(self.weights))

    def loss(self, weights: Vector, sent: Record, place: int) -> float:
        """Mean loss of one of the stacked activations.

        Raises:
            RecordError: as :meth:`hofl.protocol.split.Top.loss`, or they are not as many as asked for.
        """
        values = self.plan.values
        count = 2 * values["probes"] + values["clean"]
        return self.half.loss(weights, part(sent, place, count, values["batch"]))

    def step(self, sent: Record, place: Callable[[int, int], int]) -> float:
        """One step ``w <- w - eta (1/q) sum_j s_j u_j`` -> the mean loss over probes and sides.

        Args:
            sent: an upload.
            place: (side, probe) -> which of its activations is fed to the top at that side.

        Raises:
            RecordError: what was sent does not fit, or a loss or scalar is not finite; nothing has moved.
        """
        plan, done = self.plan.values, len(self.scalars)
        directions = step_directions(plan, self.key, done, len(self.weights))
        radii = (plan["radius"], -plan["radius"])

        def _at(side: int, j: int) -> float:
            return self.loss(shifted(self.weights, directions, j, radii[side]), sent, place(side, j))

        losses = measured(plan["probes"], _at)
        self.scalars.append(slopes(losses, plan["radius"]))
        step = Step(directions, self.scalars[-1])
        replay_(self.weights, [step], self.optimizer, self.moments, first=done + 1)
        return float(losses.mean(dtype=np.float64))

    def count(self, sent: Record, loss: float) -> None:
        """Note an upload's examples and their mean loss."""
        examples = len(sent.arrays["labels/targets"])
        self.loss_sum, self.examples = self.loss_sum + loss * examples, self.examples + examples

    def entry(self, scalars: Sequence[Floats]) -> Entry:
        """The client's, for the ledger: the scalars of its bottom, float32 [steps, q]; no activation."""
        counts = {"loss_sum": self.loss_sum, "examples": self.examples}
        reply = Record({"scalars/s": np.stack(scalars)}, {**identity(self.plan.values), **counts})
        return Entry(self.plan.values["client"], self.plan, reply)


def replicas_of(
    setup: Setup, plans: Mapping[int, Record], optimizer: Optimizer, top: Vector
) -> dict[int, Replica]:
    """A replica of ``top`` float32 [d_s] for each client."""
    return {
        i: Replica(setup.top, p, half_key(setup.training.seed, i, p.values["round"], TOP), optimizer, top)
        for i, p in plans.items()
    }


def server_entry(replicas: Mapping[int, Replica], optimizer: Optimizer, **values: Any) -> Entry:
    """The server's part of a round: the key of each replica, and the scalars of its steps, by client."""
    keys = {f"seeds/top.{i}": replica.key.array() for i, replica in replicas.items()}
    steps = {f"scalars/top.{i}": np.stack(replica.scalars) for i, replica in replicas.items()}
    asked = {"client": SERVER, "optimizer": optimizer.to_values(), **values}
    return Entry(SERVER, Record(keys, asked), Record(steps, {"client": SERVER}))


def delta(vector: Vector, d_c: int, server: Entry, client: Entry) -> Vector:
    """What a round did to both halves of one client, by replay: float32 [d]; RecordError if not finite."""
    plan, name = client.plan.values, f"top.{client.client}"
    halves = (
        (vector[:d_c], client.plan, "seeds/root", client.reply, "scalars/s", plan["bottom_optimizer"]),
        (
            vector[d_c:],
            server.plan,
            f"seeds/{name}",
            server.reply,
            f"scalars/{name}",
            server.plan.values["optimizer"],
        ),
    )
    deltas = []
    for start, asked, key, reply, scalars, optimizer in halves:
        root = Key.from_array(asked.array(key, "uint64", (2,)))
        s = reply.array(scalars, "float32", (len(reply.arrays[scalars]), plan["probes"]))
        steps = [Step(step_directions(plan, root, e, len(start)), row) for e, row in enumerate(s)]
        after = start.copy()
        with np.errstate(all="ignore"):
            replay_(after, steps, Optimizer.from_values(optimizer))
            deltas.append(after - start)
    if not all(np.isfinite(each).all() for each in deltas):
        raise RecordError("a half of the model is not finite after its steps")
    return np.concatenate(deltas)


def agreeing(
    candidates: Iterable[Entry],
    change: Callable[[Entry], Vector],
    last: Mapping[int, Record],
    d_c: int,
    accepted: list[Entry],
    failures: dict[int, str],
) -> Iterator[tuple[Entry, Vector]]:
    """The entries with their deltas float32 [d], where the uploaded bottom is the replay of its scalars.

    Args:
        candidates, change: in client order, and :func:`delta` of one.
        last: each client's last reply, with its ``weights/delta`` float32 [d_c].
        accepted, failures: filled with the entries that count, and why the others do not.
    """
    for entry in candidates:
        try:
            both = change(entry)
            uploaded = last[entry.client].array("weights/delta", "float32", (d_c,))
            if not np.array_equal(uploaded, both[:d_c]):
                raise RecordError(aggregate.MISMATCH)
        except RecordError as error:
            failures[entry.client] = f"refused: {error}"
            continue
        accepted.append(entry)
        yield entry, both
