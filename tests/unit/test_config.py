# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from pydantic import ValidationError

from hofl.algorithms import ALGORITHMS
from hofl.config import Config, about, cohort_size, dump, load, parse, placed
from hofl.errors import ConfigError, DataError, HoflError, ModelError

SYNTHETIC = '[task]\nname = "synthetic"\n'


CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = [str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.toml") if file.name != "node.toml"]


@pytest.mark.parametrize("file", sorted(SHIPPED))
def test_every_configuration_that_ships_can_be_read(file: str) -> None:
    assert load(CONFIGS / file).rounds > 0


NAMES = ", ".join(f"'{name}'" for name in list(ALGORITHMS)[:-1]) + f" or '{list(ALGORITHMS)[-1]}'"


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(f"{text}\n{SYNTHETIC}", "x.toml", overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[zo]\n# probez = 1\nprobez = 3", "x.toml:3: zo.probez is unknown, did you mean zo.probes?"),
        ("probes = 3", "x.toml:1: probes is unknown, did you mean zo.probes?"),
        ("zo.probez = 3", "x.toml:1: zo.probez is unknown, did you mean zo.probes?"),
        ("[cohort]\npreference = 1.5", "x.toml:2: cohort.preference = 1.5: must be in [0, 1)"),
        ("[cohort]\npreference = 1.0", "x.toml:2: cohort.preference = 1.0: must be in [0, 1)"),
        (
            "frob = 3",
            "x.toml:1: frob is unknown; there are algorithm, seed, rounds, quorum and [model], [task], "
            "[partition], [cohort], [local], [optimizer], [zo], [split], [evaluation], [fleet], [run]",
        ),
        (
            "[frob]\nx = 3",
            "x.toml:1: frob is unknown; there are algorithm, seed, rounds, quorum and "
            "[model], [task], [partition], [cohort], [local], [optimizer], [zo], [split], "
            "[evaluation], [fleet], [run]",
        ),
        ("[run]\nfrob = 3", "x.toml:2: run.frob is unknown; [run] has threads, ledger"),
        ('algorithm = "sgd"', f'x.toml:1: algorithm = "sgd": must be {NAMES}'),
        (
            '[partition]\nkind = "stripes"',
            "x.toml:2: partition.kind = \"stripes\": must be 'iid', 'dirichlet', 'by_label', "
            "'fixed_dirichlet', 'files' or 'nodes'",
        ),
        ("[zo.optimizer]\nlr = 1\n[optimizer]\nlr = -1", "x.toml:4: optimizer.lr = -1: must be > 0"),
        ("[zo]\n\nradius = 0", "x.toml:3: zo.radius = 0: must be > 0"),
        ("[zo]\nradius = nan", "x.toml:2: zo.radius = nan: must be a finite number"),
        ("[zo]\nprobes = 0", "x.toml:2: zo.probes = 0: must be >= 1"),
        ('[zo]\nprobes = "2"', 'x.toml:2: zo.probes = "2": must be a whole number'),
        ("[zo]\nprobes = 2.5", "x.toml:2: zo.probes = 2.5: must be a whole number"),
        ("[zo]\nprobes = true", "x.toml:2: zo.probes = true: must be a whole number"),
        ("zo = 3", "x.toml:1: zo = 3: must be a section with keys of its own"),
        ("[optimizer]\nlr = 0.0", "x.toml:2: optimizer.lr = 0.0: must be > 0"),
        ("[optimizer]\nbetas = [0.9, 1]", "x.toml:2: optimizer.betas = [0.9, 1]: must be in [0, 1)"),
        ("[optimizer]\nbetas = [0.9]", "x.toml:2: optimizer.betas = [0.9]: must have an element more"),
        ("[zo.optimizer]\nlr = -1", "x.toml:2: zo.optimizer.lr = -1: must be > 0"),
        (
            "[cohort]\nsize = 31",
            "x.toml:2: cohort.size = 31: must be at most partition.clients = 30",
        ),
        ("quorum = 7", "x.toml:1: quorum = 7: must be at most the cohort, 6 clients"),
        ("rounds = 0", "x.toml:1: rounds = 0: must be >= 1"),
        (
            "seed = 99999999999999999999",
            "x.toml:1: seed = 99999999999999999999: must be a 64-bit signed integer",
        ),
        ("rounds =", "x.toml:1: Invalid value; the file is not valid TOML"),
    ],
)
def test_bad_setting_is_one_line_with_its_place(text: str, expected: str) -> None:
    assert message(text) == expected


def test_bad_value_names_the_choices() -> None:
    assert message('[zo]\nestimator = "fwd"').endswith(
        "must be 'forward', 'central', 'tangent', 'sketch' or 'none'"
    )


