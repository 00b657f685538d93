# SPDX-License-Identifier: Apache-2.0
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import numbers
from hofl.build_task import build_task
from hofl.config import parse
from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.models.boundary import cut
from hofl.models.resnet import resnet
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.vision import vision_task
from hofl.tasks.vision_data import ImageData, read_images
from pictures import encoded, picture, table

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

TRAIN, REST = "sklearn:digits?split=train:0.8", "sklearn:digits?split=rest:0.8"
DEMO = Path(__file__).parents[2] / "configs" / "digits" / "ho_fl.toml"


def small(tmp_path: Path, **changes: Any) -> ImageData:
    """Forty images of three classes in two files, the first four of them in both."""
    given = {
        "train": table(
            tmp_path / "train.parquet", [encoded(i) for i in range(40)], [i % 3 for i in range(40)]
        ),
        "evaluation": table(
            tmp_path / "test.parquet", [encoded(i) for i in range(36, 50)], [i % 3 for i in range(14)]
        ),
        "divided": Partition(clients=4),
        "seed": 1,
    } | changes
    return read_images(given.pop("train"), given.pop("evaluation"), given.pop("divided"), **given)


def task_of(data: ImageData, **settings: Any) -> Task:
    network = resnet(
        "resnet8", classes=len(data.names), channels=data.channels, key=Key.of(1, "init"), width=4
    )
    return vision_task(data, cut(network), **settings)


def test_digits_halves_are_disjoint_complete_and_the_same_every_time() -> None:
    data, again = (read_images(TRAIN, REST, Partition(clients=5), seed=seed) for seed in (1, 2))
    assert np.array_equal(data.train.pixels, again.train.pixels) and data.facts["shared_images"] == 0
    assert len(data.train.labels) + len(data.evaluation.labels) == 1797 and data.names == tuple("0123456789")
    assert 0.75 < len(data.train.labels) / 1797 < 0.85 and data.train.pixels.shape[1:] == (1, 8, 8)
    swapped = read_images(REST, TRAIN, Partition(clients=5), seed=1)
    assert np.array_equal(swapped.train.pixels, data.evaluation.pixels)
    with_all = read_images(TRAIN, "sklearn:digits", Partition(clients=5), seed=1)
    assert f"{len(data.train.labels)} of 1797 evaluation images are also" in with_all.facts["warnings"][0]


@pytest.mark.parametrize("hub", [True, False])
def test_parquet_of_encoded_images(tmp_path: Path, hub: bool) -> None:
    cells = [encoded(i) for i in range(20)]
    path = table(tmp_path / "a.parquet", cells, ["dog", "cat"] * 10, hub)
    data = read_images(path, path, Partition(clients=3), seed=1)
    expected = np.stack([picture(i).transpose(2, 0, 1) for i in range(20)])
    assert np.array_equal(data.train.pixels, expected) and data.train.pixels.dtype == np.uint8
    assert data.names == ("cat", "dog") and data.train.labels.tolist() == [1, 0] * 10


def test_a_split_goes_by_pixels_whatever_the_encoding_and_the_name(tmp_path: Path) -> None:
    cells = [encoded(i, kind) for kind in ("PNG", "BMP") for i in range(30)]
    path = table(tmp_path / "twice.parquet", cells, [0, 1] * 30)
    data = read_images(f"{path}?split=train:0.6", f"{path}?split=rest:0.6", Partition(clients=1), seed=1)
    assert len(data.train.labels) + len(data.evaluation.labels) == 60
    assert data.facts["shared_images"] == 0 and len(data.train.labels) % 2 == 0
    kept = [
        read_images(f"{path}?{options}", path, Partition(clients=1), seed=1).train.pixels
        for options in ("label=1&split=train:0.6", "split=train:0.6&label=1", "split=train:0.6")
    ]
    assert np.array_equal(kept[0], kept[1]) and 0 < len(kept[0]) < len(kept[2]) == len(data.train.labels)


