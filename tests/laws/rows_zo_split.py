# SPDX-License-Identifier: Apache-2.0
"""Law rows of split methods whose clients only run forward passes."""

from collections.abc import Callable

from laws_base import ADAMW, BATCH, CUT, MOMENTUM, SGD, STEPS, WIDTH, Row, training

from hofl.algorithms import ALGORITHMS
from hofl.core.optimizers import Optimizer
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Probing
from hofl.protocol.split import Split
from hofl.tasks.base import Task
from hofl.theory import communication
from hofl.theory.communication import Traffic, catch_up

LABELS = 4 * BATCH
"""Bytes of a batch's labels."""
Formula = Callable[[int, int, int, int], Traffic]
"""(bytes of an activation, trainables of the bottom, probes, vectors of optimizer state) -> bytes."""


def ho_sfl_bytes(a: int, d_c: int, q: int, moments: int) -> Traffic:
    """First contact: a snapshot."""
    return communication.ho_sfl(a, LABELS, q, catch_up(d_c, 1, q, None, moments))


def hosl_bytes(a: int, d_c: int, q: int, moments: int) -> Traffic:
    """First contact: a snapshot."""
    return communication.hosl(a, LABELS, STEPS, q, catch_up(d_c, STEPS, q, None, moments))


def zo_sfl_bytes(a: int, d_c: int, q: int, moments: int) -> Traffic:
    return communication.zo_sfl(a, LABELS, STEPS, q, d_c)


def mu_bytes(a: int, d_c: int, q: int, moments: int) -> Traffic:
    return communication.mu_splitfed(a, LABELS, q, d_c)


FORMULAS: dict[str, Formula] = {
    "ho_sfl": ho_sfl_bytes, "hosl": hosl_bytes, "zo_sfl": zo_sfl_bytes, "mu_splitfed": mu_bytes
}  # fmt: skip


def row(
    name: str,
    estimator: str,
    optimizer: Optimizer,
    probes: int = 2,
    family: str = "gaussian",
    wire: str = "float32",
    **split: object,
) -> Row:
    """A split method with one optimizer for both halves."""
    probing = Probing(estimator, probes, 1e-2, family, optimizer)

    def build(task: Task) -> Algorithm:
        cuts = (CUT,) * len(task.clients)
        halves = Split(task, wire=wire, **split)
        settings = training(optimizer, task)
        return ALGORITHMS[name].build(
            layout=task.model.layout, boundaries=cuts, training=settings, probing=probing, split=halves
        )

    def traffic(task: Task, client: int) -> Traffic:
        activation = BATCH * WIDTH * (2 if wire == "bfloat16" else 4)
        d_c, q = task.model.layout.bottom_size(CUT), 0 if estimator == "none" else probes
        return FORMULAS[name](activation, d_c, q, len(optimizer.init(1)))

    return Row(build, traffic, ALGORITHMS[name].centralised)


ROWS: dict[str, Row] = {
    "ho_sfl-forward-sgd": row("ho_sfl", "forward", SGD),
    "ho_sfl-tangent-adamw": row("ho_sfl", "tangent", ADAMW),
    "ho_sfl-central-momentum-bfloat16": row("ho_sfl", "central", MOMENTUM, wire="bfloat16"),
    "ho_sfl-sketch-sgd-hadamard": row("ho_sfl", "sketch", SGD, 8, "hadamard"),
    "ho_sfl-none": row("ho_sfl", "none", ADAMW),
    "hosl-central-sgd": row("hosl", "central", SGD),
    "hosl-central-adamw": row("hosl", "central", ADAMW, 3),
    "hosl-none": row("hosl", "none", MOMENTUM),
    "zo_sfl-sgd": row("zo_sfl", "central", SGD),
    "zo_sfl-adamw-bfloat16": row("zo_sfl", "central", ADAMW, 1, wire="bfloat16"),
    "mu_splitfed-sgd": row("mu_splitfed", "central", SGD, 1),
    "mu_splitfed-rademacher": row(
        "mu_splitfed", "central", SGD, 3, "rademacher", server_steps=3, global_lr=0.5, delay=2.0
    ),
}
