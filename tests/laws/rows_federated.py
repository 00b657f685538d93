# SPDX-License-Identifier: Apache-2.0
"""Law rows of methods whose clients hold the whole model."""

from laws_base import ADAMW, MOMENTUM, SGD, STEPS, Row, training

from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.fedprox import fedprox
from hofl.algorithms.fedzo import fedzo
from hofl.algorithms.ho_fl import ho_fl
from hofl.algorithms.mezo import mezo
from hofl.core.optimizers import Optimizer
from hofl.protocol.probing import Probing
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


def near(optimizer: Optimizer, proximal: float) -> Row:
    """FedProx."""
    return Row(
        lambda task: fedprox(task.model.layout, training(optimizer, task), proximal),
        lambda task, client: communication.fedprox(task.model.layout.size),
    )


def private(estimator: str, optimizer: Optimizer, family: str = "sphere", probes: int = 2) -> Row:
    """FedZO."""
    probing = Probing(estimator, probes, 1e-2, family, optimizer)
    return Row(
        lambda task: fedzo(task.model.layout, training(optimizer, task), probing),
        lambda task, client: communication.fedzo(task.model.layout.size),
    )


def central(estimator: str, optimizer: Optimizer, family: str = "gaussian", probes: int = 1) -> Row:
    """MeZO: one trainer with all the data."""
    probing = Probing(estimator, probes, 1e-2, family, optimizer)

    def traffic(task: Task, client: int) -> communication.Traffic:
        moments = len(optimizer.init(1))
        return communication.mezo(task.model.layout.size, STEPS, probes, moments, first=True)

    return Row(lambda task: mezo(task.model.layout, training(optimizer, task), probing), traffic, True)


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
    "fedprox-sgd": near(SGD, 0.1),
    "fedprox-adamw": near(ADAMW, 1.0),
    "fedzo-forward-sgd": private("forward", SGD),
    "fedzo-central-adamw-gaussian": private("central", ADAMW, "gaussian"),
    "mezo-central-sgd": central("central", SGD),
    "mezo-central-adamw-rademacher": central("central", ADAMW, "rademacher", 3),
    "mezo-tangent-momentum": central("tangent", MOMENTUM, probes=2),
}
