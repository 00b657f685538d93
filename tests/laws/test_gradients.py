# SPDX-License-Identifier: Apache-2.0
"""Laws that tie the hybrid step to calculus, on the synthetic network and a tiny decoder."""

import numpy as np
import pytest
import torch
from rows import SEED, make_task

from hofl.algorithms.ho_fl import hybrid_step
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.core.replay import hex_digest
from hofl.tasks.base import Batch, Task

KEY = Key.of(SEED, "directions", 0, 0)


def true_gradient(task: Task, batch: Batch) -> np.ndarray:
    """The gradient of the loss by backpropagation through the whole model: float32 [d]."""
    parameters = [parameter for _, parameter in task.model.trainables()]
    loss = task.loss(task.model.full(batch.inputs), batch)
    return np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(loss, parameters)])


def plan(boundary: int, estimator: str) -> dict:
    return {"boundary": boundary, "estimator": estimator, "radius": 1e-3}


@pytest.mark.parametrize("boundary", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("estimator", "tolerance"), [("forward", 0.05), ("central", 0.01), ("tangent", 1e-5), ("sketch", 1e-5)]
)
def test_scalars_are_derivatives_of_the_loss_itself(boundary: int, estimator: str, tolerance: float) -> None:
    """At the anchor the surrogate's gradient is the loss's own (SYSTEMS 1.4): s_j = <grad_v loss, u_j>."""
    task = make_task()
    batch = task.batch(0, 0, 8)
    gradient, d_zo = true_gradient(task, batch), task.model.layout.bottom_size(boundary)
    directions = Directions(KEY, "gaussian", 4, d_zo)
    before = hex_digest(task.model.read())
    loss, top, learnt = hybrid_step(task, batch, plan(boundary, estimator), directions, check=False)
    expected = np.array([gradient[:d_zo].astype(np.float64) @ directions.block(j, 0, d_zo) for j in range(4)])
    np.testing.assert_allclose(learnt.values, expected, atol=tolerance * np.abs(expected).max())
    assert np.array_equal(top, gradient[d_zo:])  # backpropagation through the top alone, bit for bit
    assert hex_digest(task.model.read()) == before
    with torch.no_grad():
        assert loss == float(task.loss(task.model.full(batch.inputs), batch))


@pytest.mark.parametrize("boundary", [1, 3])
def test_a_full_hadamard_sketch_is_the_gradient(boundary: int) -> None:
    """q = n: (1/q) sum_j s_j u_j is the bottom's exact gradient, so HO-FL takes FedAvg's step."""
    task = make_task()
    batch, d_zo = task.batch(1, 0, 8), task.model.layout.bottom_size(boundary)
    gradient = true_gradient(task, batch)[:d_zo]
    directions = Directions(KEY, "hadamard", 1 << (d_zo - 1).bit_length(), d_zo)
    _, _, learnt = hybrid_step(task, batch, plan(boundary, "sketch"), directions, check=False)
    estimate = directions.combination(learnt.values.astype(np.float32))(0, d_zo)
    np.testing.assert_allclose(estimate, gradient, atol=1e-5 * np.abs(gradient).max())


def test_one_zero_direction_leaves_no_trace() -> None:
    class Zero(Directions):
        def block(self, probe: int, start: int, stop: int) -> np.ndarray:
            return np.zeros(stop - start, dtype=np.float32)

    task = make_task()
    for estimator in ("forward", "central", "tangent", "sketch"):
        directions = Zero(KEY, "gaussian", 2, task.model.layout.bottom_size(3))
        _, _, learnt = hybrid_step(task, task.batch(0, 0, 8), plan(3, estimator), directions, check=True)
        assert learnt.values.tolist() == [0.0, 0.0]


def test_batches_are_a_pure_function_and_cover_each_pass() -> None:
    """7 steps of 4 on 10 examples: 28 visits, each pass in a new seeded order (C68, D-20)."""
    task = make_task()
    object.__setattr__(task, "shards", [np.arange(100, 110)])
    object.__setattr__(task, "collate", lambda numbers: numbers)
    visits = [task.batch(0, position, 4) for position in range(7)]
    assert sum(map(len, visits)) == 28
    for first in (0, 2, 4):
        assert len({*visits[first], *visits[first + 1]}) == 8
    assert not np.array_equal(np.concatenate(visits[:2]), np.concatenate(visits[2:4]))
    assert np.array_equal(task.batch(0, 5, 4), visits[5])
    assert len(task.batch(0, 3, 64)) == 10  # a shard below the batch is one batch
