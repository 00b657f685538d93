# SPDX-License-Identifier: Apache-2.0
"""Images that are never on the server: two halves of a vision task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hofl.build_task import build_task, node_task, with_sizes
from hofl.config import Config, parse
from hofl.errors import ConfigError, DataError, HoflError
from hofl.runtime.prints import fingerprints
from hofl.tasks.nodes import told
from pictures import encoded, picture, table

CLIENTS = ("site-a", "site-b")


def _config(at: Path, evaluation: str = "") -> Config:
    scored = evaluation or table(at / "test.parquet", [encoded(i) for i in range(50, 62)], ["dog", "cat"] * 6)
    return parse(
        f'seed = 5\n[model]\nsource = "resnet8"\ntrain = "full"\nwidth = 4\ndevice = "cpu"\n[task]\n'
        f'name = "vision"\nevaluation = "{scored}"\n[partition]\nkind = "nodes"\nnames = {list(CLIENTS)}\n'
        "[cohort]\nsize = 2\nboundaries = [1]",
        "x",
    )


def _own(at: Path, first: int, labels: list[Any], side: int = 6) -> str:
    cells = [encoded(first + i, side=side) for i in range(len(labels))]
    return table(at / f"own-{first}.parquet", cells, labels)


def test_nodes_normalise_and_number_classes_as_the_server_says(tmp_path: Path) -> None:
    config = _config(tmp_path)
    server = build_task(config)
    facts = server.facts
    scored = np.stack([picture(i) for i in range(50, 62)]).astype(np.float64)
    assert np.allclose(facts["mean"], scored.mean((0, 1, 2))) and facts["shape"] == [3, 6, 6]
    assert (facts["n_train"], facts["shared_images"], facts["labels"]) == (None, None, ["cat", "dog"])
    labels = {"site-a": ["cat", "dog", "dog", "cat", "dog"], "site-b": ["dog"] * 7}
    for number, (client, own) in enumerate(labels.items()):
        node = node_task(config, client, _own(tmp_path, 10 * number, own), **told(server))
        assert fingerprints(node)["layout"] == fingerprints(server)["layout"]
        assert np.array_equal(node.model.read(), server.model.read())
        assert [len(shard) for shard in node.shards] == [
            len(own) if each == number else 0 for each in range(2)
        ]
        batch = node.collate(node.shards[number])
        pixels = torch.stack(
            [torch.from_numpy(picture(10 * number + i)).permute(2, 0, 1) for i in range(len(own))]
        ).float()
        mean, std = (
            torch.tensor(facts[name], dtype=torch.float32)[:, None, None] for name in ("mean", "std")
        )
        assert torch.equal(batch.inputs["input"], (pixels - mean) / std)
        assert batch.targets.tolist() == [["cat", "dog"].index(label) for label in own]
        assert (node.facts["n_train"], node.facts["n_evaluation"]) == (len(own), None)
    known = with_sizes(server, [5, 7])
    assert known.batch(1, 0, 7).targets.shape == (7,) and known.facts["n_train"] == 12
    known.model.self_test(known.batch(0, 0, 2).inputs)
    assert server.evaluate().n == 12


def test_digits_come_in_halves_too(tmp_path: Path) -> None:
    config = _config(tmp_path, "sklearn:digits?split=rest:0.8")
    server = build_task(config)
    node = node_task(config, "site-b", "sklearn:digits?split=train:0.2", **told(server))
    assert 300 < len(node.shards[1]) < 420 and server.facts["labels"] == list("0123456789")


@pytest.mark.parametrize(
    ("own", "changes", "error", "message"),
    [
        (["cow"], {}, DataError, "data.train: row 0 has the label 'cow' .* the classes are cat, dog"),
        (["cat"], {"names": ()}, ConfigError, "data.label: the server did not tell"),
        (["cat"], {"images": None}, ConfigError, "the server did not tell the shape"),
        (
            ["cat"],
            {"images": {"shape": [3, 6, 6], "mean": [0.0], "std": [1.0]}},
            ConfigError,
            "the server did",
        ),
        (
            ["cat"],
            {"images": {"shape": [1, 6, 6], "mean": [float("nan")], "std": [1.0]}},
            ConfigError,
            "the server told",
        ),
        (
            ["cat"],
            {"images": {"shape": [1, 6, 6], "mean": [1.0], "std": [0.0]}},
            ConfigError,
            "the server told",
        ),
        (["cat"], {"text": "image"}, DataError, "data.text: .*no column 'image'"),
        (["cat"], {"label": "kind"}, DataError, "data.label: .*no column 'kind'"),
    ],
)
def test_a_bad_node_is_one_line(
    tmp_path: Path, own: list[str], changes: dict[str, Any], error: type[HoflError], message: str
) -> None:
    config = _config(tmp_path)
    given = told(build_task(config)) | {"train": _own(tmp_path, 0, own)} | changes
    with pytest.raises(error, match=f"^{message}") as caught:
        node_task(config, "site-a", **given)
    assert str(caught.value).isprintable()


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with pytest.raises(DataError, match=r"^data\.train: row 0 is 8x8 in 3 channels"):
        node_task(config, "site-a", _own(tmp_path, 0, ["cat"], side=8), **told(build_task(config)))
