# SPDX-License-Identifier: Apache-2.0
"""Choosing what is trained, LoRA adapters by PEFT, and exports that are verified in a fresh process."""

import json
import math
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models.frozen import frozen_sha256
from hofl.models.hooks import replaced, same, scored
from hofl.models.load import is_head, load, output_embedding

Train = Literal["lora", "full", "head"]
TOLERANCE = 1e-6
"""Largest difference of reloaded logits, relative to the largest logit where that is above 1."""
_DEFAULTS = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("c_attn",),
    ("q_lin", "v_lin"),
    ("query_key_value",),
    ("qkv_proj",),
)


_README = {
    "peft": """# LoRA adapter trained by hofl

It belongs on the base model `{base}`, whose frozen weights have the SHA-256 (as hofl hashes them)
`{base_sha256}`.

`base_model_name_or_path` in `adapter_config.json` is where that base was on the machine of the export;
elsewhere, load the base yourself and give it to `peft.PeftModel.from_pretrained(base, folder)`.
""",
    "full": "# Model trained by hofl\n\nIt was trained from `{base}` and needs no other weights.\n",
}


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


def export(
    module: nn.Module,
    folder: Path,
    *,
    facts: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Save adapters (PEFT) or, without adapters, the whole model; then reload and compare elsewhere.

    A fresh process loads the base and the export and runs ``inputs``; only then does ``folder`` appear.
    Until then it is called ``<folder>.partial``, which is removed on failure. Beside the weights are
    ``hofl.json`` and ``README.md``, which name the base.

    Args:
        module: the trained module.
        folder: is made; nothing, or an empty folder, may be there.
        facts: ``Loaded.facts`` of the base.
        inputs: a batch of the task.
        tokenizer: saved beside a whole model.

    Returns:
        ``kind`` ("peft" or "full"), ``folder``, ``difference`` (largest of the logits), ``base``
        (the source of the model below the adapters) and, of adapters, ``base_sha256`` of its weights.

    Raises:
        ModelError: the module cannot be saved, or what was saved computes something else.
        OSError: it cannot be written.
    """
    if not hasattr(module, "save_pretrained"):
        raise ModelError(f"{type(module).__name__} is no Hugging Face model: export knows only those")
    place = folder.resolve()  # "." has no name to add to
    partial = place.with_name(place.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    told = {"kind": "full", "base": facts["source"]}
    if hasattr(module, "get_base_model"):
        told |= {"kind": "peft", "base_sha256": frozen_sha256(module)}
    try:
        _save(module, partial, facts, tokenizer)
        _describe(partial, told)
        difference = _verify(module, partial, facts, inputs)
        if place.exists():
            place.rmdir()
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {**told, "folder": str(folder), "difference": difference}


def _save(module: nn.Module, folder: Path, facts: Mapping[str, Any], tokenizer: Any) -> None:
    saved: Any = module
    values = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    if hasattr(module, "get_base_model"):
        # What PEFT loads by itself: for a package or a GGUF file that is a folder of this machine
        saved.peft_config["default"].base_model_name_or_path = facts["base"]
        saved.save_pretrained(str(folder), state_dict=values, save_embedding_layers=False)
        return
    saved.save_pretrained(str(folder), state_dict=values)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(folder))


def _describe(folder: Path, told: Mapping[str, str]) -> None:
    """Say in the folder, for a program and for a reader, which base its weights belong to."""
    Path(folder, "hofl.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    Path(folder, "README.md").write_text(_README[told["kind"]].format(**told), encoding="utf-8")


def logits_of(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """All logits in float32, also where the head is restricted to label words."""
    embedding = output_embedding(module)
    whole = {} if embedding is None else {embedding: type(embedding).forward.__get__(embedding)}
    with torch.no_grad(), replaced(whole):
        return scored(module(**inputs)).float().cpu()


def _verify(module: nn.Module, folder: Path, facts: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        tensors = {f"input.{name}": value.cpu().contiguous() for name, value in inputs.items()}
        expected = logits_of(module, inputs)
        save_file({**tensors, "expected": expected.contiguous()}, f"{scratch}/batch.safetensors")
        request = {"folder": str(folder), "facts": dict(facts), "threads": torch.get_num_threads()}
        Path(scratch, "request.json").write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", __name__, scratch], capture_output=True, text=True, check=False
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"the export cannot be loaded again and is removed: {reason}")
    difference = float(done.stdout.strip().splitlines()[-1])
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(
            f"the export computes other logits than the model, by {difference:.3g}, and is removed"
        )
    return difference


def reload(folder: Path, facts: Mapping[str, Any]) -> nn.Module:
    """The exported model: the base with its adapters, or the whole model."""
    where = {name: facts[name] for name in ("dtype", "device", "head")}
    if not (folder / "adapter_config.json").is_file():
        return load(str(folder), **where).module
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        wrapped: nn.Module = PeftModel.from_pretrained(load(facts["base"], **where).module, str(folder))
    return wrapped.eval()


def main(scratch: str) -> None:
    """In the fresh process: print the largest difference of the export's logits from the expected ones."""
    request = json.loads(Path(scratch, "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    batch = load_file(f"{scratch}/batch.safetensors")
    module = reload(Path(request["folder"]), request["facts"])
    device = request["facts"]["device"]
    inputs = {n.removeprefix("input."): t.to(device) for n, t in batch.items() if n.startswith("input.")}
    sys.stdout.write(f"{same(logits_of(module, inputs), batch['expected'])!r}\n")


if __name__ == "__main__":
    main(sys.argv[1])
