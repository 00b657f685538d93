# SPDX-License-Identifier: Apache-2.0
"""Settings that a system of the family cannot use: one line, exit 2, nothing written."""

import warnings
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs" / "synthetic"
VISION = [
    "task.name=vision",
    "task.train=sklearn:digits?split=train:0.8",
    "task.evaluation=sklearn:digits?split=train:0.8",
    "model.source=resnet8",
    "model.train=full",
]
BOTH = "blocks of this model; ho_sfl needs both halves"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    return int(left.value.code or 0)


def refused(capsys, *arguments: str) -> str:
    """What is said on standard error, one line, where nothing is written."""
    before = sorted(Path().rglob("*"))
    assert command(*arguments) == 2
    said = capsys.readouterr()
    assert all(line.startswith("loading the data and model ") for line in said.out.splitlines())
    assert said.err.startswith("hofl: ") and said.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return said.err.removeprefix("hofl: ").rstrip("\n")


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("ho_sfl", ["cohort.boundaries=[0]"], "cohort.boundaries = [0]: must be 1 or more: ho_sfl needs"),
        ("ho_sfl", ["cohort.boundaries=[4]"], f"cohort.boundaries = [4]: 4 is outside 1..3, the {BOTH}"),
        ("ho_sfl", ["cohort.boundaries=[5]"], f"cohort.boundaries = [5]: 5 is outside 1..3, the {BOTH}"),
        ("hosl", ["cohort.boundaries=[1, 2]"], "cohort.boundaries = [1, 2]: must be one boundary: in hosl"),
        ("ho_sfl", ["cohort.boundaries=[]"], "cohort.boundaries is missing; name one number a tier"),
        ("decomfl", ["cohort.boundaries=[1]"], "cohort.boundaries = [1]: must be absent or 0: decomfl has"),
        ("zo_sfl", ["zo.estimator=forward"], 'zo.estimator = "forward": must be central for zo_sfl'),
        ("hosl", ["zo.estimator=tangent"], 'zo.estimator = "tangent": must be central or none for hosl'),
        ("mezo", ["zo.estimator=none"], 'zo.estimator = "none": must be central or tangent for mezo'),
        ("decomfl", ["zo.optimizer.name=adamw"], 'zo.optimizer.name = "adamw": must be sgd: under adamw'),
        ("hiso", ["zo.optimizer.name=adamw"], 'zo.optimizer.name = "adamw": must be sgd: hiso has'),
        ("mu_splitfed", ["zo.optimizer.name=adamw"], 'zo.optimizer.name = "adamw": must be sgd: mu_splitfed'),
        ("hiso", ["zo.optimizer.momentum=0.9"], "zo.optimizer.momentum = 0.9: must be 0 for hiso"),
        (
            "ho_fl",
            [*VISION, "model.train=lora"],
            "model.train = \"lora\": must be 'full' for the vision task",
        ),
        ("ho_fl", [*VISION, "task.train=sklearn:iris"], "task.train"),
        ("ho_fl", [*VISION, "task.train=nowhere:x"], "task.train"),
        ("ho_fl", [*VISION, "task.train=junk.parquet"], "task.train"),
        ("ho_fl", [*VISION, "task.train=table.parquet", "task.image=picture"], "task.image"),
        ("splitfed_v1", ["cohort.size=13"], "cohort.size = 13: must be at most partition.clients = 12"),
        ("mezo", ["quorum=2"], "quorum = 2: must be at most the cohort, 1 client"),
        ("hosl", ["split.wire=float64"], "split.wire = \"float64\": must be 'float32' or 'bfloat16'"),
        ("ho_sfl", ["split.history=0"], "split.history = 0: must be >= 1"),
        ("heron_sfl", ["split.upload_every=6"], "split.upload_every = 6: must be at most local.steps = 5"),
        (
            "ho_sfl",
            ["zo.directions=hadamard", "zo.probes=513"],
            "zo.probes = 513: hadamard has 512 directions for d = 416",
        ),
        (
            "decomfl",
            ["zo.directions=hadamard", "zo.probes=5000"],
            "zo.probes = 5000: hadamard has 2048 directions for d = 1028",
        ),
    ],
)
def test_a_setting_that_a_system_cannot_use_is_one_line(capsys, at, name, settings, expected) -> None:
    (at / "junk.parquet").write_bytes(b"PAR1 no table at all PAR1")
    parquet.write_table(pa.table({"image": [b"", b""], "label": [0, 1]}), at / "table.parquet")
    said = refused(capsys, "run", str(CONFIGS / f"{name}.toml"), *settings)
    assert said.startswith(f"command line: {expected}"), said


