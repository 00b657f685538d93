# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling``: the plan, the pilot's choice, and the oracle against gradients it can be held to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from hofl.commands import pilot
from hofl.commands.oracle import local_runs, objective_gradient, run_oracle
from hofl.commands.pilot import Candidate, conclusive, hold_out, rank, run_pilot, survivors
from hofl.commands.sampling import plan, preferences, sampling
from hofl.config import load
from hofl.core.sampling import uniform
from hofl.errors import ConfigError
from hofl.session import prepare
from hofl.theory.optimal_sampling import statistics

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/synthetic/ho_fl.toml")
BETAS = (0.0, 0.25, 0.5, 0.75)

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(sampling)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_plan_of_a_run() -> None:
    """12 clients in 3 tiers, K = 4, T = 30; R is the 4 of boundary 1, whose bottoms have 144 numbers."""
    found = json.loads(printed(CONFIG, "--json", "--coverage", "5"))
    (part,) = found["segments"]
    assert (part["clients"], part["cohort"], found["rounds"], found["draws"]) == (12, 4, 30, 160)
    assert (part["first_round"], part["last_round"], part["rounds"], part["left_out"]) == (1, 30, 30, 0)
    assert part["boundaries"] == {"1": 4, "2": 4, "3": 4}
    assert len(part["preferred"]) == 4 and found["preference"] == 0.25
    assert found["largest_preference"] == 0.5
    for row, beta in zip(part["rows"], BETAS, strict=True):
        assert row["preference"] == beta and row["skew"] == pytest.approx(2 * beta**2)
        assert row["inclusion"] == pytest.approx([(1 - beta) / 3 + beta, (1 - beta) / 3])
        assert row["participations"] == pytest.approx([30 * x for x in row["inclusion"]])
        assert row["cohort"] == pytest.approx({"1": 4 * row["inclusion"][0], "2": 4 * row["inclusion"][1],
                                               "3": 4 * row["inclusion"][1]})  # fmt: skip
        drawn, expected = row["drawn"]["uplink"], row["totals"]["uplink"]
        assert drawn["mean"] == pytest.approx(expected, rel=0.05) and drawn["largest"] >= drawn["mean"]
    means = [row["totals"]["uplink"] for row in part["rows"]]
    assert means == sorted(means) and means[0] < means[-1]  # a preference for small bottoms uploads more
    dimensions = [row["dimension"] for row in part["rows"]]
    assert dimensions[0] == pytest.approx(1 + (144 + 416 + 688) / 3 / 2) and dimensions[-1] < dimensions[0]


def test_the_drawn_rounds_are_the_runs_own() -> None:
    session = prepare(load(CONFIG))
    profile = {1: 1.0, 2: 1000.0, 3: 1e6}
    found = plan(session, [0.25], memory=profile, draws=30)
    totals = [sum(profile[session.boundaries[c]] for c in session.draw(t, 0)) for t in range(1, 31)]
    (row,) = found["segments"][0]["rows"]
    assert row["drawn"]["memory"]["mean"] == pytest.approx(np.mean(totals))
    assert row["drawn"]["memory"]["largest"] == pytest.approx(max(totals))


def test_tables_for_people() -> None:
    shown = printed(CONFIG, "--beta", "0.5", "--beta", "0")
    assert "4 of 12 clients" in shown and "this configuration has preference 0.25" in shown
    assert "0.667 / 0.167" in shown and "uplink, largest round" in shown


def test_a_method_without_a_preference_has_one_row() -> None:
    found = json.loads(printed(str(ROOT / "configs/synthetic/fedavg.toml"), "--json"))
    (part,) = found["segments"]
    assert [row["preference"] for row in part["rows"]] == [0.0] and part["preferred"] == []
    assert part["rows"][0]["inclusion"][0] is None


