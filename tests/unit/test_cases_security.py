# SPDX-License-Identifier: Apache-2.0
"""Reports from the field on what a file may make us read (C72)."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hofl.config import parse
from hofl.errors import ConfigError, DataError, ModelError
from hofl.models.load import load, resolve
from hofl.models.tiny import tiny
from hofl.tasks.files import CLIENT_ID, client_tables

OPENED: list[Path] = []
WATCHED = [False]
INDEX = "model.safetensors.index.json"


def watch(event: str, arguments: Any) -> None:
    """Note what is opened while somebody looks; a hook cannot be taken off again."""
    if WATCHED[0] and event == "open" and isinstance(arguments[0], str):
        OPENED.append(Path(arguments[0]).resolve())


sys.addaudithook(watch)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in shards; its neighbour in the folder above is nobody's business."""
    above = tmp_path_factory.mktemp("above")
    tiny("llama", layers=2).save_pretrained(above / "model", max_shard_size="40kB")
    shutil.copyfile(next((above / "model").glob("*.safetensors")), above / "secret.safetensors")
    return above / "model"


def changed(sharded: Path, tmp_path: Path, name: str) -> Path:
    """A copy whose index has another name for the first shard."""
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    shutil.copyfile(sharded.parent / "secret.safetensors", tmp_path / "secret.safetensors")
    (folder / "a").mkdir()
    index = json.loads((folder / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    shutil.copyfile(folder / index["weight_map"][first], folder / "a" / "b")
    index["weight_map"][first] = name
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def refused(folder: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in one line, before a library gets the folder and with nothing opened outside of it."""

    def reached(*_: Any) -> Any:
        raise AssertionError("the folder was handed on")

    monkeypatch.setattr("hofl.models.load._pretrained", reached)
    OPENED.clear()
    WATCHED[0] = True
    try:
        with pytest.raises(ModelError, match=message) as caught:
            load(str(folder))
    finally:
        WATCHED[0] = False
    assert "\n" not in str(caught.value)
    assert OPENED and all(path.is_relative_to(folder.resolve()) for path in OPENED)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/hostname",
        "a/b",
        "..\\x",
        "..",
        ".hidden",
        "x\0y",
        "",
        "\u202ex",
        None,
        7,
    ],
)
def test_c72_an_index_names_files_of_its_own_folder(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    refused(changed(sharded, tmp_path, name), "names the weights .* plain file names, no path", monkeypatch)


@pytest.mark.parametrize("name", ["../secret.safetensors", "a/../../secret.safetensors"])
def test_c72_so_does_a_configuration(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = changed(sharded, tmp_path, "a")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "transformers_weights": name}))
    refused(folder, r"config\.json names the weights", monkeypatch)


@pytest.mark.parametrize("name", [None, "config.json", INDEX, "tokenizer.json"])
def test_c72_a_link_out_of_the_folder_is_not_followed(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """A shard, and any other file that is read."""
    folder = tmp_path / "model"
    shutil.copytree(sharded, folder)
    linked = folder / (name or sorted(folder.glob("*.safetensors"))[0].name)
    target = tmp_path / linked.name
    if linked.exists():
        linked.rename(target)
    linked.symlink_to(target)
    if name == "config.json":  # that there is one is asked of the link
        monkeypatch.setattr("hofl.models.load.refuse_code", lambda folder: None)
        with pytest.raises(ModelError, match=r"config\.json is a link out of its folder"):
            resolve(str(folder))
        return
    refused(folder, "is a link out of its folder", monkeypatch)


def test_c72_what_stays_inside_is_loaded(sharded: Path, tmp_path: Path) -> None:
    """Shards as they are saved, a link to the folder, a link inside it, and the layout of the hub's cache."""
    expected = tiny("llama", layers=2).state_dict()
    (tmp_path / "link").symlink_to(sharded)
    inside = tmp_path / "inside"
    shutil.copytree(sharded, inside)
    shard = sorted(inside.glob("*.safetensors"))[0]
    shard.rename(inside / "renamed.bin")
    shard.symlink_to("renamed.bin")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(sharded.iterdir())):
        shutil.copyfile(path, snapshot.parents[1] / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    for folder in (sharded, tmp_path / "link", inside, snapshot):
        found = load(str(folder), text=False).module.state_dict()
        assert len(list(folder.glob("*.safetensors"))) > 1
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["../x", "a/b", "..\\x", "", "a" * 65, "x\n", "ä"])
def test_c72_client_ids_are_plain_names(name: str, tmp_path: Path) -> None:
    """Where a run lists them, where a file is one (that cannot be called ``../x``), and in their rule."""
    assert not CLIENT_ID.fullmatch(name)
    task = '[model]\nsource = "m"\n[task]\nevaluation = "e.csv"\n'
    text = f'{task}[partition]\nkind = "nodes"\nnames = {json.dumps([name, "b"])}\n'
    with pytest.raises(ConfigError, match=r"partition\.names = .*ids of 1 to 64 of A-Z a-z 0-9 _ -"):
        parse(text, "x")
    if name and "/" not in name and not name.startswith("."):  # no glob finds a hidden file
        (tmp_path / f"{name}.csv").write_text("text\nx\n", encoding="utf-8")
        with pytest.raises(DataError, match="is no client id"):
            client_tables(str(tmp_path / "*.csv"), ["text"])
