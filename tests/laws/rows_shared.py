# SPDX-License-Identifier: Apache-2.0
"""Law rows of methods whose clients share directions over all trainables."""

from laws_base import ADAMW, MOMENTUM, SGD, STEPS, Row, training

from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.hiso import hiso
from hofl.core.optimizers import Optimizer
from hofl.protocol.probing import Probing, Shared
from hofl.tasks.base import Task
from hofl.theory import communication

PROBES = 2


def scalars(estimator: str, optimizer: Optimizer, method=decomfl, moments: int = 0, **more: object) -> Row:
    """Averaged scalars, under DeComFL or HiSo."""
    probing = Probing(estimator, PROBES, 1e-2, "gaussian", optimizer)

    def traffic(task: Task, client: int) -> communication.Traffic:
        d = task.model.layout.size
        news = communication.catch_up(d, STEPS, PROBES, None, moments)
        return communication.decomfl(d, STEPS, PROBES, news)

    def build(task: Task) -> object:
        return method(task.model.layout, training(optimizer, task), probing, Shared(**more))

    return Row(build, traffic)


def models(estimator: str, optimizer: Optimizer) -> Row:
    """DeComFL with averaged models."""
    probing = Probing(estimator, PROBES, 1e-2, "gaussian", optimizer)

    def traffic(task: Task, client: int) -> communication.Traffic:
        d = task.model.layout.size
        return communication.ho_fl(d, d, STEPS, PROBES)

    def build(task: Task) -> object:
        return decomfl(task.model.layout, training(optimizer, task), probing, Shared(average="models"))

    return Row(build, traffic)


ROWS: dict[str, Row] = {
    "decomfl-central-sgd": scalars("central", SGD),
    "decomfl-forward-momentum": scalars("forward", MOMENTUM, moments=1),
    "decomfl-tangent-models-adamw": models("tangent", ADAMW),
    "hiso-forward-round": scalars("forward", SGD, hiso, moments=1),
    "hiso-central-step": scalars("central", SGD, hiso, moments=1, every="step", curvature=0.2),
}
