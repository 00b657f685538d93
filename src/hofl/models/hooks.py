# SPDX-License-Identifier: Apache-2.0
"""Stopping, feeding and checkpointing a module's own forward, block by block.

Nothing here copies forward code. A block's ``forward`` is replaced on the instance for the
duration of one call and put back whatever happens. One thread at a time per model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hofl.errors import ModelError

Forward = Callable[..., Any]
Place = tuple[nn.Module, str]
"""One entry of one module's ``_parameters``."""


class Stop(Exception):
    """Carries the output of the last block of the bottom out of the module's forward."""

    def __init__(self, output: Any):
        super().__init__("the forward pass ended at the boundary")
        self.output = output


def hidden(output: Any) -> Tensor:
    """The hidden states in a block's output: the tensor itself or a tuple's first entry.

    Raises:
        ModelError: the block returns something else.
    """
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, Tensor):
        raise ModelError(
            f"a block returned {type(output).__name__}: a block must return a tensor or (tensor, …)"
        )
    return first


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Each module runs the given forward inside the context, and its own again after it."""
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


@contextmanager
def swapped(places: Sequence[Sequence[Place]], values: Sequence[Tensor]) -> Iterator[None]:
    """Parameter ``i`` reads as ``values[i]`` at all its places inside the context.

    Every place is saved once before any is written, so a module reachable by two paths is
    restored (``torch.func.functional_call`` is not to be trusted there).
    """
    before = [(module, name, module._parameters[name]) for many in places for module, name in many]
    try:
        for many, value in zip(places, values, strict=True):
            for module, name in many:
                module._parameters[name] = value  # type: ignore[assignment]
        yield
    finally:
        for module, name, own in before:
            module._parameters[name] = own


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """These parameters record no graph inside the context."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def checkpointed(block: nn.Module) -> Forward:
    """The block's forward, whose activations are recomputed in the backward pass."""
    forward = block.forward

    def _run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return _run


def stopping(forward: Forward) -> Forward:
    """The forward, then :class:`Stop`."""

    def _run(*args: Any, **kwargs: Any) -> Any:
        raise Stop(forward(*args, **kwargs))

    return _run


def feeding(output: Any) -> Forward:
    """A forward that computes nothing and returns ``output``."""
    return lambda *args, **kwargs: output


def stopped(call: Callable[[], Any]) -> Any:
    """The output carried by the :class:`Stop` that ``call`` ends with.

    Raises:
        ModelError: the forward pass never reached the block.
    """
    try:
        call()
    except Stop as stop:
        return stop.output
    raise ModelError(
        "the forward pass never ran the last block below the boundary: name the block list by model.blocks"
    )


def quiet(module: nn.Module) -> None:
    """Eval mode, and every dropout of the module and of its configuration at 0 (D-12)."""
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        _zero_drops(vars(part))
        config = getattr(part, "config", None)
        if config is not None and not isinstance(config, dict):
            _zero_drops(vars(config))


def _zero_drops(attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if "drop" in name and isinstance(value, float):
            attributes[name] = 0.0


def places_of(module: nn.Module) -> dict[int, list[Place]]:
    """Where each parameter sits, by ``id``: a tied one has several places, a shared module one."""
    places: dict[int, list[Place]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    return places


def same(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape, 0.0 only for equal bits."""
    if torch.equal(left, right):
        return 0.0
    return float((left.double() - right.double()).abs().max()) if left.shape == right.shape else float("inf")


def flat(gradients: Sequence[Tensor | None], names: Sequence[str]) -> NDArray[np.float32]:
    """Gradients laid end to end: float32 [their total size].

    Raises:
        ModelError: with the names of the trainables that got none.
    """
    missing = [name for name, g in zip(names, gradients, strict=True) if g is None]
    if missing:
        raise ModelError(f"no gradient reached {', '.join(missing[:5])} ({len(missing)} in all): freeze them")
    if not gradients:
        return np.zeros(0, dtype=np.float32)
    values: NDArray[np.float32] = torch.cat([g.reshape(-1) for g in gradients if g is not None]).cpu().numpy()
    return values


def scored(output: Any) -> Tensor:
    """The logits of a Hugging Face output, or the tensor itself.

    Raises:
        ModelError: the module returns something else.
    """
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ModelError(f"the model returned {type(output).__name__} without logits: give cut(output=…)")
    return found
