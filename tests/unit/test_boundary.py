# SPDX-License-Identifier: Apache-2.0
"""The cut at every boundary of every family, against the whole model."""

import numpy as np
import pytest
import torch
from torch import nn

from families import NAMES, Case, case, digest, full_case, tokens
from hofl.core.layout import EMBED
from hofl.errors import ConfigError, ModelError
from hofl.models.boundary import CutModel, cut, normalised

BOUNDARIES = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def whole_gradient(subject: Case) -> tuple[float, np.ndarray]:
    """Plain backprop by torch alone, in layout order."""
    with torch.enable_grad():
        value = subject.loss(subject.model.full(subject.inputs))
        parameters = [p for _, p in subject.model.trainables()]
        gradients = torch.autograd.grad(value, parameters)
    return float(value.detach()), torch.cat([g.reshape(-1) for g in gradients]).numpy()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_bottom_then_top_is_the_whole_bit_for_bit(subject: Case, boundary: int) -> None:
    """C17."""
    model = subject.model
    z = model.bottom(subject.inputs, boundary)
    with torch.no_grad():
        assert torch.equal(model.top(subject.inputs, boundary, z), model.full(subject.inputs))
    assert z.grad_fn is None and not z.requires_grad


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_top_ignores_what_lies_below(subject: Case, boundary: int) -> None:
    """C17: whatever is in the blocks below, frozen weights included."""
    model = subject.model
    below = [p for block in model.elements[:boundary] for p in block.parameters() if not p.requires_grad]
    frozen = [p.detach().clone() for p in below]
    z = model.bottom(subject.inputs, boundary)
    with torch.no_grad():
        before = model.top(subject.inputs, boundary, z)
        ran: list[int] = []
        handles = [
            block.register_forward_hook(lambda *_, i=i: ran.append(i))
            for i, block in enumerate(model.elements)
        ]
        kept = model.read()
        model.write(np.full(model.layout.bottom_size(boundary), 7, np.float32))
        for parameter in below:
            parameter.fill_(7)
        after = model.top(subject.inputs, boundary, z)
        model.write(kept)
        for parameter, values in zip(below, frozen, strict=True):
            parameter.copy_(values)
    for handle in handles:
        handle.remove()
    assert torch.equal(before, after)


@pytest.mark.parametrize("boundary", (0, *BOUNDARIES))
def test_first_order_gradient_is_full_backprop_exactly(subject: Case, boundary: int) -> None:
    model = subject.model
    value, expected = whole_gradient(subject)
    z = model.bottom(subject.inputs, boundary) if boundary else None
    loss, gradient, feedback = model.first_order(subject.inputs, boundary, z, subject.loss)
    assert loss == value
    assert gradient.dtype == np.float32
    assert np.array_equal(gradient, expected[model.layout.bottom_size(boundary) :])
    assert (feedback is None) == (boundary == 0)
    if feedback is not None:
        assert feedback.shape == z.shape and not feedback.requires_grad and feedback.abs().max() > 0
    assert all(p.requires_grad and p.grad is None for _, p in model.trainables())


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_checkpointing_changes_no_bit(subject: Case, boundary: int) -> None:
    model = subject.model
    z = model.bottom(subject.inputs, boundary)
    _, plain, feedback = model.first_order(subject.inputs, boundary, z, subject.loss)
    model.checkpointing = True
    try:
        _, again, refeedback = model.first_order(subject.inputs, boundary, z, subject.loss)
    finally:
        model.checkpointing = False
    assert np.array_equal(plain, again)
    assert torch.equal(feedback, refeedback)


def test_self_test_passes_and_leaves_no_trace(subject: Case) -> None:
    before = digest(subject.model.module)
    subject.model.self_test(subject.inputs)
    assert digest(subject.model.module) == before
    assert not any("forward" in vars(block) for block in subject.model.elements)


