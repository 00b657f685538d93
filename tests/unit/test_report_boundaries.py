# SPDX-License-Identifier: Apache-2.0
"""Comparisons of runs whose boundaries nobody wrote into a configuration: budgets or nodes chose them."""

from pathlib import Path

import pytest

from hofl import read_run
from hofl.config import load
from hofl.report import compare
from hofl.report.groups import Group, boundaries, group
from hofl.report.recovery import control
from hofl.session import LOCAL, prepare, run_to_end

CONFIGS = Path(__file__).parents[2] / "configs" / "synthetic"
SHORT = ("rounds=4", "evaluation.every=2", 'cohort.budget_changes=[[3, 0, "35KiB"]]')


def ran(where: Path, *settings: str) -> Path:
    run_to_end(load(CONFIGS / "budgets.toml", [*SHORT, *settings]), where, resume=False)
    return where


def grouped(*folders: Path) -> list[Group]:
    return group([read_run(folder) for folder in folders])


def test_budgets_give_a_label_and_a_control(tmp_path: Path) -> None:
    """40 KiB allow boundary 0 until round 3, 37 KiB 2, 35 KiB 3; who has 20 KiB is left out."""
    folders = [
        ran(tmp_path / f"{estimator}-{seed}", f"zo.estimator={estimator}", f"seed={seed}")
        for estimator in ("forward", "none")
        for seed in (42, 43)
    ]
    found = grouped(*folders)
    assert [g.label for g in found] == ["ho_fl forward b=0,2,3", "ho_fl none b=0,2,3"]
    assert [control(g, found) for g in found] == [found[1], None]
    shown = compare.summary_table(found).rows
    assert shown[0][6] == shown[1][2] != "–"
    given = boundaries(found[0].runs[0])
    assert sorted(str(given[1, client]) for client in range(12)) == [*"000222333", *["None"] * 3]
    assert sorted(str(given[3, client]) for client in range(12)) == [*"222333333", *["None"] * 3]


def test_a_control_that_the_same_budget_allows_another_boundary_is_none(tmp_path: Path) -> None:
    """A frozen bottom needs no probes: 32 KiB run boundary 4 with it and nothing with probes."""
    least = 'cohort.budgets=["40KiB", "37KiB", "35KiB", "32KiB"]'
    found = grouped(ran(tmp_path / "forward", least), ran(tmp_path / "none", least, "zo.estimator=none"))
    assert [g.label for g in found] == ["ho_fl forward b=0,2,3", "ho_fl none b=0,2,3,4"]
    assert [control(g, found) for g in found] == [None, None]


def test_other_budgets_for_the_same_boundaries_are_told_apart(tmp_path: Path) -> None:
    more = 'cohort.budgets=["41KiB", "37KiB", "35KiB", "20KiB"]'
    first, second = grouped(ran(tmp_path / "a"), ran(tmp_path / "b", more))
    assert first.label == "ho_fl forward b=0,2,3 cohort.budgets=['40KiB','37KiB','35KiB','20KiB']"
    assert "41KiB" in second.label


@pytest.mark.parametrize(("theirs", "has_control"), [([3] * 4 + [2] * 8, True), ([3] * 4 + [1] * 8, False)])
def test_boundaries_that_nodes_declare_are_those_of_the_rows(
    tmp_path: Path, theirs: list[int], has_control: bool
) -> None:
    settings = ["cohort.boundaries=[]", "cohort.assign=declared", "rounds=3", "cohort.size=8"]
    nodes = LOCAL._replace(says=" at nodes")
    for estimator, declared in (("tangent", [3] * 4 + [2] * 8), ("none", theirs)):
        config = load(CONFIGS / "ho_fl.toml", [*settings, f"zo.estimator={estimator}"])
        session = prepare(config, nodes, declared=declared)
        for _ in session.rows(tmp_path / estimator, resume=False, warn=print):
            pass
    found = grouped(tmp_path / "tangent", tmp_path / "none")
    assert found[0].label == "ho_fl tangent b=2,3" and found[1].label.startswith("ho_fl none b=")
    assert control(found[0], found) is (found[1] if has_control else None)
