# SPDX-License-Identifier: Apache-2.0
"""Runs beside the published values: found where they belong, and never passed off for what they are not."""

import json

import pytest

from hofl import presets, read_run
from hofl.config import dump, parse
from hofl.presets.beside import beside, published_table, published_values
from hofl.presets.toml import dumps
from hofl.report.groups import group

CELLS = presets.cells()
OPT = "papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75"


def finished(folder, name, *overrides, seed=42, n=872, n_train=67349, **metrics):
    """A run folder of a preset's configuration with these final metrics."""
    config = parse(dumps(presets.find(name).settings), name, (*overrides, f"seed={seed}"))
    metrics = metrics or {"accuracy": 0.8654}
    folder.mkdir()
    (folder / "config.toml").write_text(dump(config))
    (folder / "manifest.json").write_text(json.dumps({"facts": {"n_train": n_train, "n_evaluation": n}}))
    row = {"round": config.rounds, "metrics": metrics, "bytes_up": {}, "bytes_down": {}, "examples_seen": 1}
    (folder / "rounds.jsonl").write_text(json.dumps(row) + "\n")
    first = next(iter(metrics))
    metric = {"name": first, "value": metrics[first], "n": n}
    (folder / "summary.json").write_text(json.dumps({"metric": metric, "status": "done"}))
    return read_run(folder)


def lines(*runs):
    return beside(group(runs), CELLS)


def test_a_run_beside_its_cell(tmp_path) -> None:
    """0.8654, 0.8631, 0.8677: mean 86.54, SD 0.23; Table 7 is of seed 42 alone."""
    values = {42: 0.8654, 43: 0.8631, 44: 0.8677}
    found = lines(*(finished(tmp_path / str(s), OPT, seed=s, accuracy=v) for s, v in values.items()))
    assert [(line.published.table, line.differs) for line in found] == [
        ("Table 2", ()),
        ("Table 7, seed 42", ()),
    ]
    table = published_table(found)
    assert table.rows[0][1:5] == ("HO-FL Table 2", "accuracy", "86.54 (SD 0.24)", "86.54 ± 0.23")
    assert table.rows[0][5:] == ("3", "+0.00", "872", "0.115", "nothing known")
    assert table.rows[1][3:7] == ("86.47", "86.54", "1", "+0.07")
    values = published_values(found)
    assert values[0]["preset"] == OPT and values[0]["evaluation_examples"] == 872
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rounds=6"], "rounds 6 of 160"),
        (["model.dtype=float32"], "model.dtype float32, not bfloat16"),
        (["local.batch=8"], "local.batch 8 of 16"),
        (["zo.estimator=tangent"], "zo.estimator tangent, not forward"),
        (["zo.radius=0.01"], "zo.radius 0.01 of 0.001"),
        (["zo.optimizer.lr=1e-3"], "zo.optimizer.lr 0.001"),
        (["optimizer.lr=1e-3"], "optimizer.lr 0.001 of 1e-05"),
        (["cohort.boundaries=[9]"], "cohort.boundaries [9], not [3, 6, 9]"),
        (["model.lora.rank=4"], "model.lora.rank 4 of 8"),
        (["task.length=64"], "task.length 64 of 128"),
    ],
)
def test_what_decides_the_result_is_said(tmp_path, overrides, said) -> None:
    found = lines(finished(tmp_path / "a", OPT, *overrides))
    assert found and all(line.differs == (said,) for line in found)
    assert published_table(found).rows[0][-1] == said


def test_other_data_is_said(tmp_path) -> None:
    (line, *_) = lines(finished(tmp_path / "a", OPT, n=300, n_train=8530))
    assert line.differs == ("training examples 8,530 of 67,349", "n 300 of 872") and line.examples == 300
    assert published_table([line]).rows[0][-2] == "0.333"


def test_a_model_of_that_name_and_another_size_is_said(tmp_path) -> None:
    """A folder may be called anything."""
    run = finished(tmp_path / "a", OPT, "model.source=twins/OPT-125M")
    for parameters, differs in ((125_239_296, ()), (61_000, ("model parameters 61,000 of 125,239,296",))):
        facts = {"facts": {"model": {"parameters": parameters}}}
        (run.folder / "manifest.json").write_text(json.dumps(facts))
        assert lines(read_run(run.folder))[0].differs == differs


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.source=/models/opt-125m", "task.train=a.parquet", "task.evaluation=b.parquet"],
        ["evaluation.every=7", "evaluation.batch=8", "run.threads=2", "model.device=cpu"],
        ["split.upload_every=2", "local.proximal=0.5", "partition.alpha=3.0"],
    ],
)
def test_what_decides_nothing_is_no_difference(tmp_path, overrides) -> None:
    assert [line.differs for line in lines(finished(tmp_path / "a", OPT, *overrides))] == [(), ()]


@pytest.mark.parametrize(
    "overrides",
    [
        ["cohort.preference=0.6"],
        ["model.source=HuggingFaceTB/SmolLM2-135M"],
        ["model.source=tiny:opt"],
        ["partition.kind=dirichlet"],
        ["algorithm=hosl", "cohort.boundaries=[6]", "zo.estimator=central"],
    ],
)
def test_no_cell_no_line(tmp_path, overrides) -> None:
    assert lines(finished(tmp_path / "a", OPT, *overrides)) == []


def test_an_ablation_is_beside_its_own_number(tmp_path) -> None:
    run = finished(tmp_path / "a", f"{OPT[:-4]}0.5-probes4", accuracy=0.86, loss=0.35)
    found = lines(run)
    assert [(x.preset[-7:], x.published.metric, x.published.value, x.values) for x in found] == [
        ("probes4", "accuracy", 86.47, (86.0,)),
        ("probes4", "loss", 0.3498, (0.35,)),
    ]
    assert published_table(found).rows[1][3:7] == ("0.3498 (SD 0.0038)", "0.350", "1", "+0.0002")


def test_both_metrics_of_squad(tmp_path) -> None:
    name = "papers/ho_fl/opt-125m/squad/fedavg"
    found = lines(finished(tmp_path / "a", name, n=10570, n_train=87599, f1=0.5468, exact_match=0.4395))
    assert [(x.published.metric, x.published.value, round(x.values[0], 2)) for x in found] == [
        ("exact_match", 43.95, 43.95),
        ("f1", 54.68, 54.68),
    ]


def test_words_where_there_is_no_number(tmp_path) -> None:
    name = "papers/ho_sfl/llama-3.2-1b/squad/ho_sfl"
    found = lines(finished(tmp_path / "a", name, n=10570, n_train=87599, f1=0.6))
    assert published_table(found).rows[0][3:7] == ("about equal to SplitLoRA", "60.00", "1", "–")


def test_compare_shows_it(tmp_path, capsys) -> None:
    from hofl.cli import main

    run = finished(tmp_path / "a", OPT, "rounds=6")
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(run.folder), "--out", str(tmp_path / "c")])
    assert not ended.value.code and "rounds 6 of 160" in capsys.readouterr().out
    assert "no reproduction" in (tmp_path / "c" / "compare.md").read_text()
    (first, _) = json.loads((tmp_path / "c" / "compare.json").read_text())["published"]
    assert first["published"]["value"] == 86.54 and first["differs"] == ["rounds 6 of 160"]
