# SPDX-License-Identifier: Apache-2.0
"""Normative optimizers and the one replay: against PyTorch, against the written equations, bit for bit."""

import math

import numpy as np
import pytest
import torch

from hofl.core.directions import Directions, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.replay import Step, hex_digest, replay_

KEY = Key.of(1, "directions", 0, 0)
OPTIMIZERS = [
    Optimizer("sgd", 0.1),
    Optimizer("sgd", 0.1, weight_decay=0.01),
    Optimizer("sgd", 0.1, momentum=0.9, weight_decay=0.01),
    Optimizer("adamw", 1e-3, weight_decay=0.0),
    Optimizer("adamw", 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
]


def torch_twin(optimizer: Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    if optimizer.name == "sgd":
        return torch.optim.SGD(
            [parameter], optimizer.lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
        )
    return torch.optim.AdamW(
        [parameter],
        optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_pytorch_in_double(optimizer: Optimizer) -> None:
    w = gaussian(KEY, 0, 500)
    parameter = torch.nn.Parameter(torch.from_numpy(w.astype(np.float64)))
    twin, state = torch_twin(optimizer, parameter), optimizer.init(500)
    for step in range(1, 8):
        g = gaussian(KEY.fold(step), 0, 500)
        parameter.grad = torch.from_numpy(g.astype(np.float64))
        twin.step()
        optimizer.update_(w, g.copy(), state, step)
    np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_adamw_first_step_is_a_sign_step() -> None:
    w = np.zeros(3, dtype=np.float32)
    Optimizer("adamw", 1e-3).update_(w, np.float32([4.0, -1e-3, 0.0]), Optimizer("adamw", 1e-3).init(3), 1)
    np.testing.assert_allclose(w, [-1e-3, 1e-3, 0.0], rtol=2e-5)


def test_adamw_by_hand() -> None:
    """Two steps on one weight, every number from HO-FL eq. 24-26 in float64."""
    lr, b1, b2, eps, decay = 0.1, 0.9, 0.999, 1e-8, 0.5
    w, m, v = 2.0, 0.0, 0.0
    mine, state = np.float32([2.0]), (np.zeros(1, np.float32), np.zeros(1, np.float32))
    optimizer = Optimizer("adamw", lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    for step, g in enumerate((3.0, -1.0), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = (1 - lr * decay) * w - lr * (m / (1 - b1**step)) / (math.sqrt(v / (1 - b2**step)) + eps)
        optimizer.update_(mine, np.float32([g]), state, step)
    assert mine[0] == pytest.approx(w, rel=1e-6)


def test_values_round_trip() -> None:
    import json

    optimizer = OPTIMIZERS[-1]
    assert Optimizer.from_values(json.loads(json.dumps(optimizer.to_values()))) == optimizer


def steps(family: str, count: int, size: int, number: int = 5) -> list[Step]:
    scalars = gaussian(KEY.fold(77), 0, number * count).reshape(number, count)
    return [Step(Directions(KEY.fold(e), family, count, size), scalars[e]) for e in range(number)]


@pytest.mark.parametrize("family", ["gaussian", "rademacher", "hadamard"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_does_not_depend_on_blocks_or_on_when_it_is_called(family: str, optimizer: Optimizer) -> None:
    size, start = 3000, gaussian(KEY.fold(5), 0, 3000)
    history = steps(family, 2, size)
    whole = start.copy()
    replay_(whole, history, optimizer)
    for block in (7, 20, 4096):
        again = start.copy()
        replay_(again, history, optimizer, block=block)
        assert hex_digest(again) == hex_digest(whole)
    one_by_one, state = start.copy(), optimizer.init(size)
    for e, step in enumerate(history, start=1):  # as a client does, step by step with its state
        replay_(one_by_one, [step], optimizer, state, first=e)
    assert hex_digest(one_by_one) == hex_digest(whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replay_equals_the_obvious_twin(optimizer: Optimizer) -> None:
    size, w = 300, gaussian(KEY.fold(5), 0, 300)
    history, state = steps("gaussian", 3, 300), optimizer.init(300)
    mine = w.copy()
    replay_(mine, history, optimizer)
    for number, (directions, s) in enumerate(history, start=1):
        g = np.float32(1 / 3) * ((s[0] * directions.block(0, 0, size) + s[1] * directions.block(1, 0, size))
                                 + s[2] * directions.block(2, 0, size))  # fmt: skip
        optimizer.update_(w, g, state, number)
    assert np.array_equal(mine, w)


def test_replay_of_nothing_changes_nothing() -> None:
    w = gaussian(KEY, 0, 10)
    before = hex_digest(w)
    replay_(w, [], OPTIMIZERS[2])
    assert hex_digest(w) == before


def test_joiners_replay_to_the_same_bits() -> None:
    """50 steps; one joins at 25 and one at 49 from a log (C10)."""
    optimizer, size = Optimizer("sgd", 0.05), 1000
    history = steps("gaussian", 2, size, 50)
    server, at_25, at_49 = (np.zeros(size, np.float32) for _ in range(3))
    for step in history:
        replay_(server, [step], optimizer)
    replay_(at_25, history[:25], optimizer)
    replay_(at_25, history[25:], optimizer)
    replay_(at_49, history[:49], optimizer)
    replay_(at_49, history[49:], optimizer)
    assert hex_digest(server) == hex_digest(at_25) == hex_digest(at_49)
