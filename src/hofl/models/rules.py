# SPDX-License-Identifier: Apache-2.0
"""Forward-mode rules that PyTorch lacks or has only at a price.

For an operation with one varying operand PyTorch computes ``dx W + x dW`` with a zero ``dW``. In a
linear map that is one more product of full size, in an elementwise product a slow Python path.
Its fused attention has no rule at all. With these the primal runs the very kernels of a plain
pass, so z has the same bits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

_attend = torch.nn.functional.scaled_dot_product_attention


def unpack_dual(value: Tensor) -> tuple[Tensor, Any]:
    """Primal and tangent (None where there is none)."""
    primal, tangent = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return primal, tangent


def make_dual(primal: Tensor, tangent: Any) -> Tensor:
    """The inverse of :func:`unpack_dual`."""
    dual: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return dual


def varying(value: Any) -> bool:
    """Whether a value is a tensor that carries a tangent."""
    return isinstance(value, Tensor) and value.is_floating_point() and unpack_dual(value)[1] is not None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if varying(weight) or varying(bias) or not varying(input):
        return None
    own = torch.nn.functional.linear
    x, dx = unpack_dual(input)
    return make_dual(own(x, weight, bias), own(dx, weight))


def _addmm(*operands: Tensor, **others: Any) -> Tensor | None:
    if (
        others
        or len(operands) != 3
        or varying(operands[0])
        or varying(operands[2])
        or not varying(operands[1])
    ):
        return None
    bias, left, right = operands
    x, dx = unpack_dual(left)
    return make_dual(torch.addmm(bias, x, right), dx @ right)


def _mul(*operands: Any, **others: Any) -> Tensor | None:
    if not others and len(operands) == 2 and all(map(varying, operands)):
        (x, dx), (y, dy) = map(unpack_dual, operands)
        return make_dual(x * y, (dx * y).add_(x * dy))  # PyTorch's own rule keeps a third of them
    pair = _one_varies(operands, others)
    if pair is None:
        return None
    (x, dx), fixed = pair
    return make_dual(x * fixed, dx * fixed)


def _div(*operands: Any, **others: Any) -> Tensor | None:
    if others or len(operands) != 2 or not varying(operands[0]) or varying(operands[1]):
        return None
    (x, dx), fixed = unpack_dual(operands[0]), operands[1]
    return make_dual(x / fixed, dx / fixed)


def _add(*operands: Any, **others: Any) -> Tensor | None:
    pair = _one_varies(operands, others)
    if pair is None:
        return None
    (x, dx), fixed = pair
    total = x + fixed
    # a copy, for a later operation in place must not reach the tangent of x
    return make_dual(total, dx.clone()) if total.shape == x.shape and total.dtype == x.dtype else None


def _one_varies(operands: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, Any] | None:
    """(primal and tangent of the one operand that varies, the other operand), if it is so."""
    if others or len(operands) != 2 or varying(operands[0]) == varying(operands[1]):
        return None
    varied, fixed = operands if varying(operands[0]) else operands[::-1]
    return unpack_dual(varied), fixed


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or query.dim() != 4 or not any(map(varying, (query, key, value))):
        return None
    (q, dq), (k, dk), (v, dv) = map(unpack_dual, (query, key, value))
    out = _attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    groups = q.shape[1] // k.shape[1]
    k, dk, v, dv = (_repeated(tensor, groups) for tensor in (k, dk, v, dv))
    factor = scale or 1 / math.sqrt(q.shape[-1])
    q, slope_k = q * factor, k * factor  # scaled here, where no batch of tangents rides along
    weights = _weights(q, k, attn_mask, is_causal)
    tangents = [] if dv is None else [weights.to(v.dtype) @ dv]
    slopes = ((a, b) for a, b in ((dq, slope_k), (q, dk)) if a is not None and b is not None)
    bent = None
    for a, b in slopes:  # in place, and freed at once: with all q they are the largest tensors there are
        bent = a @ b.mT if bent is None else bent.add_(a @ b.mT)
    if bent is not None:
        bent = weights * bent
        tangents.append(bent.sub_(weights * bent.sum(-1, keepdim=True)).to(v.dtype) @ v)
    return make_dual(out, sum(tangents[1:], tangents[0]))


def _repeated(tensor: Tensor | None, groups: int) -> Any:
    """Keys or values, one for each head of the queries."""
    return tensor if tensor is None or groups == 1 else tensor.repeat_interleave(groups, 1)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Float32 [batch, heads, queries, keys] for scaled queries; a row with no key allowed is 0."""
    scores = (q @ k.mT).float()
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: _addmm,
    torch.mul: _mul,
    torch.Tensor.mul: _mul,
    torch.Tensor.__rmul__: _mul,
    torch.div: _div,
    torch.Tensor.div: _div,
    torch.Tensor.__truediv__: _div,
    torch.add: _add,
    torch.Tensor.add: _add,
    torch.Tensor.__radd__: _add,
    _attend: _attention,
}
"""Operation -> a function of its arguments that returns the dual result, or None to leave it to PyTorch."""


class ForwardRules(TorchFunctionMode):
    """Inside it, the operations above use these rules where they apply."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs ``func`` by its rule, if it has one."""
        rule = _RULES.get(func)
        found = rule(*args, **(kwargs or {})) if rule else None
        return func(*args, **(kwargs or {})) if found is None else found
