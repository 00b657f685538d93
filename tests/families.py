# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported family, cut and with a batch, shared by the tests."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hofl.core.keys import Key
from hofl.models.boundary import CutModel, cut
from hofl.models.lora import add_lora, select
from hofl.models.tiny import FAMILIES, VOCABULARY, tiny

CAUSAL = [name for name in FAMILIES if name != "bert"]
NAMES = [*FAMILIES, "sequential"]
LENGTHS = (10, 6, 3)
WIDTH = 12


@dataclass(frozen=True)
class Case:
    """A cut model, a right-padded batch of unequal lengths, and a loss of its output."""

    model: CutModel
    inputs: dict[str, Tensor]
    loss: Callable[[Tensor], Tensor]


def numbers(*shape: int, key: int = 1) -> Tensor:
    """Standard-normal float32 numbers, the same every time."""
    return torch.from_numpy(Key.of(key, "init", *shape).generator().standard_normal(shape, dtype="float32"))


def tokens(lengths: tuple[int, ...] = LENGTHS, left: bool = False, pads: int = 0) -> dict[str, Tensor]:
    """Ids, mask and explicit positions of a padded batch; ``pads`` more pads than needed."""
    longest = max(lengths) + pads
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        place = slice(longest - length, None) if left else slice(length)
        drawn = Key.of(3, "init", row).generator().integers(3, VOCABULARY, length)
        ids[row, place], mask[row, place] = torch.from_numpy(drawn), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def adapted(family: str, layers: int = 4, head: int | None = None, rank: int = 2) -> nn.Module:
    """A tiny model with LoRA adapters whose B is not zero."""
    module = add_lora(tiny(family, head=head, layers=layers), key=Key.of(5, "init"), rank=rank, alpha=4.0)
    for place, (name, parameter) in enumerate(module.named_parameters()):
        if "lora_B" in name:
            parameter.data.copy_(0.3 * numbers(*parameter.shape, key=place))
    return module


def perceptron(blocks: int = 4) -> nn.Sequential:
    """Linear layers and activations in turn, all trained."""
    with torch.random.fork_rng():  # the constructors' own draws are overwritten
        pairs = [layer for _ in range(blocks // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        whole = nn.Sequential(*pairs[:-1], nn.Linear(WIDTH, 3))
    for place, parameter in enumerate(whole.parameters()):
        parameter.data.copy_(0.3 * numbers(*parameter.shape, key=place))
    return whole


def case(name: str, *, layers: int = 4, checkpointing: bool = False) -> Case:
    """A family of ``NAMES``: LoRA for transformers (and a head for BERT), everything for ``sequential``."""
    if name == "sequential":
        model = cut(perceptron(layers), checkpointing=checkpointing)
        return Case(model, {"input": numbers(3, WIDTH)}, lambda output: output.square().mean())
    head = 3 if name == "bert" else None
    module = adapted(name, layers, head)
    inputs = tokens()
    if head:
        return Case(cut(module, checkpointing=checkpointing), inputs, lambda o: o.logsumexp(-1).mean())
    real = inputs["attention_mask"].bool()
    return Case(cut(module, checkpointing=checkpointing), inputs, lambda o: o[real].logsumexp(-1).mean())


def untie(module: nn.Module) -> None:
    """Give the output embedding a tensor of its own."""
    head = module.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    module.config.tie_word_embeddings = False


def full_case(family: str, layers: int = 3, untied: bool = True) -> CutModel:
    """A tiny model with all parameters trained, its embedding untied from its head."""
    module = tiny(family, layers=layers)
    if untied:
        untie(module)
    select(module, "full")
    return cut(module)


def digest(module: nn.Module) -> str:
    """SHA-256 over all parameters and buffers."""
    h = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        h.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
