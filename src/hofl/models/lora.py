# SPDX-License-Identifier: Apache-2.0
"""Choosing what is trained, and LoRA adapters by PEFT."""

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.load import is_head, output_embedding

Train = Literal["lora", "full", "head"]
_DEFAULTS = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("c_attn",),
    ("q_lin", "v_lin"),
    ("query_key_value",),
    ("qkv_proj",),
)


def default_targets(module: nn.Module) -> tuple[str, ...]:
    """The attention projections LoRA adapts where none are named: query and value, or the fused one.

    Raises:
        ModelError: the module has none of the known names.
    """
    present = {name.rsplit(".", 1)[-1] for name, _ in module.named_modules()}
    for names in _DEFAULTS:
        if present.issuperset(names):
            return names
    linear = {n.rsplit(".", 1)[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    raise ModelError(
        f"model.lora.targets is empty and no default fits: name some of {', '.join(sorted(linear))}"
    )


def add_lora(
    module: nn.Module, *, key: Key, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = ()
) -> nn.Module:
    """The module wrapped by PEFT with float32 LoRA adapters: A uniform from the key, B zero.

    A classification head is trained too, in float32. The global random state is left as it was.

    Args:
        module: from :func:`hofl.models.load.load`.
        key: of A, one stream a tensor.
        rank: r.
        alpha: the scale is alpha / r.
        targets: names of the linear layers to adapt; empty for :func:`default_targets`.

    Raises:
        ModelError: a target is no linear layer of the module, or is tied to the embedding.
    """
    from peft import LoraConfig, get_peft_model

    chosen = list(targets) or list(default_targets(module))
    _refuse_tied(module, chosen)
    classifies = type(module).__name__.endswith("ForSequenceClassification")
    task = "SEQ_CLS" if classifies else "CAUSAL_LM" if output_embedding(module) is not None else None
    fused = any(type(m).__name__ == "Conv1D" for n, m in module.named_modules() if n.endswith(tuple(chosen)))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=chosen,
        lora_dropout=0.0,
        task_type=task,
        fan_in_fan_out=fused,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT asks transformers 5 for an attribute by its old name
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            wrapped: nn.Module = get_peft_model(module, config)
    except ValueError as error:
        line = " ".join(str(error).split())[:160]
        raise ModelError(f"model.lora.targets = {chosen}: {line}") from error
    _draw(wrapped, key)
    return wrapped


def _refuse_tied(module: nn.Module, targets: Sequence[str]) -> None:
    """An adapter on a head that shares the embedding's tensor would change both when it is merged."""
    find = getattr(module, "get_input_embeddings", None)
    shared = getattr(find(), "weight", None) if find else None
    for name, part in module.named_modules():
        if name.endswith(tuple(targets)) and shared is not None and getattr(part, "weight", None) is shared:
            raise ModelError(
                f"model.lora.targets has {name}, which shares its tensor with the embedding: leave it out"
            )


def _draw(wrapped: nn.Module, key: Key) -> None:
    adapters = sorted((n, p) for n, p in wrapped.named_parameters() if ".lora_" in n)
    for place, (name, parameter) in enumerate(adapters):
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            drawn = (2 * key.fold(place).uniforms(parameter.numel()) - 1) * bound
            parameter.data.copy_(torch.from_numpy(drawn).view(parameter.shape))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:  # a classification head of a bfloat16 model
            parameter.data = parameter.data.float()


def select(module: nn.Module, train: Train) -> None:
    """Set ``requires_grad`` for what is trained; call it before :func:`hofl.models.boundary.cut`.

    Args:
        module: with adapters for "lora".
        train: "lora" adapters (and a classification head), "full" all parameters, "head" the head only.

    Raises:
        ModelError: there is nothing of that kind.
    """
    if train == "lora":
        if not any(".lora_" in name for name, _ in module.named_parameters()):
            raise ModelError('model.train = "lora": the model has no adapters; add_lora first')
        return
    embedding = output_embedding(module)
    own = {id(p) for p in embedding.parameters()} if embedding is not None else set()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(train == "full" or is_head(name) or id(parameter) in own)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError('model.train = "head": the model has no head; use "full" or "lora"')
