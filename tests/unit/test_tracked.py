# SPDX-License-Identifier: Apache-2.0
"""One client's memory: counted storages against counts by hand, and no bit of a result changed."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.models.boundary import CutModel, cut
from hofl.runtime.tracked import GRAIN, ClientMemory, Tracked, resident_bytes

ROWS, WIDTH, BLOCKS, CLASSES = 1024, 16, 4, 2
ACTIVATION = ROWS * WIDTH * 4
LOGITS = ROWS * CLASSES * 4


class Stack(nn.Module):
    """Blocks of Linear and Tanh between an embedding (a buffer and a weight) and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("embed_scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            input = block(input)
        output: torch.Tensor = self.head(input)
        return output


@pytest.fixture
def model() -> CutModel:
    torch.manual_seed(0)
    return cut(Stack())


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return {"input": torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32))}


def step(model: CutModel, inputs: Any, boundary: int) -> tuple[float, bytes]:
    targets = torch.zeros(ROWS, dtype=torch.long)
    z = model.bottom(inputs, boundary) if boundary else None
    loss, gradient, _ = model.first_order(
        inputs, boundary, z, lambda output: nn.functional.cross_entropy(output, targets)
    )
    return loss, gradient.tobytes()


def peak(model: CutModel, inputs: Any, boundary: int) -> int:
    with Tracked() as tracked:
        step(model, inputs, boundary)
    return tracked.peak


def test_a_storage_counts_once_rounded_up_until_it_dies() -> None:
    outside = torch.from_numpy(np.zeros(1000, dtype=np.float32))
    with Tracked() as tracked:
        a = torch.ones(1000)  # 4000 bytes: eight grains
        assert tracked.current == 8 * GRAIN
        view = a.view(10, 100)[2:]
        a.add_(1.0)
        outside.mul_(2.0)
        assert tracked.current == 8 * GRAIN
        del a
        assert tracked.current == 8 * GRAIN  # the view holds its storage
        b = view + 1.0  # 3200 bytes
        del view
        assert tracked.current == 7 * GRAIN
    assert tracked.peak == 15 * GRAIN
    del b
    assert tracked.current == 0
    with tracked:
        torch.ones(1)
    assert (tracked.current, tracked.peak) == (0, 15 * GRAIN)


def test_a_recorded_forward_pass_keeps_each_tanh_and_nothing_else(model: CutModel, inputs: Any) -> None:
    """Tanh saves its result, Linear its input, which is the tanh before; its own result dies."""
    with Tracked() as tracked, torch.enable_grad():
        output = model.full(inputs)
        assert tracked.current == BLOCKS * ACTIVATION + LOGITS
    assert tracked.peak == (BLOCKS + 1) * ACTIVATION  # in the last block its linear result lives too
    del output
    assert tracked.current == 0


def test_a_bottom_pass_keeps_its_result_alone(model: CutModel, inputs: Any) -> None:
    with Tracked() as tracked:
        z = model.bottom(inputs, BLOCKS)
        assert tracked.current == ACTIVATION
    assert tracked.peak == 3 * ACTIVATION  # a block's input, its linear result, its tanh
    del z


@pytest.mark.parametrize("boundary", range(BLOCKS))
def test_a_step_keeps_what_is_above_its_boundary(model: CutModel, inputs: Any, boundary: int) -> None:
    """Boundary b >= 1: z and L - b tanh results; at the top of the backward pass two gradients with them."""
    kept = BLOCKS - boundary + 1 if boundary else BLOCKS
    targets, small = ROWS * 8, 4 * LOGITS + 16 * GRAIN
    found = peak(model, inputs, boundary)
    assert (kept + 2) * ACTIVATION + targets <= found <= (kept + 2) * ACTIVATION + targets + small


def test_deeper_boundaries_need_less(model: CutModel, inputs: Any) -> None:
    peaks = [peak(model, inputs, boundary) for boundary in range(BLOCKS + 1)]
    assert peaks == sorted(peaks, reverse=True) and peaks[1] - peaks[3] >= 2 * ACTIVATION
    assert peaks[-1] < peaks[0] / 1.9


