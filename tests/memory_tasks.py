# SPDX-License-Identifier: Apache-2.0
"""Tasks of random tokens at exact lengths, and what a complete participation in one was seen to need."""

import inspect

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hofl.algorithms import ALGORITHMS
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.memory.subject import Workload
from hofl.models.boundary import CutModel, cut
from hofl.models.lora import add_lora
from hofl.protocol.aggregate import Training
from hofl.protocol.probing import Probing, Shared
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.tasks.base import Batch, Task, cross_entropy
from hofl.tasks.metrics import Sums

VOCABULARY = 500


def cut_lora(module: nn.Module, rank: int = 8) -> CutModel:
    """The module with adapters, cut."""
    return cut(add_lora(module, key=Key.of(0, "init"), rank=rank))


def token_task(model: CutModel, work: Workload, headed: bool = False) -> Task:
    """One client whose batches are as a workload says; where it has a mask, the first row is half pads."""
    base = model.module.get_base_model()
    accepted = inspect.signature(base.forward).parameters

    def collate(numbers: NDArray[np.int64]) -> Batch:
        shape = (len(numbers), work.length)
        ids = torch.from_numpy(Key.of(3, "init").generator().integers(3, VOCABULARY, shape))
        mask = torch.ones(shape, dtype=torch.int64)
        if work.attention == "mask":
            mask[0, : work.length // 2] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {name: tensor for name, tensor in inputs.items() if name in accepted}
        if not headed and "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = torch.tensor([work.length - 1])
        return Batch(inputs, torch.zeros(len(numbers), dtype=torch.int64))

    return Task(
        "tokens",
        model,
        ("a",),
        [np.arange(work.batch)],
        collate,
        lambda output, batch: cross_entropy(output[:, -1] if output.ndim == 3 else output, batch),
        lambda: Sums.zero(2),
        0,
    )


def seen(task: Task, work: Workload, boundary: int, estimator: str | None, pure: bool = False) -> int:
    """Bytes of the model and of the tracked storages of one participation at their most."""
    task.model.checkpointing = work.checkpointing
    optimizer = Optimizer("adamw", 1e-5)
    training = Training(1, work.steps, work.batch, optimizer, (work.batch,), run="seen")
    probing = Probing(estimator or "none", work.probes, 1e-3, "gaussian", optimizer)
    given = {"layout": task.model.layout, "boundaries": (boundary,), "training": training, "probing": probing}
    method = ALGORITHMS["decomfl" if pure else "ho_fl"]
    algorithm = method.build(**given, preferred=None, shared=Shared())
    meter = Meter()
    meter.memory.on = True
    call = local_call(task, algorithm.actions, meter)
    outcome = algorithm.round(algorithm.init(task.model.read()), [0], call)
    assert not outcome.failures
    return meter.memory.largest(0)
