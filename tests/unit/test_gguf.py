# SPDX-License-Identifier: Apache-2.0
"""GGUF files: exact weights, refused differences, and a cache that is whole or absent."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from torch import nn

from families import tokens
from gguf_files import arrays, model, surroundings, write
from hofl.errors import ModelError
from hofl.models import gguf
from hofl.models.load import load


def apart(one: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        return float((one(**tokens()).logits - other(**tokens()).logits).abs().max())


pytestmark = pytest.mark.usefixtures("cache")


# --- weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_gives_the_same_logits(family: str, tied: bool, tmp_path: Path) -> None:
    """C35: a Llama's rows of q and k are permuted in the file, a Qwen2's are not."""
    module = model(family, tied)
    file = write(tmp_path / "m.gguf", module.config, arrays(module, family == "llama"))
    for _ in range(2):  # converted, then from the cache
        loaded = load(str(file))
        assert apart(loaded.module, module) <= 1e-5
    assert loaded.tokenizer("go g", add_special_tokens=False)["input_ids"][0] == 256
    output, embedding = loaded.module.get_output_embeddings(), loaded.module.get_input_embeddings()
    assert (output.weight.data_ptr() == embedding.weight.data_ptr()) == tied


@pytest.mark.parametrize(("family", "pairs"), [("llama", False), ("qwen2", True)])
def test_the_wrong_order_of_rows_shows(family: str, pairs: bool, tmp_path: Path) -> None:
    module = model(family)
    file = write(tmp_path / "m.gguf", module.config, arrays(module, pairs))
    assert apart(load(str(file)).module, module) > 1e-2


def test_a_quantised_file_is_kept_as_float16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = model("llama")
    kind = library.GGMLQuantizationType.Q8_0
    stored = {
        name: library.quantize(values, kind) if values.ndim > 1 else values
        for name, values in arrays(module, True).items()
    }
    found = load(str(write(tmp_path / "m.gguf", module.config, stored)))
    kept = load_file(Path(found.base) / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float16}
    assert 0 < apart(found.module, module) < 0.3
    head = stored["blk.0.ffn_up.weight"][0].copy()
    head[:2] = np.frombuffer(
        np.float16(6e4).tobytes(), np.uint8
    )  # a scale that float16 weights cannot follow
    stored["blk.0.ffn_up.weight"][0] = head
    found = load(str(write(tmp_path / "large.gguf", module.config, stored)))
    assert torch.isfinite(found.module.model.layers[0].mlp.up_proj.weight).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.1.ffn_up.weight", r"blk\.1\.ffn_up\.weight \(1 in all\)"),
        ("output_norm.weight", r"output_norm\.weight \(1 in all\)"),
        ("token_embd.weight", r"token_embd\.weight \(1 in all\)"),  # and with it the tied output
    ],
)
def test_a_lost_tensor_is_named(name: str, message: str, tmp_path: Path, cache: Path) -> None:
    """C35."""
    module = model("llama")
    stored = arrays(module, True)
    del stored[name]
    file = write(tmp_path / "m.gguf", module.config, stored)
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=f"lacks tensors: {message}"):
        load(str(file))
    assert list(cache.iterdir()) == []
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.2.ffn_up.weight"])
def test_a_tensor_with_no_place_is_named(name: str, tmp_path: Path, cache: Path) -> None:
    module = model("llama")
    stored = {**arrays(module, True), name: np.ones(32, np.float32)}
    with pytest.raises(ModelError, match=rf"has unknown tensors: {name} \(1 in all\)"):
        load(str(write(tmp_path / "m.gguf", module.config, stored)))
    assert list(cache.iterdir()) == []


def test_an_absent_output_is_tied_unless_the_file_says_otherwise(tmp_path: Path, cache: Path) -> None:
    """C36."""
    module = model("qwen2")
    stored = arrays(module, False)
    file = write(tmp_path / "tied.gguf", module.config, stored, tie_word_embeddings=True)
    found = load(str(file)).module
    assert found.get_output_embeddings().weight.data_ptr() == found.get_input_embeddings().weight.data_ptr()
    shutil.rmtree(cache)
    file = write(tmp_path / "untied.gguf", module.config, stored, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks tensors: output\.weight"):
        load(str(file))
    assert not cache.exists()


def test_files_beside_it_are_not_read(plain: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(plain, tmp_path / "m.gguf"))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "run.Config"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["run.T", null]}}')
    (tmp_path / "run.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    found = load(str(file))
    assert not (tmp_path / "marker").exists()
    text = "".join(path.read_text() for path in Path(found.base).glob("*.json"))
    assert "auto_map" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_attention_heads", 0, "not a GGUF model that can be read"),
        ("hidden_size", 2**20, r"its settings need \d{9,} weights, it holds \d{5}\)"),
        ("intermediate_size", 2**31, r"its settings need \d{9,} weights, it holds \d{5}\)"),
        ("num_hidden_layers", 3, r"lacks tensors: blk\.2\..* \(12 in all\)"),
        ("num_hidden_layers", 1, r"has unknown tensors: blk\.1\..* \(12 in all\)"),
    ],
)
def test_settings_that_do_not_fit_the_tensors(
    setting: str, value: int, message: str, tmp_path: Path, cache: Path
) -> None:
    module = model("qwen2")
    broken = SimpleNamespace(**{**module.config.to_dict(), setting: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=message):
        load(str(write(tmp_path / "m.gguf", broken, arrays(module, False))))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    assert list(cache.iterdir()) == []


# --- output and the cache


def test_nothing_is_printed_where_nobody_watches(plain: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    load(str(plain))
    assert capfd.readouterr() == ("", "")
    assert theirs.is_progress_bar_enabled() and theirs.get_verbosity() == level


def test_bars_on_a_terminal(
    plain: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(str(plain))
    shown = capfd.readouterr().err
    assert "Converting and de-quantizing GGUF tensors" in shown and "Loading weights" in shown


def test_a_misshapen_tensor_is_named_and_no_report_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    module = model("llama")
    stored = {**arrays(module, True), "blk.1.ffn_norm.weight": np.ones(31, np.float32)}
    file = write(tmp_path / "m.gguf", module.config, stored)
    logging.getLogger("transformers").addHandler(caplog.handler)  # its records do not reach the root logger
    try:
        with pytest.raises(ModelError, match=r"misshapen tensors: .*norm\.weight \[31\] for \[32\]"):
            load(str(file))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert capfd.readouterr() == ("", "") and caplog.text == ""


KILLED = """
import os, signal, sys
from pathlib import Path
from hofl.models import gguf
def half(path, header, work):
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
gguf._convert = half
gguf.converted(Path(sys.argv[1]))
"""


def test_a_killed_conversion_leaves_no_cache(plain: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(plain)], env=surroundings())
    assert done.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name != gguf.sha256_of(plain) and (left / "model" / "config.json").exists()
    assert apart(load(str(plain)).module, model("llama")) <= 1e-5
    assert left.exists()  # it might still be at work
    os.utime(left, (0, 0))
    shutil.rmtree(cache / gguf.sha256_of(plain))
    load(str(plain))
    assert [path.name for path in cache.iterdir()] == [gguf.sha256_of(plain)]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("act", "raised", "message"),
    [(interrupted, KeyboardInterrupt, None), (full, ModelError, "cannot be converted into .*No space left")],
)
def test_a_conversion_that_fails_leaves_nothing(
    act: Callable[..., None],
    raised: type[BaseException],
    message: str | None,
    plain: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", act)
    with pytest.raises(raised, match=message):
        load(str(plain))
    assert list(cache.iterdir()) == []


def test_two_conversions_at_once(plain: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, order = gguf._convert, []

    def second_in_the_middle(path: Path, header: Any, work: Path) -> None:
        order.append(work)
        if len(order) == 1:
            gguf.converted(plain)
        real(path, header, work)

    monkeypatch.setattr(gguf, "_convert", second_in_the_middle)
    target = gguf.converted(plain)
    assert len(set(order)) == 2 and [*cache.iterdir()] == [target]
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    assert apart(load(str(plain)).module, model("llama")) <= 1e-5


def test_a_damaged_cache_is_not_written_over(plain: Path, cache: Path) -> None:
    target = cache / gguf.sha256_of(plain)
    (target / "own").mkdir(parents=True)
    with pytest.raises(ModelError, match="cannot be converted into"):
        load(str(plain))
    assert [path.name for path in cache.iterdir()] == [target.name]
