# SPDX-License-Identifier: Apache-2.0
"""The bottom as a function: values, tangents and recorded gradient against autograd."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from families import CAUSAL, NAMES, WIDTH, Case, case, digest, full_case, numbers, tokens
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.boundary import cut

BOUNDARIES = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def exact(subject: Case, boundary: int) -> tuple[Tensor, np.ndarray]:
    """The feedback, and the bottom's gradient by plain backprop of the whole model."""
    model = subject.model
    z = model.bottom(subject.inputs, boundary)
    _, _, feedback = model.first_order(subject.inputs, boundary, z, subject.loss)
    _, gradient, _ = model.first_order(subject.inputs, 0, None, subject.loss)
    return feedback, gradient[: model.layout.bottom_size(boundary)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_tangents_are_directional_derivatives(subject: Case, boundary: int) -> None:
    feedback, gradient = exact(subject, boundary)
    surrogate = subject.model.surrogate(subject.inputs, boundary)
    directions = numbers(3, len(gradient))
    z, tangents = surrogate.tangents(directions)
    scalars = (tangents.double() * feedback.double()).flatten(1).sum(1)
    expected = directions.double() @ torch.from_numpy(gradient).double()
    assert tangents.shape == (3, *z.shape)
    assert torch.equal(z, surrogate.outputs())
    assert (scalars - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_recorded_gradient_is_full_backprop_exactly(subject: Case, boundary: int) -> None:
    feedback, gradient = exact(subject, boundary)
    z, pull = subject.model.surrogate(subject.inputs, boundary).recorded()
    assert not z.requires_grad and torch.equal(z, subject.model.bottom(subject.inputs, boundary))
    assert np.array_equal(pull(feedback), gradient)


def test_nothing_moves(subject: Case) -> None:
    model = subject.model
    before = digest(model.module)
    own = {id(p) for p in model.module.parameters()}
    surrogate = model.surrogate(subject.inputs, 2)
    surrogate.outputs()
    z, _ = surrogate.tangents(numbers(2, len(surrogate.anchor)))
    surrogate.recorded()[1](torch.ones_like(z))
    for step in range(10):
        surrogate.write(surrogate.anchor + np.float32(step), 0)
        surrogate.write(surrogate.anchor, 0)
    assert digest(model.module) == before
    assert {id(p) for p in model.module.parameters()} == own
    assert not any("forward" in vars(block) for block in model.elements)


def test_zero_direction_gives_exact_zero(subject: Case) -> None:
    surrogate = subject.model.surrogate(subject.inputs, 3)
    assert not surrogate.tangents(torch.zeros(2, len(surrogate.anchor)))[1].any()
    assert torch.equal(surrogate.outputs(), surrogate.outputs())


def test_values_follow_the_live_parameters() -> None:
    subject = case("llama")
    surrogate = subject.model.surrogate(subject.inputs, 2)
    at_anchor = surrogate.outputs()
    surrogate.write(np.zeros(8, np.float32), 8)
    assert not torch.equal(surrogate.outputs(), at_anchor)
    surrogate.write(surrogate.anchor[8:16], 8)
    assert torch.equal(surrogate.outputs(), at_anchor)


def test_the_anchor_is_private_and_the_bottom_ends_at_the_boundary() -> None:
    subject = case("sequential")
    surrogate = subject.model.surrogate(subject.inputs, 1)
    kept = surrogate.anchor.copy()
    surrogate.write(kept + 1, 0)
    assert np.array_equal(surrogate.anchor, kept)
    with pytest.raises(ModelError, match="beyond the bottom"):
        surrogate.write(np.zeros(2, np.float32), len(kept) - 1)


def test_a_bottom_without_trainables() -> None:
    module = case("sequential").model.module
    model = cut(module, trainable=lambda name: name.startswith("3."))
    surrogate = model.surrogate({"input": numbers(3, WIDTH)}, 2)
    z, tangents = surrogate.tangents(torch.zeros(2, 0))
    assert tangents.shape == (2, *z.shape) and not tangents.any()
    assert len(surrogate.recorded()[1](torch.ones_like(z))) == 0


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma3"])
def test_full_parameter_bottom(family: str) -> None:
    model = full_case(family)
    subject = Case(model, tokens(), lambda o: o[tokens()["attention_mask"].bool()].logsumexp(-1).mean())
    feedback, gradient = exact(subject, 2)
    surrogate = model.surrogate(subject.inputs, 2)
    directions = numbers(2, len(gradient))
    scalars = (surrogate.tangents(directions)[1].double() * feedback).flatten(1).sum(1)
    expected = directions.double() @ torch.from_numpy(gradient).double()
    assert (scalars - expected).abs().max() <= 2e-5 * directions.norm(dim=1).max() * np.linalg.norm(gradient)
    assert np.array_equal(surrogate.recorded()[1](feedback), gradient)


class Shared(nn.Module):
    """Two blocks that hold the very same layer, and reach it by two names each."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.first = self.second = layer

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(input)))


def test_a_shared_submodule_is_restored() -> None:
    """C09: after forward mode, and after the evaluations at ``anchor + r u`` and ``anchor - r u``."""
    layer = nn.Linear(WIDTH, WIDTH)
    model = cut(nn.Sequential(Shared(layer), Shared(layer), nn.Linear(WIDTH, 2)))
    inputs = {"input": numbers(3, WIDTH)}
    before = digest(model.module)
    subject = Case(model, inputs, lambda o: o.square().mean())
    feedback, gradient = exact(subject, 2)
    surrogate = model.surrogate(inputs, 2)
    directions = numbers(2, len(gradient))
    scalars = (surrogate.tangents(directions)[1] * feedback).flatten(1).sum(1)
    assert torch.allclose(scalars, directions @ torch.from_numpy(gradient), rtol=1e-4)
    assert digest(model.module) == before and model.module[0].first is model.module[1].second
    assert len(gradient) == WIDTH * WIDTH + WIDTH
    u = Directions(Key.of(4, "directions"), "gaussian", 2, len(gradient))
    found = ESTIMATORS["central"](surrogate, u, 1e-3, False)[1](feedback).values
    assert np.abs(found - u.project(gradient)).max() <= 2e-2 * np.linalg.norm(gradient)
    assert digest(model.module) == before
    with pytest.raises(ModelError, match=r"0\.first"):
        model.surrogate(inputs, 1)


class Stubborn(torch.autograd.Function):
    """Has no forward-mode rule."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2


class NoForwardMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return Stubborn.apply(self.layer(input))


def test_a_model_without_forward_mode_is_told_the_alternatives() -> None:
    model = cut(nn.Sequential(NoForwardMode(), nn.Linear(WIDTH, 2)))
    with pytest.raises(ModelError, match=r'zo\.estimator = "tangent".*"forward".*"sketch"'):
        model.surrogate({"input": numbers(3, WIDTH)}, 1).tangents(numbers(1, model.layout.bottom_size(1)))


@pytest.mark.parametrize("family", CAUSAL)
def test_padding_on_the_left_changes_nothing_that_counts(family: str) -> None:
    """C20: four pads; without explicit positions GPT-2, whose positions are absolute, would tell them."""
    model = case(family).model
    with torch.no_grad():
        bare = model.full(tokens((6,)))
        padded = model.full(tokens((6,), left=True, pads=4))[:, 4:]
        rows = model.full(tokens((10, 6, 3), left=True))[:1]
        assert (padded - bare).abs().max() <= 1e-5
        assert (rows - model.full(tokens((10,)))).abs().max() <= 1e-5
        if family == "gpt2":
            inputs = tokens((6,), left=True, pads=4)
            del inputs["position_ids"]
            assert (model.full(inputs)[:, 4:] - bare).abs().max() > 0.1


def test_bfloat16_is_cut_bit_for_bit() -> None:
    """C22: the scale of Gemma's embeddings is applied once, below the cut."""
    subject = case("gemma2")
    module = subject.model.module
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model, inputs = cut(module), tokens()
    z = model.bottom(inputs, 2)
    with torch.no_grad():
        assert z.dtype == torch.bfloat16
        assert torch.equal(model.top(inputs, 2, z), model.full(inputs))
    assert model.read().dtype == np.float32
