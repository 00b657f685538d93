# SPDX-License-Identifier: Apache-2.0
"""GGUF files: dequantised once into a cached folder, read from there afterwards."""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hofl.errors import ModelError
from hofl.models.gguf_header import OUTPUT, Header, read_header, refusal, within_budget

_STALE = 24 * 3600.0
_FLOAT16_MAX = 65504.0
_WHOLE = {"F32", "F64", "BF16"}


def cache_folder() -> Path:
    """``$HOFL_CACHE``, or ``hofl`` in the user's cache folder."""
    own = os.environ.get("HOFL_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hofl"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted(path: Path, budget: int | None = None) -> Path:
    """The cached folder (safetensors, configuration, tokenizer) of a GGUF file, made if absent.

    It is keyed by the file's SHA-256 and appears whole or not at all.

    Args:
        path: of the file.
        budget: most bytes its weights may take as float32; None for any.

    Raises:
        ModelError: the file is not readable as a model, lacks a tensor (the message names it), is over
            the budget, or the cache cannot be written.
    """
    if budget is not None:
        within_budget(path, budget)
    target = cache_folder() / "gguf" / sha256_of(path)
    if _complete(target):
        return target
    header = read_header(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            _convert(path.resolve(), header, work)
            _publish(work / "model", target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{path} cannot be converted into {target.parent}: {line(error)}") from error
    return target


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:  # another process was faster, or what is there is no cache
        if not _complete(target):
            raise


def _sweep(target: Path) -> None:
    """Remove what killed conversions of this file left; younger ones may still be running."""
    for left in target.parent.glob(f"{target.name}.*"):
        if time.time() - left.stat().st_mtime > _STALE:
            shutil.rmtree(left, ignore_errors=True)


def _convert(path: Path, header: Header, work: Path) -> None:
    """Write the folder ``work / "model"``."""
    import torch

    alone = work / "source"  # else the tokenizer would be mixed with files that lie beside the GGUF file
    alone.mkdir()
    (alone / "model.gguf").symlink_to(path)
    try:  # tensors that are missing are drawn before we refuse
        with quiet(), torch.random.fork_rng(devices=[]):
            model, tokenizer, report = _read(path, header, alone)
    except ModelError:
        raise
    except Exception as error:  # the reader raises of every kind at a broken file
        raise refusal(path, line(error)) from error
    check_tensors(str(path), report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
    vars(model.config).pop("quantization_config", None)  # or the saved folder would claim to be GGUF
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(mark, None)
    with quiet():
        (model.half() if _fits_float16(model, header) else model).save_pretrained(str(work / "model"))
        tokenizer.save_pretrained(str(work / "model"))


def _read(path: Path, header: Header, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    safe = {"gguf_file": "model.gguf", "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(str(folder), **safe)
    with torch.device("meta"):
        _foresee(path, header, AutoModelForCausalLM.from_config(config))
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **safe)
    model, report = AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, which we refuse by
        **safe,
    )
    return model, tokenizer, report


def _foresee(path: Path, header: Header, empty: Any) -> None:
    """Refuse, before a weight is read, tensors that do not fit the model the file's settings describe.

    The reader passes over tensors it has no place for without a word, so they are found by its name map;
    it allocates what the settings say, so they may not say much more than the file holds.
    """
    from transformers.integrations.gguf import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    if not is_gguf_arch_supported(header.architecture):  # those have a reader that reports by itself
        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
        places = get_gguf_hf_weights_map(empty, processor)
        spelled = {ours: theirs for theirs, ours in places.items()}
        needed = {spelled[name] for name in empty.state_dict() if name in spelled}
        if empty.config.tie_word_embeddings:
            needed.discard(OUTPUT)
        check_tensors(str(path), needed - set(header.tensors), set(header.tensors) - set(places))
    described = sum(parameter.numel() for parameter in empty.parameters())
    if described > 2 * header.elements:
        raise refusal(path, f"its settings need {described} weights, it holds {header.elements}")


def _fits_float16(model: Any, header: Header) -> bool:
    """Whether rounding to float16 is below what the file's own quantisation lost, and nothing overflows."""
    from gguf.constants import GGMLQuantizationType

    matrices = {GGMLQuantizationType(t.kind).name for t in header.tensors.values() if t.dimensions > 1}
    return not matrices & _WHOLE and all(
        float(parameter.detach().abs().max()) <= _FLOAT16_MAX for parameter in model.parameters()
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of the loader unless someone watches or asked for them, and none of its warnings.

    What it would warn of, tensors that are missing or too many, we refuse; a user who asked the library
    for more than warnings still gets it.
    """
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as library

    shown, level, bar = library.is_progress_bar_enabled(), library.get_verbosity(), vars(reader)["tqdm"]
    try:
        if not sys.stderr.isatty() and HF_HUB_DISABLE_PROGRESS_BARS is not False:
            library.disable_progress_bar()
            vars(reader)["tqdm"] = partial(bar, disable=True)  # this one does not follow the switch above
        if level == logging.WARNING:
            library.set_verbosity_error()
        yield
    finally:
        vars(reader)["tqdm"] = bar
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


def check_tensors(
    source: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Iterable[tuple[Any, ...]] = (),
) -> None:
    """Refuse a model whose file lacks tensors, has others or has them in another shape.

    Args:
        source: of the model, for the message.
        missing: names.
        unexpected: names.
        misshapen: name, shape in the file and shape in the model.

    Raises:
        ModelError: naming up to three of them.
    """
    shapes = [f"{name} {list(file)} for {list(model)}" for name, file, model in misshapen]
    for what, names in (("has misshapen", shapes), ("lacks", missing), ("has unknown", unexpected)):
        listed = sorted(names)
        if listed:
            shown = ", ".join(listed[:3])
            raise ModelError(
                f"{source} {what} tensors: {shown} ({len(listed)} in all): it fits another model"
            )


def line(error: Exception) -> str:
    """An error of a library in one printable line of at most 200 characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    return "".join(character for character in words if character.isprintable())[:200]
