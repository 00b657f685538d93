# SPDX-License-Identifier: Apache-2.0
"""On an accelerator every estimator gives what it gives on a processor, up to rounding."""

import hashlib

import numpy as np
import pytest
import torch
from test_directions import GOLDEN, KEY
from torch import nn

from clients import Clients, play
from families import adapted, tokens
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.core.replay import hex_digest
from hofl.models.boundary import cut
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from two_numbers import built

BOUNDARY, PROBES = 2, 3


DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
        ],
    ),
)


def scalars(name: str, device: str) -> np.ndarray:
    """s_j of one step of a tiny model with its weights on a device, float64 [q]."""
    model = cut(adapted("llama").to(device))
    inputs = {key: value.to(device) for key, value in tokens().items()}
    size = model.layout.bottom_size(BOUNDARY)
    directions = Directions(Key.of(5, "directions"), "gaussian", PROBES, size)
    z, probe = ESTIMATORS[name](model.surrogate(inputs, BOUNDARY), directions, 1e-2, True)
    _, gradient, feedback = model.first_order(inputs, BOUNDARY, z, lambda out: out.logsumexp(-1).mean())
    assert z.device.type == device and gradient.shape == (model.layout.size - size,)
    assert feedback is not None
    return probe(feedback).values


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_agree_across_devices(name: str) -> None:
    here, there = scalars(name, "cpu"), scalars(name, "cuda")
    assert len(here) == (0 if name == "none" else PROBES)
    np.testing.assert_allclose(there, here, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_runs_where_the_model_is(name: str) -> None:
    assert np.isfinite(scalars(name, "cpu")).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", GOLDEN)
def test_c02_a_direction_has_the_same_bits_where_the_model_is(family: str, device: str) -> None:
    """A million numbers written into a model on the device, read back, and hashed: the pinned constants."""
    layers = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    model = cut(layers.to(device))
    model.write(Directions(KEY, family, 2, 2**20).block(1, 0, 10**6))
    there = model.trainables()[0][1].detach().cpu().numpy()
    assert hashlib.sha256(there.astype("<f4").tobytes()).hexdigest() == GOLDEN[family]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["ho_sfl", "zo_sfl"])
def test_c02_a_server_elsewhere_has_the_bottom_of_its_clients(name: str, device: str) -> None:
    """20 rounds; the server's model is on the device, the clients' are on the processor."""
    here, there = (
        synthetic_task(Partition(clients=2), seed=1, rows=40, width=6, device=where)
        for where in ("cpu", device)
    )
    algorithm = built(
        name, there, 2, probes=3, radius=0.01, directions="gaussian", batch=4, optimizer="adamw"
    )
    state, clients = algorithm.init(here.model.read()), Clients(here, algorithm.actions)
    size = here.model.layout.bottom_size(2)
    assert there.model.device.type == device
    there.model.self_test(there.batch(0, 0, 1).inputs)  # as every server does when it starts
    for outcome in play(algorithm, state, clients, [range(2)] * 20):
        assert not outcome.failures and outcome.row["replay_ok"] is True
        assert algorithm.rebuild(state, outcome.entries).to_bytes() == outcome.state.to_bytes()
        state = outcome.state
    bottom = state.arrays["weights/vector"][:size]
    assert not np.array_equal(bottom, algorithm.init(there.model.read()).arrays["weights/vector"][:size])
    if name == "ho_sfl":  # its clients keep their bottoms
        kept = [clients.memories[i].kept.arrays["weights/bottom"] for i in range(2)]
        assert {hex_digest(values) for values in kept} == {hex_digest(bottom)}
