# SPDX-License-Identifier: Apache-2.0
"""``hofl evaluate`` end to end: the recorded metrics again, one line an example, and what it refuses."""

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest

from hofl import read_run

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
LONG, SHORT = "a much longer text about it that is {word} {i}", "{word} {i}"
TEXT = """algorithm = "ho_sfl"
rounds = 2
[model]
source = "tiny:llama"
device = "cpu"
[task]
train = "{at}/train.csv"
evaluation = "{at}/evaluation.csv"
length = 24
[partition]
clients = 2
[cohort]
size = 2
boundaries = [1]
[local]
steps = 1
[optimizer]
lr = 1e-2
[evaluation]
batch = 4
"""
IMAGES = """algorithm = "fedavg"
rounds = 1
[model]
source = "resnet8"
train = "full"
width = 4
device = "cpu"
[task]
name = "vision"
train = "sklearn:digits?split=train:0.9"
evaluation = "sklearn:digits?split=rest:0.9"
train_rows = 60
evaluation_rows = 30
[partition]
clients = 2
[cohort]
size = 1
[local]
steps = 1
"""


def hofl_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return int(left.value.code or 0)


def _csv(path: Path, rows: int, start: int = 0) -> None:
    """Texts of two lengths, so that batches of like length are not in the order of the rows."""
    lines = ["sentence,label"]
    for i in range(start, start + rows):
        word = ("bad", "good")[i % 2]
        lines.append(f"{(LONG, SHORT)[i % 3 == 0].format(word=word, i=i)},{i % 2}")
    path.write_text("\n".join(lines), encoding="utf-8")


def _config(folder: Path, name: str) -> Path:
    if name in ("ho_fl", "fedavg"):
        return SYNTHETIC / f"{name}.toml"
    _csv(folder / "train.csv", 24)
    _csv(folder / "evaluation.csv", 11, 100)
    (folder / f"{name}.toml").write_text({"text": TEXT.replace("{at}", str(folder)), "images": IMAGES}[name])
    return folder / f"{name}.toml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run each of points, texts and images, in folders of these names."""
    folder = tmp_path_factory.mktemp("evaluated")
    assert hofl_command("run", _config(folder, "ho_fl"), "rounds=2", "--out", folder / "points") == 0
    for name in ("text", "images"):
        assert hofl_command("run", _config(folder, name), "--out", folder / name) == 0
    return folder


