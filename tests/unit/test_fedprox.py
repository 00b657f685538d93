# SPDX-License-Identifier: Apache-2.0
"""FedProx: the proximal term by hand, in the gradient under AdamW too, and FedAvg without it."""

import math

import numpy as np
import pytest
from laws_base import ADAMW, COHORT, MOMENTUM, SGD, make_task
from laws_base import training as laws_training

from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.fedprox import fedprox
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, RoundVoid
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from pair_task import pair_task


def played(algorithm: Algorithm, task: Task, cohort: list[int], rounds: int = 1) -> Record:
    state = algorithm.init(task.model.read())
    for _ in range(rounds):
        state = algorithm.round(state, cohort, local_call(task, algorithm.actions)).state
    return state


def test_two_clients_two_sgd_steps_by_hand() -> None:
    """mu = 1, lr = 0.1, from w_t = (1, 2).

    Client 0, x = (1, 1), y = 0: gradient (3, 3), w = (0.7, 1.7); then 2.4 - 0.3 = 2.1 each, w = (0.49, 1.49).
    Client 1, x = (1, 0), y = 0: gradient (1, 0), w = (0.9, 2); then 0.9 - 0.1 = 0.8, w = (0.82, 2).
    Their mean is (0.655, 1.745); without the term it would be (0.635, 1.73).
    """
    task = pair_task([(1.0, 1.0, 0), (1.0, 0.0, 0)])
    training = Training(1, 2, 1, Optimizer("sgd", 0.1), (1, 1))
    state = played(fedprox(task.model.layout, training, 1.0), task, [0, 1])
    np.testing.assert_allclose(state.arrays["weights/vector"], [0.655, 1.745], rtol=1e-6)
    assert state.arrays["cursors/next"].tolist() == [2, 2]


def test_under_adamw_the_term_is_in_the_gradient() -> None:
    """mu = 10, lr = 0.1, decoupled decay 0.5: gradients 3, then o = 2.6, less mu times the displacement."""
    task = pair_task([(1.0, 1.0, 0)])
    optimizer = Optimizer("adamw", 0.1, weight_decay=0.5)
    state = played(fedprox(task.model.layout, Training(1, 2, 1, optimizer, (1,)), 10.0), task, [0])
    w, m, v, lr, decay = list(np.float64([1.0, 2.0])), [0.0, 0.0], [0.0, 0.0], 0.1, 0.5
    for step in (1, 2):
        o = w[0] + w[1]
        for i, start in enumerate((1.0, 2.0)):
            g = o + 10.0 * (w[i] - start)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            step_size = (m[i] / (1 - 0.9**step)) / (math.sqrt(v[i] / (1 - 0.999**step)) + 1e-8)
            w[i] = (1 - lr * decay) * w[i] - lr * step_size
    np.testing.assert_allclose(state.arrays["weights/vector"], w, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
def test_without_the_term_it_is_fedavg_bit_for_bit(optimizer: Optimizer) -> None:
    task = make_task()
    training, cohort = laws_training(optimizer, task), list(range(COHORT))
    start = task.model.read()
    ends = []
    for algorithm in (
        fedprox(task.model.layout, training, 0.0),
        fedavg(task.model.layout, training),
        fedprox(task.model.layout, training, 0.5),
    ):
        task.model.write(start)
        ends.append(played(algorithm, task, cohort, 3).arrays["weights/vector"])
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], ends[2])


def test_a_larger_term_keeps_clients_nearer() -> None:
    task = make_task()
    start, moved = task.model.read(), []
    for proximal in (0.0, 1.0, 10.0):
        task.model.write(start)
        end = played(fedprox(task.model.layout, laws_training(SGD, task), proximal), task, [0, 1])
        moved.append(float(np.linalg.norm(end.arrays["weights/vector"] - start)))
    assert moved[0] > moved[1] > moved[2] > 0


def test_weights_by_examples() -> None:
    """One SGD step, clients of 1 and 3 registered examples: (1 (0.7, 1.7) + 3 (0.9, 2)) / 4."""
    task = pair_task([(1.0, 1.0, 0), (1.0, 0.0, 0)])
    training = Training(1, 1, 1, Optimizer("sgd", 0.1), (1, 3), weighting="examples")
    state = played(fedprox(task.model.layout, training, 1.0), task, [0, 1])
    np.testing.assert_allclose(state.arrays["weights/vector"], [0.85, 1.925], rtol=1e-6)


def test_a_client_that_leaves_the_numbers_is_left_out() -> None:
    """An lr that overflows: the client says so, and alone it makes the round void."""
    task = pair_task([(1.0, 1.0, 0)])
    training = Training(1, 3, 1, Optimizer("sgd", 1e30), (1,))
    with pytest.raises(RoundVoid) as void:
        played(fedprox(task.model.layout, training, 1.0), task, [0])
    assert "non-finite loss or gradient in local step 2" in void.value.failures[0]