@pytest.mark.parametrize(("arguments", "message"), [
    (["cohort.size=13"], "cohort.size = 13: must be at most partition.clients = 12"),
    (["--beta", "1"], "--beta 1: must be in"),
    (["--beta", "-0.1"], "--beta -0.1: must be in"),
    (["--coverage", "10.5"], "a coverage of 10.5 rounds: must be between 0 and K T / N = 4 x 30 / 12 = 10"),
    (["--oracle", "--runs", "1"], "--runs 1: at least 2"),
    (["--oracle", "--floor", "0"], "--floor 0: must be in"),
    (["--oracle", "--smoothness", "0"], "--smoothness 0: must be > 0"),
    (["--pilot", "--seeds", "0"], "--seeds 0: must be at least 1"),
    (["--pilot", "cohort.boundaries=[2]"], "a pilot would show nothing: all clients cost the same"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [CONFIG, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize("option", ["--pilot", "--oracle"])
def test_methods_without_a_preference_have_no_pilot_and_no_oracle(option: str) -> None:
    result = CliRunner().invoke(app, [str(ROOT / "configs/synthetic/fedavg.toml"), option])
    assert isinstance(result.exception, ConfigError) and "samples uniformly" in str(result.exception)


def test_one_of_pilot_and_oracle() -> None:
    assert CliRunner().invoke(app, [CONFIG, "--pilot", "--oracle"]).exit_code == 2


def test_preferences_are_sorted_and_single() -> None:
    assert preferences([0.5, 0.0, 0.5]) == (0.0, 0.5) and preferences(None) == BETAS


def candidates(losses: list[list[list[float]]]) -> list[Candidate]:
    return [Candidate(b, uniform(4, 2), [], np.array(x)) for b, x in zip(BETAS, losses, strict=False)]


def test_a_difference_counts_beyond_two_standard_errors() -> None:
    even = np.array([[1.0, 2.0, 3.0, 4.0], [1.1, 2.1, 3.1, 4.1]])
    assert conclusive(even + 0.5, even)  # every client, both runs
    assert not conclusive(even, even + 0.5)
    one_client = even + np.array([2.0, 0, 0, 0])
    assert not conclusive(one_client, even)
    one_run = even + np.array([[1.0], [0.0]])
    assert not conclusive(one_run, even)
    assert conclusive(np.full((2, 4), np.inf), even) and not conclusive(even, np.full((2, 4), np.inf))


def test_the_smaller_preference_where_nothing_is_decided() -> None:
    noisy = [[[1.0, 2.0, 3.0, 4.0]], [[2.0, 1.0, 3.5, 3.0]], [[1.5, 1.5, 2.0, 4.5]], [[4.0, 3.0, 2.0, 0.5]]]
    level, beaten = rank(candidates(noisy))
    assert [c.beta for c in level] == [0, 0.25, 0.5, 0.75] and not beaten
    assert [c.beta for c in survivors(level, beaten)] == [0, 0.25]  # the default and the lowest loss, 9.5 / 4
    clear = [[[x + add for x in (1.0, 2.0, 3.0, 4.0)]] for add in (0.3, 0.2, 0.0, 0.1)]
    level, beaten = rank(candidates(clear))
    assert [c.beta for c in level] == [0.5] and [c.beta for c in beaten] == [0.75, 0.25, 0]
    assert [c.beta for c in survivors(level, beaten)] == [0.5, 0.75]
    assert [c.beta for c in survivors(*rank(candidates(clear)[:3]))] == [0.25, 0.5]


def test_held_out_examples_are_not_trained_on() -> None:
    task = prepare(load(CONFIG)).task
    less, held = hold_out(task)
    for kept, out, shard in zip(less.shards, held, task.shards, strict=True):
        assert len(out) == max(1, len(shard) // 5) and not set(kept) & set(out)
        assert sorted([*kept, *out]) == sorted(shard)


def test_a_pilot() -> None:
    config = load(CONFIG, ["rounds=8", "local.steps=2"])
    found = run_pilot(config, BETAS, seeds=2)
    assert [rung["rounds"] for rung in found["rungs"]] == [4, 12]
    assert [len(rung["candidates"]) for rung in found["rungs"]] == [4, 2]
    assert found["recommended"] in [c["preference"] for c in found["rungs"][-1]["candidates"]]
    first, last = (min(c["loss"] for c in rung["candidates"]) for rung in found["rungs"])
    assert last < first  # they go on from where they were
    assert set(found["rungs"][0]["candidates"][0]["loss_by_boundary"]) == {"1", "2", "3"}
    assert run_pilot(config, BETAS, seeds=2) == found
    assert run_pilot(config, [0.5], seeds=1)["recommended"] == 0.5


def test_a_pilot_trains_on_what_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        pilot, "prepare", lambda config, task: seen.append(task) or prepare(config, task=task)
    )
    config = load(CONFIG, ["rounds=1", "local.steps=1"])
    run_pilot(config, [0.0], seeds=1)
    assert sum(map(len, seen[0].shards)) + sum(map(len, hold_out(prepare(config).task)[1])) == 480


def test_a_lost_run_is_beaten() -> None:
    config = load(CONFIG, ["rounds=8", "optimizer.name=sgd", "optimizer.lr=1e9", "local.steps=2"])
    found = run_pilot(config, (0.0, 0.5), seeds=1)
    assert found["recommended"] == 0.0 and found["rungs"][0]["candidates"][0]["loss"] is None


def sgd(*more: str) -> list[str]:
    return ["optimizer.name=sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0.0", *more]


def test_the_objectives_gradient() -> None:
    """The mean over clients of the gradient of each one's mean loss, by autograd on whole shards."""
    session = prepare(load(CONFIG, sgd()))
    task, total = session.task, torch.zeros(session.task.model.layout.size, dtype=torch.float64)
    for client in session.able:
        batch = task.collate(task.shards[client])
        loss = task.loss(task.model.full(batch.inputs), batch)
        slots = task.model.trainables()
        grads = torch.autograd.grad(loss, [p for _, p in slots])
        total += torch.cat([g.reshape(-1) for g in grads]).double() / len(session.able)
    np.testing.assert_allclose(objective_gradient(session), total.numpy(), atol=1e-6)


def test_one_local_step_is_an_unbiased_gradient() -> None:
    """E = 1: a_i = grad f_i, so the uniform policy has no bias beyond what 40 runs leave of noise."""
    session = prepare(load(CONFIG, sgd("local.steps=1", "zo.estimator=central", "zo.probes=8")))
    gradient = objective_gradient(session)
    updates = list(local_runs(session, 40, 0.01))
    assert len({u.tobytes() for u in updates}) == 40  # fresh minibatches and directions each time
    known = statistics(updates, gradient)
    even = np.full(12, 1 / 12)
    bias = known.objective(even, np.zeros(12))
    error = float(known.variances.sum()) / 12**2 / 40  # E ||mean of means - a_bar||^2
    assert abs(bias) < 4 * np.sqrt(error) * (np.sqrt(known.gradient) + np.sqrt(error))
    assert known.gradient > 10 * error
    probed = [known.variances[i] for i in range(12) if session.boundaries[i] == 3]
    assert min(probed) > 1.5 * max(known.variances[i] for i in range(12) if session.boundaries[i] == 1)


def test_local_runs_take_fresh_minibatches() -> None:
    """Clients without probes differ from run to run by their minibatches alone, until a shard is used up."""
    session = prepare(load(CONFIG, sgd("local.steps=1", "cohort.boundaries=[0]", "zo.probes=1")))
    first, second = local_runs(session, 2, 0.01)
    fresh = [c for c in session.able if len(session.task.shards[c]) >= 16]
    assert len(fresh) > 6 and all((first[c] != second[c]).any() for c in fresh)


def test_the_oracle() -> None:
    found = run_oracle(load(CONFIG), BETAS, runs=4)
    rows = {row["policy"]: row for row in found["rows"]}
    best = rows["reference (13)"]["objective"]
    assert all(row["objective"] >= best - 1e-9 for row in found["rows"])
    assert rows["reference (13)"]["to_reference"] == 0 and rows["water-filling (15)"]["to_water_filling"] == 0
    for row in found["rows"]:
        assert row["objective"] == pytest.approx(row["bias"] + row["noise"])
        assert sum(row["cohort"].values()) == pytest.approx(4) and 0 <= row["to_reference"] <= 1
    noise = [rows[f"preference {b:g}"]["noise"] for b in BETAS]
    assert noise == sorted(noise, reverse=True)  # small bottoms are quieter
    assert found["gap"] < 1e-6 and found["optimizer"] == "sgd" and found["rate"] == pytest.approx(0.02)
    for shares in found["shares"].values():
        assert (
            sum(shares) == pytest.approx(1)
            and max(shares) <= 0.25 + 1e-12
            and min(shares) >= 0.25 / 12 - 1e-12
        )


def test_the_oracle_and_the_pilot_print() -> None:
    shown = printed(CONFIG, "--oracle", "--runs", "2")
    assert "preference 0.25 (this configuration)" in shown and "water-filling (15)" in shown
    shown = printed(CONFIG, "--pilot", "--seeds", "1", "--beta", "0", "--beta", "0.5", "rounds=4")
    assert "recommended: cohort.preference = " in shown
