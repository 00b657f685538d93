# SPDX-License-Identifier: Apache-2.0
"""A run goes on, and is exported, only over the very texts and weights it was started with."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hofl import exporting, session
from hofl.config import Config, load
from hofl.errors import ConfigError, RecordError

CONFIG = """
algorithm = "ho_fl"
seed = 3
rounds = {rounds}
[model]
source = "tiny:llama"
[model.lora]
rank = 2
[task]
name = "text"
template = "sst2-v1"
train = "train.csv"
evaluation = "test.csv"
text = "sentence"
label = "label"
[partition]
clients = 3
[cohort]
size = 2
boundaries = [0, 1]
[local]
steps = 1
batch = 2
[zo]
estimator = "tangent"
probes = 1
[optimizer]
name = "sgd"
lr = 0.1
"""
WORDS = ("good", "bad", "fine", "dull", "warm", "cold", "bright", "flat", "rich", "thin")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("train.csv", "film"), ("test.csv", "play")):
        lines = [f"a {word} {kind} {i},{i % 2}" for i, word in enumerate(WORDS * 2)]
        (tmp_path / name).write_text("\n".join(["sentence,label", *lines]) + "\n")
    return tmp_path


def config(place: Path, rounds: int) -> Config:
    (place / "c.toml").write_text(CONFIG.format(rounds=rounds))
    return load(place / "c.toml")


def go(place: Path, rounds: int, resume: bool = False, touch: Callable[[Any], object] = id) -> int:
    """Run or resume; the rounds that were run."""
    made = session.prepare(config(place, rounds))
    touch(made.task.model.module)
    return len(list(made.rows(place / "run", resume=resume, warn=warnings.warn)))


def touched(module: Any) -> None:
    """Change one frozen weight in its last bits."""
    frozen = next(p for p in module.parameters() if not p.requires_grad)
    frozen.data.reshape(-1)[5] *= 1.001


@pytest.mark.parametrize("name", ["train.csv", "test.csv"])
@pytest.mark.parametrize(("old", "new"), [("good", "poor"), (" 3,1\n", " 3,0\n")], ids=["text", "label"])
def test_another_text_is_refused(place: Path, name: str, old: str, new: str) -> None:
    assert go(place, 1) == 2
    original = (place / name).read_text()
    (place / name).write_text(original.replace(old, new, 1))
    manifest = (place / "run" / "manifest.json").read_bytes()
    with pytest.raises(RecordError, match=r"not what this run was started with is the data: .*new folder"):
        go(place, 2, resume=True)
    assert (place / "run" / "manifest.json").read_bytes() == manifest
    (place / name).write_text(original)
    assert go(place, 2, resume=True) == 1


def test_another_weight_is_refused(place: Path) -> None:
    go(place, 1)
    with pytest.raises(RecordError, match=r"was started with is the model: its frozen weights; .*new folder"):
        go(place, 2, resume=True, touch=touched)
    assert go(place, 2, resume=True) == 1


def test_an_export_checks_the_weights(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(place, 1)
    original = exporting.load_text

    def other(*arguments: Any) -> Any:
        task, loaded = original(*arguments)
        touched(task.model.module)
        return task, loaded

    monkeypatch.setattr(exporting, "load_text", other)
    with pytest.raises(RecordError, match="the model: its frozen weights; give the weights"):
        exporting.export_run(place / "run", place / "adapter")
    assert not (place / "adapter").exists()


def test_an_unfinished_run_is_not_exported(place: Path) -> None:
    made = session.prepare(config(place, 2))
    rows = made.rows(place / "run", resume=False, warn=warnings.warn)
    next(rows)
    with pytest.raises(ConfigError, match="the run is not finished: hofl run --resume"):
        exporting.export_run(place / "run", place / "adapter")
    rows.close()


def test_a_replay_asks_the_ledger_and_not_the_configuration(place: Path) -> None:
    go(place, 2)
    row = json.loads((place / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    (place / "run" / "config.toml").write_text('algorithm = "fedavg"\n[local]\nsteps = 9\n')
    assert session.rebuild(place / "run", 2)["state_sha256"] == row["state_sha256"]
