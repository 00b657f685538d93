# SPDX-License-Identifier: Apache-2.0
"""HO-FL and FedAvg by hand on the model of two numbers, ``output = w1 (w0 x)`` with w0 = 0.5 and w1 = 3.

Client 0 has x = 2, y = 1: z = 1, output 3, residual 2, so dloss/dw1 = 2 z = 2, feedback = 2 w1 = 6 and
dloss/dw0 = 6 x = 12. Client 1 has x = 1, y = 0: z = 0.5, output 1.5, residual 1.5, so 0.75, 4.5 and 4.5.
A direction of one number is u = +1 or -1, s = feedback x u, and s u is the gradient whatever its sign.
"""

import numpy as np
import pytest

from hofl.algorithms import ALGORITHMS
from hofl.core.optimizers import Optimizer
from hofl.protocol.aggregate import Training
from hofl.protocol.probing import Probing
from hofl.runtime.local import local_call
from two_numbers import two_numbers


def moved(name: str, boundaries: tuple[int, ...], estimator: str = "forward", **settings: str) -> list[float]:
    """w0 and w1 after one round of one step; rates 0.01 of a probed part and 0.1 of a backpropagated one."""
    task = two_numbers((0, 1))
    training = Training(3, 1, 1, Optimizer("sgd", 0.1), (1, 3), **settings)
    probing = Probing(estimator, 2, 0.25, "rademacher", Optimizer("sgd", 0.01))
    given = {"layout": task.model.layout, "boundaries": boundaries, "training": training, "probing": probing}
    algorithm = ALGORITHMS[name].build(**given, preferred=None)
    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, [0, 1], local_call(task, algorithm.actions))
    assert not outcome.failures
    return [float(w) for w in outcome.state.arrays["weights/vector"]]


@pytest.mark.parametrize("estimator", ["forward", "central", "tangent", "sketch"])
def test_ho_fl_probes_w0_and_backpropagates_w1(estimator: str) -> None:
    """Client 0: w0 = 0.5 - 0.12, w1 = 3 - 0.2. Client 1: w0 = 0.5 - 0.045, w1 = 3 - 0.075. Their means."""
    assert moved("ho_fl", (1, 1), estimator) == pytest.approx([0.4175, 2.8625], rel=1e-6)


def test_ho_fl_clients_of_two_boundaries() -> None:
    """Client 1 at boundary 0 backpropagates w0 too: 0.5 - 0.45."""
    assert moved("ho_fl", (1, 0)) == pytest.approx([(0.38 + 0.05) / 2, 2.8625], rel=1e-6)


def test_a_frozen_bottom_stays() -> None:
    assert moved("ho_fl", (1, 1), "none") == pytest.approx([0.5, 2.8625], rel=1e-6)


def test_fedavg() -> None:
    """Client 0: 0.5 - 1.2 and 2.8; client 1: 0.05 and 2.925."""
    assert moved("fedavg", (0, 0)) == pytest.approx([(-0.7 + 0.05) / 2, 2.8625], rel=1e-6)


def test_weights_by_examples() -> None:
    """Shards of one and three examples: a quarter of client 0 and three of client 1."""
    expected = np.array([-0.7, 2.8]) / 4 + np.array([0.05, 2.925]) * 3 / 4
    assert moved("fedavg", (0, 0), weighting="examples") == pytest.approx(list(expected), rel=1e-6)
