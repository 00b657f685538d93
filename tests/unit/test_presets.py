# SPDX-License-Identifier: Apache-2.0
"""The papers' cells as configurations: none is missing, each says what the paper says."""

import json
import tomllib
import warnings
from pathlib import Path

import pytest

from hofl import presets
from hofl.checks import RESNETS
from hofl.config import load, parse
from hofl.errors import ConfigError
from hofl.memory.named import MODELS, known
from hofl.presets.published import PUBLISHED
from hofl.presets.toml import dumps

with warnings.catch_warnings():  # typer asks click for names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from hofl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
OWN = [preset for preset in presets.presets().values() if not preset.recommended]
OTHER = [preset for preset in presets.presets().values() if preset.recommended]


def hofl_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def numbers(table: str, paper: str = "HO-FL") -> dict[tuple[str, str], tuple[float | None, float | None]]:
    return {(p.cell, p.metric): (p.value, p.sd) for p in PUBLISHED if (p.paper, p.table) == (paper, table)}


def test_every_cell_of_the_tables_is_there() -> None:
    """SYSTEMS 5.2: 12 rows of 5, 6 of 5, 4 of 4, 6 of 4, 6 of 3, 8 of 2, and HO-SFL's 6 of 3."""
    tables = ("Table 2", "Table 3", "Table 4", "Table 7, seed 42", "Table 8", "Table 9")
    assert [len(numbers(table)) for table in tables] == [60, 30, 16, 24, 18, 16]
    assert len(numbers("language models", "HO-SFL")) == 18
    assert {(p.paper, p.cell) for p in PUBLISHED} == {
        ("HO-FL" if "/ho_fl/" in preset.name else "HO-SFL", preset.name.split("/", 2)[2]) for preset in OWN
    }


@pytest.mark.parametrize(
    ("table", "cell", "metric", "value"),
    [
        ("Table 2", "opt-125m/sst2/decomfl", "accuracy", (51.95, 0.00)),
        ("Table 2", "smollm3-3b/ag_news-dir0.5/ho_fl-beta0.75", "accuracy", (87.52, 0.55)),
        ("Table 2", "qwen2.5-1.5b/boolq/fedprox", "accuracy", (79.11, 0.08)),
        ("Table 3", "opt-125m/squad/decomfl", "exact_match", (1.29, 0.05)),
        ("Table 3", "smollm3-3b/squad/ho_fl-beta0.75", "f1", (88.57, 0.13)),
        ("Table 4", "qwen2.5-1.5b/ag_news-dir0.1/ho_fl-beta0.25", "accuracy", (83.83, 0.92)),
        ("Table 7, seed 42", "qwen2.5-1.5b/sciq/ho_fl-beta0.75", "accuracy", (90.30, None)),
        ("Table 8", "qwen2.5-1.5b/squad/ho_fl-beta0.5", "f1", (86.61, 0.11)),
        ("Table 9", "opt-125m/sst2/ho_fl-beta0.5-probes8", "accuracy", (86.47, 0.11)),
        ("Table 9", "opt-125m/sst2/ho_fl-beta0.5-radius1e-2", "loss", (0.3493, 0.0040)),
        ("Table 9", "opt-125m/sst2/ho_fl-beta0.5-steps10", "loss", (0.3406, 0.0008)),
    ],
)
def test_published_values(table, cell, metric, value) -> None:
    """The corners of each table, read from the paper by hand."""
    assert numbers(table)[cell, metric] == value


def test_the_published_gaps_are_the_papers() -> None:
    """Its text: at most 39.47 points over DeComFL in Table 2, and 3.27 of beta on AG News."""
    found = numbers("Table 2")
    pairs = [
        (v[0], found[c.replace("ho_fl-beta0.75", "decomfl"), m][0])
        for (c, m), v in found.items()
        if "0.75" in c
    ]
    assert max(ours - theirs for ours, theirs in pairs) == pytest.approx(39.47)
    news = "opt-125m/ag_news-dir0.5/ho_fl-beta"
    assert found[f"{news}0.75", "accuracy"][0] - found[f"{news}0", "accuracy"][0] == pytest.approx(3.27)