def test_rows_are_drawn_by_the_seed_and_batches_are_normalised(tmp_path: Path) -> None:
    data = small(tmp_path, train_rows=12, evaluation_rows=10)
    assert (data.facts["n_train"], data.facts["n_evaluation"]) == (12, 10)
    other = small(tmp_path, train_rows=12, evaluation_rows=10, seed=2)
    assert data.facts["data_sha256"] != other.facts["data_sha256"]
    task = task_of(data)
    everyone = task.collate(np.arange(12))
    images = everyone.inputs["input"]
    assert images.dtype == torch.float32 and images.shape == (12, 3, 6, 6)
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    spread = data.train.pixels.astype(np.float64)
    assert np.allclose(data.facts["mean"], spread.mean((0, 2, 3))) and np.allclose(
        data.facts["std"], spread.std((0, 2, 3))
    )
    assert torch.equal(task.batch(1, 5, 2).inputs["input"], task.batch(1, 5, 2).inputs["input"])


def test_a_constant_channel_is_divided_by_one(tmp_path: Path) -> None:
    cells = {"img": [np.full((1, 4, 4), 7, np.uint8)] * 4, "label": [0, 1, 0, 1]}
    task = task_of(read_images(cells, cells, Partition(clients=1), seed=1))
    assert torch.equal(task.collate(np.arange(4)).inputs["input"], torch.zeros(4, 1, 4, 4))


def test_evaluation_scores_every_image_once_whatever_the_batch(tmp_path: Path) -> None:
    data = small(tmp_path)
    one, two = (task_of(data, batch=size).evaluate() for size in (3, 100))
    assert (
        one.n == 14 and np.array_equal(one.confusion, two.confusion) and one.loss == pytest.approx(two.loss)
    )
    assert one.majority_rate == data.facts["majority_class"]["rate"]
    assert not torch.is_inference_mode_enabled() and all(
        p.grad is None for p in task_of(data).model.module.parameters()
    )


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "by_label", "fixed_dirichlet"])
def test_partitions_and_facts_are_fit_for_a_manifest(tmp_path: Path, kind: str) -> None:
    data = small(tmp_path, divided=Partition(kind, clients=4, size=9))
    facts = json.loads(json.dumps(data.facts, allow_nan=False))
    assert [row["examples"] for row in facts["partition"]] == [len(shard) for shard in data.shards]
    assert facts["shared_images"] == 4 and "4 of 14 evaluation images" in facts["warnings"][0]
    assert facts["labels"] == ["0", "1", "2"] and facts["shape"] == [3, 6, 6]


def test_it_learns_digits_in_eighty_steps() -> None:
    data = read_images(TRAIN, REST, Partition(clients=1), seed=1)
    task = task_of(data)
    before, values = task.evaluate(), task.model.read()
    for step in range(80):
        batch = task.batch(0, step, 32)
        _, gradient, _ = task.model.first_order(batch.inputs, 0, None, task.loss_on(batch))
        values -= np.float32(0.2) * gradient
        task.model.write(values)
    after = task.evaluate()
    assert before.accuracy < 0.3 < 0.6 < after.accuracy and after.loss < before.loss


@pytest.mark.parametrize("setting", ["train", "evaluation"])
def test_a_bad_image_is_one_line_with_its_setting_and_row(tmp_path: Path, setting: str) -> None:
    cells = [encoded(i) for i in range(10)]
    cells[7] = encoded(7, side=5)
    with pytest.raises(DataError) as caught:
        small(tmp_path, **{setting: table(tmp_path / "bad.parquet", cells, [0, 1] * 5)})
    line = str(caught.value)
    assert line.startswith(f"task.{setting}: row 7 is 5x5 in 3 channels and the first image is 6x6")


