# SPDX-License-Identifier: Apache-2.0
"""Golden loss curves of every system on the synthetic task, within float tolerance on any machine."""

import pytest
from rows import ROWS, rounds, task_of

GOLDEN = {
    "ho_fl-forward-adamw": [1.444947, 1.218394, 1.299625, 1.162254, 1.203516, 1.257401, 1.271269, 1.192697],
    "ho_fl-sketch-sgd-hadamard": [
        1.357235,
        1.082918,
        1.073687,
        0.929036,
        0.929718,
        0.901663,
        0.89104,
        0.833413,
    ],
    "fedavg-adamw": [1.413808, 1.150832, 1.186672, 1.036952, 1.05034, 1.060774, 1.065399, 1.003552],
    "fedprox-sgd": [1.355414, 1.076304, 1.070061, 0.924394],
    "fedzo-forward-sgd": [1.347082, 1.134741, 1.083957, 0.943375],
    "mezo-central-sgd": [1.496633, 1.160313, 1.083173, 1.279243],
    "decomfl-central-sgd": [1.303926, 0.962441, 1.002942, 0.893344],
    "hiso-forward-round": [1.302667, 0.963221, 1.001642, 0.898048],
    "splitfed_v1-sgd": [1.354961, 1.074993, 1.06819, 0.922111],
    "splitfed_v2-momentum": [1.304737, 0.8583, 0.739051, 0.501465],
    "splitlora-adamw": [1.375367, 1.055986, 1.038445, 0.850679],
    "heron_sfl-central-adamw": [1.408839, 1.135978, 1.159548, 0.998428],
    "ho_sfl-forward-sgd": [1.441203, 1.227871, 1.222347, 1.07615],
    "hosl-central-sgd": [1.500806, 1.142344, 0.993519, 1.072911],
    "zo_sfl-sgd": [1.329352, 1.141506, 1.137417, 1.036257],
    "mu_splitfed-sgd": [1.441451, 1.294636, 1.341237, 1.176775],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_loss_curve(name: str) -> None:
    played = rounds(ROWS[name], task_of(name), len(GOLDEN[name]))
    losses = [outcome.row["loss"] for _, outcome in played]
    assert losses == pytest.approx(GOLDEN[name], rel=1e-3)
