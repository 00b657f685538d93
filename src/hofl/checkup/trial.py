# SPDX-License-Identifier: Apache-2.0
"""Single local steps of a run's own, in process: how long they take, what they estimate, what is true.

A trial is a round of the method with one client and one step. Where the estimate is asked for, the
optimizer of the probed part is SGD at rate 1024 without decay, so what the round moves is minus 1024 times
``(1/q) sum_j s_j u_j`` as the run would have formed it: its keys, its rounding, its messages.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.algorithms import ALGORITHMS
from hofl.build import build_algorithm, probes_of
from hofl.config import Config, OptimizerConfig
from hofl.core.estimators import Doubles
from hofl.core.record import Record
from hofl.models.auxiliary import features, head_loss
from hofl.protocol.base import RoundVoid, Vector
from hofl.protocol.probing import CHECKED
from hofl.runtime.local import local_call
from hofl.session import Session
from hofl.tasks.base import Batch

RATE = 1024.0
"""A power of two, so that it multiplies without rounding; large, so that the weights' own rounding is not."""
MOST_STEPS = 4
"""Local steps of a timed trial, where some steps differ from others (HERON-SFL's uploads)."""
HEAD = "weights/auxiliary"


@dataclass(frozen=True)
class Subject:
    """What trials are about.

    Attributes:
        session: of the run.
        boundary: of every client in a trial.
        clients: numbers of those that have it.
        start: all trainables at the starting point, float32 [d].
    """

    session: Session
    boundary: int
    clients: Sequence[int]
    start: Vector

    @property
    def probed(self) -> int:
        """Numbers of the model that the probes move: the bottom's, or all where both halves are probed."""
        method, layout = ALGORITHMS[self.session.config.algorithm], self.session.task.model.layout
        whole = not method.hybrid or method.name == "zo_sfl"
        return layout.size if whole else layout.bottom_size(self.boundary)

    @property
    def probes(self) -> int:
        """q; 0 where nothing is probed."""
        return probes_of(self.session.config) * (self.probed > 0)


@dataclass(frozen=True)
class Trial:
    """One that was run.

    Attributes:
        seconds: of one local step with its messages.
        agreements: sums of :func:`hofl.core.estimators.agreement`, one a client.
        estimate: float64 [numbers probed], where it was asked for.
        why: it came to nothing, else empty.
    """

    seconds: float
    agreements: tuple[Doubles, ...] = ()
    estimate: NDArray[np.float64] | None = None
    why: str = ""


def timed(subject: Subject, number: int) -> Trial:
    """Steps as most of a run are: with its optimizers, and without mirrored probes."""
    config = subject.session.config
    every = min(config.split.upload_every, MOST_STEPS)
    own = _changed(config, steps=every, every=every)
    return _played(subject, own, number, CHECKED, every)


