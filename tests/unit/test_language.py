# SPDX-License-Identifier: Apache-2.0
"""Causal language modelling on plain text files: pieces, loss, perplexity, who holds what."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hofl.build_task import build_task, node_task, with_sizes
from hofl.config import Config, parse
from hofl.errors import ConfigError, DataError
from hofl.exporting import export_run
from hofl.report.compare import summary_table, verdicts
from hofl.report.groups import group
from hofl.report.rows import RunData
from hofl.session import prepare
from hofl.tasks.base import IGNORED
from hofl.tasks.language_data import read_files
from hofl.tasks.nodes import told
from hofl.tasks.partition import Partition
from question_tasks import language, text, tokenizer, write_texts


def _ids(words: int, key: int) -> list[int]:
    found: list[int] = tokenizer()([text(words, key)])["input_ids"][0]
    return found


def test_every_token_but_a_files_first_is_predicted_once(tmp_path: Path) -> None:
    """The first is the tokenizer's own start, so that all of the text is predicted."""
    task = language(tmp_path, length=8)
    predicted: Counter[int] = Counter()
    count = sum(map(len, task.shards))
    for place in range(count):
        batch = task.collate(np.array([place]))
        ids, targets = batch.inputs["input_ids"][0].tolist(), batch.targets[0].tolist()
        assert len(ids) == len(targets) <= 8 and ids[1:] == targets[:-1]
        predicted.update(targets)
    whole = [_ids(words, place) for place, words in enumerate((50, 23, 70))]
    assert predicted == Counter(token for ids in whole for token in ids[1:])
    assert count == sum(math.ceil((len(ids) - 1) / 8) for ids in whole) == task.facts["n_train"]
    mixed = task.collate(np.arange(count))
    assert all(row[0] == IGNORED for row in mixed.targets.tolist() if IGNORED in row)
    assert mixed.targets.shape == mixed.inputs["input_ids"].shape == (count, 8)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_perplexity_is_that_of_the_tokens_one_by_one(family: str, tmp_path: Path) -> None:
    """Against the model alone on each piece, without pads; 41 words and some line breaks held out."""
    task, kept = language(tmp_path, family), list[dict[str, Any]]()
    row = task.evaluate(kept.append).to_row()
    ids, losses = _ids(41, 9), []
    for start in range(0, len(ids) - 1, 8):
        piece = torch.tensor([ids[start : start + 9]])
        with torch.no_grad():
            output = task.model.module(input_ids=piece[:, :-1], use_cache=False).logits[0].double()
        losses.append(torch.nn.functional.cross_entropy(output, piece[0, 1:], reduction="sum").item())
    assert row["metric"] == "perplexity" and row["tokens"] == len(ids) - 1 and row["n"] == len(losses)
    assert row["loss"] == pytest.approx(sum(losses) / (len(ids) - 1), rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / (len(ids) - 1)), rel=1e-4)
    assert [each["row"] for each in kept] == list(range(len(losses))) and json.loads(json.dumps(kept)) == kept
    assert [each["loss"] * each["tokens"] for each in kept] == pytest.approx(losses, rel=1e-4)


def test_files_can_be_the_clients(tmp_path: Path) -> None:
    task = language(tmp_path, kind="files")
    assert task.clients == ("part-0", "part-1", "part-2")
    for client, words in enumerate((50, 23, 70)):
        shard = task.shards[client]
        first = task.collate(shard[:1]).inputs["input_ids"][0].tolist()
        assert first == _ids(words, client)[:8]
        assert len(shard) == math.ceil((len(_ids(words, client)) - 1) / 8)
    few = language(tmp_path, kind="files", train_rows=5, evaluation_rows=2)
    assert sum(map(len, few.shards)) == 5 == few.facts["n_train"] and few.evaluate().to_row()["n"] == 2
    dealt = language(tmp_path)
    assert {len(shard) for shard in dealt.shards} <= {6, 7} and dealt.clients[0] == "client-0"


def test_bad_files_are_refused(tmp_path: Path) -> None:
    at = write_texts(tmp_path / "texts")
    held, divided = str(at / "held.txt"), Partition(clients=2)
    (at / "odd name.txt").write_text("some text", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "rows.csv").write_text("text\nx\n", encoding="utf-8")
    for train, said in (
        (str(at / "none*.txt"), r"^task.train: .*no such file"),
        (str(tmp_path / "latin.txt"), r"^task.train: .*latin.txt: not UTF-8 text \(byte 3\)"),
        (str(tmp_path / "blank.txt"), r"^task.train: .*no text in 1 files"),
        (str(tmp_path / "rows.csv"), r"^task.train: .*rows.csv: the language task reads plain text"),
    ):
        with pytest.raises(DataError, match=said):
            read_files(train, held, divided, seed=1)
    with pytest.raises(DataError, match="file name 'odd name' is no client id"):
        read_files(str(at / "*.txt"), held, Partition("files"), seed=1)
    with pytest.raises(ConfigError, match=r"partition.kind = 'dirichlet'"):
        read_files(held, held, Partition("dirichlet"), seed=1)
    with pytest.raises(ConfigError, match=r"task.train_rows = 99: the data has 21 rows"):
        language(tmp_path / "more", train_rows=99)
    warnings = read_files(str(at / "*.txt"), held, divided, seed=1).facts["warnings"]
    assert warnings == ["1 held-out files are also trained on: the perplexity flatters"]


