# SPDX-License-Identifier: Apache-2.0
"""Law rows of split methods whose clients train a bottom of their own and average it."""

from collections.abc import Callable

from laws_base import ADAMW, BATCH, CLIENTS, CUT, MOMENTUM, SGD, STEPS, WIDTH, Row, training

from hofl.algorithms.heron_sfl import heron_sfl
from hofl.algorithms.splitfed import splitfed_v1, splitfed_v2
from hofl.algorithms.splitlora import splitlora
from hofl.core.optimizers import Optimizer
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Probing
from hofl.protocol.split import Split
from hofl.tasks.base import Task
from hofl.theory import communication

CUTS = (CUT,) * CLIENTS
LABELS = 4 * BATCH


def backpropagated(method: Callable[..., Algorithm], optimizer: Optimizer, wire: str = "float32") -> Row:
    """SplitFed and SplitLoRA."""
    bytes_of_z = {"float32": 4, "bfloat16": 2}[wire] * BATCH * WIDTH

    def build(task: Task) -> Algorithm:
        return method(task.model.layout, CUTS, training(optimizer, task), Split(task, wire))

    def traffic(task: Task, client: int) -> communication.Traffic:
        return communication.splitfed(bytes_of_z, LABELS, STEPS, task.model.layout.bottom_size(CUT))

    return Row(build, traffic)


def probed(
    estimator: str, optimizer: Optimizer, probes: int, family: str = "gaussian", every: int = 1
) -> Row:
    """HERON-SFL with one optimizer for both halves."""

    def build(task: Task) -> Algorithm:
        probing = Probing(estimator, probes, 1e-3, family, optimizer)
        split = Split(task, upload_every=every)
        return heron_sfl(task.model.layout, CUTS, training(optimizer, task), probing, split)

    def traffic(task: Task, client: int) -> communication.Traffic:
        d_c, d_a = task.model.layout.bottom_size(CUT), (WIDTH + 1) * len(task.facts["labels"])
        q = 0 if estimator == "none" else probes
        return communication.heron_sfl(4 * BATCH * WIDTH, LABELS, STEPS, q, every, d_c, d_a)

    return Row(build, traffic)


ROWS: dict[str, Row] = {
    "splitfed_v1-sgd": backpropagated(splitfed_v1, SGD),
    "splitfed_v1-adamw": backpropagated(splitfed_v1, ADAMW),
    "splitfed_v2-momentum": backpropagated(splitfed_v2, MOMENTUM),
    "splitfed_v2-adamw-bfloat16": backpropagated(splitfed_v2, ADAMW, "bfloat16"),
    "splitlora-adamw": backpropagated(splitlora, ADAMW),
    "heron_sfl-forward-sphere-sgd": probed("forward", SGD, 1, "sphere", every=2),
    "heron_sfl-central-adamw": probed("central", ADAMW, 2),
    "heron_sfl-none": probed("none", ADAMW, 2, every=7),
}
