# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError, HoflError, ModelError
from hofl.models.boundary import CutModel, cut
from hofl.models.load import load, restrict_head
from hofl.models.tiny import FAMILIES
from hofl.tasks.partition import Partition
from hofl.tasks.text import text_task
from hofl.tasks.text_data import TextData, read_text
from hofl.tasks.tokens import word_tokens

WORDS = ["fine", "dull", "film", "plot", "a", "the", "and", "Review", "It", "was", "bad", "good", ":", "."]
"""Ids from 3 on; 0 pads, 1 begins, 2 ends."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words by a table, so that every id in a test can be read off."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[BOS]", "[SEP]", *WORDS, "[UNK]"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("[BOS] $A [SEP]", None, [("[BOS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[SEP]", bos_token="[BOS]"
    )


def _ids(*words: str) -> list[int]:
    return [3 + WORDS.index(word) for word in words]


def _started(module: nn.Module) -> nn.Module:
    """The module with its weights from a key: the global generator has no part in a test."""
    for place, (name, parameter) in enumerate(module.named_parameters()):
        values = Key.of(7, "init", place).uniforms(parameter.numel()).reshape(parameter.shape) - 0.5
        if parameter.ndim == 1:  # biases 0, scales of norms 1
            values = np.full(parameter.shape, not name.endswith("bias"))
        parameter.data = torch.from_numpy(values.astype(np.float32))
    return module.eval()


SIZES = {
    "vocab_size": 18,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def _llama(head: bool = False) -> CutModel:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    made = LlamaConfig(**SIZES, num_labels=2)
    return cut(_started(LlamaForSequenceClassification(made) if head else LlamaForCausalLM(made)))


def _opt(head: bool = False) -> CutModel:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return cut(_started(OPTForCausalLM(OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16))))


def _bert(head: bool = True) -> CutModel:
    from transformers import BertConfig, BertForSequenceClassification

    return cut(_started(BertForSequenceClassification(BertConfig(**SIZES, num_labels=2))))


def _rows(n: int, start: int = 0) -> list[dict[str, Any]]:
    """Sentences of one to six words after a word that gives the label away."""
    first, rest = ("dull", "fine"), ("film", "and", "plot", "the", "a")
    return [
        {"text": " ".join([first[i % 2], *rest[: i % 6], str(i)]), "label": i % 2}
        for i in range(start, start + n)
    ]


def _data(**changes: Any) -> TextData:
    settings: dict[str, Any] = {"template_id": "sst2-v1", "seed": 1, "divided": Partition(clients=4)}
    settings |= {"train": _rows(60), "evaluation": _rows(21, 1000)} | changes
    return read_text(**settings)


def test_a_batch_is_a_pure_function_and_holds_what_the_module_takes(tokenizer: Any) -> None:
    """C20: positions are explicit, from the mask."""
    task = text_task(_data(), _llama(), tokenizer, length=16)
    one, same = task.batch(2, 5, 4), task.batch(2, 5, 4)
    assert set(one.inputs) == {"input_ids", "attention_mask", "position_ids", "logits_to_keep"}
    assert all(torch.equal(one.inputs[name], same.inputs[name]) for name in one.inputs)
    last = one.inputs["input_ids"][:, -2:]
    assert last.tolist() == [_ids("It", "was")] * 4
    assert one.inputs["position_ids"][:, -1].tolist() == (one.inputs["attention_mask"].sum(1) - 1).tolist()
    gives_away = (one.inputs["input_ids"] == _ids("fine")[0]).any(1)
    assert torch.equal(gives_away.long(), one.targets)


@pytest.mark.parametrize(
    ("make", "name"),
    [(_llama, "sst2-v1"), (_opt, "sst2-v1"), (lambda: _llama(True), "head-v1"), (_bert, "head-v1")],
)
def test_padding_changes_no_score(tokenizer: Any, make: Callable[[], CutModel], name: str) -> None:
    data = _data(template_id=name)
    scores = {
        batch: text_task(data, make(), tokenizer, length=16, batch=batch).evaluate() for batch in (1, 5, 64)
    }
    assert scores[1].n == 21 and np.array_equal(scores[1].confusion, scores[64].confusion)
    assert (
        scores[1].loss == pytest.approx(scores[5].loss, rel=1e-5) == pytest.approx(scores[64].loss, rel=1e-5)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sst2-v1", "head-v1"])
def test_every_family_scores_alike_whatever_the_padding(family: str, name: str) -> None:
    if family == "bert" and name != "head-v1":
        pytest.skip("an encoder has no next token")
    loaded = load(f"tiny:{family}", head=2 if name == "head-v1" else None)
    data = _data(template_id=name)
    whole = text_task(data, cut(loaded.module), loaded.tokenizer, length=24, batch=21).evaluate()
    if name != "head-v1":
        restrict_head(loaded.module, word_tokens(loaded.tokenizer, data.template))
    task = text_task(data, cut(loaded.module), loaded.tokenizer, length=24, batch=1)
    task.model.self_test(task.batch(0, 0, 4).inputs)
    each = task.evaluate()
    assert np.array_equal(whole.confusion, each.confusion) and whole.loss == pytest.approx(
        each.loss, rel=1e-4
    )


def test_the_loss_looks_at_the_label_words_at_the_answer_only(tokenizer: Any) -> None:
    task = text_task(_data(), _llama(), tokenizer, length=16)
    batch = task.batch(0, 0, 8)
    whole = {name: value for name, value in batch.inputs.items() if name != "logits_to_keep"}
    logits = task.model.full(whole)[:, -1][:, _ids("bad", "good")].detach()
    expected = nn.functional.cross_entropy(logits, batch.targets)
    assert float(task.loss(task.model.full(batch.inputs).detach(), batch)) == pytest.approx(
        float(expected), rel=1e-5
    )
    restricted = logits[:, None]  # a head that was cut down to the label words gives [batch, 1, words]
    assert float(task.loss(restricted, batch)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("make", "name"), [(_llama, "sst2-v1"), (_bert, "head-v1")])
def test_a_few_steps_learn_and_the_cut_model_agrees_with_itself(
    tokenizer: Any, make: Callable[[], CutModel], name: str
) -> None:
    task = text_task(_data(template_id=name), make(), tokenizer, length=16)
    task.model.self_test(task.batch(0, 0, 4).inputs)
    before = task.evaluate()
    for step in range(60):
        batch = task.batch(step % 4, step // 4, 8)
        _, gradient, _ = task.model.first_order(batch.inputs, 0, None, task.loss_on(batch))
        task.model.write(task.model.read() - np.float32(0.1) * gradient)
    after = task.evaluate()
    assert after.n == before.n == 21 and after.loss < 0.5 * before.loss and after.accuracy >= 0.9


def test_a_head_of_another_width_is_refused(tokenizer: Any) -> None:
    data = _data(template_id="head-v1", train=[{"text": str(i), "label": i % 3} for i in range(9)])
    task = text_task(data, _bert(), tokenizer, length=16)
    with pytest.raises(ModelError, match="head has 2 outputs for 3 classes"):
        task.evaluate()


def test_the_facts_say_what_the_data_is_and_quote_none_of_it(tokenizer: Any) -> None:
    canary = "canary sentence"
    rows = [*_rows(60)[:-1], {"text": canary, "label": 1}]
    task = text_task(_data(train=rows), _llama(), tokenizer, length=16)
    facts = task.facts
    assert (facts["n_train"], facts["n_evaluation"], facts["template"]) == (60, 21, "sst2-v1")
    assert facts["labels"] == ["negative", "positive"] and facts["label_words"] == [" bad", " good"]
    assert facts["label_tokens"] == _ids("bad", "good")
    assert facts["majority_class"] == {"label": "negative", "rate": 11 / 21}
    assert [row["client"] for row in facts["partition"]] == list(task.clients)
    assert sum(row["examples"] for row in facts["partition"]) == 60
    assert facts["shared_texts"] == 0 and facts["warnings"] == []
    assert "canary" not in repr(facts)


def test_cut_texts_are_counted_and_said(tokenizer: Any) -> None:
    """C40: the share of texts that do not fit is said."""
    rows = [{"text": "film " * (40 if i < 3 else 2) + str(i), "label": i % 2} for i in range(10)]
    facts = text_task(_data(train=rows, divided=Partition(clients=2)), _llama(), tokenizer, length=20).facts
    assert facts["truncated"] == {"train": 3, "evaluation": 0}
    assert any("30% of the training texts are cut" in warning for warning in facts["warnings"])


def test_texts_on_both_sides_are_counted_and_said() -> None:
    facts = _data(evaluation=[{"text": "DULL   0", "label": 0}, {"text": "new", "label": 1}]).facts
    assert facts["shared_texts"] == 1
    assert facts["warnings"] and facts["warnings"][0].startswith(
        "1 of 2 evaluation texts are also in the training"
    )


def test_the_fingerprint_covers_texts_and_labels() -> None:
    same, again = _data().facts["data_sha256"], _data().facts["data_sha256"]
    rows = _rows(60)
    rows[3]["label"] = 0
    assert same == again != _data(train=rows).facts["data_sha256"]
    assert same["evaluation"] == _data(train=rows).facts["data_sha256"]["evaluation"]


def _client_files(folder: Path, counts: Sequence[int]) -> str:
    for client, rows in enumerate(counts):
        lines = ["text,label", *(f"site {client} row {i},{i % 2}" for i in range(rows))]
        (folder / f"site-{client}.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "*.csv")


def test_files_are_clients_and_an_empty_one_is_idle(tmp_path: Path) -> None:
    """C43."""
    data = _data(train=_client_files(tmp_path, [5, 0, 7]), divided=Partition("files"))
    assert data.clients == ("site-0", "site-1", "site-2")
    assert [len(shard) for shard in data.shards] == [5, 0, 7]
    for client, shard in enumerate(data.shards):
        assert all(data.train.texts[i][0].startswith(f"site {client} ") for i in shard)


def test_drawn_rows_stay_with_their_client(tmp_path: Path) -> None:
    data = _data(train=_client_files(tmp_path, [50, 0, 70]), divided=Partition("files"), train_rows=40)
    assert sum(map(len, data.shards)) == len(data.train.texts) == 40 and len(data.shards[1]) == 0
    for client, shard in enumerate(data.shards):
        assert all(data.train.texts[i][0].startswith(f"site {client} ") for i in shard)


def test_drawn_rows_follow_the_seed() -> None:
    one, same, other = (_data(train_rows=10, evaluation_rows=5, seed=seed) for seed in (1, 1, 2))
    assert one.train.texts == same.train.texts != other.train.texts
    assert len(one.train.texts) == 10 and len(one.evaluation.texts) == 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"template_id": "none"}, ConfigError, "task.template"),
        (
            {"text": "text,label"},
            ConfigError,
            "task.text = 'text,label': template 'sst2-v1' needs columns for text",
        ),
        (
            {"text": "texts"},
            DataError,
            "^task.text: .*no column 'texts'; there are 'text', 'label': did you mean 'text'",
        ),
        ({"label": "labels"}, DataError, "^task.label: .*no column 'labels'"),
        ({"train": "no.csv"}, DataError, "^task.train: 'no.csv': no such file"),
        ({"evaluation": "no.csv"}, DataError, "^task.evaluation: 'no.csv': no such file"),
        ({"evaluation": "a.csv?b="}, ConfigError, "^task.evaluation: 'a.csv.b=': 'b=' is not understood"),
        (
            {"template_id": "head-v1", "train": [{"text": "a", "label": 1}] * 9},
            DataError,
            "^task.label: templ",
        ),
        ({"evaluation_rows": 22}, ConfigError, "^task.evaluation_rows = 22: the data has 21"),
        ({"train": [{"text": "a", "label": -1}] * 9}, DataError, "task.train: label '-1' in 9 of 9 rows"),
        ({"evaluation": [{"text": "a", "label": 2}]}, DataError, "task.evaluation: label '2' in 1 of 1 rows"),
        ({"train": [{"text": None, "label": 0}] * 9}, DataError, "task.train: 9 of 9 rows have no text"),
        ({"train": []}, DataError, "no column 'text'"),
        ({"train_rows": 61}, ConfigError, "^task.train_rows = 61: the data has 60"),
        ({"divided": Partition(clients=61)}, ConfigError, "would hold no example"),
    ],
)
def test_bad_data_fails_before_any_model_and_in_one_line(
    changes: dict[str, Any], error: type[HoflError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        _data(**changes)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_the_model_has_no_positions_for_is_refused(tokenizer: Any, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"task.length = {length}: allowed is 1 to 64"):
        text_task(_data(), _llama(), tokenizer, length=length)


def test_text_that_is_no_unicode_does_no_harm(tokenizer: Any) -> None:
    rows = [{"text": "fine \ud800 film {braces} {0}", "label": i % 2} for i in range(8)]
    task = text_task(_data(train=rows), _llama(), tokenizer, length=32)
    assert task.facts["n_train"] == 8 and task.batch(0, 0, 2).targets.shape == (2,)
