# SPDX-License-Identifier: Apache-2.0
"""GGUF files: dequantised once into a cached folder, read from there afterwards."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hofl.errors import ModelError


def cache_folder() -> Path:
    """``$HOFL_CACHE``, or ``hofl`` in the user's cache folder."""
    own = os.environ.get("HOFL_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hofl"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted(path: Path) -> Path:
    """The cached folder (float16 safetensors, configuration, tokenizer) of a GGUF file, made if absent.

    It is keyed by the file's SHA-256 and appears whole or not at all.

    Raises:
        ModelError: the file is not readable as a model, or lacks a tensor; the message names it.
    """
    target = cache_folder() / "gguf" / sha256_of(path)
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            with bars():
                _convert(path, partial)
            if not target.exists():  # another process may have been faster
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        model, report = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{path}: not a GGUF model that can be read ({_line(error)})") from error
    check_tensors(str(path), report["missing_keys"], report["unexpected_keys"])
    vars(model.config).pop("quantization_config", None)  # or the saved folder would claim to be GGUF
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(mark, None)
    model.to(torch.float16).save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


@contextmanager
def bars() -> Iterator[None]:
    """Progress bars of the loader only where someone watches."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    try:
        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_tensors(source: str, missing: object, unexpected: object) -> None:
    """Refuse a model whose file lacks tensors or has others.

    Raises:
        ModelError: naming up to three of them.
    """
    for what, names in (("lacks", missing), ("has unknown", unexpected)):
        listed = sorted(names)  # type: ignore[call-overload]
        if listed:
            shown = ", ".join(listed[:3])
            raise ModelError(
                f"{source} {what} tensors: {shown} ({len(listed)} in all): it fits another model"
            )


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