@pytest.mark.parametrize("size", ['"0%"', '"101%"', '"some"', "0", "-1", "2.5", "true"])
def test_bad_cohort_sizes(size: str) -> None:
    assert message(f"[cohort]\nsize = {size}").startswith(f"x.toml:2: cohort.size = {size}: must be")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("zo.radius=0", "command line: zo.radius = 0: must be > 0"),
        ("zo.probez=2", "command line: zo.probez is unknown, did you mean zo.probes?"),
        ("cohort.size=31", "command line: cohort.size = 31: must be at most partition.clients = 30"),
        ("seed.x=1", "command line: seed = 1: must be a whole number"),
        ("probes", "command line: 'probes' is no setting; write section.key=value"),
        ("a b=1", "command line: 'a b=1' is no setting; write section.key=value"),
    ],
)
def test_bad_override_names_the_command_line(override: str, expected: str) -> None:
    assert message("", override) == expected


def test_override_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"command line: seed\.x is unknown; seed is no section"):
        parse(f"seed = 1\n{SYNTHETIC}", "x.toml", ["seed.x=1"])


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("zo.radius=1e-2", lambda c: c.zo.radius == 0.01),
        ("zo.estimator=tangent", lambda c: c.zo.estimator == "tangent"),
        ("cohort.size=50%", lambda c: c.cohort.size == "50%"),
        ("cohort.boundaries=[1, 2]", lambda c: c.cohort.boundaries == (1, 2)),
        ("model.checkpointing=true", lambda c: c.model.checkpointing is True),
        ("task.train=data/a=b.csv", lambda c: c.task.train == "data/a=b.csv"),
        ("zo.optimizer.lr=3", lambda c: c.bottom_optimizer.lr == 3.0 and c.optimizer.lr == 1e-5),
        ("task.text=1\nseed = 7", lambda c: c.seed == 42 and c.task.text == "1\nseed = 7"),
    ],
)
def test_override_values(override: str, read) -> None:
    assert read(parse(SYNTHETIC, "x.toml", [override]))


def test_override_wins_over_the_file() -> None:
    assert parse(f"[zo]\nprobes = 2\n{SYNTHETIC}", "x.toml", ["zo.probes=4", "zo.probes=5"]).zo.probes == 5


@pytest.mark.parametrize(
    "overrides", [[], ["zo.optimizer.name=sgd"], ["cohort.boundaries=[1,2]", "model.lora.targets=['a']"]]
)
def test_dump_reloads_to_an_equal_config(overrides: list[str]) -> None:
    config = parse(SYNTHETIC, "x.toml", overrides)
    assert parse(dump(config), "y.toml") == config
    assert "preference = 0.75" in dump(config)  # complete: defaults are written too


@pytest.mark.parametrize(
    ("given", "bottom"),
    [
        ([], ("adamw", 0.5, 0.25)),
        (["zo.optimizer.lr=3"], ("adamw", 3.0, 0.25)),
        (["zo.optimizer.name=sgd", "zo.optimizer.weight_decay=0"], ("sgd", 0.5, 0.0)),
    ],
)
def test_what_the_bottoms_optimizer_leaves_unset_is_the_tops(given: list[str], bottom: tuple) -> None:
    text = f"[optimizer]\nlr = 0.5\nweight_decay = 0.25\n{SYNTHETIC}"
    config = parse(text, "x.toml", given)
    found = config.bottom_optimizer
    assert (found.name, found.lr, found.weight_decay) == bottom
    assert "[zo.optimizer]" in dump(config) and parse(dump(config), "y.toml") == config
    assert Config(optimizer=config.optimizer, task=config.task).bottom_optimizer == config.optimizer


@pytest.mark.parametrize(
    ("error", "overrides", "expected"),
    [
        (DataError("task.train: no rows"), [], "FILE:4: task.train: no rows"),
        (ModelError("model.source = 'x': none"), [], "FILE:2: model.source = 'x': none"),
        (ModelError("its blocks are odd"), [], "FILE:2: model.source: its blocks are odd"),
        (
            ModelError("model.layers.0.weight is half"),
            [],
            "FILE:2: model.source: model.layers.0.weight is half",
        ),
        (ConfigError("zo.probes = 9: too many"), ["zo.probes=9"], "command line: zo.probes = 9: too many"),
        (ConfigError("zo.probes = 9: too many"), [], "FILE: zo.probes = 9: too many"),
    ],
)
def test_what_a_build_says_has_its_place(
    tmp_path, error: HoflError, overrides: list[str], expected: str
) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[model]\nsource = "x"\n[task]\ntrain = "y"\n')
    with pytest.raises(type(error)) as caught, placed(file, overrides), about("model.source"):
        raise error
    assert str(caught.value) == expected.replace("FILE", str(file))


def test_what_is_about_no_setting_has_no_place(tmp_path) -> None:
    with pytest.raises(HoflError, match=r"^partition: odd$"), placed(tmp_path / "no.toml"):
        raise ConfigError("partition: odd")


