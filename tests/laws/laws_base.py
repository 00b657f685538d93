# SPDX-License-Identifier: Apache-2.0
"""What the rows of the law suite share: settings, the task, and what a row is."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hofl.core.optimizers import Optimizer
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from hofl.theory.communication import Traffic

SEED, STEPS, BATCH, CLIENTS, COHORT = 11, 5, 8, 6, 4
CUT = 2
"""The boundary of split methods: blocks 0 and 1 of four below it."""
WIDTH = 6
"""Numbers of one example at any boundary."""
SGD = Optimizer("sgd", 0.05, weight_decay=1e-3)
MOMENTUM = Optimizer("sgd", 0.02, momentum=0.9)
ADAMW = Optimizer("adamw", 3e-3, weight_decay=5e-4)


class Row(NamedTuple):
    """An algorithm with its settings.

    Attributes:
        build: a task -> the algorithm.
        traffic: (task, client) -> bytes by category of that client's first round, from the formula.
        centralised: one client holds all the data.
    """

    build: Callable[[Task], Algorithm]
    traffic: Callable[[Task, int], Traffic]
    centralised: bool = False


def training(optimizer: Optimizer, task: Task, **more: object) -> Training:
    """Five steps of eight examples; every client has the same weight."""
    return replace(Training(SEED, STEPS, BATCH, optimizer, (1,) * len(task.clients), run="laws"), **more)


def make_task(centralised: bool = False) -> Task:
    """Six clients of unequal sizes on clouds of points; four blocks and a head."""
    divided = Partition("dirichlet", CLIENTS, alpha=1.0, minimum=9)
    task = synthetic_task(divided, seed=SEED, rows=160, width=WIDTH)
    if not centralised:
        return task
    return replace(task, clients=("centre",), shards=[np.concatenate(task.shards)])
