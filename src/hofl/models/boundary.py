# SPDX-License-Identifier: Apache-2.0
"""The cut model: one module, one flat vector of its trainables, and a cut at any boundary.

The forward pass is always the module's own. It is stopped after block ``b - 1`` (bottom), or
fed ``z`` there (top); blocks that are not needed are skipped, not removed. One thread at a time.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hofl.core.layout import EMBED, Layout, Slot
from hofl.errors import ModelError
from hofl.models.blocks import block_of, find_blocks
from hofl.models.forward_mode import BottomSurrogate
from hofl.models.hooks import (
    checkpointed,
    feeding,
    flat,
    frozen,
    hidden,
    quiet,
    replaced,
    scored,
    stopped,
    stopping,
)
from hofl.models.selftest import self_test

Inputs = Mapping[str, Any]
"""Keyword arguments of the module's forward; a lone ``"input"`` is passed by position."""


def normalised(name: str) -> str:
    """A parameter's name without the marks of PEFT and ``torch.compile`` wrappers."""
    name = name.removeprefix("base_model.model.").replace("_orig_mod.", "")
    return name.replace(".modules_to_save", "").replace(".default", "")


@dataclass
class CutModel:
    """A module whose trainables are views of one float32 vector; made by :func:`cut`.

    Attributes:
        module: as it was given (a PEFT wrapper, say), in eval mode, dropouts 0.
        layout: names, shapes, blocks and offsets of the trainables.
        vector: float32 [d] on the device, the live trainables: writing it writes the model.
        checkpointing: recompute each block of the first-order part in its backward pass.
        output: takes the tensor to be scored from what the module returns.
        elements: the blocks.
    """

    module: nn.Module
    layout: Layout
    vector: Tensor
    checkpointing: bool
    output: Callable[[Any], Tensor]
    elements: list[nn.Module]
    _base: nn.Module
    _parameters: list[nn.Parameter]
    _tied: list[tuple[str, int, int]]
    _constants: dict[str, Any]
    _shapes: dict[type, int | None] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """L, the number of blocks; a boundary is in ``0 .. L``."""
        return self.layout.blocks

    @property
    def device(self) -> torch.device:
        """Where the vector and the module live."""
        return self.vector.device

    def write(self, values: NDArray[np.float32], start: int = 0) -> None:
        """Set coordinates ``start .. start+len(values)-1`` of the live trainables."""
        into = self.vector[start : start + len(values)]
        if self.device.type == "cpu":
            np.copyto(into.numpy(), values)
        else:
            into.copy_(torch.from_numpy(values if values.flags.writeable else values.copy()))

    def read(self) -> NDArray[np.float32]:
        """A copy of the live trainables: float32 [d]."""
        copy: NDArray[np.float32] = self.vector.to("cpu", copy=True).numpy()
        return copy

    def trainables(self) -> list[tuple[Slot, nn.Parameter]]:
        """The slots and the parameters that are views of the vector there, in layout order."""
        return list(zip(self.layout.slots, self._parameters, strict=True))

    def parameters_of(self, first: int, last: int) -> list[nn.Parameter]:
        """The trainables of blocks ``first .. last``, in layout order."""
        return [p for slot, p in self.trainables() if first <= slot.block <= last]

    def bottom_parameters(self, boundary: int) -> list[nn.Parameter]:
        """The trainables below a boundary, in layout order; none at boundary 0."""
        return self.parameters_of(EMBED, boundary - 1) if boundary else []

    def top_parameters(self, boundary: int) -> list[nn.Parameter]:
        """The trainables from a boundary on, in layout order; all of them at boundary 0."""
        return self.parameters_of(boundary if boundary else EMBED, self.blocks)

    def check_boundary(self, boundary: int) -> None:
        """Refuse a boundary outside ``0 .. L`` or one that separates the places of a tied trainable.

        Raises:
            ConfigError, ModelError: as said.
        """
        self.layout.bottom_size(boundary)
        for name in self.separates(boundary):
            raise ModelError(
                f"boundary {boundary} separates two uses of the trainable {name}, which share one tensor: "
                'freeze it, or train with model.train = "lora"; boundary 0 also works'
            )

    def separates(self, boundary: int) -> list[str]:
        """The tied trainables that are used both below and above a boundary; none at boundary 0."""
        return [name for name, low, high in self._tied if boundary and low < boundary <= high]

    def full(self, inputs: Inputs) -> Tensor:
        """The whole forward pass; the caller's grad mode decides whether a graph is recorded."""
        return self.output(self._run(inputs))

    def stop(self, inputs: Inputs, boundary: int, recompute: bool = False) -> Tensor:
        """z [batch, ...] in the caller's grad mode; ``recompute`` checkpoints each bottom block."""
        below = self.elements[:boundary]
        forwards = {block: checkpointed(block) for block in below} if recompute else {}
        last = below[-1]
        forwards[last] = stopping(forwards.get(last, last.forward))
        with replaced(forwards):
            output = stopped(lambda: self._run(inputs))
        self._shapes[type(last)] = len(output) if isinstance(output, tuple) else None
        return hidden(output)

    @torch.no_grad()
    def bottom(self, inputs: Inputs, boundary: int) -> Tensor:
        """z, the output of block ``boundary - 1``, without a graph; nothing above it is run.

        Raises:
            ModelError: boundary 0 has no bottom.
        """
        self._require_bottom(boundary)
        return self.stop(inputs, boundary)

    def top(self, inputs: Inputs, boundary: int, z: Tensor) -> Tensor:
        """The output when fed ``z`` as the output of block ``boundary - 1``; blocks below are skipped."""
        self._require_bottom(boundary)
        last = self.elements[boundary - 1]
        if type(last) not in self._shapes:
            self.bottom(inputs, boundary)  # once per class of block: does it return a tensor or a tuple?
        length = self._shapes[type(last)]
        fed = feeding(z if length is None else (z, *[None] * (length - 1)))
        with replaced(dict.fromkeys(self.elements[:boundary], fed)):
            return self.output(self._run(inputs))

    def first_order(
        self, inputs: Inputs, boundary: int, z: Tensor | None, loss: Callable[[Tensor], Tensor]
    ) -> tuple[float, NDArray[np.float32], Tensor | None]:
        """One backward pass through the top.

        Args:
            inputs: of the module's forward.
            boundary: b; 0 trains everything and needs no ``z``.
            z: the output of :meth:`bottom`.
            loss: the module's output -> a scalar.

        Returns:
            The loss, its gradient float32 [d - d_zo] in layout order, and the feedback
            d loss / d z with z's shape and dtype (None at boundary 0).

        Raises:
            ModelError: a trainable or z got no gradient; the message has its name.
        """
        self.check_boundary(boundary)
        top = self.top_parameters(boundary)
        names = [slot.name for slot in self.layout.slots[len(self._parameters) - len(top) :]]
        if boundary and z is None:
            raise ModelError(f"boundary {boundary} needs z, the output of the bottom")
        leaf = z.detach().requires_grad_() if boundary and z is not None else None
        wrt = [*top, leaf] if leaf is not None else list(top)
        above = self.elements[boundary:] if self.checkpointing else []
        with torch.enable_grad(), frozen(self.bottom_parameters(boundary)):
            with replaced({block: checkpointed(block) for block in above}):
                output = self.full(inputs) if leaf is None else self.top(inputs, boundary, leaf)
                value = loss(output)
            grads = torch.autograd.grad(value, wrt, allow_unused=True)
        gradient = flat(grads[: len(top)], names)
        feedback = grads[-1] if leaf is not None else None
        if leaf is not None and feedback is None:
            raise ModelError(f"the boundary activation at boundary {boundary} does not reach the loss")
        return float(value.detach()), gradient, feedback

    def surrogate(self, inputs: Inputs, boundary: int) -> BottomSurrogate:
        """The bottom at fixed inputs, as a function of its trainables."""
        self.check_boundary(boundary)
        self._require_bottom(boundary)
        return BottomSurrogate(self, inputs, boundary)

    def self_test(self, inputs: Inputs) -> None:
        """Cut in the middle and check the pieces against the whole, see :func:`selftest.self_test`."""
        self_test(self, inputs)

    def _require_bottom(self, boundary: int) -> None:
        if self.layout.bottom_size(boundary) == 0 and boundary == 0:
            raise ModelError("boundary 0 has no bottom: the whole model is first order")

    def _run(self, inputs: Inputs) -> Any:
        if self.module.training:
            quiet(self.module)
        if set(inputs) == {"input"}:
            return self._base(inputs["input"])
        return self._base(**{**self._constants, **inputs})