def test_text_needs_a_model_and_data() -> None:
    with pytest.raises(ConfigError, match=r"x.toml: model.source is missing; name a hub id"):
        parse("rounds = 1", "x.toml")
    with pytest.raises(ConfigError, match=r"x.toml:1: task.train is missing"):
        parse('[task]\nname = "text"\n[model]\nsource = "m"', "x.toml")


@pytest.mark.parametrize(("boundaries", "fine"), [("[]", True), ("[0, 0]", True), ("[0, 1]", False)])
def test_fedavg_has_no_boundary(boundaries: str, fine: bool) -> None:
    text = f'algorithm = "fedavg"\n{SYNTHETIC}[cohort]\nboundaries = {boundaries}'
    if fine:
        assert parse(text, "x").algorithm == "fedavg"
    else:
        with pytest.raises(ConfigError, match="fedavg has no boundary"):
            parse(text, "x")


def test_listed_boundaries_are_one_per_client() -> None:
    text = f'{SYNTHETIC}[partition]\nclients = 3\n[cohort]\nsize = 1\nassign = "listed"\nboundaries = [1, 2]'
    with pytest.raises(
        ConfigError, match=r"x:8: cohort.boundaries = \[1, 2\]: must list one number per client, 3"
    ):
        parse(text, "x")


@pytest.mark.parametrize(
    ("size", "clients", "cohort"), [("all", 10, 10), ("50%", 5, 3), ("100%", 7, 7), ("10%", 30, 3), (4, 4, 4)]
)
def test_cohort_size(size: int | str, clients: int, cohort: int) -> None:
    """C78."""
    assert cohort_size(size, clients) == cohort


def test_cohort_beyond_the_clients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cohort.size = 5: must be at most the 4 clients"):
        cohort_size(5, 4)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse(SYNTHETIC, "x").seed = 1  # type: ignore[misc]
    assert hash(Config.model_validate({"task": {"name": "synthetic"}})) is not None


def test_missing_file_and_bad_bytes(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: No such file or directory; give the path"):
        load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml: is not UTF-8 text"):
        load(tmp_path / "bad.toml")


NODES = """
[model]
source = "m"
[task]
evaluation = "e.csv"
[partition]
kind = "nodes"
names = ["a", "b"]
[cohort]
size = 2
boundaries = [1]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('names = ["a", "b"]', "", "partition.names is missing; list the client ids of the nodes"),
        (
            '"b"]',
            '"a"]',
            'partition.names = ["a", "a"]: must be ids of 1 to 64 of A-Z a-z 0-9 _ -, each once',
        ),
        ('"b"]', '"../b"]', 'partition.names = ["a", "../b"]: must be ids of'),
        ('kind = "nodes"', "", "must be absent unless partition.kind is 'nodes'"),
        (
            'evaluation = "e.csv"',
            'evaluation = "e.csv"\ntrain = "t.csv"',
            "must be absent: the data is at the nodes",
        ),
        (
            'evaluation = "e.csv"',
            'evaluation = "e.csv"\ntrain_rows = 9',
            "must be 0: the data is at the nodes",
        ),
        ('evaluation = "e.csv"', "", "task.evaluation is missing"),
        ("size = 2", "size = 3", "cohort.size = 3: must be at most the 2 of partition.names"),
        (
            "size = 2",
            "size = 2\nassign = 'listed'",
            "must list one number per client, 2, when assign is 'listed'",
        ),
        (
            "size = 2",
            "assign = 'declared'",
            "must be absent: assign is 'declared', so each node says its own",
        ),
        (
            "[task]",
            '[task]\nname = "synthetic"',
            "must not be 'nodes': the synthetic task makes its own data",
        ),
        ("\n[model]", 'algorithm = "mezo"\n[model]', "must not be 'nodes': mezo needs all data in one place"),
        ("\n[model]", "quorum = 3\n[model]", "quorum = 3: must be at most the cohort, 2 clients"),
    ],
)
def test_data_at_the_nodes_and_what_contradicts_it(old: str, new: str, message: str) -> None:
    config = parse(NODES, "x")
    assert config.partition.names == ("a", "b") and parse(dump(config), "x") == config
    text = NODES.replace(old, new, 1)
    if "synthetic" in new:  # it brings its own network
        text = text.replace('source = "m"', "")
    with pytest.raises(ConfigError) as caught:
        parse(text, "x")
    assert message in str(caught.value)


@pytest.mark.parametrize(("algorithm", "fine"), [("ho_fl", True), ("ho_sfl", False), ("fedavg", False)])
def test_only_where_clients_have_a_boundary_each_do_nodes_declare_one(algorithm: str, fine: bool) -> None:
    text = f'algorithm = "{algorithm}"\n{SYNTHETIC}[cohort]\nassign = "declared"'
    if fine:
        assert parse(text, "x").cohort.assign == "declared"
    else:
        with pytest.raises(ConfigError, match=f"must be 'tiers' or 'listed': in {algorithm} no client has"):
            parse(text, "x")
