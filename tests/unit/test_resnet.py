# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from families import digest, numbers
from hofl.checks import RESNETS as LISTED
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.core.layout import EMBED
from hofl.errors import ConfigError
from hofl.models.boundary import CutModel, cut
from hofl.models.resnet import RESNETS, FixedBatchNorm, resnet

KEY = Key.of(3, "init")
CASES = [
    (depth, norm)
    for depth, norms in {
        "resnet8": ("group", "batch", "batch-frozen"),
        "resnet18": ("group", "batch"),
    }.items()
    for norm in norms
]
TARGETS = torch.tensor([0, 3, 1, 2])


def loss(output: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, TARGETS)


def cut_of(depth: str, norm: str, key: Key = KEY) -> tuple[CutModel, dict[str, Tensor]]:
    """A narrow network whose running statistics are not 0 and 1, and a batch."""
    module = resnet(depth, classes=4, channels=3, key=key, norm=norm, width=4)  # type: ignore[arg-type]
    for place, (name, buffer) in enumerate(module.named_buffers()):
        if name.endswith("running_mean"):
            buffer.copy_(0.1 * numbers(*buffer.shape, key=place))
        elif name.endswith("running_var"):
            buffer.copy_(numbers(*buffer.shape, key=place).square() + 0.5)
    return cut(module), {"input": numbers(4, 3, 8, 8)}


@pytest.mark.parametrize(("depth", "norm"), CASES)
def test_first_order_gradients_are_those_of_full_backprop_at_every_boundary(depth: str, norm: str) -> None:
    model, inputs = cut_of(depth, norm)
    model.self_test(inputs)
    whole, gradient, _ = model.first_order(inputs, 0, None, loss)
    for boundary in range(1, model.blocks):
        part, top, feedback = model.first_order(inputs, boundary, model.bottom(inputs, boundary), loss)
        assert part == whole and feedback is not None
        assert np.array_equal(top, gradient[model.layout.bottom_size(boundary) :])


@pytest.mark.parametrize(("depth", "norm"), CASES)
def test_every_estimator_sees_the_same_slope_and_z_has_the_same_bits(depth: str, norm: str) -> None:
    model, inputs = cut_of(depth, norm)
    before = model.read()
    for boundary in (1, model.blocks // 2, model.blocks):
        z = model.bottom(inputs, boundary)
        feedback = numbers(*z.shape, key=9)
        found = {}
        for name in ("tangent", "sketch", "forward", "central"):
            u = Directions(KEY, "gaussian", 4, model.layout.bottom_size(boundary))
            seen, scalars = ESTIMATORS[name](model.surrogate(inputs, boundary), u, 1e-4, False)
            assert torch.equal(seen, z)
            found[name] = scalars(feedback).values
        exact = found["sketch"]
        assert np.abs(found["tangent"] - exact).max() < 1e-4 * np.abs(exact).max()
        for name in ("forward", "central"):  # a step across a kink of ReLU is off
            assert np.linalg.norm(found[name] - exact) < 0.2 * np.linalg.norm(exact), name
    assert np.array_equal(model.read(), before)


@pytest.mark.parametrize("depth", ["resnet8", "resnet18"])
def test_c17_a_server_that_has_run_no_bottom_has_the_top_at_every_cut(depth: str) -> None:
    """Stem, blocks and head are of three classes; of the images it has only how many there are."""
    (client, inputs), (server, _) = (cut_of(depth, "group") for _ in range(2))
    server.self_test(inputs)
    for boundary in range(1, server.blocks + 1):
        z = client.bottom(inputs, boundary)
        _, gradient, _ = server.first_order({"input": z.new_zeros(len(z))}, boundary, z, loss)
        assert np.array_equal(gradient, client.first_order(inputs, boundary, z, loss)[1])


@pytest.mark.parametrize("norm", ["batch", "batch-frozen"])
def test_running_statistics_never_move_and_train_wakes_nothing(norm: str) -> None:
    """C65: they are not averaged, for they are constants of the model."""
    model, inputs = cut_of("resnet8", norm)
    statistics = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    assert len(statistics) == 3 * 9
    plain = model.full(inputs)
    model.module.train()
    norms = [part for part in model.module.modules() if isinstance(part, FixedBatchNorm)]
    assert len(norms) == 9 and not any(part.training for part in norms)
    assert torch.equal(model.module(inputs["input"]), plain)  # the module itself, past the cut model
    values = model.read()
    for _ in range(3):
        model.module.train()
        z = model.bottom(inputs, 2)
        u = Directions(KEY, "gaussian", 2, model.layout.bottom_size(2))
        for estimator in ESTIMATORS.values():
            estimator(model.surrogate(inputs, 2), u, 1e-2, True)[1](z)
        _, gradient, _ = model.first_order(inputs, 0, None, loss)
        values -= np.float32(0.1) * gradient
        model.write(values)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.module.named_buffers())