def cut(
    module: nn.Module,
    *,
    blocks: str | None = None,
    trainable: Callable[[str], bool] | None = None,
    checkpointing: bool = False,
    output: Callable[[Any], Tensor] | None = None,
) -> CutModel:
    """Bind the module's trainables to one vector, so that it can be cut between any two blocks.

    The module is put in eval mode with dropouts 0. Move it to its device before, not after.

    Args:
        module: any module, with or without PEFT adapters.
        blocks: dotted path of the block list, for models in which it is not evident.
        trainable: name (normalised) -> whether to train; default: what ``requires_grad`` says.
        checkpointing: see :class:`CutModel`.
        output: see :class:`CutModel`; default: ``.logits``, or the tensor itself.

    Raises:
        ModelError: no evident block list, nothing to train, or trainables that are not float32.
    """
    unwrap = getattr(module, "get_base_model", None)
    base: nn.Module = unwrap() if unwrap else module
    path, elements = find_blocks(base, blocks or None)
    if trainable is not None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trainable(normalised(name)))
    found, tied = _trainables(base, path, len(elements))
    layout = Layout.build(
        ((name, tuple(p.shape), block) for name, (p, block) in found.items()), len(elements)
    )
    parameters = [found[slot.name][0] for slot in layout.slots]
    vector = _bind(parameters, layout)
    quiet(module)
    accepted = inspect.signature(base.forward).parameters
    constants = {"use_cache": False} if "use_cache" in accepted else {}
    return CutModel(
        module, layout, vector, checkpointing, output or scored, elements, base, parameters, tied, constants
    )


