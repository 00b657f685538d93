# SPDX-License-Identifier: Apache-2.0
"""The bottom as a function of its trainables: values, forward-mode tangents, recorded gradient."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.errors import ModelError
from hofl.models.hooks import flat, places_of, swapped
from hofl.models.rules import ForwardRules

if TYPE_CHECKING:
    from hofl.models.boundary import CutModel


class BottomSurrogate:
    """Implements ``core.estimators.Surrogate`` for one batch and one boundary.

    Attributes:
        anchor: float32 [d_zo], a private copy of the bottom's trainables.
    """

    anchor: NDArray[np.float32]

    def __init__(self, model: "CutModel", inputs: Mapping[str, Any], boundary: int):
        self._model, self._inputs, self._boundary = model, inputs, boundary
        self._parameters = model.bottom_parameters(boundary)
        self._slots = model.layout.slots[: len(self._parameters)]
        self._size = sum(slot.size for slot in self._slots)
        self.anchor = model.vector[: self._size].to("cpu", copy=True).numpy()

    def write(self, values: NDArray[np.float32], start: int) -> None:
        """Set coordinates ``start ..`` of the live bottom.

        Raises:
            ModelError: the values reach beyond the bottom.
        """
        if start + len(values) > self._size:
            raise ModelError(f"coordinates up to {start + len(values)} are beyond the bottom's {self._size}")
        self._model.write(values, start)

    def outputs(self) -> Tensor:
        """z at the live parameters, without a graph."""
        with torch.no_grad():
            return self._run()

    def _run(self) -> Tensor:
        return self._model.stop(self._inputs, self._boundary)

    def tangents(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """z and its directional derivatives, in one forward-mode pass that keeps nothing for a backward.

        The primal is computed once and the q tangents ride along it as a batch: (1 + q) forwards.
        z has the bits of :meth:`outputs`: the primal runs the same kernels, see :mod:`hofl.models.rules`.

        Args:
            directions: float32 [q, d_zo], on any device.

        Returns:
            z, and [q, *z.shape] with z's dtype.

        Raises:
            ModelError: an operation of the bottom has no forward-mode rule.
        """
        directions = directions.to(self._model.device)
        pieces = tuple(
            directions[:, slot.offset : slot.offset + slot.size].reshape(-1, *slot.shape)
            for slot in self._slots
        )
        if not pieces:
            z = self.outputs()
            return z, z.new_zeros((len(directions), *z.shape))
        try:
            with torch.no_grad():
                return torch.func.vmap(self._along, out_dims=(None, 0))(*pieces)  # type: ignore[arg-type]
        except (NotImplementedError, RuntimeError) as error:
            if not any(word in str(error).lower() for word in ("forward", "functorch", "vmap", "jvp")):
                raise
            reason = str(error).splitlines()[0]
            raise ModelError(
                f'zo.estimator = "tangent" needs forward-mode rules this model lacks ({reason}): '
                'use "forward", "central" or "sketch"'
            ) from error

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], NDArray[np.float32]]]:
        """z without a graph, and a function from the feedback to the exact gradient float32 [d_zo].

        Only the inputs of the bottom's blocks are kept; each block is run again in the backward
        pass, which the function may do once, before the live parameters are written.
        """
        with torch.enable_grad():
            graph = self._model.stop(self._inputs, self._boundary, recompute=True)
        names = [slot.name for slot in self._slots]

        def _pull(feedback: Tensor) -> NDArray[np.float32]:
            if not names:
                return np.zeros(0, dtype=np.float32)
            grads = torch.autograd.grad(graph, self._parameters, feedback, allow_unused=True)
            return flat(grads, names)

        return graph.detach(), _pull

    def _along(self, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        """z and one directional derivative of it."""
        places = places_of(self._model.module)
        mine = [places[id(parameter)] for parameter in self._parameters]

        def _bottom(*values: Tensor) -> Tensor:
            with swapped(mine, values), ForwardRules():
                return self._run()

        primals = tuple(parameter.detach() for parameter in self._parameters)
        return torch.func.jvp(_bottom, primals, tangents)  # type: ignore[return-value]


def bottom_gradient(
    model: "CutModel", inputs: Mapping[str, Any], boundary: int, feedback: Tensor
) -> NDArray[np.float32]:
    """The bottom's gradient float32 [d_zo] of ``<feedback, z>``, by running it again and backward.

    Raises:
        ModelError: a trainable of the bottom got no gradient.
    """
    below = model.bottom_parameters(boundary)
    if not below:
        return np.zeros(0, dtype=np.float32)
    with torch.enable_grad():
        z = model.stop(inputs, boundary, recompute=model.checkpointing)
        grads = torch.autograd.grad(z, below, feedback, allow_unused=True)
    return flat(grads, [slot.name for slot in model.layout.slots[: len(below)]])


class DeferredSurrogate(BottomSurrogate):
    """The bottom of a client that waits for its feedback while others use the model."""

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], NDArray[np.float32]]]:
        """z, and a function that sets the anchor, runs the bottom again and recomputes block by block.

        One forward pass more than :meth:`BottomSurrogate.recorded`, and no graph waits for a message.
        """

        def _pull(feedback: Tensor) -> NDArray[np.float32]:
            self.write(self.anchor, 0)
            return BottomSurrogate.recorded(self)[1](feedback)

        return self.outputs(), _pull


class LossSurrogate(BottomSurrogate):
    """The loss of a batch as a function of all d trainables: what pure zeroth order probes."""

    def __init__(self, model: "CutModel", inputs: Mapping[str, Any], loss: Callable[[Tensor], Tensor]):
        super().__init__(model, inputs, model.blocks)
        self._loss = loss
        self._slots, self._size = model.layout.slots, model.layout.size
        self._parameters = [parameter for _, parameter in model.trainables()]
        self.anchor = model.read()

    def _run(self) -> Tensor:
        """The loss: float32 [1]."""
        return self._loss(self._model.full(self._inputs)).reshape(1)

    def recorded(self) -> tuple[Tensor, Callable[[Tensor], NDArray[np.float32]]]:
        """Refused.

        Raises:
            ModelError: always: backpropagation through everything is no zeroth-order method.
        """
        raise ModelError('zo.estimator = "sketch" backpropagates through the whole model: use "fedavg"')
