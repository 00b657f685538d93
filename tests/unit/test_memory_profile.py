# SPDX-License-Identifier: Apache-2.0
"""``hofl profile``: participations in processes of their own, beside the plan."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from hofl.commands.profile import profile as command
from hofl.config import load
from hofl.errors import ConfigError, HoflError, RunFailed
from hofl.memory import profile as module
from hofl.memory.profile import participations, profile

SYNTHETIC = "configs/synthetic/ho_fl.toml"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A run on a tiny model with sentences of unequal lengths."""
    rows = "".join(f"{'word ' * (1 + i % 9)},{i % 2}\n" for i in range(40))
    (tmp_path / "data.csv").write_text("sentence,label\n" + rows)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nsource = "tiny:llama"\n[task]\ntrain = "{tmp_path}/data.csv"\n'
        f'evaluation = "{tmp_path}/data.csv"\nlength = 24\n[partition]\nclients = 2\n[cohort]\nsize = 1\n'
        'boundaries = [0, 2]\n[local]\nsteps = 2\nbatch = 4\n[zo]\nestimator = "sketch"\n'
    )
    return file


def hofl(*arguments: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app(args=list(arguments), standalone_mode=False)


def test_a_run_on_texts_is_as_planned(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hofl(str(texts), "--repeats", "1", "--json")
    first, second = json.loads(capsys.readouterr().out)["rows"]
    assert (first["label"], second["label"]) == ("first order", "hybrid, boundary 2, sketch")
    for row in (first, second):
        assert row["batch"] == 4 and 1 < row["length"] <= 24 and row["attention"] == "mask"
        assert row["ratio"] == pytest.approx(1.0, abs=0.05)
        assert row["planned_bytes"] > row["planned_storages"] and len(row["repeats"]) == 1
        assert row["rss_bytes"] > row["tracked_bytes"]


@pytest.fixture(params=["generation", "language"])
def answers(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run whose loss is of many tokens, each over the whole vocabulary."""
    if request.param == "language":
        (tmp_path / "data.txt").write_text(" ".join(f"word{i % 17}" for i in range(400)))
        task = f'train = "{tmp_path}/data.txt"\nevaluation = "{tmp_path}/data.txt"\nlength = 24\n'
    else:
        rows = [
            {
                "context": "w " * (3 + i % 5),
                "question": "who",
                "answers": {"text": ["a b c"], "answer_start": [0]},
            }
            for i in range(40)
        ]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = f'train = "{tmp_path}/data.jsonl"\nevaluation = "{tmp_path}/data.jsonl"\nlength = 24\n'
        task += 'template = "squad-v1"\ntext = "context,question"\nlabel = "answers"\nnew_tokens = 6\n'
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nsource = "tiny:llama"\n[task]\nname = "{request.param}"\n{task}[partition]\nclients = 2\n'
        '[cohort]\nsize = 1\nboundaries = [2]\n[local]\nsteps = 2\nbatch = 4\n[zo]\nestimator = "forward"\n'
    )
    return file


def test_a_loss_of_many_tokens_is_as_planned(answers: Path) -> None:
    (row,) = profile(load(answers), str(answers), 1)
    assert row["ratio"] == pytest.approx(1.0, abs=0.05)


def test_the_largest_of_the_repeats_counts(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([1_000_000, 3_000_000, 2_000_000] * 2)

    def apart(*_: Any) -> dict[str, Any]:
        shape = {"batch": 4, "length": 16, "scored": 0, "padded": True, "device": "cpu"}
        return {"tracked_bytes": next(peaks), "rss_bytes": None, "idle_bytes": None, **shape}

    monkeypatch.setattr(module, "_apart", apart)
    rows = profile(load(texts), "run.toml")
    assert [row["tracked_bytes"] for row in rows] == [3_000_000] * 2
    assert rows[0]["repeats"] == [1_000_000, 3_000_000, 2_000_000]


def test_what_is_measured_of_each_method() -> None:
    config = load(SYNTHETIC)
    assert [o.boundary for o in participations(config)] == sorted(set(config.cohort.boundaries))
    kinds = {"fedavg": "first_order", "fedprox": "first_order", "decomfl": "zeroth_order"}
    for name, kind in kinds.items():
        (only,) = participations(load(f"configs/synthetic/{name}.toml"))
        assert only.order == kind
    with pytest.raises(ConfigError, match="hold the whole model"):
        participations(load("configs/synthetic/ho_sfl.toml"))


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [(2, HoflError, "no such thing"), (1, RunFailed, "no such thing"), (-9, RunFailed, "killed by signal 9")],
)
def test_a_process_that_dies_is_said(
    code: int, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signal.SIGKILL == 9
    done = subprocess.CompletedProcess([], code, "", "warning\nno such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **settings: done)
    with pytest.raises(kind, match=said):
        profile(load(SYNTHETIC), SYNTHETIC, 1)


def test_a_network_is_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hofl(SYNTHETIC, "--repeats", "1")
    told = capsys.readouterr().out
    assert "plan / measured" in told and "in one complete participation; one process" in told
