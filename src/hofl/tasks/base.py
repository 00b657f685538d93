# SPDX-License-Identifier: Apache-2.0
"""A task: one cut model, the clients' data, a loss and sums for the metrics."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.core.keys import Key
from hofl.models.boundary import CutModel
from hofl.tasks.metrics import Score


@dataclass(frozen=True)
class Batch:
    """Model inputs by argument name and what they are scored against.

    Attributes:
        inputs: what the module's forward takes, each [batch, ...].
        targets: class ids int64 [batch]; or tokens int64 [batch, n], each the one that follows one of the
            last n positions of the inputs, ``IGNORED`` where none is scored.
    """

    inputs: dict[str, Tensor]
    targets: Tensor


IGNORED = -100
"""The target of a position that is not scored, as PyTorch's cross-entropy has it."""


Keep = Callable[[dict[str, Any]], None]
"""Takes one held-out example as plain JSON values: at least ``row``, ``target`` and ``prediction``."""


class Evaluate(Protocol):
    """Scores the live parameters on the evaluation set."""

    def __call__(self, keep: Keep | None = None) -> Score:
        """The sums; ``keep``, if given, is called once for each example in the order of its row number."""


@dataclass(frozen=True)
class Task:
    """Everything a client or an evaluation needs; one instance serves all clients.

    Attributes:
        name: what the run folder calls it.
        model: the only copy of the model.
        clients: ids, ``[A-Za-z0-9_-]{1,64}``; a client's number is its place here.
        shards: example numbers of each client, int64 arrays.
        collate: example numbers of the training set -> Batch.
        loss: (output [batch, classes] or [batch, positions, vocabulary], batch) -> mean loss, a scalar
            tensor.
        evaluate: the live parameters on the evaluation set -> their score; see :class:`Evaluate`.
        seed: the run's seed, for the order of batches.
        lengths: batch -> int32 [batch], what the top needs beside z where examples differ in size; None
            where they do not.
        top_inputs: (lengths or None, z) -> inputs that stand for the batch's where the bottom is another's:
            the module's forward runs on them with every block below the boundary replaced.
        facts: for the manifest: labels, majority class, truncated texts, the partition table.
    """

    name: str
    model: CutModel
    clients: tuple[str, ...]
    shards: Sequence[NDArray[np.int64]]
    collate: Callable[[NDArray[np.int64]], Batch]
    loss: Callable[[Tensor, Batch], Tensor]
    evaluate: Evaluate
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    lengths: Callable[[Batch], NDArray[np.int32]] | None = None
    top_inputs: Callable[[NDArray[np.int32] | None, Tensor], dict[str, Tensor]] = field(
        default=lambda lengths, z: {"input": z.new_zeros(len(z))}
    )

    def batch(self, client: int, position: int, size: int) -> Batch:
        """The client's minibatch number ``position``, counted over the whole run.

        A pure function: each pass over the shard has its own seeded order, the short last
        batch of a pass is dropped, and a shard below ``size`` is one batch.
        """
        shard = self.shards[client]
        size = min(size, len(shard))
        passes, place = divmod(position, len(shard) // size)
        order = Key.of(self.seed, "batches", client, passes).permutation(len(shard))
        return self.collate(shard[order[place * size : (place + 1) * size]])

    def loss_on(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The loss of one batch as a function of the model's output."""
        return lambda output: self.loss(output, batch)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the partition: client ids and their example numbers in order."""
        h = hashlib.sha256()
        for client, shard in zip(self.clients, self.shards, strict=True):
            h.update(f"{client}:{len(shard)};".encode() + np.ascontiguousarray(shard).tobytes())
        return h.hexdigest()


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy in float32: output [batch, classes], targets [batch] -> []."""
    return torch.nn.functional.cross_entropy(output.float(), batch.targets)


def aligned(inputs: dict[str, Tensor], targets: Tensor) -> Batch:
    """A batch whose targets are classes [batch], or those of the last n positions of its texts [batch, n].

    Of the latter, a module that can is asked for logits of these positions only: they are most of the memory.
    """
    if targets.ndim == 2 and "logits_to_keep" in inputs:
        positions, n = inputs["input_ids"].shape[1], targets.shape[1]
        inputs = {**inputs, "logits_to_keep": torch.arange(positions - n, positions, device=targets.device)}
    return Batch(inputs, targets)


def token_losses(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropies of the last n positions in output's dtype, 0 where a target is ``IGNORED``: [batch, n].

    Args:
        output: [batch, positions, vocabulary], of n positions or more.
        targets: [batch, n].
    """
    scored = output[:, output.shape[1] - targets.shape[1] :]
    each = torch.nn.functional.cross_entropy(
        scored.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view(targets.shape)


def token_cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Mean in float32 over the batch's scored tokens; see :func:`token_losses`."""
    targets = batch.targets.view(len(batch.targets), -1)
    return token_losses(output.float(), targets).sum() / (targets != IGNORED).sum()
