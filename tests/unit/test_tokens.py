# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from hofl.errors import ConfigError, ModelError
from hofl.models.tiny import HashTokenizer
from hofl.tasks.templates import TEMPLATES, template
from hofl.tasks.tokens import encode, padded, word_tokens

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


def test_a_prompt_ends_with_its_cue_and_begins_as_the_tokenizer_begins(tokenizer: Any) -> None:
    found = encode(tokenizer, template("sst2-v1"), [["a fine film"]], 64)
    assert found.ids[0].tolist() == [1, *_ids("Review", ":", "a", "fine", "film", "It", "was")]
    framed = encode(tokenizer, template("head-v1"), [["a fine film"]], 64)
    assert framed.ids[0].tolist() == [1, *_ids("a", "fine", "film"), 2]
    assert found.truncated == framed.truncated == 0


@pytest.mark.parametrize("length", [6, 7, 10, 13])
@pytest.mark.parametrize("name", ["sst2-v1", "head-v1"])
def test_only_the_text_is_cut_and_no_more_than_it_must(tokenizer: Any, name: str, length: int) -> None:
    texts = [["fine"], ["a fine film and the plot " * 3], ["dull " * 5000]]
    found = encode(tokenizer, template(name), texts, length)
    ends = _ids("It", "was") if name == "sst2-v1" else [2]
    assert [len(ids) for ids in found.ids[1:]] == [length, length]
    assert all(ids[-len(ends) :].tolist() == ends for ids in found.ids)
    assert found.truncated == 2
    whole = encode(tokenizer, template(name), texts, 64).ids[1].tolist()
    assert found.ids[1].tolist()[: -len(ends)] == whole[: length - len(ends)]


def test_the_first_field_alone_is_cut(tokenizer: Any) -> None:
    found = encode(tokenizer, template("rte-v1"), [["the plot " * 30, "a film"]], 24).ids[0].tolist()
    whole = encode(tokenizer, template("rte-v1"), [["the plot", "a film"]], 64).ids[0].tolist()
    assert len(found) == 24 and found[-len(whole[3:]) :] == whole[3:]


@pytest.mark.parametrize(("length", "short"), [(1, 4), (4, 1)])
def test_a_length_that_holds_no_cue_is_refused(tokenizer: Any, length: int, short: int) -> None:
    with pytest.raises(ConfigError, match=f"task.length: template 'sst2-v1' needs {short} tokens more"):
        encode(tokenizer, template("sst2-v1"), [["a fine film"]], length)
    assert len(encode(tokenizer, template("sst2-v1"), [["a fine film"]], length + short).ids[0]) == 5


def test_label_words_are_the_tokens_after_the_cue(tokenizer: Any) -> None:
    assert word_tokens(tokenizer, template("sst2-v1")) == _ids("bad", "good")


def test_label_words_without_a_token_of_their_own_are_named(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="' World', ' Sports', ' Business', ' Technology'; use another"):
        word_tokens(tokenizer, template("ag_news-v1"))  # all four are the unknown word


def test_pads_go_left_of_an_answer_and_right_of_a_text() -> None:
    ids = [np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32)]
    tokens, mask = padded(ids, 0, left=True)
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert padded(ids, 9, left=False)[0].tolist() == [[5, 6, 7], [8, 9, 9]]


@pytest.mark.parametrize("name", [name for name, each in TEMPLATES.items() if each.words])
def test_the_tiny_tokenizer_knows_all_label_words(name: str) -> None:
    tokens = word_tokens(HashTokenizer(), template(name))
    assert len(set(tokens)) == len(TEMPLATES[name].words)
