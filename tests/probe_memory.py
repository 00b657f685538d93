# SPDX-License-Identifier: Apache-2.0
"""What an estimator's probes keep alive above a plain pass, and what one block does, in storages."""

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hofl.core.directions import BLOCK, Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.models.boundary import CutModel
from hofl.runtime.tracked import GRAIN, Tracked

Inputs = Mapping[str, Tensor]
FLOAT = 4


@dataclass(frozen=True)
class Block:
    """One block of a bottom, run alone on the inputs that it has there; the largest of the bottom's blocks.

    Attributes:
        hidden: bytes of its input activation.
        transient: alive at most in its forward pass, its output among them, nothing recorded.
        plain_attention: the same where attention is made of plain operations, as forward mode needs it.
        activations: alive at most in a recorded forward pass and the backward pass after it.
    """

    hidden: int
    transient: int
    plain_attention: int
    activations: int


def peak_of(action: Callable[[], Any]) -> int:
    """Bytes of the storages that an action has alive at most."""
    with Tracked() as tracked:
        kept = action()
    del kept
    return int(tracked.peak)


def block_of(model: CutModel, inputs: Inputs, boundary: int) -> Block:
    """Measure every block below a boundary; the largest of each number."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((module, args, kwargs))

    hooks = [e.register_forward_pre_hook(note, with_kwargs=True) for e in model.elements[:boundary]]
    with torch.no_grad():
        model.stop(inputs, boundary)
    for hook in hooks:
        hook.remove()
    found = [_measured(*call) for call in calls]
    return Block(*(max(getattr(b, name) for b in found) for name in Block.__dataclass_fields__))


def _measured(module: nn.Module, args: Any, kwargs: Any) -> Block:
    first = args[0] if args else kwargs["hidden_states"]
    with torch.no_grad():
        transient = peak_of(lambda: module(*args, **kwargs))
        with sdpa_kernel(SDPBackend.MATH):
            plain = peak_of(lambda: module(*args, **kwargs))

    def recorded() -> Any:
        leaf = first.detach().requires_grad_()
        given = (leaf, *args[1:]) if args else ()
        output = module(*given, **kwargs) if args else module(**{**kwargs, "hidden_states": leaf})
        z = output[0] if isinstance(output, tuple) else output
        wanted = [leaf, *(p for p in module.parameters() if p.requires_grad)]
        return torch.autograd.grad(z, wanted, torch.ones_like(z), allow_unused=True)

    with torch.enable_grad():
        activations = peak_of(recorded)
    return Block(_grains(first), transient, plain, activations)


def _grains(tensor: Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // GRAIN) * GRAIN


@dataclass(frozen=True)
class Probed:
    """An estimator's two phases.

    Attributes:
        inference: alive at most in a plain pass to the boundary.
        above: what the anchor pass and the probes have alive beyond that.
        arrays: NumPy's, alive at most while the scalars are made.
    """

    inference: int
    above: int
    arrays: int


def probed(model: CutModel, inputs: Inputs, boundary: int, estimator: str, probes: int) -> Probed:
    """Run an estimator with a feedback that is made outside; NumPy's arrays are counted by tracemalloc."""
    size = model.layout.bottom_size(boundary)
    directions = Directions(Key.of(0, "directions"), "gaussian", probes, size)
    directions.block(0, 0, min(size, BLOCK))  # the process's first makes the table of normal quantiles
    surrogate = model.surrogate(inputs, boundary)
    with torch.no_grad():
        inference = peak_of(lambda: model.stop(inputs, boundary))
        feedback = torch.ones_like(model.stop(inputs, boundary))
    with Tracked() as tracked:
        z, scalars = ESTIMATORS[estimator](surrogate, directions, 1e-3, False)
        tracemalloc.start()
        try:
            scalars(feedback)
            arrays = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    del z
    return Probed(inference, int(tracked.peak) - inference, arrays)


def bound(block: Block, boundary: int, estimator: str, probes: int) -> int:
    """What the storages above inference may be, in bytes, from one measured block."""
    if estimator == "tangent":
        return (1 + probes) * block.plain_attention
    if estimator == "sketch":
        return boundary * block.hidden + block.activations
    return block.transient


def direction_block(size: int) -> int:
    """Bytes of the coordinates of a direction that are there at once."""
    return FLOAT * min(size, BLOCK)