def test_splitlora_needs_a_text_task(capsys) -> None:
    said = refused(capsys, "run", str(CONFIGS / "splitfed_v2.toml"), "algorithm=splitlora")
    assert said.endswith("model.train must be 'lora', on a text task: splitlora trains adapters")


@pytest.mark.parametrize(("name", "size"), [("mezo", "99"), ("hosl", "50%")])
def test_a_centralised_system_has_one_client_whatever_the_cohort(capsys, name, size) -> None:
    settings = ["rounds=1", f"cohort.size={size}", "local.steps=1", "--out", "r"]
    assert command("run", str(CONFIGS / f"{name}.toml"), *settings) == 0
    said = capsys.readouterr().out
    assert "cohort: one client with the data of all 12\n" in said
    assert "peak memory of a client" in said and "1 optimizer step," in said


@pytest.mark.parametrize("name", ["decomfl", "mezo", "zo_sfl", "ho_sfl", "fedavg"])
def test_a_ledger_of_scalars_replays_where_no_weights_are_sent(capsys, name) -> None:
    settings = ["rounds=2", "run.ledger=scalars", "local.steps=1", "--out", "r"]
    assert command("run", str(CONFIGS / f"{name}.toml"), *settings) == 0
    capsys.readouterr()
    if name in ("decomfl", "mezo", "zo_sfl"):
        assert command("replay", "r", "--round", "2") == 0
        assert "equal         True" in capsys.readouterr().out
    else:
        said = refused(capsys, "replay", "r", "--round", "2")
        assert said.startswith('r: run.ledger = "scalars" left out weights that this method sends')


@pytest.mark.parametrize(
    ("name", "scalars", "note"),
    [
        ("hosl", "0", "first contact"),
        ("zo_sfl", "0", ""),
        ("fedzo", "0", ""),
        ("decomfl", "40", "for each round it lacks, its own last one among them;"),
        ("ho_sfl", "2", "for each round it lacks;"),
        ("ho_fl", "10", ""),
    ],
)
def test_what_a_client_sends_and_receives_is_said(name, scalars, note) -> None:
    from hofl.commands.describe import boundaries
    from hofl.commands.participation import contact
    from hofl.config import load
    from hofl.session import prepare

    session = prepare(load(CONFIGS / f"{name}.toml"))
    table = boundaries(session)
    assert table.rows[0][table.columns.index("scalars up")] == scalars
    assert ("bottom" in table.columns) == (name not in ("decomfl", "fedzo"))
    said = list(contact(session))
    assert bool(said) == bool(note) and all(note in line for line in said)


def test_what_is_said_of_averaged_models_is_what_travels(tmp_path: Path) -> None:
    """DeComFL with ``zo.average = "models"`` sends w_t down, as HO-FL does, not its missed scalars."""
    import hofl
    from hofl.session import prepare
    from hofl.theory import traffic

    config = hofl.load_config(CONFIGS / "decomfl.toml", "zo.average=models", "rounds=1")
    hofl.run(config, tmp_path / "run")
    row = hofl.read_run(tmp_path / "run").rows[1]
    said = traffic.of("decomfl", prepare(config).sizes[0])
    for way in ("up", "down"):
        found = {k: v // len(row["cohort"]) for k, v in row[f"bytes_{way}"].items() if k != "headers"}
        assert found == {k: v for k, v in said[way].items() if v}
    assert said["down"]["weights"] == 4 * 1028
