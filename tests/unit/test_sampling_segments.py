# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling`` with the memory of a plan, and where budgets change: which rounds a command speaks of."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from hofl.build import OUT
from hofl.commands.oracle import run_oracle
from hofl.commands.pilot import run_pilot
from hofl.commands.sampling import memory_of, plan, sampling
from hofl.commands.segments import Span, alone, spans
from hofl.commands.theory import diagnostics
from hofl.config import load
from hofl.errors import ConfigError
from hofl.memory.planned import other_work, peaks, read_plan, zeroth_order_peak
from hofl.session import Session, prepare
from hofl.theory.convergence import Assumptions

ROOT = Path(__file__).parents[2]
SYNTHETIC = ROOT / "configs" / "synthetic"
QWEN = ROOT / "docs" / "results" / "memory" / "plan_qwen2.5-1.5b.json"
GIB = 2**30

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(sampling)


@pytest.fixture(scope="module")
def segmented() -> Session:
    """Rounds 1-10, 11-20 and 21-30; three clients are out of the first two."""
    return prepare(load(SYNTHETIC / "budgets.toml"))


def written(where: Path, **more: Any) -> Path:
    """A plan of the synthetic network: 1 MiB a block that is backpropagated, over 1 MiB."""
    session = prepare(load(SYNTHETIC / "ho_fl.toml"))
    layout = session.task.model.layout
    rows = [
        {"order": "hybrid" if b else "first_order", "boundary": b, "estimator": "forward" if b else None,
         "checkpointing": again, "peak_bytes": (5 - b) * 2**20 // (1 + again)}
        for b in range(5) for again in (False, True)
    ]  # fmt: skip
    rows.append({"order": "zeroth_order", "boundary": 4, "estimator": "central", "checkpointing": False,
                 "peak_bytes": 2**19})  # fmt: skip
    facts = {"model": "clouds", "blocks": layout.blocks, "trainables": layout.size, "batch": 8, "rows": rows}
    where.write_text(json.dumps(facts | more))
    return where


def test_the_memory_of_a_round(tmp_path: Path) -> None:
    """K = 4 of three tiers of four at 1, 2, 3, which need 4, 3 and 2 MiB: 12 MiB uniformly, 14 at 3/4."""
    file = written(tmp_path / "plan.json")
    arguments = [str(SYNTHETIC / "ho_fl.toml"), "--plan", str(file)]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    rows = json.loads(result.stdout)["segments"][0]["rows"]
    for row, mib in zip(rows, (12.0, 13.0, 14.0, 15.0), strict=True):
        assert row["totals"]["memory"] == pytest.approx(mib * 2**20)
        assert row["drawn"]["memory"]["mean"] == pytest.approx(mib * 2**20, rel=0.03)
        assert row["drawn"]["memory"]["largest"] <= 16 * 2**20
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "memory, expected" in shown and "12.0 MiB" in shown


def test_a_plan_of_other_batches_is_said_to_be_one(tmp_path: Path) -> None:
    config = load(SYNTHETIC / "ho_fl.toml")
    same, other = (
        written(tmp_path / "same.json"),
        written(tmp_path / "other.json", batch=16, dtype="bfloat16"),
    )
    assert other_work(read_plan(same), config) == ""
    differs = "the plan is of batches of 16 in bfloat16, the run has 8 in float32"
    assert other_work(read_plan(other), config).startswith(differs)
    shown = CliRunner().invoke(app, [str(SYNTHETIC / "ho_fl.toml"), "--plan", str(other)])
    assert shown.exit_code == 0 and differs in shown.stderr


@pytest.mark.parametrize(("file", "mib"), [
    ("ho_fl.toml", {1: 4, 2: 3, 3: 2}), ("fedavg.toml", {0: 5}), ("decomfl.toml", {0: 0.5}),
])  # fmt: skip
def test_each_method_has_its_rows(tmp_path: Path, file: str, mib: dict[int, float]) -> None:
    session = prepare(load(SYNTHETIC / file))
    assert memory_of(session, written(tmp_path / "plan.json")) == {b: x * 2**20 for b, x in mib.items()}


def test_a_published_shape_has_the_published_peaks() -> None:
    found = read_plan(QWEN)
    plain, again = (peaks(found, "forward", checkpointing=each) for each in (False, True))
    assert plain[0] / GIB == pytest.approx(40.26, rel=0.01) and plain[24] / GIB == pytest.approx(
        9.08, rel=0.01
    )
    assert sorted(plain) == list(range(29)) and all(again[b] <= plain[b] for b in plain)
    assert zeroth_order_peak(found, "forward") and zeroth_order_peak(found, "none") is None


@pytest.mark.parametrize(("file", "text", "message"), [
    ("ho_fl.toml", None, "plan.json: No such file or directory; write one with: hofl plan MODEL"),
    ("ho_fl.toml", "{", "plan.json: not JSON"),
    ("ho_fl.toml", "[]", "plan.json: is no plan; write one with"),
    ("ho_fl.toml", '{"rows": [{}]}', "plan.json: is no plan"),
    ("ho_sfl.toml", "", "--plan: ho_sfl splits the model; a plan is of clients that hold it all"),
    ("hiso.toml", "", "--plan: it has no row of zeroth order with forward; plan it with: hofl plan MODEL"),
])  # fmt: skip
def test_plans_that_are_refused(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    where = tmp_path / "plan.json"
    if text == "":
        written(where)
    elif text:
        where.write_text(text)
    with pytest.raises(ConfigError) as caught:
        memory_of(prepare(load(SYNTHETIC / file)), where)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_of_another_model_or_without_the_boundary_is_refused(tmp_path: Path) -> None:
    session = prepare(load(SYNTHETIC / "ho_fl.toml", ["zo.estimator=central"]))
    with pytest.raises(
        ConfigError, match=r"is of Qwen2.5-1.5B with 28 blocks and 1,089,536 trainables; this"
    ):
        memory_of(session, QWEN)
    with pytest.raises(
        ConfigError, match=r"no row of boundary 1 with central; plan it .* --estimator central"
    ):
        memory_of(session, written(tmp_path / "plan.json"))


def test_the_plan_has_every_segment(segmented: Session) -> None:
    found = plan(segmented, [0.0, 0.5], draws=40, least=6)
    parts = found["segments"]
    assert [(p["first_round"], p["last_round"], p["rounds"]) for p in parts] == [
        (1, 10, 10), (11, 20, 10), (21, 30, 10)
    ]  # fmt: skip
    assert [(p["clients"], p["left_out"]) for p in parts] == [(9, 3), (9, 3), (12, 0)]
    assert [p["boundaries"] for p in parts] == [
        {"0": 3, "2": 3, "3": 3}, {"2": 3, "3": 6}, {"0": 1, "2": 3, "3": 8}
    ]  # fmt: skip
    for part in parts:
        now = segmented.during(part["first_round"])
        chosen = [segmented.task.clients[now.able[place]] for place in now.policy.preferred]
        assert part["preferred"] == chosen
        assert part["rows"][1]["inclusion"][0] == pytest.approx(0.5 * 4 / part["clients"] + 0.5)
        assert part["rows"][0]["participations"][1] == pytest.approx(10 * 4 / part["clients"])
        assert sum(part["rows"][0]["cohort"].values()) == pytest.approx(4)
    assert parts[0]["preferred"] != parts[1]["preferred"]
    assert found["largest_preference"] == pytest.approx(1 - 6 / (40 / 9 + 40 / 9 + 40 / 12))


def test_drawn_rounds_are_those_of_the_segment(segmented: Session) -> None:
    memory = {0: 1e6, 2: 1e3, 3: 1.0}
    found = plan(segmented, [0.25], memory=memory, draws=10)  # 0.25 is the configuration's own
    for part in found["segments"]:
        now = segmented.during(part["first_round"])
        rounds = range(part["first_round"], part["last_round"] + 1)
        totals = [sum(memory[now.boundaries[c]] for c in segmented.draw(t)) for t in rounds]
        assert part["rows"][0]["drawn"]["memory"]["mean"] == pytest.approx(sum(totals) / 10)


def test_the_tables_say_which_rounds(segmented: Session) -> None:
    shown = CliRunner().invoke(app, [str(SYNTHETIC / "budgets.toml")], catch_exceptions=False).stdout
    assert "rounds 1 to 10 of 30: 3 at boundary 0, 3 at boundary 2, 3 at boundary 3, 3 left out" in shown
    assert "rounds 21 to 30 of 30: 1 at boundary 0, 3 at boundary 2, 8 at boundary 3\n" in shown
    moved = ["cohort.schedule=measured", "cohort.final=0.1"]
    shown = CliRunner().invoke(app, [str(SYNTHETIC / "ho_fl.toml"), *moved], catch_exceptions=False).stdout
    assert "has preference 0.25, as measured down to 0.1" in shown and "rounds 1 to" not in shown


def test_spans(segmented: Session) -> None:
    assert spans(segmented) == [Span(1, 3, 1, 10), Span(2, 3, 11, 20), Span(3, 3, 21, 30)]
    session, span = alone(segmented, 11)
    assert span == Span(2, 3, 11, 20) and span.rounds == 10
    assert session.boundaries == segmented.during(11).boundaries and len(session.segments) == 1
    assert [alone(segmented, t)[1].segment for t in (1, 10, 20, 21, 30)] == [1, 1, 2, 3, 3]
    for bad in (0, 31):
        with pytest.raises(ConfigError, match=f"--round {bad}: must be in 1..30"):
            alone(segmented, bad)
    cut = prepare(load(SYNTHETIC / "budgets.toml", ["rounds=15"]))
    assert spans(cut) == [Span(1, 2, 1, 10), Span(2, 2, 11, 15)]


def test_theory_speaks_of_one_segment(segmented: Session) -> None:
    first, last = (diagnostics(segmented, Assumptions(), t) for t in (1, 25))
    assert (first["segment"], first["first_round"], first["last_round"]) == (1, 1, 10)
    assert (last["segment"], last["segments"], last["first_round"]) == (3, 3, 21)
    assert first["run"]["rounds"] == last["run"]["rounds"] == 10
    sizes = [segmented.task.model.layout.bottom_size(b) for b in (0, 2, 3)]
    assert [c["boundary"] for c in first["clients"]] == [0, 2, 3]
    assert first["uniform"]["dimension"] == pytest.approx(1 + sum(3 * s for s in sizes) / 9 / 2)
    assert last["uniform"]["dimension"] == pytest.approx(1 + (3 * sizes[1] + 8 * sizes[2]) / 12 / 2)


def test_pilot_and_oracle_keep_to_one_segment() -> None:
    """Left alone they would run into the next segment, where client 0 is out, or has another boundary."""
    changes = 'cohort.budget_changes=[[2, 0, "20KiB"], [3, 3, "36KiB"]]'
    config = load(SYNTHETIC / "budgets.toml", [changes, "rounds=6", "local.steps=1"])
    assert OUT in prepare(config).during(2).boundaries
    found = run_pilot(config, [0.0, 0.5], seeds=1)
    assert (found["segment"], found["first_round"], found["last_round"]) == (1, 1, 1)
    assert set(found["rungs"][0]["candidates"][0]["loss_by_boundary"]) == {"0", "2", "3"}
    other = run_pilot(config, [0.0, 0.5], seeds=1, round_number=4)
    assert other["segment"] == 3 and set(other["rungs"][0]["candidates"][0]["loss_by_boundary"]) == {"2", "3"}
    shares = run_oracle(config, [0.5], runs=3)
    assert shares["segment"] == 1 and set(shares["rows"][0]["cohort"]) == {"0", "2", "3"}
    assert set(run_oracle(config, [0.5], runs=2, round_number=3)["rows"][0]["cohort"]) == {"2", "3"}


@pytest.mark.parametrize("arguments", [["--round", "2"], ["--plan", "x.json", "--oracle"]])
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [str(SYNTHETIC / "ho_fl.toml"), *arguments], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