@pytest.mark.parametrize(("name", "n", "classes"), [("points", 200, 4), ("text", 11, 2), ("images", 30, 10)])
def test_the_recorded_metrics_come_again_and_follow_from_the_predictions(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path, name: str, n: int, classes: int
) -> None:
    capsys.readouterr()
    out = tmp_path / "predictions.jsonl"
    assert hofl_command("evaluate", finished / name, "--predictions", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    run = read_run(finished / name)
    assert found["metrics"] == found["recorded"] == run.rows[-1]["metrics"]
    assert found["equal"] is True and found["differ"] == [] and found["round"] == run.rows[-1]["round"]
    assert run.summary and found["metrics"]["accuracy"] == run.summary["metric"]["value"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(n)) and found["metrics"]["n"] == n
    names = run.manifest["facts"]["labels"]
    assert len(names) == classes
    for row in rows:
        assert len(row["scores"]) == classes and math.fsum(map(math.exp, row["scores"])) == pytest.approx(1.0)
        assert row["prediction"] == names[row["scores"].index(max(row["scores"]))]
        assert row["loss"] == pytest.approx(-row["scores"][names.index(row["target"])], abs=1e-12)
    right = sum(row["target"] == row["prediction"] for row in rows)
    assert right / n == found["metrics"]["accuracy"]
    assert math.fsum(row["loss"] for row in rows) / n == pytest.approx(found["metrics"]["loss"], rel=1e-12)


def test_the_rows_are_those_of_the_file_in_its_order(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    assert hofl_command("evaluate", finished / "text", "--predictions", out) == 0
    targets = [json.loads(line)["target"] for line in out.read_text().splitlines()]
    assert targets == [("negative", "positive")[i % 2] for i in range(100, 111)]


def test_the_table_shows_both_and_says_that_they_are_equal(
    capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    capsys.readouterr()
    assert hofl_command("evaluate", finished / "points") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["now", "recorded"]
    loss = next(line.split() for line in lines if line.startswith("loss "))
    assert loss[1] == loss[2] and lines[-1] == "equal to what the run recorded, to the last bit"


def _copy(finished: Path, tmp_path: Path, name: str = "points") -> Path:
    return Path(shutil.copytree(finished / name, tmp_path / "copy"))


def test_a_recorded_metric_that_is_another_is_said(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    run = _copy(finished, tmp_path)
    lines = (run / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["metrics"]["accuracy"] += 0.005
    (run / "rounds.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    capsys.readouterr()
    assert hofl_command("evaluate", run) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("not equal to what the run recorded: accuracy; weights and evaluation data are the same")
    )
    assert hofl_command("evaluate", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False and found["differ"] == ["accuracy"]


def test_a_last_round_that_was_not_due_is_held_to_the_summary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As after a run that was ended early by fewer rounds: the last row has no metrics, the summary has."""
    out = tmp_path / "r"
    config = SYNTHETIC / "fedavg.toml"
    assert hofl_command("run", config, "rounds=3", "evaluation.every=9", "--out", out) == 0
    rows = (out / "rounds.jsonl").read_text().splitlines()
    last = {**json.loads(rows[-1]), "metrics": None}
    (out / "rounds.jsonl").write_text("\n".join([*rows[:-1], json.dumps(last)]) + "\n")
    capsys.readouterr()
    assert hofl_command("evaluate", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True
    assert set(found["recorded"]) == {"n", "accuracy", "loss", "balanced_accuracy"}


def _refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert hofl_command("evaluate", *arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("hofl: ") and said.err.count("\n") == 1
    return said.err.removeprefix("hofl: ").rstrip("\n")


def test_what_is_no_finished_run_is_refused(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    assert "no is no run folder" in _refused(capsys, "no")
    run = _copy(finished, tmp_path)
    (run / "final.safetensors").unlink()
    assert _refused(capsys, run) == f"{run}: the run is not finished: hofl run --resume {run}"
    (run / "summary.json").write_text("{}")
    shutil.copy(finished / "points" / "final.safetensors", run)
    assert "summary.json: damaged: KeyError" in _refused(capsys, run)
    hot = ["rounds=8", "optimizer.name=sgd", "optimizer.lr=1e30"]
    assert hofl_command("run", SYNTHETIC / "fedavg.toml", *hot, "--out", tmp_path / "hot") == 1
    said = _refused(capsys, tmp_path / "hot")
    assert "the run diverged (round " in said or "the run failed (round " in said
    assert said.endswith("only a finished run has a final model to score")


def test_another_model_or_other_data_is_refused(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    run = _copy(finished, tmp_path)
    shutil.copy(run / "initial.safetensors", run / "final.safetensors")
    assert "not the final model that summary.json names" in _refused(capsys, run)
    shutil.rmtree(run)
    run = _copy(finished, tmp_path, "text")
    _csv(tmp_path / "evaluation.csv", 11, 101)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace(f"{finished}/evaluation", f"{tmp_path}/evaluation"))
    assert _refused(capsys, run).endswith(
        "the evaluation data is not what this run was scored on; give it back"
    )
    (tmp_path / "evaluation.csv").unlink()
    assert "task.evaluation: " in _refused(capsys, run)
    (run / "config.toml").write_text(config.replace("tiny:llama", "tiny:qwen2"))
    assert "not what this run was started with is the" in _refused(capsys, run)


def test_a_file_of_predictions_is_never_replaced(
    capsys: pytest.CaptureFixture[str], finished: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("keep")
    said = _refused(capsys, finished / "points", "--predictions", mine)
    assert said == f"--predictions {mine}: exists already; name another file" and mine.read_text() == "keep"
    said = _refused(capsys, finished / "points", "--predictions", tmp_path / "no" / "p")
    assert said.endswith("its folder does not exist")
