# SPDX-License-Identifier: Apache-2.0
"""What split methods share whose server takes losses at both sides of a point (HOSL, ZO-SFL, MU-SplitFed).

A client's upload of a step is one message: activations stacked [n, batch, ...], the clean one first where the
method has one, then q at ``bottom + radius u_j``, then q at ``bottom - radius u_j``. What the client learns
from them comes with the question for the next step, so that a step is one trip.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.core.directions import Directions, blocks
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, replay_
from hofl.errors import RecordError
from hofl.protocol import aggregate, learner
from hofl.protocol.base import LARGEST, Memory, Vector, usable
from hofl.protocol.probing import step_directions
from hofl.protocol.split import identity, opened, sent_values, smashed
from hofl.tasks.base import Task

Floats = NDArray[np.float32]


def shifted(weights: Vector, directions: Directions, probe: int, radius: float) -> Vector:
    """``weights + radius u_probe``, a new float32 [n]."""
    moved: Vector = np.empty_like(weights)
    for start, stop in blocks(len(weights)):
        u = directions.block(probe, start, stop)
        u *= np.float32(radius)
        np.add(u, weights[start:stop], out=moved[start:stop])
    return moved


def measured(probes: int, loss: Callable[[int, int], float]) -> Floats:
    """The losses at both sides, as they travel: float32 [2, q].

    Args:
        probes: q.
        loss: (side, probe) -> the loss there; side 0 is ahead, 1 behind.
    """
    both = [[loss(side, j) for j in range(probes)] for side in (0, 1)]
    return np.array(both, dtype=np.float32).reshape(2, probes)


def slopes(losses: Floats, radius: float) -> Floats:
    """``s_j = (l+_j - l-_j) / (2 radius)``: losses float32 [2, q] -> float32 [q], rounded once.

    Raises:
        RecordError: a scalar is not finite, or beyond any use.
    """
    ahead, behind = losses.astype(np.float64)
    with np.errstate(all="ignore"):
        s: Floats = ((ahead - behind) / (2 * radius)).astype(np.float32)
    if not usable(s):
        raise RecordError(f"non-finite scalar, or one beyond {LARGEST:g}")
    return s


def part(sent: Record, place: int, count: int, most: int) -> Record:
    """One of the ``count`` stacked activations of an upload, as a message of its own.

    Raises:
        RecordError: they are not so many, or of more than ``most`` examples.
    """
    z = sent.arrays.get("activations/z")
    if z is None or z.ndim < 2 or len(z) != count or z.shape[1] > most:
        shape = [] if z is None else list(z.shape)
        raise RecordError(f"activations {shape}, expected {count} of at most {most} examples")
    return Record({**sent.arrays, "activations/z": z[place]}, sent.values)


def answer(sent: Record, arrays: dict[str, NDArray[Any]]) -> Record:
    """The server's message after an upload: what was learnt of it, and the question for the next step."""
    step = identity(sent.values, sent.values["step"] + 1)
    return Record(arrays, {**step, "after": sent.values["batch_id"]})


def answered(memory: Memory, request: Record) -> dict[str, Any]:
    """What this client keeps of the step that :func:`answer` is about.

    Raises:
        ClientError: it is of another step than the one that waits here, or comes a second time.
    """
    of = identity(request.values, request.values["step"] - 1)
    return opened(memory, Record({}, {**of, "batch_id": request.values.get("after")}))


def started(task: Task, request: Record) -> dict[str, Any]:
    """What a client holds that loads the bottom in a request, with a new optimizer.

    Raises:
        ClientError: its model has another layout.
    """
    aggregate.check_layout(task, request)
    d_c = task.model.layout.bottom_size(request.values["boundary"])
    bottom = request.array("weights/bottom", "float32", (d_c,))
    moments = learner.moments_of(Optimizer.from_values(request.values["bottom_optimizer"]), d_c)
    return {"plan": request, "bottom": bottom, "moments": moments, "first": 1}


def upload(task: Task, memory: Memory, held: dict[str, Any], step: int) -> Record:
    """The client's forward passes of one step: z at the bottom (``clean``) and at both sides of it, stacked.

    Args:
        task: its model's bottom is written, and left at ``held["bottom"]``.
        memory: opened for the answer.
        held: the ``plan``, the moving ``bottom`` float32 [d_c], its ``moments`` [k, d_c], and the number of
            the ``first`` step for these.
        step: the local step, from 0.
    """
    plan, bottom, model = held["plan"].values, held["bottom"], task.model
    batch = task.batch(plan["client"], plan["position"] + step, plan["batch"])
    directions = directions_of(held["plan"], step, len(bottom))
    model.write(bottom)
    passes = [model.bottom(batch.inputs, plan["boundary"])] if plan["clean"] else []
    try:
        for side in (1.0, -1.0):
            for j in range(directions.count):
                model.write(shifted(bottom, directions, j, side * plan["radius"]))
                passes.append(model.bottom(batch.inputs, plan["boundary"]))
    finally:
        model.write(bottom)
    z = torch.stack(passes)
    values = sent_values(plan, step, batch, z)
    memory.open = {**held, **values}
    return Record(smashed(task, batch, z, plan["wire"]), values)


def directions_of(plan: Record, step: int, size: int) -> Directions:
    """The bottom's directions of one step, from the key in the plan; none where it has no probes."""
    q = plan.values["probes"]
    root = Key.from_array(plan.array("seeds/root", "uint64", (2,))) if q else Key(0, 0)
    return step_directions(plan.values, root, step, size)


def moved(held: dict[str, Any], s: Floats) -> dict[str, Any]:
    """The client's step, ``bottom <- bottom - eta (1/q) sum_j s_j u_j``, on copies; s is float32 [q]."""
    plan: Record = held["plan"]
    bottom, moments = held["bottom"].copy(), np.array(held["moments"], dtype=np.float32)
    steps = [Step(directions_of(plan, held["step"], len(bottom)), s)] if len(s) else []
    optimizer = Optimizer.from_values(plan.values["bottom_optimizer"])
    replay_(bottom, steps, optimizer, list(moments), first=held["first"] + held["step"])
    return {**held, "bottom": bottom, "moments": moments}


def finished(memory: Memory, held: dict[str, Any], request: Record) -> Record:
    """A participation's last reply, the bottom's delta float32 [d_c]; nothing is kept."""
    memory.open = {}
    delta = held["bottom"] - held["plan"].arrays["weights/bottom"]
    return Record({"weights/delta": delta}, identity(request.values, request.values["step"]))
