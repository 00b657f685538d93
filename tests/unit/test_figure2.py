# SPDX-License-Identifier: Apache-2.0
"""The committed Figure 2 is what its script makes of the committed plan, and near what was published."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hofl.memory.planned import read_plan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "memory"
sys.path.insert(0, str(ROOT / "benchmarks"))
import figure2  # noqa: E402  the script is no module of the package


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    measured: dict[str, Any] = figure2.measure(read_plan(RESULTS / "plan_qwen2.5-1.5b.json"))
    return measured


def test_the_committed_numbers_are_those_of_the_script(found: dict[str, Any]) -> None:
    assert json.loads((RESULTS / "figure2.json").read_text()) == json.loads(json.dumps(found))


def test_the_left_panel_is_near_the_papers(found: dict[str, Any]) -> None:
    """40.26 and 9.08 GiB within 1%, the cut of 77.4% within half a point; 8 and 16 as the totals imply."""
    gib = {row["boundary"]: row["gib"] for row in found["single"]}
    assert gib[0] == pytest.approx(40.26, rel=0.01) and gib[24] == pytest.approx(9.08, rel=0.01)
    assert found["cut_percent"]["ours"] == pytest.approx(-77.4, abs=0.5)
    assert gib[8] == pytest.approx(29.88, rel=0.01) and gib[16] == pytest.approx(19.6, rel=0.01)
    assert [gib[b] for b in range(29)] == sorted(gib.values(), reverse=True)


def test_the_right_panel_is_near_the_papers(found: dict[str, Any]) -> None:
    """A round's totals within 2%; the draws are of other coins, so their means scatter by about 1%."""
    totals = {(row["method"], row["preference"]): row for row in found["rounds"]}
    for key, published in ((("FedAvg", None), 241.57), (("HO-FL", 0.0), 117.32), (("HO-FL", 0.75), 163.78)):
        assert totals[key]["gib"] == pytest.approx(published, rel=0.02)
        assert totals[key]["published_gib"] == published
    for beta, expected in ((0.0, 116.8), (0.25, 132.4), (0.5, 148.0), (0.75, 163.6)):  # of a straight line
        assert totals["HO-FL", beta]["expected_gib"] == pytest.approx(expected, rel=0.005)
        assert totals["HO-FL", beta]["gib"] == pytest.approx(expected, rel=0.035)


def test_the_picture_is_there_and_can_be_drawn_again(found: dict[str, Any], tmp_path: Path) -> None:
    figure2.draw(found, tmp_path / "again.png")
    for file in (tmp_path / "again.png", RESULTS / "figure2.png"):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
