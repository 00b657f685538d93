# SPDX-License-Identifier: Apache-2.0
"""Each forward-mode rule against reverse mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from families import numbers
from hofl.models.rules import ForwardRules

X, W, BIAS = numbers(5, 4), numbers(4, 4, key=2), numbers(4, key=3)
ATTEND = functional.scaled_dot_product_attention
HEADS = numbers(2, 4, 6, 8)
PADDED = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
PADDED[1, :, :2] = False  # the first two queries of the second row see no key
# every query sees a key here: for a row of finfo.min alone the fused kernel's own backward is wrong
ADDED = torch.zeros(2, 1, 6, 6).masked_fill(~PADDED.roll(2, -1), torch.finfo(torch.float32).min)
ADDED[..., 0] = 0.3


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    y *= 2
    y += x * x
    return y * x


OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "linear": (lambda x: functional.linear(x, W, BIAS), X),
    "linear weight": (lambda x: functional.linear(X, x, BIAS), W),
    "linear bias": (lambda x: functional.linear(X, W, x), BIAS),
    "linear both": (lambda x: functional.linear(x, x), X),
    "addmm": (lambda x: torch.addmm(BIAS, x, W), X),
    "addmm bias": (lambda x: torch.addmm(x, X, W), BIAS),
    "addmm scaled": (lambda x: torch.addmm(BIAS, x, W, alpha=2.0), X),
    "mul": (lambda x: x * BIAS, X),
    "mul by a number": (lambda x: 3 * x * 2.0, X),
    "mul grows": (lambda x: x * X, BIAS),
    "mul both": (lambda x: x * x.sin(), X),
    "div": (lambda x: x / (2 + BIAS.abs()), X),
    "div by a number": (lambda x: x / 3.0, X),
    "div grows": (lambda x: x / (2 + X.abs()), BIAS),
    "div of a number": (lambda x: 1.5 / (2 + x * x), X),
    "div by what varies": (lambda x: BIAS / (2 + x * x), X),
    "div both": (lambda x: x / (2 + x * x), X),
    "div rounded": (lambda x: x + torch.div(x, 0.3, rounding_mode="floor"), X),
    "add": (lambda x: x + BIAS, X),
    "add a number": (lambda x: 1 + (x + 2.0), X),
    "add grows": (lambda x: X + x, BIAS),
    "add scaled": (lambda x: torch.add(x, BIAS, alpha=2), X),
    "in place": (in_place, X),
    "attention": (lambda x: ATTEND(x, x.sin(), x.cos()), HEADS),
    "attention causal": (lambda x: ATTEND(x, x.sin(), x.cos(), is_causal=True), HEADS),
    "attention scale": (lambda x: ATTEND(x, x.sin(), x.cos(), scale=0.7), HEADS),
    "attention masked": (lambda x: ATTEND(x, x.sin(), x.cos(), attn_mask=PADDED), HEADS),
    "attention float mask": (lambda x: ATTEND(x, x.sin(), x.cos(), attn_mask=ADDED), HEADS),
    "attention grouped": (lambda x: ATTEND(x, x[:, :2].sin(), x[:, 2:].cos(), enable_gqa=True), HEADS),
    "attention queries": (lambda x: ATTEND(x, HEADS, HEADS), HEADS),
    "attention keys": (lambda x: ATTEND(HEADS, x, HEADS), HEADS),
    "attention values": (lambda x: ATTEND(HEADS, HEADS, x), HEADS),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rule_is_the_transpose_of_reverse_mode(name: str) -> None:
    operation, point = OPERATIONS[name]
    tangents = numbers(3, *point.shape, key=7)

    def along(tangent: Tensor) -> tuple[Tensor, Tensor]:
        def ruled(x: Tensor) -> Tensor:
            with ForwardRules():
                return operation(x)

        return torch.func.jvp(ruled, (point,), (tangent,))

    value, forward = torch.func.vmap(along, out_dims=(None, 0))(tangents)
    leaf = point.clone().requires_grad_()
    plain = operation(leaf)
    feedback = numbers(*plain.shape, key=9)
    (gradient,) = torch.autograd.grad(plain, leaf, feedback)
    expected = (tangents * gradient).flatten(1).sum(1)
    assert torch.equal(value, plain.detach())
    assert torch.allclose((forward * feedback).flatten(1).sum(1), expected, rtol=1e-4, atol=1e-4)


def test_outside_a_tangent_nothing_changes() -> None:
    with ForwardRules():
        assert torch.equal(functional.linear(X, W, BIAS), X @ W.T + BIAS)
        assert torch.equal(ATTEND(HEADS, HEADS, HEADS, attn_mask=PADDED), ATTEND(HEADS, HEADS, HEADS, PADDED))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.tanh(x / 50.0) * 50.0,  # as Gemma 2 caps its scores
        lambda x: x / torch.arange(1.0, 5.0, dtype=torch.float64),
        lambda x: x * x.sin(),
        lambda x: (x * x[:, :1].exp()) / 3,
    ],
)
def test_quotients_and_products_against_central_differences(operation: Callable[[Tensor], Tensor]) -> None:
    """Float64 with a step of 1e-5: the differences themselves are good to about 1e-9."""
    point, along = X.double(), numbers(5, 4, key=11).double()

    def ruled(x: Tensor) -> Tensor:
        with ForwardRules():
            return operation(x)

    _, found = torch.func.jvp(ruled, (point,), (along,))
    expected = (operation(point + 1e-5 * along) - operation(point - 1e-5 * along)) / 2e-5
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8)
