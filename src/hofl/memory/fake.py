# SPDX-License-Identifier: Apache-2.0
"""One participation's storages without a byte of them: the real step on tensors that have shapes alone.

A module is built on the meta device and its tensors are replaced by fake ones that claim to be on the CPU, so
that the kernels that a run would take are taken, attention's among them. The cut model, the surrogates, the
estimators and the backward pass are those of a run. What leaves a tensor, for NumPy or for Python, is zeros.
Storages are counted as in a run, see :mod:`hofl.runtime.tracked`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.models.boundary import CutModel
from hofl.models.forward_mode import BottomSurrogate, LossSurrogate
from hofl.runtime.tracked import GRAIN, Tracked

Loss = Callable[[Tensor], Tensor]
Inputs = Mapping[str, Tensor]

PROBES_AT_ONCE = 2
"""Differences keep at most this many displaced outputs, whatever q is; tangents keep all q."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_MOVES = (torch.ops.aten.to.dtype_layout, torch.ops.aten._to_copy.default)
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.uint8: np.uint8, torch.int64: np.int64}


class _StandIns(TorchFunctionMode):
    """Answers what asks for a number: zeros, and for yes or no whether all rows are full."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self._full = full

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The stand-in of ``func``, if it has one; else ``func``."""
        if func is Tensor.numpy:
            return np.zeros(args[0].shape, _NUMPY[args[0].dtype])
        if func in (Tensor.__float__, Tensor.item):
            return 0.0
        if func is Tensor.__bool__:
            return self._full
        return func(*args, **(kwargs or {}))


class _Still(Directions):
    """Directions of zeros: as large as those of a run, and made in no time."""

    def block(self, probe: int, start: int, stop: int) -> NDArray[np.float32]:
        """Zeros: float32 [stop-start]."""
        return np.zeros(stop - start, dtype=np.float32)

    def project(self, gradient: NDArray[np.float32]) -> NDArray[np.float64]:
        """Zeros: float64 [q]."""
        return np.zeros(self.count)


class _OnCpu(FakeTensorMode):
    """Forward-mode rules written in C++ see the meta device below a fake tensor and move results there."""

    def dispatch(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As any fake operation, but nothing is moved away from the CPU."""
        named = dict(kwargs or {})
        if func in _MOVES and named.get("device") == _META:
            named["device"] = _CPU
        return super().dispatch(func, types, args, named)  # type: ignore[no-untyped-call]


@contextmanager
def pretending(module: nn.Module, full: bool = True) -> Iterator[None]:
    """Replace a module's tensors by fake ones, for good; inside the context new tensors are fake too.

    Args:
        module: of any tensors; what is tied stays tied.
        full: whether no row is padded, so that a causal model runs without a mask tensor. Libraries look
            at the values for that, but not where they find fake tensors; here they do.
    """
    mode = _OnCpu(allow_non_fake_inputs=True)
    _pretend_(module, mode)
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(_StandIns(full))
        masks: Any = import_module("transformers.masking_utils")
        before = masks.is_tracing
        masks.is_tracing = lambda tensor=None: False
        stack.callback(setattr, masks, "is_tracing", before)
        yield


def _pretend_(module: nn.Module, mode: FakeTensorMode) -> None:
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept, so that its id stays its own
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    found = made.setdefault(id(tensor), (_fake(tensor, mode), tensor))
                    store[name] = found[0]  # type: ignore[assignment]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    fake: Tensor = FakeTensor(mode, tensor.detach().to(_META), _CPU)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake


@dataclass(frozen=True)
class Bottom:
    """Bytes that an estimator's two phases have alive at most; the model itself is not among them.

    Attributes:
        anchor: until z is there.
        held: what waits for the feedback: z, the anchor's copy, and tangents or a recorded graph.
        probes: with the feedback, until the scalars are there.
    """

    anchor: int
    held: int
    probes: int


def bottom(model: CutModel, inputs: Inputs, boundary: int, estimator: str, probes: int) -> Bottom:
    """Run an estimator on the bottom, without what is above it.

    Args:
        model: of fake or of real tensors; the latter are really computed.
        inputs: one batch.
        boundary: b >= 1.
        estimator: of :mod:`hofl.core.estimators`.
        probes: q.
    """
    size = model.layout.bottom_size(boundary)
    return _phases(model.surrogate(inputs, boundary), size, estimator, probes)


def pure(model: CutModel, inputs: Inputs, loss: Loss, estimator: str, probes: int) -> Bottom:
    """The same for pure zeroth order, where the loss itself is probed along all d trainables."""
    return _phases(LossSurrogate(model, inputs, loss), model.layout.size, estimator, probes)


def _phases(surrogate: BottomSurrogate, size: int, estimator: str, probes: int) -> Bottom:
    count = probes if estimator == "tangent" else min(probes, PROBES_AT_ONCE)
    directions = _Still(Key(0, 0), "gaussian", count, size)
    copied = _grains(4 * size)  # the surrogate's copy of the anchor was made before counting began
    with Tracked() as tracked:
        z, scalars = ESTIMATORS[estimator](surrogate, directions, 1.0, False)
        anchor, held = tracked.peak, tracked.current
        tracked.peak = held
        scalars(torch.ones_like(z))
    return Bottom(anchor + copied, held + copied, tracked.peak + copied)


def top(model: CutModel, inputs: Inputs, boundary: int, loss: Loss, z: Tensor | None = None) -> int:
    """Most bytes alive in one backward pass from the loss to the boundary, z not among them.

    Args:
        model: as for :func:`bottom`.
        inputs: one batch.
        boundary: b.
        loss: of the output.
        z: what stands for the boundary activation; None runs the bottom for it.
    """
    z = model.bottom(inputs, boundary) if boundary and z is None else z
    with Tracked() as tracked:
        model.first_order(inputs, boundary, z, loss)
    peak: int = tracked.peak
    return peak


def _grains(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
