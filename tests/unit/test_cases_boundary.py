# SPDX-License-Identifier: Apache-2.0
"""Reports from the field on the cut and what crosses it (C18, C22, C23, C24, C28, C35)."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from families import CAUSAL, adapted, tokens
from hofl.checkup.evaluation import evaluated
from hofl.checkup.findings import language
from hofl.config import parse
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.errors import ConfigError
from hofl.models import export as exporting
from hofl.models.boundary import cut
from hofl.models.export import Form, export, logits_of, reload
from hofl.models.hooks import same
from hofl.models.load import load
from hofl.models.lora import add_lora
from hofl.models.tiny import tiny, tiny_config
from hofl.protocol.base import Call, Replies
from hofl.protocol.split import Wire, pack, unpack
from hofl.runtime.local import local_call
from hofl.runtime.tracked import resident_bytes
from hofl.session import prepare
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from question_tasks import write_texts
from split_tasks import losing
from two_numbers import built, played, texts


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


# --- halves of a model


@pytest.mark.parametrize("family", CAUSAL)
def test_c18_the_bottom_runs_without_a_cache_and_blocks_keep_their_numbers(family: str) -> None:
    model, given = cut(adapted(family)), list[set[str]]()

    def read(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        given.append({type(value).__name__ for value in (*args, *kwargs.values())})

    handles = [block.register_forward_pre_hook(read, with_kwargs=True) for block in model.elements]
    for boundary in (1, 3):
        z = model.bottom(tokens(), boundary)
        model.top(tokens(), boundary, z)
    for handle in handles:
        handle.remove()
    assert len(given) == (1 + 4) + (3 + 4) and not any("Cache" in kind for each in given for kind in each)
    numbers = {m.layer_idx for m in model.module.modules() if hasattr(m, "layer_idx")}
    assert numbers == {0, 1, 2, 3}


def test_c18_a_split_client_is_counted_with_the_embedding_and_the_layers_below() -> None:
    """At cut 1: 509 x 32 numbers, and q, k, v, o, three of 64 x 32 and two norms; see ``hofl plan``."""
    layer = 4 * (32 * 32 + 16 * 32 + 16 * 32 + 32 * 32 + 3 * 64 * 32 + 2 * 32)
    model = cut(tiny("llama"))
    assert (resident_bytes(model, 1), resident_bytes(model, 2)) == (65152 + layer, 65152 + 2 * layer)


# --- Gemma's scale

SCALES = {640: 25.25, 1152: 34.0, 2304: 48.0, 3072: 55.5}
"""sqrt(hidden) rounded to bfloat16, as the models were trained."""


@pytest.mark.parametrize("hidden", SCALES)
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_c22_gemmas_scale_is_rounded_once_and_never_applied_at_the_cut(
    family: str, hidden: int, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        small = AutoModelForCausalLM.from_config(tiny_config(family, 2, hidden_size=hidden))
    small.get_input_embeddings().weight.data.fill_(1.0)
    small.save_pretrained(tmp_path)
    module = load(str(tmp_path), dtype="bfloat16", text=False).module
    model, seen = cut(add_lora(module, key=Key.of(1, "init"), rank=2)), list[Tensor]()
    handles = [
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in model.elements
    ]
    z = model.bottom(tokens(), 1)
    with torch.no_grad():
        fed, full = model.top(tokens(), 1, z), model.full(tokens())
    for handle in handles:
        handle.remove()
    real = tokens()["attention_mask"].bool()
    assert seen[0].dtype == torch.bfloat16 and set(seen[0][real].flatten().tolist()) == {SCALES[hidden]}
    assert torch.equal(seen[2], z) and torch.equal(fed, full)  # 0: bottom; 1, 2: top; 3, 4: full


# --- weights that were read wrongly


def test_c35_a_model_that_knows_no_language_is_told(tmp_path: Path) -> None:
    """A random model is about at the vocabulary of 509; a tenth is 50.9. A file like that is warned of."""
    at = write_texts(tmp_path / "texts")
    config = parse(
        f'algorithm = "fedavg"\nrounds = 1\n[model]\nsource = "tiny:llama"\ndevice = "cpu"\n[task]\n'
        f'name = "language"\ntrain = "{at / "part-*.txt"}"\nevaluation = "{at / "held.txt"}"\nlength = 8\n'
        "[partition]\nclients = 2\n[cohort]\nsize = 2\n",
        "x.toml",
    )
    session = prepare(config)
    (note,) = language(session, {"evaluation": evaluated(session)})
    assert note["level"] == "note" and note["numbers"]["vocabulary"] == 509 < note["numbers"]["value"]
    own = config.model_copy(update={"model": config.model.model_copy(update={"source": "own.gguf"})})
    loaded = replace(session, config=own)
    for value, level in ((50.0, []), (51.0, ["warning"]), (None, [])):
        found = {"evaluation": {"metric": "perplexity", "value": value}}
        assert [one["level"] for one in language(loaded, found)] == level
    assert not list(language(loaded, {"evaluation": {"metric": "f1", "value": 99.0}}))


# --- what travels


@pytest.mark.parametrize(("wire", "arrives"), [("bfloat16", 70144.0), ("float32", 70000.0)])
def test_c23_what_overflows_float16_arrives_finite(wire: Wire, arrives: float) -> None:
    """Numbers of bfloat16 beyond 65536 are 512 apart: 137 x 512 = 70144."""
    z = torch.tensor([[1.0, 7.0e4]])
    assert torch.isinf(z.half()).any() and unpack(pack(z, wire), "float32").tolist() == [[1.0, arrives]]


def test_c23_float16_is_no_wire() -> None:
    with pytest.raises(ConfigError, match=r"split\.wire.*float16"):
        parse('algorithm = "ho_sfl"\n[split]\nwire = "float16"\n', "x.toml")


STEPS = {"splitfed_v1": ("forward", "backward"), "splitfed_v2": ("forward",), "splitlora": ("backward",),
         "zo_sfl": ("advance",), "ho_sfl": ("activate", "probe", "settle")}  # fmt: skip


def swapping(call: Call, client: int, action: str, early: dict[str, Record]) -> Call:
    """This client's first answer to an action comes second, and the second, overheard before, first."""
    count = {"asked": 0}

    def swapped(asked: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = call(asked, requests, deadline)
        if asked == action and client in replies.records:
            count["asked"] += 1
            replies.records[client] = early["second" if count["asked"] == 1 else "first"]
        return replies

    return swapped


def overhearing(call: Call, client: int, action: str, early: dict[str, Record]) -> Call:
    def heard(asked: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = call(asked, requests, deadline)
        if asked == action and client in replies.records:
            early.setdefault("second" if "first" in early else "first", replies.records[client])
        return replies

    return heard


@pytest.mark.parametrize(("name", "action"), [(name, a) for name, many in STEPS.items() for a in many])
def test_c24_answers_of_two_steps_that_are_swapped_never_meet(name: str, action: str) -> None:
    """The client is refused for the round, which ends as if it had been lost there, and the run goes on."""
    task, victim, early = (
        synthetic_task(Partition(clients=3), seed=1, rows=60, width=6),
        1,
        dict[str, Record](),
    )
    start = task.model.read()
    algorithm = built(name, task, 2, steps=3, batch=4, directions="gaussian", radius=0.01)
    rounds = 2 if name == "ho_sfl" else 1
    list(played(algorithm, task, overhearing(local_call(task, algorithm.actions), victim, action, early),
                rounds, range(3)))  # fmt: skip
    assert set(early) == {"first", "second"}
    outcomes = list[Any]()
    for wrong in (
        swapping(local_call(task, algorithm.actions), victim, action, early),
        losing(local_call(task, algorithm.actions), victim, action, 0),
    ):
        task.model.write(start)
        outcomes.append(next(played(algorithm, task, wrong, 1, range(3))))
    swapped, lost = outcomes
    assert set(swapped.failures) == {victim} == set(lost.failures)
    assert swapped.failures[victim].startswith("refused: reply is for ")
    mine, expected = (outcome.state.arrays["weights/vector"] for outcome in outcomes)
    assert np.array_equal(mine, expected) and not np.array_equal(mine, start)
    task.model.write(start)
    again = algorithm.round(swapped.state, range(3), local_call(task, algorithm.actions))
    assert not again.failures


# --- a tied embedding


@pytest.mark.parametrize("name", ["ho_fl", "ho_sfl"])
@pytest.mark.parametrize("form", ["peft", "merged"])
def test_c28_a_tied_embedding_stays_as_it_was_and_tied(
    name: str, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters on both sides of the cut take 5 hybrid steps; what is saved and loaded again is the same."""
    task = texts("llama")
    model, module = task.model, task.model.module.get_base_model()
    embedding, start = module.get_input_embeddings().weight, model.read()
    before = sha256(embedding)
    algorithm = built(name, task, 2, probes=2, radius=0.01, directions="gaussian", batch=4)
    *_, outcome = played(algorithm, task, local_call(task, algorithm.actions), 5, range(2))
    moved, boundary = outcome.state.arrays["weights/vector"], model.layout.bottom_size(2)
    assert (moved != start)[:boundary].any() and (moved != start)[boundary:].any()
    model.write(moved)
    assert sha256(embedding) == before
    assert module.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    inputs, facts = tokens(), load("tiny:llama").facts
    expected = logits_of(model.module, inputs)
    monkeypatch.setattr(exporting, "_verify", lambda *_: 0.0)  # it would start a process; see test_lora.py
    export(model.module, tmp_path / "out", facts=facts, inputs=inputs, form=form)
    again = reload(tmp_path / "out", facts)
    assert same(logits_of(again, inputs), expected) <= (1e-6 if form == "peft" else 1e-5)
    base = again.get_base_model() if form == "peft" else again
    held = base.get_input_embeddings().weight
    assert base.get_output_embeddings().weight.data_ptr() == held.data_ptr() and sha256(held) == before
    assert base.config.tie_word_embeddings