def test_checkpointing_needs_less(inputs: Any) -> None:
    torch.manual_seed(0)
    plain, saving = cut(Stack()), cut(Stack(), checkpointing=True)
    wide = [nn.Sequential(*(nn.Tanh() for _ in range(8))) for _ in range(2)]
    for model in (plain, saving):
        for block, extra in zip(model.elements, wide, strict=False):
            block.append(extra)
    assert peak(saving, inputs, 0) < peak(plain, inputs, 0) - 6 * ACTIVATION


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "none"])
def test_no_estimator_changes_a_bit_and_none_leaves_a_byte(
    model: CutModel, inputs: Any, estimator: str
) -> None:
    found = []
    for tracked in (nullcontext(), Tracked()):
        with tracked:
            directions = Directions(Key.of(1, "directions", 0, 1), "gaussian", 3, model.layout.bottom_size(3))
            z, scalars = ESTIMATORS[estimator](model.surrogate(inputs, 3), directions, 1e-3, True)
            found.append(
                (z.numpy().tobytes(), scalars(torch.ones_like(z)).values.tobytes(), step(model, inputs, 2))
            )
            del z, scalars, directions
    assert found[0] == found[1]
    assert isinstance(tracked, Tracked) and tracked.peak > 3 * ACTIVATION and tracked.current == 0


def test_what_a_client_holds_of_the_model(model: CutModel) -> None:
    block, head, embed = (WIDTH * WIDTH + WIDTH) * 4, (CLASSES * WIDTH + CLASSES) * 4, WIDTH * (WIDTH + 1) * 4
    assert resident_bytes(model, None) == embed + BLOCKS * block + head
    assert [resident_bytes(model, b) for b in range(BLOCKS + 1)] == [
        embed + b * block for b in range(BLOCKS + 1)
    ]


def allocate(memory: ClientMemory, model: CutModel, client: int, boundary: int | None, grains: int) -> Any:
    with memory.of(client, boundary, model, 0):
        return torch.ones(grains * GRAIN // 4)


def test_a_client_is_measured_until_a_round_with_its_boundary_is_over(model: CutModel) -> None:
    memory, held = ClientMemory(), resident_bytes(model, 0)
    allocate(memory, model, 0, 1, 5)
    assert memory.take() == (None, 0)
    memory.on = True
    allocate(memory, model, 0, 1, 5)
    allocate(memory, model, 1, 1, 7)
    assert memory.take() == (held + 7 * GRAIN, 0)
    allocate(memory, model, 2, 1, 9)
    assert memory.take() == (None, 0)
    allocate(memory, model, 2, 3, 2)
    assert memory.take() == (held + 2 * GRAIN, 0)


def test_what_a_client_keeps_between_two_actions_counts_in_the_second(model: CutModel) -> None:
    memory, held = ClientMemory(on=True), resident_bytes(model, 0)
    kept = allocate(memory, model, 0, None, 4)
    allocate(memory, model, 1, None, 6)
    allocate(memory, model, 0, None, 3)
    del kept
    allocate(memory, model, 0, None, 5)
    assert memory.take() == (held + 7 * GRAIN, 0)


def test_an_action_that_fails_was_measured_up_to_there(model: CutModel) -> None:
    memory = ClientMemory(on=True)
    with pytest.raises(ValueError, match="boom"), memory.of(0, None, model, None):
        torch.ones(GRAIN)
        raise ValueError("boom")
    assert memory.take() == (resident_bytes(model, None) + 4 * GRAIN, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_counts_what_the_allocator_counts() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = cut(Stack().to(device))
    memory, held = ClientMemory(on=True), resident_bytes(model, None)
    before = torch.cuda.memory_allocated(device)
    big = torch.ones(1 << 20, device=device)
    del big
    with memory.of(0, None, model, None):
        kept = torch.ones(4 * GRAIN, device=device)
    with memory.of(0, None, model, None):
        torch.ones(2 * GRAIN, device=device)
    peak, highest = memory.take()
    assert peak == held + 24 * GRAIN and highest >= before + (4 << 20)
    del kept
