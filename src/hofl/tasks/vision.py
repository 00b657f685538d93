# SPDX-License-Identifier: Apache-2.0
"""Image classification: small images, all of one size, kept as bytes and made float32 a batch at a time.

Two steps, so that bad data fails before a network is built: :mod:`hofl.tasks.vision_data` needs files only,
:func:`vision_task` adds the cut model. There is no augmentation: a batch is a pure function of its example
numbers, so that anyone can make it again.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.models.boundary import CutModel
from hofl.tasks.base import Batch, Keep, Task, cross_entropy
from hofl.tasks.metrics import Sums
from hofl.tasks.predictions import classified
from hofl.tasks.vision_data import ImageData, Images


def vision_task(data: ImageData, model: CutModel, *, batch: int = 32) -> Task:
    """The task of a cut model, images float32 [batch, channels, height, width] to logits, on the data.

    Args:
        data: from :func:`hofl.tasks.vision_data.read_images`, or what one half of it has.
        model: takes the images, normalised by the mean and the deviation of the training images.
        batch: images an evaluation batch.
    """
    mean, std = (
        torch.tensor(data.facts[name], dtype=torch.float32, device=model.device)[:, None, None]
        for name in ("mean", "std")
    )

    def collate(numbers: NDArray[np.int64], of: Images = data.train) -> Batch:
        """Examples by number, of the training set unless another is named."""
        pixels = torch.from_numpy(of.pixels[numbers]).to(model.device)
        targets = torch.from_numpy(of.labels[numbers]).to(model.device)
        return Batch({"input": (pixels.float() - mean) / std}, targets)

    def answers(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Logits and targets of held-out images by number."""
        scored = collate(rows, data.evaluation)
        return model.full(scored.inputs), scored.targets

    def evaluate(keep: Keep | None = None) -> Sums:
        """All held-out images, in their order."""
        return classified(answers, np.arange(len(data.evaluation.labels)), batch, data.names, keep)

    facts = dict(data.facts)
    return Task(
        "vision", model, data.clients, data.shards, collate, cross_entropy, evaluate, data.seed, facts
    )
