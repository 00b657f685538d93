# SPDX-License-Identifier: Apache-2.0
"""A golden loss curve: eight rounds of HO-FL on the synthetic task, within float tolerance on any machine."""

import pytest
from rows import ROWS, make_task, rounds

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
}


@pytest.mark.parametrize("name", GOLDEN)
def test_loss_curve(name: str) -> None:
    losses = [outcome.row["loss"] for _, outcome in rounds(ROWS[name], make_task(), 8)]
    assert losses == pytest.approx(GOLDEN[name], rel=1e-3)