def measured(subject: Subject, number: int) -> Trial:
    """The first step of a run, or of one with another seed, with mirrored probes and its estimate."""
    config = subject.session.config
    sgd = OptimizerConfig(name="sgd", lr=RATE, weight_decay=0.0, momentum=0.0)
    zo = config.zo.model_copy(update={"optimizer": sgd})
    update = {"zo": zo, "seed": config.seed + number // CHECKED}
    own = _changed(config, steps=1, every=1).model_copy(update=update)
    return _played(subject, own, number, number % CHECKED, 1, estimating=True)


def _changed(config: Config, steps: int, every: int) -> Config:
    """For one client and few steps."""
    update = {
        "quorum": 1,
        "local": config.local.model_copy(update={"steps": steps, "epochs": None}),
        "split": config.split.model_copy(update={"upload_every": every, "global_lr": 1.0}),
    }
    return config.model_copy(update=update)


def _played(
    subject: Subject, config: Config, number: int, round_number: int, steps: int, estimating: bool = False
) -> Trial:
    """One round of one client from the starting point; the model is put back."""
    session, start = subject.session, subject.start
    task, model = session.seen, session.task.model
    cuts = [subject.boundary] * len(task.shards)
    algorithm = build_algorithm(config, task, cuts)
    client = subject.clients[number % len(subject.clients)]
    try:
        state = _at(algorithm.init(start), round_number, number)
        held = cuts if ALGORITHMS[config.algorithm].split else None
        call = local_call(task, algorithm.actions, None, held)
        begun = time.perf_counter()
        outcome = algorithm.round(state, [client], call)
        seconds = (time.perf_counter() - begun) / steps
    except RoundVoid as void:
        return Trial(0.0, why=next(iter(void.failures.values()), "the client did not finish"))
    finally:
        model.write(start)
    if outcome.failures:
        return Trial(0.0, why=next(iter(outcome.failures.values())))
    replies = [entry.reply.arrays for entry in outcome.entries]
    sums = tuple(arrays["metrics/agreement"] for arrays in replies if "metrics/agreement" in arrays)
    moved = _moved(state, outcome.state, subject.probed) if estimating else None
    return Trial(seconds, sums, moved)


def _at(state: Record, round_number: int, position: int) -> Record:
    """A fresh state that says it is of another round, with the clients at another minibatch."""
    cursors = np.full_like(state.arrays["cursors/next"], position)
    return Record({**state.arrays, "cursors/next": cursors}, {**state.values, "round": round_number})


def _moved(before: Record, after: Record, count: int) -> NDArray[np.float64]:
    """The estimate, from what a rate of RATE made of it; with HERON-SFL's head after the bottom."""
    pairs = [(s.arrays["weights/vector"][:count], s.arrays.get(HEAD, np.empty(0))) for s in (before, after)]
    was, now = (np.concatenate(pair).astype(np.float64) for pair in pairs)
    estimate: NDArray[np.float64] = (was - now) / RATE
    return estimate


def exact(subject: Subject, number: int, checkpointing: bool) -> NDArray[np.float64]:
    """The gradient that trial ``number`` estimates, by backpropagation of the same batch from the start.

    Args:
        subject: what trials are about.
        number: of the trial.
        checkpointing: recompute block by block: less memory, the same gradient.

    Returns:
        float64 [numbers probed]; of HERON-SFL that of the auxiliary loss, with the head's after the bottom's.

    Raises:
        ModelError: no gradient reaches some trainable.
    """
    session, model = subject.session, subject.session.task.model
    client = subject.clients[number % len(subject.clients)]
    batch = session.seen.batch(client, number, session.config.local.batch)
    before, model.checkpointing = model.checkpointing, checkpointing
    try:
        if session.config.algorithm == "heron_sfl":
            return _auxiliary(subject, number, batch, checkpointing)
        _, gradient, _ = model.first_order(batch.inputs, 0, None, session.seen.loss_on(batch))
        return gradient[: subject.probed].astype(np.float64)
    finally:
        model.checkpointing = before


def _auxiliary(subject: Subject, number: int, batch: Batch, checkpointing: bool) -> NDArray[np.float64]:
    """Of the loss of HERON-SFL's new head, by the bottom and the head."""
    session, model = subject.session, subject.session.task.model
    seed = session.config.seed + number // CHECKED
    config = _changed(session.config, steps=1, every=1).model_copy(update={"seed": seed})
    algorithm = build_algorithm(config, session.seen, [subject.boundary] * len(session.seen.shards))
    numbers = algorithm.init(subject.start).arrays[HEAD]
    below = model.bottom_parameters(subject.boundary)
    with torch.enable_grad():
        head = torch.from_numpy(numbers).to(model.device, torch.float64).requires_grad_()
        z = model.stop(batch.inputs, subject.boundary, recompute=checkpointing)
        loss = head_loss(head, features(z, batch.inputs), batch.targets)
        gradients: Any = torch.autograd.grad(loss, [*below, head])
    flat: Any = torch.cat([g.double().reshape(-1) for g in gradients]).cpu().numpy()
    return np.asarray(flat, dtype=np.float64)


def cosine(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Of the angle between two vectors; 0 where one of them is zero."""
    scale = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / scale if scale > 0 else 0.0