def _config(at: Path, algorithm: str, more: str, kind: str = "iid") -> Config:
    write_texts(at / "texts")
    return parse(
        f'algorithm = "{algorithm}"\nseed = 3\nrounds = 1\n[model]\nsource = "tiny:llama"\ndevice = "cpu"\n'
        f'[task]\nname = "language"\ntrain = "{at / "texts" / "part-*.txt"}"\n'
        f'evaluation = "{at / "texts" / "held.txt"}"\nlength = 8\n[partition]\nkind = "{kind}"\nclients = 3\n'
        f"[local]\nsteps = 2\nbatch = 2\n[evaluation]\nevery = 1\nbatch = 6\n{more}",
        "x.toml",
    )


METHODS = {
    "ho_fl": "[cohort]\nsize = 2\nboundaries = [1, 2, 3]",
    "fedavg": "[cohort]\nsize = 2",
    "decomfl": '[cohort]\nsize = 2\n[zo]\nestimator = "tangent"\n[optimizer]\nname = "sgd"',
    "ho_sfl": "[cohort]\nsize = 2\nboundaries = [2]",
    "splitlora": "[cohort]\nsize = 2\nboundaries = [2]",
}


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_run_reports_perplexity(algorithm: str, tmp_path: Path) -> None:
    session = prepare(_config(tmp_path, algorithm, METHODS[algorithm]))
    found = list(session.rows(tmp_path / "run", resume=False, warn=print))
    assert [row["failures"] for row in found] == [[], []]
    summary, metrics = json.loads((tmp_path / "run" / "summary.json").read_bytes()), found[-1]["metrics"]
    assert summary["metric"] == {"name": "perplexity", "value": metrics["perplexity"], "n": metrics["n"]}
    assert summary["tokens"] == metrics["tokens"] and summary["loss"] == metrics["loss"]
    assert math.log(summary["zero_shot"]) == pytest.approx(found[0]["metrics"]["loss"])


@pytest.mark.slow
def test_a_finished_run_can_be_exported(tmp_path: Path) -> None:
    """The export is checked in a process of its own: ``pytest -m slow tests/unit/test_language.py``."""
    for _ in prepare(_config(tmp_path, "fedavg", METHODS["fedavg"])).rows(
        tmp_path / "run", resume=False, warn=print
    ):
        pass
    found = export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file() and found["base"] == "tiny:llama"


def test_files_can_be_at_the_nodes(tmp_path: Path) -> None:
    config = _config(tmp_path, "ho_fl", METHODS["ho_fl"])
    names = ("part-0", "part-1", "part-2")
    config = config.model_copy(
        update={
            "partition": config.partition.model_copy(update={"kind": "nodes", "names": names}),
            "task": config.task.model_copy(update={"train": ""}),
        }
    )
    server = build_task(config)
    assert server.facts["n_train"] is None and server.facts["n_evaluation"] > 1
    whole = build_task(_config(tmp_path, "ho_fl", METHODS["ho_fl"], kind="files"))
    sizes = [len(shard) for shard in whole.shards]
    server = with_sizes(server, sizes)
    assert server.facts["n_train"] == sum(sizes) and len(server.batch(2, 0, 4).targets) == 4
    node = node_task(config, "part-1", train=str(tmp_path / "texts" / "part-1.txt"), **told(server))
    assert [len(shard) for shard in node.shards] == [0, sizes[1], 0]
    for position in range(4):
        mine, theirs = node.batch(1, position, 2), whole.batch(1, position, 2)
        assert torch.equal(mine.targets, theirs.targets)
        assert all(torch.equal(mine.inputs[name], theirs.inputs[name]) for name in mine.inputs)
    assert server.evaluate().to_row() == whole.evaluate().to_row()


def _run(at: Path, label: str, seed: int, value: float) -> RunData:
    metric = {"name": "perplexity", "value": value, "n": 5}
    summary = {"status": "done", "metric": metric, "loss": math.log(value), "zero_shot": 30.0}
    return RunData(at / f"{label}-{seed}", {"algorithm": label, "seed": seed}, {}, (), summary)


def test_of_perplexities_the_lower_is_ahead(tmp_path: Path) -> None:
    values = {"fedavg": (10.0, 10.1), "decomfl": (20.0, 20.1)}
    runs = [_run(tmp_path, name, seed, v) for name, pair in values.items() for seed, v in enumerate(pair)]
    groups = group(runs)
    (verdict,) = verdicts(groups)
    assert "fedavg is ahead of" in verdict
    table = summary_table(groups)
    assert table.columns[2:4] == ("perplexity", "loss") and "less is better" in table.title
    assert [row[2] for row in table.rows] == ["10.050 ± 0.071", "20.050 ± 0.071"]
