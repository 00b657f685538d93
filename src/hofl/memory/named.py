# SPDX-License-Identifier: Apache-2.0
"""The models of the papers and those of hofl's own studies: where they are, where they are cut, their shapes.

With the shape a plan needs neither weights nor a network.
"""

from typing import Any, NamedTuple

_TIED = {"tie_word_embeddings": True}


class Known(NamedTuple):
    """A model.

    Attributes:
        source: what ``model.source`` is: a hub id, or a network of hofl's own.
        boundaries: of three tiers, the most capable first; HO-FL Table 1 for the three it names, about a
            quarter, a half and three quarters of the blocks for the others.
        parameters: how many it has, tied ones once.
        kind: its Hugging Face model type; none for a network that is no transformer.
        shape: what its ``config.json`` says of shapes.
    """

    source: str
    boundaries: tuple[int, int, int]
    parameters: int
    kind: str
    shape: dict[str, Any]

    @property
    def blocks(self) -> int:
        """L, what a boundary may be at most."""
        return int(self.shape["num_hidden_layers"])


MODELS: dict[str, Known] = {
    "Qwen2.5-1.5B": Known(
        "Qwen/Qwen2.5-1.5B",
        (8, 16, 24),
        1_543_714_304,
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
    "SmolLM2-135M": Known(
        "HuggingFaceTB/SmolLM2-135M",
        (10, 20, 27),
        134_515_008,
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
    "OPT-125M": Known(
        "facebook/opt-125m",
        (3, 6, 9),
        125_239_296,
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
    "SmolLM3-3B": Known(
        "HuggingFaceTB/SmolLM3-3B",
        (9, 18, 27),
        3_075_098_624,
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
    "Llama-3.2-1B": Known(
        "meta-llama/Llama-3.2-1B",
        (4, 8, 12),
        1_235_814_400,
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
    "Llama-3.1-8B": Known(
        "meta-llama/Llama-3.1-8B",
        (8, 16, 24),
        8_030_261_248,
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
    "Gemma-3-270M": Known(
        "google/gemma-3-270m",
        (5, 9, 14),
        268_098_176,
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
    "MiniLM-L6": Known(
        "sentence-transformers/all-MiniLM-L6-v2",
        (2, 3, 5),
        22_713_216,
        "bert",
        {
            "vocab_size": 30522,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
        },
    ),
    "ResNet-18": Known("resnet18", (3, 5, 7), 11_173_962, "", {"num_hidden_layers": 10}),
}
"""Every model by the name that the papers give it."""

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    name: (model.kind, model.shape) for name, model in MODELS.items() if model.kind
}
"""Name -> the Hugging Face model type and the shapes of a transformer."""


def find(name: str) -> tuple[str, dict[str, Any]] | None:
    """The entry of ``NAMED`` of a name; None if it is not known."""
    return NAMED.get(known(name) or "")


def known(name: str) -> str | None:
    """The name in ``MODELS`` of a name or a source, with or without its owner; None for others."""
    wanted = name.rpartition("/")[2].lower()
    return next(
        (
            own
            for own, model in MODELS.items()
            if wanted in (own.lower(), model.source.lower().rpartition("/")[2])
        ),
        None,
    )
