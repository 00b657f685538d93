# SPDX-License-Identifier: Apache-2.0
"""C68: what is said of a run with ``local.epochs`` follows each client's own steps, not the most allowed."""

import json
from pathlib import Path

import pytest

from hofl.checkup.examine import examine
from hofl.cli import main
from hofl.commands.describe import boundaries, ledger_bytes, scalars_up
from hofl.config import load, parse
from hofl.core.layout import Layout
from hofl.errors import ClientError, ConfigError
from hofl.protocol.aggregate import steps_of_epochs
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.join import Joined
from hofl.runtime.flower.roster import Roster
from hofl.session import prepare

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
OWN = (
    "partition.kind=dirichlet", "partition.alpha=0.4", "partition.clients=6", "partition.minimum=8",
    "local.epochs=0.5", "local.batch=4", "cohort.size=6", "rounds=3", "zo.probes=2",
)  # fmt: skip
NAMES = ("clinic-a", "clinic-b", "clinic-c")


def hofl(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def test_bytes_said_before_a_run_are_those_that_it_moves(tmp_path: Path) -> None:
    assert hofl("run", SYNTHETIC / "ho_fl.toml", *OWN, "local.steps=400", "--out", tmp_path / "run") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    moved = sum(n for category, n in rows[1]["bytes_up"].items() if category != "headers")
    session = prepare(load(SYNTHETIC / "ho_fl.toml", [*OWN, "local.steps=400"]))
    steps = [-(-len(shard) // 8) for shard in session.seen.shards]  # ceil(0.5 n / 4)
    assert rows[1]["bytes_up"]["scalars"] == 4 * 2 * sum(steps)
    assert len(set(steps)) > 2 and max(steps) < 400
    for cut in session.cuts:
        most = max(n for n, b in zip(steps, session.boundaries, strict=True) if b == cut)
        assert scalars_up(session, cut) == 2 * most
    assert "of the client with the most steps" in boundaries(session).title
    assert ledger_bytes(session) == pytest.approx(3 * moved)


def test_a_check_takes_the_steps_of_the_clients() -> None:
    low, high = (examine(load(SYNTHETIC / "ho_fl.toml", [*OWN, f"local.steps={n}"])) for n in (40, 400))
    assert [t["bytes"] for t in low["tiers"]] == [t["bytes"] for t in high["tiers"]]  # no client takes 40
    for tier in high["tiers"]:  # 22 at most, whatever the first step costs more
        spent = tier["step_seconds"] * 22 + tier["checked_seconds"]
        assert 0 < tier["participation_seconds"] <= spent


def test_what_needs_one_number_of_steps_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert hofl("sampling", SYNTHETIC / "ho_fl.toml", "--oracle", *OWN, "local.steps=40") == 2
    said = capsys.readouterr().err
    assert "local.epochs: the reference has one number of local steps" in said and said.count("\n") == 1


def test_an_endless_number_of_passes_is_the_most_steps() -> None:
    assert steps_of_epochs(1e308, 100, 4, most=7) == 7  # the product is infinite
    assert steps_of_epochs(1e-300, 100, 4, most=7) == 1


def at_nodes(*settings: str) -> str:
    lines = "".join(f"{line}\n" for line in settings)
    return (
        'algorithm = "fedavg"\n[model]\nsource = "tiny:gpt2"\n[task]\nevaluation = "e.csv"\n'
        f'[partition]\nkind = "nodes"\nnames = {json.dumps(NAMES)}\n[local]\nsteps = 9\nbatch = 4\n{lines}'
        "[cohort]\nsize = 2\n"
    )


def test_a_node_that_joins_later_cannot_be_paced_by_its_examples() -> None:
    roster = Roster.__new__(Roster)
    roster.task = type("Task", (), {"clients": NAMES})()
    told = [Joined(name, 10, -1, 0, True, "", None) for name in NAMES]  # type: ignore[arg-type]
    roster.joined, roster.dealt = dict(enumerate(told[:2])), []
    roster.config = parse(at_nodes(), "a.toml")
    assert roster.sizes() == [10, 10, 1]
    roster.config = parse(at_nodes("epochs = 0.5"), "a.toml")
    with pytest.raises(ConfigError, match=r"^local\.epochs needs every client's size and clinic-c has not"):
        roster.sizes()
    roster.joined = dict(enumerate(told))
    assert roster.sizes() == [10, 10, 10]


def test_capped_sizes_do_not_pace_anybody() -> None:
    with pytest.raises(ConfigError, match=r"a\.toml:\d+: local\.epochs = 0\.5: must be absent: with cohort"):
        parse(at_nodes("epochs = 0.5") + 'weighting = "examples"\n', "a.toml")


def test_a_node_takes_no_more_steps_than_its_examples_give() -> None:
    """ceil(0.5 x 10 / 4) = 2; without epochs, or where a node's examples are not known, the most holds."""
    layout, consent = Layout.build([("w", (10,), 0)], blocks=1), Consent()
    paced, plain = parse(at_nodes("epochs = 0.5"), "a.toml"), parse(at_nodes(), "a.toml")
    plan = {"round": 0, "batch": 4, "steps": 2}
    consent.check_plan(plan, layout, paced, examples=10)
    consent.check_plan(plan | {"steps": 9}, layout, plain, examples=10)
    consent.check_plan(plan | {"steps": 9}, layout, paced)
    with pytest.raises(ClientError, match=r"the plan has steps = 3, at most 2 by this run's local\.epochs"):
        consent.check_plan(plan | {"steps": 3}, layout, paced, examples=10)