@pytest.mark.parametrize("preset", OWN, ids=lambda preset: preset.name)
def test_what_the_papers_say(preset) -> None:
    """SYSTEMS 5.1 and the HO-SFL section, value by value."""
    c = presets.config(preset)
    assert (c.seed, c.optimizer.betas, c.optimizer.eps) == (42, (0.9, 0.999), 1e-8)
    assert (c.model.lora.rank, c.model.lora.alpha, c.model.lora.targets) == (8, 16, ())
    if c.task.name == "vision":
        assert (c.model.source, c.zo.probes, c.partition.clients, c.cohort.size) == ("resnet18", 5, 100, 10)
        return
    assert (c.model.dtype, c.model.train, c.local.batch) == ("bfloat16", "lora", 16)
    assert (c.optimizer.name, c.optimizer.lr, c.optimizer.weight_decay) == ("adamw", 1e-5, 5e-4)
    assert c.bottom_optimizer == c.optimizer
    if "/ho_sfl/" in preset.name:
        assert c.rounds * c.local.steps == 800 and c.cohort.boundaries == (6,) and c.zo.probes == 2
        return
    assert (c.partition.clients, c.cohort.size) == (30, 6)
    assert c.rounds * c.cohort.size * c.local.steps * c.local.batch == 76_800
    if "-" not in preset.name.rpartition("/beta")[2]:
        assert (c.rounds, c.local.steps, c.zo.probes, c.zo.radius) == (160, 5, 2, 1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("steps1", {"rounds": 800, "local.steps": 1}),
        ("steps10", {"rounds": 80, "local.steps": 10}),
        ("probes4", {"zo.probes": 4}),
        ("radius1e-4", {"zo.radius": 1e-4}),
    ],
)
def test_an_ablation_changes_one_thing(name, settings) -> None:
    plain, other = (
        presets.find(f"papers/ho_fl/opt-125m/sst2/ho_fl-beta0.5{end}") for end in ("", f"-{name}")
    )
    changed = {key: v for key, v in other.settings.items() if plain.settings.get(key) != v}
    assert {key: v for key, v in changed.items() if key != "evaluation.every"} == settings


@pytest.mark.parametrize(
    ("model", "tiers"),
    [("opt-125m", (3, 6, 9)), ("qwen2.5-1.5b", (8, 16, 24)), ("smollm3-3b", (9, 18, 27))],
)
def test_tiers_of_table_1(model, tiers) -> None:
    preset = presets.find(f"papers/ho_fl/{model}/boolq/ho_fl-beta0")
    assert presets.config(preset).cohort.boundaries == tiers
    assert MODELS[known(model) or ""].boundaries == tiers


def test_a_partition_of_table_4() -> None:
    found = [
        presets.config(presets.find(f"papers/ho_fl/qwen2.5-1.5b/ag_news-{kind}/ho_fl-beta0")).partition
        for kind in ("iid", "dir1", "dir0.1")
    ]
    assert [p.kind for p in found] == ["iid", "fixed_dirichlet", "fixed_dirichlet"]
    assert [(p.size, p.alpha) for p in found[1:]] == [(4000, 1.0), (4000, 0.1)]


def test_recommended_variants_are_of_the_papers_own_method() -> None:
    assert {preset.settings["algorithm"] for preset in OTHER} == {"ho_fl", "ho_sfl"}
    for preset in OTHER:
        plain = presets.find(preset.name.removesuffix(presets.RECOMMENDED))
        changed = {k: v for k, v in preset.settings.items() if plain.settings.get(k) != v}
        assert changed == {"zo.estimator": "sketch", "zo.directions": "hadamard", "zo.probes": 256}
        assert presets.config(preset).zo.estimator == "sketch"


def test_the_files_are_what_the_table_makes() -> None:
    """After a change of the table: ``python -m hofl.presets configs``."""
    there = {str(file.relative_to(CONFIGS)) for file in (CONFIGS / "papers").rglob("*.toml")}
    assert there == {f"{preset.name}.toml" for preset in OWN}
    for preset in OWN:
        assert (CONFIGS / f"{preset.name}.toml").read_text(encoding="utf-8") == presets.text(preset), (
            preset.name
        )


def test_a_file_is_the_preset() -> None:
    for preset in OWN[::7]:
        assert load(CONFIGS / f"{preset.name}.toml") == presets.config(preset)
        found = tomllib.loads(presets.text(preset))
        assert found["evaluation"]["every"] in (
            presets.config(preset).rounds,
            presets.config(preset).rounds // 4,
        )


