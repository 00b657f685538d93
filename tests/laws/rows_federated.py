# SPDX-License-Identifier: Apache-2.0
"""Law rows of methods whose clients hold the whole model."""

from laws_base import ADAMW, MOMENTUM, SGD, STEPS, Row, training

from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.ho_fl import ho_fl
from hofl.algorithms.probing import Probing
from hofl.core.optimizers import Optimizer
from hofl.tasks.base import Task
from hofl.theory import communication

BOUNDARIES = (0, 1, 2, 4, 3, 4)  # 0, middle and L = 4


def hybrid(
    estimator: str,
    optimizer: Optimizer,
    probes: int = 2,
    family: str = "gaussian",
    boundaries: tuple = BOUNDARIES,
) -> Row:
    """HO-FL with one optimizer for both parts."""
    probing = Probing(estimator, probes, 1e-2, family, optimizer)

    def traffic(task: Task, client: int) -> communication.Traffic:
        layout = task.model.layout
        d_zo = layout.bottom_size(boundaries[client])
        return communication.ho_fl(layout.size, d_zo, STEPS, 0 if estimator == "none" else probes)

    return Row(lambda task: ho_fl(task.model.layout, boundaries, training(optimizer, task), probing), traffic)


def first_order(optimizer: Optimizer) -> Row:
    """FedAvg."""
    return Row(
        lambda task: fedavg(task.model.layout, training(optimizer, task)),
        lambda task, client: communication.fedavg(task.model.layout.size),
    )


ROWS: dict[str, Row] = {
    "fedavg-sgd": first_order(SGD),
    "fedavg-adamw": first_order(ADAMW),
    "ho_fl-forward-sgd": hybrid("forward", SGD),
    "ho_fl-forward-adamw": hybrid("forward", ADAMW),
    "ho_fl-forward-momentum-rademacher": hybrid("forward", MOMENTUM, family="rademacher"),
    "ho_fl-central-adamw": hybrid("central", ADAMW),
    "ho_fl-tangent-adamw": hybrid("tangent", ADAMW),
    "ho_fl-sketch-sgd-hadamard": hybrid("sketch", SGD, 32, "hadamard"),
    "ho_fl-sketch-adamw": hybrid("sketch", ADAMW, 3),
    "ho_fl-none": hybrid("none", ADAMW),
}
