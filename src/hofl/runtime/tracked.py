# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one client: what its actions allocate on the device, and what it holds of the model.

All clients of a simulation share a process, whose own peak says nothing about one of them. So while an
action runs, every storage it makes is counted until that storage dies. The sum covers activations,
recorded graphs, logits and gradients, to which the parameters and buffers that the client holds are added.
It does not cover NumPy arrays (the message, the optimizer's moments, a block of directions) and what
lies outside any tensor.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hofl.models.blocks import block_of
from hofl.models.boundary import CutModel

GRAIN = 512
"""Bytes a storage is rounded up to, as an accelerator's allocator does."""


class Tracked(TorchDispatchMode):
    """Counts the storages that operations return while it is entered, until each dies.

    It may be entered again: what outlives an action counts in the next one. It looks at results only, so
    no bit of any of them changes.

    Attributes:
        current: bytes alive now.
        peak: the most there ever were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, then count the storages that are neither its operands' nor known."""
        named = kwargs or {}
        result = func(*args, **named)
        given = {storage._cdata for storage in _storages((args, named))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // GRAIN) * GRAIN
        self._alive.add(storage._cdata)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop, storage._cdata, size).atexit = False

    def _drop(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.current -= size


class Allocated:
    """The same from the counts of CUDA's allocator, whose peak it sets back each time it is entered.

    Attributes:
        peak: the most that actions had allocated, in bytes.
        highest: the allocator's own peak before it was set back.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak = self.highest = 0
        self._device, self._start, self._kept = device, 0, 0

    def __enter__(self) -> None:
        self.highest = max(self.highest, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)

    def __exit__(self, *_: object) -> None:
        grown = torch.cuda.max_memory_allocated(self._device) - self._start
        self.peak = max(self.peak, self._kept + grown)
        self._kept += torch.cuda.memory_allocated(self._device) - self._start


@dataclass
class ClientMemory:
    """The largest client of a round; a client is measured until a round with its boundary is over.

    Attributes:
        on: whether anyone asked.
    """

    on: bool = False
    _trackers: dict[int, Tracked | Allocated] = field(default_factory=dict)
    _largest: dict[int, int] = field(default_factory=dict)
    _round: set[Any] = field(default_factory=set)
    _known: set[Any] = field(default_factory=set)

    @contextmanager
    def of(self, client: int, boundary: int | None, model: CutModel, cut: int | None) -> Iterator[None]:
        """Measure one action of a client, if that is due.

        Args:
            client: its number.
            boundary: what its request says; None where the method has none.
            model: the one it computes on.
            cut: the boundary up to which it holds the model; None: it holds all of it.
        """
        if not self.on or boundary in self._known:
            yield
            return
        self._round.add(boundary)
        tracker = self._trackers.setdefault(client, _tracker(model.device))
        try:
            with tracker:
                yield
        finally:
            held = resident_bytes(model, cut)
            self._largest[client] = max(self._largest.get(client, 0), tracker.peak + held)

    def note(self, client: int, boundary: int | None, peak: int) -> None:
        """Count what a client on another machine measured of itself, in bytes, if that is due."""
        if self.on and boundary not in self._known:
            self._round.add(boundary)
            self._largest[client] = max(self._largest.get(client, 0), peak)

    def largest(self, client: int) -> int:
        """Bytes of a client in this round; 0 if it was not measured."""
        return self._largest.get(client, 0)

    def take(self) -> tuple[int | None, int]:
        """(bytes of the largest client, None if none was measured; an allocator's peak that was set back)."""
        peak = max(self._largest.values(), default=None)
        highest = max((getattr(t, "highest", 0) for t in self._trackers.values()), default=0)
        self._known |= self._round
        self._trackers, self._largest, self._round = {}, {}, set()
        return peak, highest


def resident_bytes(model: CutModel, boundary: int | None) -> int:
    """Bytes of the parameters and buffers a client holds, tied ones once.

    Args:
        model: the whole model.
        boundary: the blocks below it and what comes before them are held; None: all of the module.
    """
    blocks = {id(t): place for place, block in enumerate(model.elements) for t in _tensors(block)}
    places: dict[int, tuple[int, int]] = {}  # id -> (block, bytes)
    after = False
    for path, module in model.module.named_modules():
        for name, tensor in chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            after = after or id(tensor) in blocks
            outside = block_of(f"{path}.{name}", "", model.blocks, after)
            size = tensor.numel() * tensor.element_size()
            places.setdefault(id(tensor), (blocks.get(id(tensor), outside), size))
    return sum(size for place, size in places.values() if boundary is None or place < boundary)


def _tracker(device: torch.device) -> Tracked | Allocated:
    return Allocated(device) if device.type == "cuda" else Tracked()


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in an operation's operands or results; some kinds have none."""
    for value in tree_iter(values):
        if isinstance(value, Tensor):
            try:
                yield value.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