def test_a_failing_loss_leaves_the_model_whole() -> None:
    subject = case("llama", checkpointing=True)
    z = subject.model.bottom(subject.inputs, 2)
    with pytest.raises(ZeroDivisionError):
        subject.model.first_order(subject.inputs, 2, z, lambda output: output / (1 // 0))
    assert not any("forward" in vars(block) for block in subject.model.elements)
    assert all(parameter.requires_grad for _, parameter in subject.model.trainables())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_b_moves_in_all_blocks_above_only(checkpointing: bool) -> None:
    """C27: q and v of two blocks are 4 of 4 above the cut, of four blocks 8 of 8 in the whole model."""
    subject = case("llama", checkpointing=checkpointing)
    _, whole, _ = subject.model.first_order(subject.inputs, 0, None, subject.loss)
    every = [s for s in subject.model.layout.slots if "lora_B" in s.name]
    assert [np.any(whole[s.offset : s.offset + s.size]) for s in every] == [True] * 8
    z = subject.model.bottom(subject.inputs, 2)
    _, gradient, _ = subject.model.first_order(subject.inputs, 2, z, subject.loss)
    offset = subject.model.layout.bottom_size(2)
    above = [s for s in subject.model.layout.slots if s.block >= 2 and "lora_B" in s.name]
    moved = [s.name for s in above if np.any(gradient[s.offset - offset : s.offset - offset + s.size])]
    assert len(moved) == 4
    assert len(gradient) == subject.model.layout.size - offset


def test_a_trainable_the_loss_does_not_reach_is_named() -> None:
    subject = case("sequential")
    for layer in subject.model.elements[3:]:
        layer.register_parameter("lost", nn.Parameter(torch.ones(2)))
    model = cut(subject.model.module)
    with pytest.raises(ModelError, match=r"no gradient reached 3\.lost"):
        model.first_order(subject.inputs, 1, model.bottom(subject.inputs, 1), subject.loss)


# --- the vector


def test_parameters_are_views_of_the_vector(subject: Case) -> None:
    model = subject.model
    kept = model.read()
    model.write(np.arange(model.layout.size, dtype=np.float32))
    for slot, parameter in model.trainables():
        assert parameter.detach().reshape(-1)[-1] == slot.offset + slot.size - 1
    model.write(np.zeros(2, np.float32), start=3)
    assert model.read()[:6].tolist() == [0, 1, 2, 0, 0, 5]
    model.write(kept)


def test_read_is_a_copy() -> None:
    model = case("sequential").model
    first = model.read()
    model.write(first + 1)
    assert not np.array_equal(first, model.read())


def test_restoring_a_thousand_times_changes_nothing(subject: Case) -> None:
    model = subject.model
    before, anchor = digest(model.module), model.read()
    for step in range(1000):
        model.write(anchor + np.float32(1e-3) * (step % 7))
        model.write(anchor)
    assert digest(model.module) == before


def test_lora_count_and_bytes() -> None:
    """C33."""
    model = case("llama").model
    assert (len(model.layout.slots), model.layout.size, model.read().nbytes) == (16, 896, 3584)


def test_names_carry_no_wrapper_marks(subject: Case) -> None:
    names = [slot.name for slot in subject.model.layout.slots]
    assert not any(mark in name for name in names for mark in ("base_model", ".default", "modules_to_save"))
    assert names == [n for _, n in sorted((s.block, s.name) for s in subject.model.layout.slots)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            "base_model.model.model.layers.0.q_proj.lora_A.default.weight",
            "model.layers.0.q_proj.lora_A.weight",
        ),
        ("base_model.model.score.modules_to_save.default.weight", "score.weight"),
        ("_orig_mod.0.weight", "0.weight"),
    ],
)
def test_normalised(raw: str, expected: str) -> None:
    assert normalised(raw) == expected


def test_dropout_is_off_everywhere() -> None:
    """C07."""
    model = case("opt").model
    dropouts = [p for part in model.module.modules() for n, p in vars(part).items() if "drop" in n]
    assert model.module.get_base_model().config.dropout == 0.0
    assert not any(value for value in dropouts if isinstance(value, float))
    model.module.train()
    first = model.full(tokens())
    assert torch.equal(first, model.full(tokens())) and not model.module.training


# --- refusals


def test_boundaries_outside_the_model() -> None:
    subject = case("sequential")
    with pytest.raises(ConfigError, match=r"0\.\.4"):
        subject.model.bottom(subject.inputs, 5)
    with pytest.raises(ModelError, match="no bottom"):
        subject.model.bottom(subject.inputs, 0)
    with pytest.raises(ModelError, match="needs z"):
        subject.model.first_order(subject.inputs, 1, None, subject.loss)


def test_a_tied_trainable_across_the_cut_is_refused() -> None:
    model = full_case("llama", untied=False)
    inputs = tokens()
    model.self_test(inputs)
    assert len(model.first_order(inputs, 0, None, lambda o: o.square().mean())[1]) == model.layout.size
    for boundary in (1, 3):
        with pytest.raises(ModelError, match=r"embed_tokens.*freeze it, or train with .*lora"):
            model.surrogate(inputs, boundary)
        with pytest.raises(ModelError, match="separates"):
            model.first_order(inputs, boundary, model.bottom(inputs, boundary), torch.sum)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "opt-post-norm"])
def test_full_training_places_embeddings_below_and_heads_above(family: str) -> None:
    model = full_case(family)
    model.self_test(tokens())
    blocks = {slot.name: slot.block for slot in model.layout.slots}
    outside = {name: block for name, block in blocks.items() if block in (EMBED, 3)}
    assert {
        name for name, block in outside.items() if block == 3 and ("embed" in name or "wte" in name)
    } == set()
    assert blocks["lm_head.weight"] == 3 and min(blocks.values()) == EMBED


def test_a_misplaced_trainable_is_found_by_the_self_test() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.entrance = nn.Linear(4, 4)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            out = self.entrance(input)
            for block in self.blocks:
                out = block(out)
            return out

    with pytest.raises(ModelError, match=r"entrance.* was taken for the head"):
        cut(Odd()).self_test({"input": torch.ones(2, 4)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trainables_must_be_float32(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"must be float32.*model\.dtype"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype))


def test_nothing_to_train() -> None:
    with pytest.raises(ModelError, match="nothing to train"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), trainable=lambda name: False)


def test_trainable_by_name() -> None:
    model = cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), trainable=lambda name: name == "1.weight")
    assert [(slot.name, slot.block) for slot in model.layout.slots] == [("1.weight", 1)]


def test_an_output_without_logits() -> None:
    class Odd(nn.Sequential):
        def forward(self, input: torch.Tensor) -> list[torch.Tensor]:
            return [super().forward(input)]

    module = Odd(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ModelError, match="output="):
        cut(module).full({"input": torch.ones(1, 2)})
    own: CutModel = cut(module, output=lambda found: found[0])
    assert own.full({"input": torch.ones(1, 2)}).shape == (1, 2)
