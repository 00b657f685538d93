# SPDX-License-Identifier: Apache-2.0
"""C68: local work in steps or in passes over a client's own examples."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from hofl.algorithms import ALGORITHMS
from hofl.cli import main
from hofl.core.optimizers import Optimizer
from hofl.protocol.aggregate import Training
from hofl.runtime import ledger

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
UNEVEN = ("partition.kind=dirichlet", "partition.alpha=0.4", "partition.clients=6", "partition.minimum=8")


def hofl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def training(sizes: tuple[int, ...], epochs: float | None, *, steps: int = 50, batch: int = 4) -> Training:
    return Training(1, steps, batch, Optimizer("sgd", 0.1), sizes, epochs=epochs)


@pytest.mark.parametrize(
    ("examples", "epochs", "steps", "taken"),
    [
        (10, None, 7, 7),
        (10, 0.5, 50, 2),  # ceil(0.5 x 10 / 4) = ceil(1.25)
        (10, 1.0, 50, 3),
        (8, 1.0, 50, 2),
        (1, 0.1, 50, 1),
        (120, 0.1, 50, 3),  # 0.1 x 120 / 4 is 3.0000000000000004 in floating point
        (10, 3.0, 5, 5),  # 8, and 5 at most
    ],
)
def test_c68_steps_of_a_client(examples: int, epochs: float | None, steps: int, taken: int) -> None:
    assert training((99, examples), epochs, steps=steps).steps_of(1) == taken


@pytest.mark.parametrize("name", ["ho_fl", "fedavg", "fedprox", "fedzo"])
def test_c68_each_client_takes_its_own(name: str, tmp_path: Path, capsys) -> None:
    where = tmp_path / "run"
    own = ("local.epochs=0.5", "local.steps=40", "local.batch=4", "rounds=3")
    assert hofl("run", SYNTHETIC / f"{name}.toml", *UNEVEN, *own, "cohort.size=6", "--out", where) == 0
    said = capsys.readouterr().out
    held = json.loads((where / "manifest.json").read_text())["facts"]["partition"]
    sizes = [part["examples"] for part in held] if isinstance(held, list) else []
    expected = {c: min(40, -(-n // 8)) for c, n in enumerate(sizes)}  # ceil(0.5 n / 4)
    assert len(set(expected.values())) > 2
    with closing(ledger.read(where / "ledger.sqlite")) as book:
        entries = [e for r in (1, 2, 3) for e in book.entries(r)]
    assert {e.client: e.plan.values["steps"] for e in entries} == expected
    low, high = min(expected.values()), max(expected.values())
    middle = sorted(expected.values())[3]
    assert f"each participation: {low} / {middle} / {high} optimizer steps" in said
    assert hofl("replay", where, "--round", "3") == 0
    bare = tmp_path / "same"
    assert hofl("run", "--resume", where, "rounds=4") == 0
    assert (
        hofl("run", SYNTHETIC / f"{name}.toml", *UNEVEN, *own[:3], "rounds=4", "cohort.size=6", "--out", bare)
        == 0
    )
    ends = [json.loads((place / "summary.json").read_text())["final_sha256"] for place in (where, bare)]
    assert ends[0] == ends[1]


def test_c68_what_epochs_cannot_be(capsys, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    text = (SYNTHETIC / "ho_fl.toml").read_text()
    file.write_text(text.replace("[local]", "[local]\nepochs = 0.5"))
    kept = "steps" in text.partition("[local]")[2].partition("[")[0]
    if kept:
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "steps =" not in line))
    assert hofl("run", file) == 2
    said = capsys.readouterr().err
    assert "needs local.steps, the most that any client takes" in said and "a.toml:" in said
    assert hofl("theory", SYNTHETIC / "ho_fl.toml", "local.epochs=1", "local.steps=5") == 2
    assert "one number of local steps" in capsys.readouterr().err
    for name in ("ho_sfl", "decomfl", "hosl", "splitfed_v1", "heron_sfl", "mezo", "mu_splitfed"):
        assert name in ALGORITHMS
        assert hofl("run", SYNTHETIC / f"{name}.toml", "local.epochs=1", "local.steps=5") == 2
        assert f"in {name} all clients take the same steps" in capsys.readouterr().err
