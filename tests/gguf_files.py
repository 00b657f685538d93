# SPDX-License-Identifier: Apache-2.0
"""Tiny models written as GGUF files, shared by the tests."""

import os
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
from torch import nn

import hofl
from families import untie
from hofl.core.keys import Key
from hofl.models.tiny import VOCABULARY, tiny, tiny_config

LAYERS = 2
ROPE = 5e4
Arrays = dict[str, np.ndarray]


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to pairs, as GGUF files of Llama hold them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def arrays(module: nn.Module, pairs: bool) -> Arrays:
    """A model's tensors under their GGUF names."""
    config: Any = module.config
    kind = next(key for key, name in library.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = library.get_tensor_name_map(kind, LAYERS)
    found = {}
    for name, tensor in module.state_dict().items():
        stored = names.get_name(name, (".weight", ".bias"))
        values = tensor.detach().numpy().copy()
        if pairs and ".attn_q." in stored:
            values = permuted(values, config.num_attention_heads)
        if pairs and ".attn_k." in stored:
            values = permuted(values, config.num_key_value_heads)
        if not (stored == "output.weight" and config.tie_word_embeddings):
            found[stored] = values
    return found


def write(path: Path, config: Any, tensors: Arrays, **extra: Any) -> Path:
    """A GGUF file with the settings of a configuration and a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    family = config.model_type
    words = [*bytes_to_unicode().values(), "go"]
    words += [f"unused{place}" for place in range(VOCABULARY - len(words))]
    out = library.GGUFWriter(path, family)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(ROPE)
    if family == "llama":
        out.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_merges(["g o"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    for key, value in extra.items():
        {bool: out.add_bool, int: out.add_uint32}[type(value)](f"{family}.{key}", value)
    for name, values in tensors.items():
        if values.dtype == np.uint8:
            out.add_tensor(name, values, raw_dtype=library.GGMLQuantizationType.Q8_0)
        else:
            out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def model(family: str, tied: bool = True) -> nn.Module:
    module = tiny(family, layers=LAYERS, key=Key.of(7, "init"))
    rotated = tiny_config(family, LAYERS, rope_parameters={"rope_type": "default", "rope_theta": ROPE})
    result = type(module)(rotated).eval()
    result.load_state_dict(module.state_dict())
    if not tied:
        untie(result)
        result.get_output_embeddings().weight.data.mul_(-1)
    return result


def llama(folder: Path) -> Path:
    """The file of the tied tiny Llama in a folder."""
    module = model("llama")
    return write(folder / "llama.gguf", module.config, arrays(module, True))


def surroundings() -> dict[str, str]:
    """Environment of a process that imports hofl as this one does."""
    source = str(Path(hofl.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