@pytest.mark.parametrize(
    ("changes", "labels", "said"),
    [
        ({}, [0, 1, -1, 0], "task.train: row 2 has the label '-1' (1 of 4 rows have none that is a class)"),
        ({}, [0, 1, None, 0], "task.train: row 2 has no label (1 of 4 rows"),
        ({}, [0, 0, 0, 0], "task.label: 1 classes in 4 images"),
        ({}, [0, 1, 0, 2_000_000], "task.label: 2000001 classes in 4 images"),
        ({"setting": "evaluation"}, [0, 1, 9, 9], "task.evaluation: row 2 has the label '9' (2 of 4 rows"),
        ({"image": "image"}, [0, 1, 0, 1], "task.image: "),
        ({"label": "fine"}, [0, 1, 0, 1], "task.label: "),
        ({"train_rows": 5}, [0, 1, 0, 1], "task.train_rows = 5: the data has 4 rows"),
        ({"suffix": "?split=train:0.000000001"}, [0, 1, 0, 1], "keeps none of the 4 images"),
        ({"suffix": "?split=train:0.5&split=rest:0.5"}, [0, 1, 0, 1], "allowed is one split"),
        ({"suffix": "?split=train:1.5"}, [0, 1, 0, 1], "'split=train:1.5' is not understood"),
        ({"suffix": "?label=3"}, [0, 1, 0, 1], "no rows: give a file with data"),
        ({"divided": Partition("files")}, [0, 1, 2, 1], "partition.kind = 'files'"),
    ],
)
def test_bad_labels_columns_and_rows_are_one_line(
    tmp_path: Path, changes: dict[str, Any], labels: list[Any], said: str
) -> None:
    setting, suffix = changes.pop("setting", "train"), changes.pop("suffix", "")
    path = table(tmp_path / "bad.parquet", [encoded(i) for i in range(4)], labels)
    with pytest.raises((DataError, ConfigError)) as caught:
        small(tmp_path, **{setting: path + suffix}, **changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_other_sklearn_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.train: 'sklearn:iris': allowed is sklearn:digits"):
        read_images("sklearn:iris", REST, Partition(clients=1), seed=1)
    with pytest.raises(ConfigError, match=r"allowed is sklearn:digits, with \?split=train:0.8"):
        read_images("sklearn:digits?label=3", REST, Partition(clients=1), seed=1)


@pytest.mark.parametrize(("module", "source"), [("sklearn.datasets", TRAIN), ("PIL", "")])
def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str
) -> None:
    source = source or table(tmp_path / "a.parquet", [encoded(i) for i in range(4)], [0, 1, 0, 1])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"one more package: pip install 'hofl\[vision\]'"):
        read_images(source, source, Partition(clients=1), seed=1)


def said(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What ``hofl run`` of the digits demo says when it refuses: one line, exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(["run", str(DEMO), *overrides])
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.source=resnet50"], "model.source = \"resnet50\": must be 'resnet18' or 'resnet8'"),
        (["model.train=lora"], "model.train = \"lora\": must be 'full' for the vision task"),
        (["model.dtype=bfloat16"], "model.dtype = \"bfloat16\": must be 'float32'"),
        (["model.blocks=layers"], 'model.blocks = "layers": must be absent'),
        (["model.norm=layer"], "model.norm = \"layer\": must be 'group', 'batch' or 'batch-frozen'"),
        (["model.width=-1"], "model.width = -1: must be >= 0"),
        (["partition.kind=files"], "partition.kind = \"files\": must not be 'files' for the vision task"),
        (["task.train="], "task.train"),
        (["task.train=no/such.parquet"], "task.train: 'no/such.parquet': no such file"),
        (["task.train_rows=2000"], "task.train_rows = 2000: the data has 1435 rows"),
        (["cohort.boundaries=[6]"], "cohort.boundaries = [6]: 6 is outside 0..5"),
    ],
)
def test_bad_settings_are_one_line_with_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in said(capsys, *overrides)


@pytest.mark.parametrize("setting", ['norm = "batch"', "width = 8"])
def test_settings_of_images_are_refused_elsewhere(setting: str) -> None:
    with pytest.raises(ConfigError, match="must be absent: only the vision task has it"):
        parse(f'[task]\nname = "synthetic"\n[model]\n{setting}', "x.toml")


def test_the_demo_builds_and_its_norm_is_the_configured_one() -> None:
    text = DEMO.read_text()
    for norm, kind in (("group", torch.nn.GroupNorm), ("batch", torch.nn.BatchNorm2d)):
        task = build_task(parse(text, "demo", [f"model.norm={norm}", "model.width=8"]))
        assert sum(isinstance(part, kind) for part in task.model.module.modules()) == 9
        task.model.self_test(task.batch(0, 0, 2).inputs)
    assert task.name == "vision" and len(task.clients) == 10
    assert task.model.full({"input": numbers(2, 1, 8, 8)}).shape == (2, 10)
