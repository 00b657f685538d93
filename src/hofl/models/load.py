# SPDX-License-Identifier: Apache-2.0
"""Loading a model and its tokenizer: hub id, local folder, GGUF file, installed package, tiny random.

Only safetensors are read and no code that comes with a model is run. Local sources open no socket.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.contained import refuse_escapes
from hofl.models.gguf import check_tensors, converted, line, quiet
from hofl.models.tiny import HashTokenizer, tiny

LAYOUT = "config.json, model.safetensors (or its shards) and the tokenizer's files"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Loaded:
    """A model on its device, in eval mode.

    Attributes:
        module: the model.
        tokenizer: of the model.
        base: what ``load`` and PEFT can load the same model from: a hub id or a folder (or ``tiny:``).
        facts: source, base, dtype, parameters, classes, for the manifest.
    """

    module: nn.Module
    tokenizer: Any
    base: str
    facts: dict[str, Any]


def load(
    source: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    head: int | None = None,
    key: Key | None = None,
    budget: int | None = None,
    text: bool = True,
) -> Loaded:
    """Load a model.

    Args:
        source: hub id, local folder, path of a ``.gguf``, ``package:NAME`` or ``tiny:FAMILY``.
        dtype: "float32" or "bfloat16".
        device: a torch device name.
        head: classes of a classification head; None for a causal language model.
        key: of a head's first weights and of a tiny model's.
        budget: most bytes the weights of a GGUF file may take dequantised to float32, checked by its
            header before any is read; None for any. Other sources are not checked.
        text: whether the tokenizer is needed; False leaves it out.

    Raises:
        ModelError: nothing usable there; the message says what was expected.
    """
    if dtype not in _DTYPES:
        raise ModelError(f'model.dtype = "{dtype}": allowed are {", ".join(_DTYPES)}')
    key = key or Key.of(0, "init")
    base, local = resolve(source, budget)
    if source.startswith("tiny:"):
        module: nn.Module = tiny(
            source.removeprefix("tiny:"), head=_checked(source, "bert" in source, head), key=key
        )
        tokenizer: Any = HashTokenizer()
    else:
        module, tokenizer = _pretrained(base, local, _DTYPES[dtype], head, key, text)
    module = module.to(device=device).eval()
    # No buffers: rotary frequencies in bfloat16 would turn far positions wrong.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(_DTYPES[dtype])
    parameters = sum(p.numel() for p in module.parameters())
    facts = {
        "source": source,
        "base": base,
        "dtype": dtype,
        "device": device,
        "parameters": parameters,
        "head": head,
    }
    return Loaded(module, tokenizer, base, facts)


def resolve(source: str, budget: int | None = None) -> tuple[str, bool]:
    """Where a source is loaded from, and whether that is local; converts a GGUF file on first use.

    Raises:
        ModelError: nothing usable there, or a GGUF file over the budget of bytes.
    """
    if not source:
        raise ModelError(
            'model.source is empty: give a hub id, a folder, a .gguf file, "package:NAME" or "tiny:FAMILY"'
        )
    if source.startswith("tiny:"):
        return source, True
    if source.startswith("package:"):
        return _folder_or_gguf(_packaged(source), budget, installed=True)
    try:
        path = Path(source).expanduser()
        if (
            path.exists()
            or source.endswith(".gguf")
            or source.startswith((".", "/", "~"))
            or source.count("/") > 1
        ):
            return _folder_or_gguf(path, budget)
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no such user's home
        raise ModelError(f'model.source = "{source[:80]}": {line(error)}') from error
    return source, False


def _folder_or_gguf(path: Path, budget: int | None, installed: bool = False) -> tuple[str, bool]:
    if path.suffix == ".gguf" and path.is_file():
        return str(converted(path, budget)), True
    if not (path / "config.json").is_file():
        raise ModelError(f'model.source = "{path}": not found; a model folder holds {LAYOUT}')
    refuse_code(path)
    if not installed:  # a package manager may have linked its files, and its code is trusted anyway
        refuse_escapes(path)
    return str(path), True


def refuse_code(folder: Path) -> None:
    """Refuse a model folder that asks for its own Python code.

    Raises:
        ModelError: a configuration of it has an ``auto_map``.
    """
    for path in sorted(folder.glob("*config.json")):
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if isinstance(settings, dict) and "auto_map" in settings:
            raise ModelError(f"{path} asks to run code that comes with the model (auto_map): hofl never does")


def _packaged(source: str) -> Path:
    """The model folder or file inside an installed package, which is not imported."""
    name = source.removeprefix("package:")
    plain = name.isidentifier() and name != "__main__"
    found = importlib.util.find_spec(name) if plain else None
    roots = list(found.submodule_search_locations or []) if found else []
    if not roots:
        raise ModelError(f'model.source = "{source}": no package "{name}" is installed in {sys.prefix}')
    root = Path(roots[0])
    folders = [
        path.parent for path in sorted(root.rglob("config.json")) if any(path.parent.glob("*.safetensors"))
    ]
    for path in [*folders, *sorted(root.rglob("*.gguf"))]:
        return path
    raise ModelError(f'model.source = "{source}": the package holds no model folder ({LAYOUT}) and no .gguf')


def _checked(source: str, encoder: bool, head: int | None) -> int | None:
    if encoder and head is None:
        raise ModelError(
            f'model.source = "{source}" is an encoder without next-token logits: use a trained head, head-v1'
        )
    return head


def _pretrained(
    base: str, local: bool, dtype: torch.dtype, head: int | None, key: Key, text: bool
) -> tuple[nn.Module, Any]:
    try:
        with quiet(), torch.random.fork_rng(devices=[]):  # a new head is drawn from our key below
            module, tokenizer, report = _parts(base, local, dtype, head, text)
    except ModelError:
        raise
    except Exception as error:  # the libraries raise of every kind at a damaged file
        raise ModelError(
            f'model.source = "{base}": cannot be loaded ({line(error)}); a folder holds {LAYOUT}'
        ) from error
    new = {name for name in report["missing_keys"] if head is not None and is_head(name)}
    dropped = {name for name in report["unexpected_keys"] if head is None}
    check_tensors(base, set(report["missing_keys"]) - new, dropped, report["mismatched_keys"])
    _draw(module, new, key)
    return module, tokenizer


def _parts(
    base: str, local: bool, dtype: torch.dtype, head: int | None, text: bool
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model, its tokenizer and the library's account of tensors it lacks, has too many or misshapen."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    safe = {"trust_remote_code": False, "local_files_only": local}
    config = AutoConfig.from_pretrained(base, **safe)
    encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    _checked(base, encoder, head)
    tokenizer = AutoTokenizer.from_pretrained(base, **safe) if text else None
    kind = AutoModelForCausalLM if head is None else AutoModelForSequenceClassification
    if head is not None:
        config.num_labels = head
        config.pad_token_id = _pad(config, tokenizer) if text else config.pad_token_id
    options = {
        **safe,
        "config": config,
        "dtype": dtype,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are in the report, which we refuse by
    }
    module, report = kind.from_pretrained(base, **options)
    return module, tokenizer, report


def is_head(name: str) -> bool:
    """Whether a parameter belongs to a classification head, by the names Hugging Face uses."""
    return any(part in ("score", "classifier", "pooler", "pre_classifier") for part in name.split("."))


def _pad(config: Any, tokenizer: Any) -> int | None:
    known = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((number for number in known if number is not None), None)


def _draw(module: nn.Module, names: set[str], key: Key) -> None:
    """First weights of a new head, from the key: normal with standard deviation 0.02, biases 0."""
    parameters = dict(module.named_parameters())
    for place, name in enumerate(sorted(names)):
        shape = tuple(parameters[name].shape)
        drawn = key.fold(place).generator().standard_normal(shape, dtype=np.float32)
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(0.02 * drawn) if len(shape) > 1 else torch.zeros(shape))


def restrict_head(module: nn.Module, token_ids: Sequence[int]) -> None:
    """Let the output embedding compute these tokens' logits only: [..., len(token_ids)].

    Weights stay as they are (and tied). Works before or after adapters are added; an adapter on the
    output embedding itself still takes effect, but then all logits are computed first.

    Raises:
        ModelError: the module has no output embedding.
    """
    embedding = output_embedding(module)
    if embedding is None:
        raise ModelError(
            f"{type(module).__name__} has no output embedding: label words need a language model"
        )
    ids = torch.tensor(list(token_ids), device=next(module.parameters()).device)
    plain = type(embedding) is nn.Linear

    def _forward(hidden: torch.Tensor) -> torch.Tensor:
        if not plain:
            return type(embedding).forward(embedding, hidden)[..., ids]
        weight, bias = embedding.weight, embedding.bias
        return nn.functional.linear(hidden, weight[ids], None if bias is None else bias[ids])

    vars(embedding)["forward"] = _forward


def output_embedding(module: nn.Module) -> Any:
    """The module that turns hidden states into logits, or None."""
    unwrap = getattr(module, "get_base_model", None)
    base = unwrap() if unwrap else module
    find = getattr(base, "get_output_embeddings", None)
    return find() if find else None
