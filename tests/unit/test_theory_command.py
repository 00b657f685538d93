# SPDX-License-Identifier: Apache-2.0
"""``hofl theory``: the numbers are those of the pure functions at the run's settings, and never a gate."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hofl.commands.theory import diagnostics, theory
from hofl.config import load
from hofl.errors import ConfigError
from hofl.session import prepare
from hofl.theory.convergence import Assumptions, guarantee
from hofl.theory.moments import moments

CONFIGS = Path(__file__).parents[2] / "configs/synthetic"
CONFIG = str(CONFIGS / "ho_fl.toml")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(theory)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_numbers_are_the_runs_own() -> None:
    session = prepare(load(CONFIG))
    a = Assumptions(variance=2.0, heterogeneity=0.5, affine=0.1)
    found = diagnostics(session, a)
    d_zo = [session.task.model.layout.bottom_size(b) for b in session.boundaries]
    exact = guarantee(session.policy.shares, d_zo, probes=2, steps=5, assumptions=a, rounds=30)
    assert found["run"]["bound"] == exact.bound and found["run"]["c_star"] == exact.c_star
    assert found["run"]["dimension"] == pytest.approx(175) and found["run"]["skew"] == pytest.approx(0.125)
    assert found["at_least_rounds"]["horizon_holds"] and not found["run"]["horizon_holds"]
    assert found["uniform"]["skew"] == pytest.approx(0) and found["uniform"]["dimension"] == pytest.approx(
        209
    )
    assert [c["d_zo"] for c in found["clients"]] == [144, 416, 688]
    first = moments(144, 2, 1e-3, variance=2.0)
    assert found["clients"][0] == {"boundary": 1, "d_zo": 144, "kappa": first.kappa, "rho2": first.rho2,
                                   "omega2": first.omega2, "nu": first.nu}  # fmt: skip


def test_tables_and_json_agree() -> None:
    shown, found = printed(CONFIG), json.loads(printed(CONFIG, "--json"))
    assert f"{found['run']['c_star']:.3e}" in shown and "T >= T_min" in shown
    assert found["assumptions"]["variance"] == 1.0


def test_exact_derivatives_have_no_bias_of_smoothing() -> None:
    found = json.loads(printed(CONFIG, "--json", "zo.estimator=tangent"))
    assert all(c["rho2"] == 0 == c["omega2"] and c["kappa"] > 0 for c in found["clients"])


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_system_has_diagnostics(name: str) -> None:
    found = json.loads(printed(str(CONFIGS / f"{name}.toml"), "--json"))
    assert found["rate"] and ("run" in found or found["rate_value"] is None or found["rate_value"] > 0)
    assert printed(str(CONFIGS / f"{name}.toml"))


def test_all_clients_first_order() -> None:
    found = json.loads(printed(CONFIG, "--json", "cohort.boundaries=[0]"))
    assert found["run"]["dimension"] == 1 and found["run"]["radius"] is None
    assert found["clients"] == [{"boundary": 0, "d_zo": 0, "kappa": 0, "rho2": 0, "omega2": 0, "nu": 1}]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--smoothness", "0"], "--smoothness 0: must be a finite number > 0"),
    (["--variance", "-1"], "--variance -1: must be a finite number >= 0"),
    (["--gap", "inf"], "--gap inf"),
    (["--affine", "nan"], "--affine nan"),
    (["cohort.size=13"], "must be at most partition.clients = 12"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [CONFIG, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
