# SPDX-License-Identifier: Apache-2.0
"""The README runs: its Python blocks are executed, its commands parsed, its files looked up (C77)."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import hofl.cli
from hofl.runtime.flower.node_config import NodeConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DEPLOY = (ROOT / "docs" / "deploy.md").read_text()


def fenced(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_python_blocks_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    exec(compile(fenced("python")[number], "README.md", "exec"), {})
    assert capsys.readouterr().out


def commands(text: str) -> list[list[str]]:
    lines = "".join(fenced("sh", text)).splitlines()
    return [shlex.split(re.sub("^cd .* && ", "", line), comments=True) for line in lines if "hofl " in line]


COMMANDS = [command for command in commands(README) if command[0] == "hofl"]
DEPLOYING = [command for command in commands(DEPLOY) if command[0] == "hofl"]


@pytest.mark.parametrize("command", COMMANDS + DEPLOYING, ids=" ".join)
def test_commands_exist(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as left:
        hofl.cli.main([command[1], "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in command if word.startswith("--"))
    assert all((ROOT / word).is_file() for word in command if word.startswith("configs/"))


def test_the_node_file_of_the_guide_is_the_one_that_ships() -> None:
    shown = tomllib.loads(fenced("toml", DEPLOY)[0])
    assert shown == tomllib.loads((ROOT / "configs/deploy/node.toml").read_text())
    NodeConfig.model_validate_json(json.dumps(shown))


def test_synthetic_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """All but those that need a model: what is left names no run folder that was not made here."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    done = []
    for _, *words in COMMANDS:
        config = next((word for word in words if word.endswith(".toml")), "configs/synthetic/")
        new = words[words.index("--out") + 1] if "--out" in words else ""
        runs = [Path(word) for word in words if word.startswith("runs/") and word != new]
        preset = any(word.startswith("papers/") for word in words)  # they need a model from the hub
        if "configs/synthetic/" in config and not preset and all(run.is_dir() for run in runs):
            with pytest.raises(SystemExit) as left:
                hofl.cli.main(words)
            assert left.value.code == 0, (words, capsys.readouterr().err)
            done.append(words[0])
    assert {"run", "list"} <= set(done)


def test_nothing_is_left_to_fill_in() -> None:
    assert "DEMO_" not in README


def test_files_exist() -> None:
    tree = fenced("text")[-1]
    for name in re.findall(r"^  (\w+/)", tree, re.MULTILINE):
        assert (ROOT / "src" / "hofl" / name).is_dir(), name
    for name in re.findall(r"^(\w+/)", tree, re.MULTILINE):
        assert (ROOT / name).is_dir(), name
