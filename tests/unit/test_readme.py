# SPDX-License-Identifier: Apache-2.0
"""The README runs: its Python blocks are executed, its commands parsed, its files looked up (C77)."""

import re
import shlex
from pathlib import Path

import pytest

import hofl.cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_python_blocks_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    exec(compile(fenced("python")[number], "README.md", "exec"), {})
    assert capsys.readouterr().out


COMMANDS = [
    shlex.split(line, comments=True) for line in "".join(fenced("sh")).splitlines() if line.startswith("hofl")
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_exist(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as left:
        hofl.cli.main([command[1], "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in command if word.startswith("--"))
    assert all((ROOT / word).is_file() for word in command if word.endswith(".toml"))


def test_synthetic_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """All but those that need the demo model: what is left names no run folder that was not made here."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    done = []
    for _, *words in COMMANDS:
        config = next((word for word in words if word.endswith(".toml")), "configs/synthetic/")
        new = words[words.index("--out") + 1] if "--out" in words else ""
        runs = [Path(word) for word in words if word.startswith("runs/") and word != new]
        if "configs/synthetic/" in config and all(run.is_dir() for run in runs):
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
