# SPDX-License-Identifier: Apache-2.0
"""A forward-mode rule for linear maps with frozen weights.

PyTorch's own rule is ``dx W + x dW`` with a zero ``dW`` that it fills in and multiplies by, so
each frozen layer would cost one more forward. Here it is ``dx W``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """x -> affine(x), whose tangent is linear(dx); both close over frozen weights."""

    @staticmethod
    def forward(x: Tensor, affine: Map, linear: Map) -> Tensor:
        return affine(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map, Map], output: Tensor) -> None:
        ctx.linear = inputs[2]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        result: Tensor = ctx.linear(tangent)
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], x: Tensor, affine: Map, linear: Map
    ) -> tuple[Tensor, int]:
        return _apply(x.movedim(in_dims[0] or 0, 0), affine, linear), 0


def _apply(x: Tensor, affine: Map, linear: Map) -> Tensor:
    result: Tensor = _Linear.apply(x, affine, linear)  # type: ignore[no-untyped-call]
    return result


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Map, Map] | None:
    if not _frozen(weight, bias):
        return None
    own = torch._C._nn.linear
    return x, lambda v: own(v, weight, bias), lambda v: own(v, weight)


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Map, Map] | None:
    if not _frozen(weight, bias) or bias.dim() != 1:
        return None
    return x, lambda v: torch.matmul(v, weight) + bias, lambda v: torch.matmul(v, weight)


def _frozen(*tensors: Tensor | None) -> bool:
    """Swapped-in weights carry a tangent and are no ``nn.Parameter``."""
    return all(t is None or isinstance(t, nn.Parameter) for t in tensors)


_RULES: dict[Any, Callable[..., tuple[Tensor, Map, Map] | None]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: _addmm,
}


class FrozenLinears(TorchFunctionMode):
    """Inside it, ``linear`` and ``addmm`` with frozen weights use the short rule."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs ``func``, by the short rule where there is one."""
        rule = _RULES.get(func)
        found = rule(*args, **(kwargs or {})) if rule else None
        return _apply(*found) if found else func(*args, **(kwargs or {}))