def test_a_header_has_the_number_and_the_command() -> None:
    text = presets.text(presets.find("papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75.toml"))
    assert "Table 2: accuracy 86.54 (SD 0.24); one of its 872 examples is 0.115 points" in text
    assert "hofl sweep configs/papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75.toml --seeds 42,43,44" in text
    assert all(line.startswith("#") for line in text.splitlines()[:7])


def test_no_such_preset() -> None:
    with pytest.raises(ConfigError, match=r"did you mean papers/ho_fl/opt-125m/sst2/fedavg"):
        presets.find("papers/ho_fl/opt-125m/sst2/fedav")


def test_models() -> None:
    """Table 1 and the models' cards: blocks; every tier is inside them."""
    blocks = {"OPT-125M": 12, "Qwen2.5-1.5B": 28, "SmolLM3-3B": 36, "Gemma-3-270M": 18, "Llama-3.2-1B": 16}
    blocks |= {"Llama-3.1-8B": 32, "SmolLM2-135M": 30, "MiniLM-L6": 6, "ResNet-18": 10}
    assert {name: model.blocks for name, model in MODELS.items()} == blocks
    for name, model in MODELS.items():
        assert 0 < model.boundaries[0] < model.boundaries[1] < model.boundaries[2] < model.blocks
        assert known(model.source) == known(name.lower()) == name
    sizes = {"OPT-125M": 125.2e6, "Qwen2.5-1.5B": 1.54e9, "SmolLM3-3B": 3.08e9, "Llama-3.1-8B": 8.03e9}
    assert all(MODELS[name].parameters == pytest.approx(size, rel=0.005) for name, size in sizes.items())
    assert MODELS["ResNet-18"].source in RESNETS and known("org/else") is None


def test_the_blocks_of_resnet_18() -> None:
    from hofl.core.keys import Key
    from hofl.models.boundary import cut
    from hofl.models.resnet import resnet

    network = resnet("resnet18", key=Key.of(1, "init"), norm="group", classes=10, channels=3)
    assert sum(parameter.numel() for parameter in network.parameters()) == MODELS["ResNet-18"].parameters
    assert cut(network).blocks == MODELS["ResNet-18"].blocks


def test_the_commands(capsys) -> None:
    name = "papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75"
    assert hofl_command("preset", name) == 0
    assert parse(capsys.readouterr().out, "shown") == presets.config(presets.find(name))
    assert hofl_command("list", "presets", "table 9", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 8
    assert hofl_command("list", "presets", "nothing-like-it") == 2
    assert hofl_command("list", "models", "opt") == 2
    assert hofl_command("preset", "papers/x") == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert hofl_command("list", "models", "--json") == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert (
        models[2]["model.source"] == "facebook/opt-125m"
        and models[2]["boundaries of three tiers"] == "3, 6, 9"
    )


def test_toml_has_one_line_a_setting() -> None:
    text = dumps({"zo.radius": 1e-4, "rounds": 3, "cohort.boundaries": [3, 6], "zo.optimizer.name": "sgd"})
    sections = ("rounds = 3", "[cohort]\nboundaries = [3, 6]", "[zo]\nradius = 0.0001")
    assert text == "\n\n".join([*sections, '[zo.optimizer]\nname = "sgd"\n'])


def test_a_run_may_be_given_a_presets_name() -> None:
    name = "papers/ho_fl/opt-125m/sst2/ho_fl-beta0.75"
    found = load(f"{name}-recommended", ["rounds=3"])
    assert (found.zo.estimator, found.rounds, found.cohort.preference) == ("sketch", 3, 0.75)
    assert load(name) == load(CONFIGS / f"{name}.toml")
    with pytest.raises(ConfigError, match=r"did you mean papers.ho_fl.opt-125m.sst2.ho_fl-beta0\.75"):
        load("papers/ho_fl/opt-125m/sst2/ho_fl-beta0.7")


def test_what_is_wrong_with_a_preset_here_is_said_with_its_line(capsys) -> None:
    assert hofl_command("run", "papers/ho_fl/opt-125m/sst2/fedavg", "task.train=none.parquet") == 2
    assert "none.parquet" in capsys.readouterr().err
