# SPDX-License-Identifier: Apache-2.0
"""From token ids to what a text model's forward takes, and what stands for them where only z is known."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.errors import RecordError
from hofl.models.boundary import CutModel
from hofl.tasks.base import Batch
from hofl.tasks.tokens import Tokens, padded


def model_inputs(
    model: CutModel, tokenizer: Any, left: bool
) -> Callable[[Sequence[NDArray[np.int32]]], dict[str, Tensor]]:
    """Token ids of a batch -> what the module's forward takes, of this and no more.

    Position ids are explicit, for with pads on the left they do not follow from the places; logits are
    asked for at the last position only.
    """
    unwrap = getattr(model.module, "get_base_model", None)
    accepted = inspect.signature((unwrap() if unwrap else model.module).forward).parameters
    pad = pad_id(model, tokenizer)

    def fill(ids: Sequence[NDArray[np.int32]]) -> dict[str, Tensor]:
        """Padded to the longest of the batch, on the model's device."""
        tokens, mask = padded(ids, pad, left)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        if "position_ids" in accepted:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if left and "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = torch.tensor([tokens.shape[1] - 1])
        return {name: value.to(model.device) for name, value in inputs.items()}

    return fill


def pad_id(model: CutModel, tokenizer: Any) -> int:
    """The id of the pads: a head finds the last token by the model's own."""
    config = getattr(model.module, "config", None)
    known = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((i for i in known if i is not None and i >= 0), 0)


def known_lengths(lengths: NDArray[np.int32] | None, z: Tensor) -> NDArray[np.int32]:
    """The lengths of the texts behind z [batch, positions, width], checked: the longest fills the positions.

    Raises:
        RecordError: they do not fit z.
    """
    fits = lengths is not None and z.ndim == 3 and len(lengths) == len(z)
    if lengths is None or not fits or lengths.min() < 1 or lengths.max() != z.shape[1]:
        raise RecordError(f"lengths of texts do not fit activations of shape {list(z.shape)}")
    return lengths


def text_lengths(batch: Batch) -> NDArray[np.int32]:
    """Tokens of each text: int32 [batch]."""
    lengths: NDArray[np.int32] = batch.inputs["attention_mask"].sum(1).cpu().numpy().astype(np.int32)
    return lengths


def stand_ins(lengths: NDArray[np.int32], pad: int) -> list[Tokens]:
    """Texts of these lengths, of a token that is no pad."""
    return [np.full(n, 0 if pad else 1, dtype=np.int32) for n in lengths]