def test_what_a_norm_trains() -> None:
    layouts = {norm: cut_of("resnet8", norm)[0].layout for norm in ("group", "batch", "batch-frozen")}
    assert layouts["group"].fingerprint == layouts["batch"].fingerprint
    channels = 4 + (4 + 4) + 3 * 8 + 3 * 16  # stem, a block without and two with a norm in the shortcut
    assert layouts["batch"].size - layouts["batch-frozen"].size == 2 * channels
    assert not any("norm" in slot.name for slot in layouts["batch-frozen"].slots)


@pytest.mark.parametrize(
    ("depth", "blocks", "side", "size"), [("resnet18", 10, 4, 11_173_962), ("resnet8", 5, 8, 78_042)]
)
def test_the_form_and_size(depth: str, blocks: int, side: int, size: int) -> None:
    model = cut(resnet(depth, classes=10, channels=3, key=KEY))
    layout = model.layout
    assert (layout.blocks, layout.size) == (blocks, size)
    assert {slot.block for slot in layout.slots} == set(range(blocks)) and EMBED not in range(blocks)
    z = model.bottom({"input": numbers(1, 3, 32, 32)}, blocks - 1)
    assert z.shape == (1, {"resnet18": 512, "resnet8": 64}[depth], side, side)
    assert model.full({"input": numbers(2, 3, 32, 32)}).shape == (2, 10)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_start_is_stable(norm: str) -> None:
    module = resnet("resnet18", classes=10, channels=3, key=KEY, norm=norm, width=16)  # type: ignore[arg-type]
    model, inputs = cut(module), {"input": numbers(8, 3, 16, 16)}
    spreads = [float(model.bottom(inputs, boundary).std()) for boundary in range(1, 11)]
    assert all(0.3 < spread < 2 for spread in spreads), spreads


def test_the_key_decides_every_parameter_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (
        resnet("resnet8", classes=3, channels=1, key=Key.of(seed, "init")) for seed in (1, 1, 2)
    )
    assert digest(one) == digest(same) != digest(other)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [parameter for parameter in one.parameters() if parameter.ndim > 1]
    assert len({float(weight.detach().flatten()[0]) for weight in weights}) == len(weights)


def test_checkpointing_changes_no_bit() -> None:
    plain, inputs = cut_of("resnet8", "group")
    saving = cut(resnet("resnet8", classes=4, channels=3, key=KEY, width=4), checkpointing=True)
    for boundary in (0, 2):
        z = plain.bottom(inputs, boundary) if boundary else None
        assert np.array_equal(
            plain.first_order(inputs, boundary, z, loss)[1], saving.first_order(inputs, boundary, z, loss)[1]
        )


def test_an_unknown_depth_lists_those_that_are() -> None:
    assert set(LISTED) == set(RESNETS)
    with pytest.raises(
        ConfigError, match=r"model\.source = 'resnet50': allowed for images are resnet18 and resnet8"
    ):
        resnet("resnet50", classes=2, channels=3, key=KEY)
