# SPDX-License-Identifier: Apache-2.0
"""On an accelerator every estimator gives what it gives on a processor, up to rounding."""

import numpy as np
import pytest
import torch

from families import adapted, tokens
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.models.boundary import cut

BOUNDARY, PROBES = 2, 3


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
