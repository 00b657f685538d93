# SPDX-License-Identifier: Apache-2.0
"""A trained model as a folder for PEFT or Transformers, verified in a fresh process before it appears."""

import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hofl.errors import ModelError
from hofl.models.frozen import frozen_sha256
from hofl.models.hooks import replaced, same, scored
from hofl.models.load import load, output_embedding

Form = Literal["peft", "merged"]
TOLERANCE = 1e-4
"""Largest difference of reloaded logits, relative to the largest logit where that is above 1. (W + B A) x
rounds otherwise than W x + B (A x), and another process may take other kernels. The difference is told."""

_README = {
    "peft": """# LoRA adapter trained by hofl

It belongs on the base model `{base}`, whose frozen weights have the SHA-256 (as hofl hashes them)
`{base_sha256}`.

`base_model_name_or_path` in `adapter_config.json` is where that base was on the machine of the export;
elsewhere, load the base yourself and give it to `peft.PeftModel.from_pretrained(base, folder)`.
""",
    "merged": """# Model trained by hofl

LoRA adapters are merged into the weights of `{base}` (SHA-256 of its frozen weights, as hofl hashes them:
`{base_sha256}`), in float32. It needs no other weights.
""",
    "full": "# Model trained by hofl\n\nIt was trained from `{base}` and needs no other weights.\n",
}


def export(
    module: nn.Module,
    folder: Path,
    *,
    facts: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    tokenizer: Any = None,
    form: Form | None = None,
) -> dict[str, Any]:
    """Save adapters (PEFT), or the whole model with them merged in; then reload and compare elsewhere.

    A fresh process loads the base and the export and runs ``inputs``; only then does ``folder`` appear.
    Until then it is called ``<folder>.partial``, which is removed on failure. Beside the weights are
    ``hofl.json`` and ``README.md``, which name the base.

    Args:
        module: the trained module.
        folder: is made; nothing, or an empty folder, may be there.
        facts: ``Loaded.facts`` of the base.
        inputs: a batch of the task.
        tokenizer: saved beside a whole model.
        form: "peft", or "merged" for W + (alpha / r) B A in float32, after which ``module`` has no adapters
            any more; None for "peft" where there are adapters, else the whole model.

    Returns:
        ``kind`` ("peft", "merged" or "full"), ``folder``, ``difference`` (largest of the logits), ``base``
        (the source of the model below the adapters) and, of adapters, ``base_sha256`` of its weights.

    Raises:
        ModelError: the module cannot be saved so, or what was saved computes something else.
        OSError: it cannot be written.
    """
    adapted = hasattr(module, "get_base_model")
    if form == "peft" and not adapted:
        count = sum(p.requires_grad for p in module.parameters())
        raise ModelError(f"{count} tensors of the model itself were trained: an adapter would leave them out")
    if not hasattr(module, "save_pretrained"):
        raise ModelError(f"{type(module).__name__} is no Hugging Face model: export knows only those")
    place = folder.resolve()  # "." has no name to add to
    partial = place.with_name(place.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    told = {"kind": "full", "base": facts["source"]}
    if adapted:
        told |= {"kind": form or "peft", "base_sha256": frozen_sha256(module)}
    if told["kind"] == "merged":
        module, facts = module.float(), {**facts, "dtype": "float32"}
    expected = logits_of(module, inputs)
    if told["kind"] == "merged":
        merged: Any = module
        module = merged.merge_and_unload()
    try:
        _save(module, partial, facts, tokenizer)
        _describe(partial, told)
        difference = _verify(expected, partial, facts, inputs)
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


def _verify(expected: Tensor, folder: Path, facts: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        tensors = {f"input.{name}": value.cpu().contiguous() for name, value in inputs.items()}
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
        return load(str(folder), **where, text=False).module
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
