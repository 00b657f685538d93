# SPDX-License-Identifier: Apache-2.0
"""FedZO: the paper's estimate on the unit sphere by hand, private directions, any law that is set."""

import math

import numpy as np
import pytest
from laws_base import ADAMW, SGD, make_task
from laws_base import training as laws_training

from hofl.algorithms.fedzo import fedzo
from hofl.core.directions import gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Outcome
from hofl.protocol.probing import Probing
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from pair_task import START, pair_task

EXAMPLES = [(1.0, 1.0, 0), (1.0, -0.5, 1)]


def played(algorithm: Algorithm, task: Task, cohort: list[int], rounds: int = 1) -> list[Outcome]:
    state, outcomes = algorithm.init(task.model.read()), []
    for _ in range(rounds):
        outcomes.append(algorithm.round(state, cohort, local_call(task, algorithm.actions)))
        state = outcomes[-1].state
    return outcomes


def loss(w: list[float], example: tuple[float, float, int]) -> float:
    return (w[0] * example[0] + w[1] * example[1] - example[2]) ** 2 / 2


def on_the_unit_sphere(seed: int, client: int, step: int, probe: int) -> list[float]:
    """v_j of the paper: two normal numbers of the client's own stream, divided by their length."""
    a, b = gaussian(Key.of(seed, "directions", client, 0).fold(step).fold(probe), 0, 2).tolist()
    return [a / math.hypot(a, b), b / math.hypot(a, b)]


@pytest.mark.parametrize("estimator", ["forward", "central"])
def test_two_clients_two_steps_of_the_papers_estimate_by_hand(estimator: str) -> None:
    """``g = (d / (mu q)) sum_j [F(x + mu v_j) - F(x)] v_j``, v_j on the unit sphere, d = 2, q = 3, H = 2.

    It is the family ``sphere`` at radius mu / sqrt(d); ``central`` takes both sides of the same points.
    """
    mu, lr, seed, d, q, ends = 0.5, 0.05, 21, 2, 3, []
    for client, example in enumerate(EXAMPLES):
        x = list(START)
        for step in range(2):
            g = [0.0, 0.0]
            for probe in range(q):
                v = on_the_unit_sphere(seed, client, step, probe)
                ahead = loss([x[0] + mu * v[0], x[1] + mu * v[1]], example)
                behind = loss([x[0] - mu * v[0], x[1] - mu * v[1]], example)
                rise = ahead - loss(x, example) if estimator == "forward" else (ahead - behind) / 2
                g = [g[i] + d / (mu * q) * rise * v[i] for i in range(2)]
            x = [x[i] - lr * g[i] for i in range(2)]
        ends.append(x)
    task = pair_task(EXAMPLES)
    probing = Probing(estimator, q, mu / math.sqrt(d), "sphere", Optimizer("sgd", lr))
    training = Training(seed, 2, 1, Optimizer("sgd", 99.0), (1, 1))  # nothing is backpropagated
    (outcome,) = played(fedzo(task.model.layout, training, probing), task, [0, 1])
    expected = [(ends[0][i] + ends[1][i]) / 2 for i in range(2)]
    np.testing.assert_allclose(outcome.state.arrays["weights/vector"], expected, rtol=2e-6)
    delta = outcome.entries[1].reply.arrays["weights/delta"]
    np.testing.assert_allclose(delta, [ends[1][0] - 1.0, ends[1][1] - 2.0], rtol=2e-5)


def test_the_loss_in_the_row_is_that_of_the_points_visited() -> None:
    """One step each: losses 9/2 and (0 - 1)^2 / 2 at the start, 5/2 on average; examples 2."""
    task = pair_task(EXAMPLES)
    probing = Probing("forward", 1, 1e-3, "sphere", Optimizer("sgd", 0.01))
    training = Training(3, 1, 1, Optimizer("sgd", 1.0), (1, 1))
    (outcome,) = played(fedzo(task.model.layout, training, probing), task, [0, 1])
    assert (outcome.row["loss"], outcome.row["examples"], outcome.row["replay_ok"]) == (2.5, 2, None)


def test_directions_are_private_and_new_in_each_round() -> None:
    task = make_task()
    algorithm = fedzo(task.model.layout, laws_training(SGD, task), Probing("forward", 2, 1e-2, "sphere", SGD))
    roots = {
        entry.plan.arrays["seeds/root"].tobytes()
        for outcome in played(algorithm, task, [0, 2, 5], 3)
        for entry in outcome.entries
    }
    assert len(roots) == 9


def test_whole_deltas_travel_and_no_scalar() -> None:
    task = make_task()
    algorithm = fedzo(task.model.layout, laws_training(SGD, task), Probing("forward", 2, 1e-2, "sphere", SGD))
    (outcome,) = played(algorithm, task, [0, 1])
    for entry in outcome.entries:
        assert set(entry.reply.arrays) == {"weights/delta", "metrics/agreement"}
        assert entry.reply.arrays["weights/delta"].shape == (task.model.layout.size,)


@pytest.mark.parametrize("estimator", ["forward", "central"])
def test_the_law_that_is_set_is_used_and_the_signal_is_checked(estimator: str) -> None:
    start, ends = make_task().model.read(), []
    for family in ("sphere", "gaussian", "rademacher", "hadamard"):
        task = make_task()
        probing = Probing(estimator, 4, 1e-2, family, ADAMW)
        *_, outcome = played(fedzo(task.model.layout, laws_training(ADAMW, task), probing), task, [0, 1, 2])
        ends.append(outcome.state.arrays["weights/vector"].tobytes())
        assert outcome.row["zo_signal"] > 0.9  # a smooth loss: both sides of the anchor agree
        assert all(entry.plan.values["directions"] == family for entry in outcome.entries)
    assert len({start.tobytes(), *ends}) == 5


def test_a_radius_below_the_rounding_of_the_loss_has_no_signal() -> None:
    """At 1e-9 neither side moves the float32 loss, or moves it by one unit: the sides do not agree."""
    task = make_task()
    probing = Probing("forward", 8, 1e-9, "sphere", Optimizer("sgd", 1e-6))
    (outcome,) = played(fedzo(task.model.layout, laws_training(SGD, task), probing), task, [0, 1, 2])
    assert outcome.row["zo_signal"] is None or outcome.row["zo_signal"] < 0.5


def test_it_learns() -> None:
    task = make_task()
    optimizer = Optimizer("adamw", 2e-2)
    probing = Probing("forward", 5, 1e-3, "sphere", optimizer)
    outcomes = played(fedzo(task.model.layout, laws_training(optimizer, task), probing), task, [0, 1, 2], 12)
    assert outcomes[-1].row["loss"] < 0.6 * outcomes[0].row["loss"]