def _trainables(
    base: nn.Module, path: str, count: int
) -> tuple[dict[str, tuple[nn.Parameter, int]], list[tuple[str, int, int]]]:
    """Each trainable once, under its first name, with its block; and the tied ones with their extremes."""
    uses: dict[int, tuple[nn.Parameter, list[tuple[int, str]]]] = {}
    inside = f"{path}." if path else ""
    after = False
    for name, parameter in base.named_parameters(remove_duplicate=False):
        after = after or name.startswith(inside)
        if parameter.requires_grad:
            block = block_of(name, path, count, after)
            uses.setdefault(id(parameter), (parameter, []))[1].append((block, normalised(name)))
    firsts = {min(many)[1]: (parameter, min(many)[0]) for parameter, many in uses.values()}
    spread = [(min(many)[1], min(many)[0], max(many)[0]) for _, many in uses.values()]
    return firsts, [each for each in spread if each[1] < each[2]]


def _bind(parameters: list[nn.Parameter], layout: Layout) -> Tensor:
    """The flat vector; every parameter's data becomes a view of it."""
    if not parameters:
        raise ModelError('nothing to train: add adapters, or set model.train = "full" or "head"')
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"{slot.name} is {str(parameter.dtype).removeprefix('torch.')}: trainables must be float32; "
                'set model.dtype = "float32", or model.train = "lora" on a frozen bfloat16 backbone'
            )
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        parameter.data = vector[slot.offset : slot.offset + slot.size].view(slot.shape)
    return vector
