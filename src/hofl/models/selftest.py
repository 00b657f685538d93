# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a cut model: its pieces against the whole, on one small batch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hofl.core.layout import EMBED
from hofl.errors import ModelError
from hofl.models.hooks import places_of, same

if TYPE_CHECKING:
    from hofl.models.boundary import CutModel


def self_test(model: "CutModel", inputs: Mapping[str, Any]) -> None:
    """Cut in the middle; the bottom then the top must equal the whole, bit for bit.

    Also: trainables outside the blocks run on the side their block number says, the top's
    trainables and the boundary activation get a gradient. Afterwards the model knows what each class of
    block returns, so that a server, whose inputs only stand for those of clients, has the top at any cut.

    Raises:
        ModelError: with the boundary, and the largest difference or the misplaced trainable.
    """
    boundary = max(1, model.blocks // 2)
    _check_places(model, inputs)
    last = {type(block): place for place, block in enumerate(model.elements, start=1)}
    for place in last.values():
        model.bottom(inputs, place)
    z, gap = halves(model, inputs, boundary)
    if gap or z.requires_grad:
        raise ModelError(
            f"the model cut at boundary {boundary} of {model.blocks} differs from the whole by {gap:.3g}: "
            "its blocks do not run one after another; name others by model.blocks"
        )
    if not model.separates(boundary):
        model.first_order(inputs, boundary, z, lambda output: output.float().square().mean())


def halves(model: "CutModel", inputs: Mapping[str, Any], boundary: int) -> tuple[Tensor, float]:
    """The activation at a boundary, and by how much bottom then top differs from the whole; 0 bit for bit."""
    z = model.bottom(inputs, boundary)
    with torch.no_grad():
        return z, same(model.full(inputs), model.top(inputs, boundary, z))


def _check_places(model: "CutModel", inputs: Mapping[str, Any]) -> None:
    """Whether trainables outside the blocks run before block 0 or after it, as their block number says."""
    first, *_ = model.elements
    late: dict[int, bool] = {}
    started: list[bool] = []

    def _enter(owner: nn.Module, *_: Any) -> None:
        for parameter in owner.parameters(recurse=False):
            late.setdefault(id(parameter), bool(started))

    outside = [(s, p) for s, p in model.trainables() if s.block in (EMBED, model.blocks)]
    places = places_of(model.module)
    owners = {module for _, parameter in outside for module, _ in places[id(parameter)]}
    handles = [first.register_forward_pre_hook(lambda *_: started.append(True))]
    handles += [owner.register_forward_pre_hook(_enter) for owner in owners]
    try:
        with torch.no_grad():
            model.full(inputs)
    finally:
        for handle in handles:
            handle.remove()
    for slot, parameter in outside:
        head = slot.block == model.blocks
        if late.get(id(parameter), head) != head:
            raise ModelError(
                f"{slot.name} was taken for {'the head' if head else 'an embedding'} but is not: freeze it"
            )
