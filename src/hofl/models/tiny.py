# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every supported family, as in ``model.source = "tiny:llama"``."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from hofl.core.keys import Key
from hofl.errors import ModelError

VOCABULARY = 509
_SPREAD = 0.2
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}
_GEMMA = {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
_OPT = {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "max_position_embeddings": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", _GROUPED),
    "smollm3": ("smollm3", {**_GROUPED, "no_rope_layers": [1, 0, 1, 0]}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "opt": ("opt", _OPT),
    "opt-post-norm": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_positions": 128}),
    "bert": ("bert", _SIZES),
}
"""Family -> its Hugging Face model type and the settings of its tiny shape."""


class HashTokenizer:
    """One token a whitespace-separated word, by hash: any text works, nothing is learned from data."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        """Token ids of each text, after a start token where special tokens are asked for."""
        start = [self.bos_token_id] if add_special_tokens else []
        return {"input_ids": [start + [_token(word) for word in text.split()] for text in texts]}

    def __len__(self) -> int:
        """How many tokens there are."""
        return VOCABULARY

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """A made-up word for each token: a hash has no way back."""
        kept = [[i for i in row if i > self.eos_token_id or not skip_special_tokens] for row in ids]
        return [" ".join(f"w{i}" for i in row) for row in kept]


def _token(word: str) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 3 + int.from_bytes(digest, "little") % (VOCABULARY - 3)


def tiny_config(family: str, layers: int = 4, **settings: Any) -> Any:
    """The Hugging Face configuration of a tiny family.

    Raises:
        ModelError: no such family; the message lists them.
    """
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ModelError(f'model.source = "tiny:{family}": allowed families are {", ".join(FAMILIES)}')
    kind, sizes = FAMILIES[family]
    if "no_rope_layers" in sizes:
        sizes = {**sizes, "no_rope_layers": [(place + 1) % 2 for place in range(layers)]}
    count = {"num_hidden_layers": layers}
    return AutoConfig.for_model(kind, **{**_COMMON, **sizes, **count, **settings})


def tiny(family: str, *, head: int | None = None, layers: int = 4, key: Key | None = None) -> nn.Module:
    """A random model of a family: 32 wide, 4 layers, the same weights for the same key.

    Args:
        family: a name of :data:`FAMILIES`.
        head: classes of a classification head; None for a causal language model.
        layers: number of blocks.
        key: of the weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = tiny_config(family, layers, **({} if head is None else {"num_labels": head}))
    kind = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):  # whatever the constructor draws is overwritten below
        module: nn.Module = kind.from_config(config)
    numbers = (key or Key.of(0, "init")).generator()
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = numbers.standard_normal(tuple(parameter.shape), dtype=np.float32)
            if parameter.dim() > 1:
                parameter.copy_(torch.from_numpy(_SPREAD * drawn))
            else:
                parameter.add_(torch.from_numpy(_SPREAD / 2 * drawn))
    return module.eval()
