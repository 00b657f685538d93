# SPDX-License-Identifier: Apache-2.0
"""The shapes of a few well-known models, so that a plan needs neither their weights nor a network."""

from typing import Any

_TIED = {"tie_word_embeddings": True}

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-1.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            **_TIED,
        },
    ),
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            **_TIED,
        },
    ),
    "OPT-125M": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
            **_TIED,
        },
    ),
    "SmolLM3-3B": (
        "smollm3",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            **_TIED,
        },
    ),
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            **_TIED,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "Gemma-3-270M": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            **_TIED,
        },
    ),
}
"""Name -> its Hugging Face model type and what its ``config.json`` says of shapes."""


def find(name: str) -> tuple[str, dict[str, Any]] | None:
    """The entry of a name, with or without its owner and in any case; None if it is not known."""
    wanted = name.rpartition("/")[2].lower()
    return next((entry for known, entry in NAMED.items() if known.lower() == wanted), None)
