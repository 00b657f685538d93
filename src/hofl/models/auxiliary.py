# SPDX-License-Identifier: Apache-2.0
"""An auxiliary head: a client's own small classifier on the boundary activation (HERON-SFL).

Features of z, a layer norm without weights, one linear layer. The head's numbers are a vector of their own,
``[weight [classes, F] row by row | bias [classes]]``, no part of the model's layout.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, linear

from hofl.core.directions import gaussian
from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.forward_mode import BottomSurrogate

if TYPE_CHECKING:
    from hofl.models.boundary import CutModel

Floats = NDArray[np.float32]


def features(z: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """What a head sees of a boundary activation: [batch, F], in z's dtype.

    z [batch, F] as it is; of [batch, channels, height, width] the mean over places; of a text's [batch,
    positions, F] the last position that is no pad, on whichever side the pads are.

    Args:
        z: the activation.
        inputs: of the model's forward; of a text, with its ``attention_mask``.

    Raises:
        ModelError: z has another shape.
    """
    if z.ndim == 2:
        return z
    if z.ndim == 4:
        return z.mean((2, 3))
    mask = inputs.get("attention_mask")
    if z.ndim != 3 or mask is None:
        raise ModelError(
            f"no auxiliary head for activations of shape {list(z.shape)}: choose another boundary"
        )
    last = mask.cumsum(1).argmax(1)  # the first place that has all of the text behind it
    return z[torch.arange(len(z), device=z.device), last]


def start_head(key: Key, width: int, classes: int) -> Floats:
    """A new head: weights Gaussian over sqrt(F), zero biases: float32 [(F + 1) classes]."""
    weight = gaussian(key, 0, width * classes) / np.float32(math.sqrt(width))
    return np.concatenate([weight, np.zeros(classes, dtype=np.float32)])


def head_loss(head: Tensor, seen: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the head, in ``head``'s dtype: head [d_a], features [batch, F] -> []."""
    seen = layer_norm(seen.to(head.dtype), seen.shape[1:])
    classes = len(head) // (seen.shape[1] + 1)
    weight, bias = head[:-classes].view(classes, -1), head[-classes:]
    return cross_entropy(linear(seen, weight, bias), targets)


class AuxiliarySurrogate(BottomSurrogate):
    """The auxiliary loss of a batch as a function of bottom and head together: what HERON-SFL probes.

    Attributes:
        anchor: float32 [d_c + d_a], the bottom's trainables and then the head's.
        z: the boundary activation of the first evaluation, which is the anchor's.
    """

    z: Tensor | None = None

    def __init__(
        self, model: "CutModel", inputs: Mapping[str, Any], boundary: int, head: Floats, targets: Tensor
    ):
        super().__init__(model, inputs, boundary)
        self._targets, self._below = targets, self._size
        self._head = torch.from_numpy(head.copy())
        self._size += len(head)
        self.anchor = np.concatenate([self.anchor, head])

    def write(self, values: Floats, start: int) -> None:
        """Set coordinates ``start ..`` of the live bottom and head.

        Raises:
            ModelError: the values reach beyond the head.
        """
        if start + len(values) > self._size:
            raise ModelError(f"coordinates up to {start + len(values)} are beyond the {self._size} there are")
        below = min(len(values), max(0, self._below - start))
        if below:
            super().write(values[:below], start)
        place = start + below - self._below
        if below < len(values):
            self._head[place : place + len(values) - below] = torch.from_numpy(values[below:].copy())

    def outputs(self) -> Tensor:
        """The loss at the live bottom and head: float64 [1], so that a difference of two keeps its digits."""
        with torch.no_grad():
            z = self._run()
            self.z = z if self.z is None else self.z
            seen = features(z, self._inputs)
            return head_loss(self._head.to(z.device, torch.float64), seen, self._targets).reshape(1)

    def tangents(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Refused.

        Raises:
            ModelError: always: the method is defined by differences of the loss.
        """
        raise ModelError('the auxiliary loss has no "tangent": use "forward" or "central"')

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], Floats]]:
        """Refused.

        Raises:
            ModelError: always: the client would backpropagate.
        """
        raise ModelError('the auxiliary loss has no "sketch": use "forward" or "central"')
