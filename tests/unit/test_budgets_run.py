# SPDX-License-Identifier: Apache-2.0
"""Runs whose boundaries follow from budgets: the bits of listed ones, who is left out, segments."""

import json
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hofl.budgets import assign, draw_of, segments_of
from hofl.build import OUT, deal
from hofl.commands.describe import describe, moves
from hofl.config import Config, load
from hofl.errors import ConfigError, RecordError
from hofl.needs import dry_run
from hofl.report.tables import Table
from hofl.session import LOCAL, Session, prepare, rebuild

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
HO_FL, BUDGETS = SYNTHETIC / "ho_fl.toml", SYNTHETIC / "budgets.toml"
SHORT = ("rounds=6", "evaluation.every=3")
SEGMENTED = ("rounds=8", 'cohort.budget_changes=[[3, 0, "35KiB"], [6, 3, "36KiB"], [6, "client-0", "41KiB"]]')
BITS = ("round", "cohort", "boundaries", "loss", "state_sha256", "bytes_up", "bytes_down", "zo_signal")


def rows(session: Session, where: Path, resume: bool = False, stop: int | None = None) -> list[Any]:
    found = session.rows(where, resume=resume, warn=warnings.warn)
    kept = list(islice(found, stop))
    found.close()
    return kept


def bits(found: list[Any]) -> list[Any]:
    return [{name: row[name] for name in BITS} for row in found]


def by_budget(*more: str) -> Config:
    return load(BUDGETS, ["cohort.budget_changes=[]", *SHORT, *more])


def segmented(*more: str) -> Config:
    return load(BUDGETS, [*SEGMENTED, *more])


def test_the_same_bits_as_with_the_boundaries_listed(tmp_path: Path) -> None:
    session = prepare(by_budget('cohort.budgets=["40KiB", "37KiB", "35KiB"]'))
    assert sorted(session.boundaries) == [0] * 4 + [2] * 4 + [3] * 4
    listed = ",".join(map(str, session.boundaries))
    other = prepare(load(HO_FL, [*SHORT, "cohort.assign=listed", f"cohort.boundaries=[{listed}]"]))
    mine, theirs = rows(session, tmp_path / "a"), rows(other, tmp_path / "b")
    assert len(mine) == 7 and bits(mine) == bits(theirs)


def test_tiers_of_budgets_are_tiers_of_boundaries() -> None:
    session = prepare(by_budget('cohort.budgets=["40KiB", "37KiB", "35KiB"]'))
    tiers = prepare(load(HO_FL, ["cohort.boundaries=[0, 2, 3]"]))
    assert session.boundaries == tiers.boundaries
    assert (session.policy.shares == tiers.policy.shares).all()


def test_who_is_left_out_is_never_drawn(tmp_path: Path) -> None:
    session = prepare(by_budget("rounds=20", "cohort.preference=0.0"))
    out = [client for client, boundary in enumerate(session.boundaries) if boundary == OUT]
    assert len(out) == 3 and session.able == [c for c in range(12) if c not in out]
    found = rows(session, tmp_path / "run")
    drawn = {client for row in found for client in row["cohort"]}
    assert drawn == set(session.able)
    assert all(row["boundaries"] == [session.boundaries[c] for c in row["cohort"]] for row in found[1:])
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())["facts"]["budgets"]
    (segment,) = said["segments"]
    assert segment["left_out"].keys() == {session.task.clients[client] for client in out}
    assert "boundary 4 needs" in segment["left_out"]["client-0"]
    assert segment["boundaries"] == [None if b == OUT else b for b in session.boundaries]
    lines = [line for line in describe(session) if isinstance(line, str)]
    assert any(
        line.startswith("client-0, client-2, client-4 are left out: 20.0 KiB is not") for line in lines
    )
    assert any("4 of 9 clients" in line and "3 are left out" in line for line in lines)


def test_a_plan_that_is_too_optimistic_is_put_right_before_round_1() -> None:
    """By a hundredth of the plan everything fits; what a dry run takes is a byte more than the budget."""
    seen = prepare(by_budget()).seen
    took = dry_run(by_budget(), seen, 0)
    exact = by_budget(f'cohort.budgets=["{took}B", "{took - 1}B"]')
    found = assign(exact, seen, margin=0.01)
    assert found is not None
    assert set(found.planned[0]) == {0} and found.needs.measured[0] == took > found.needs.measured[1]
    (segment,) = segments_of(exact, seen, found)
    tier = deal(exact.seed, (0, 1), 12)
    assert segment.boundaries == tier  # those of the smaller budget are at 1, the others at 0
    assert segment.able == list(range(12))
    moved = found.moved(seen.clients)
    assert moved.keys() == {seen.clients[client] for client in range(12) if tier[client]}
    assert {(was, now) for was, now, _ in moved.values()} == {(0, 1)}
    assert found.facts(seen.clients)["segments"][0]["moved"].keys() == moved.keys()
    told = list(moves(replace(prepare(by_budget()), assigned=found, segments=(segment,))))
    assert (
        len(told) == 1 and "are moved from boundary 0 to 1: a dry run took 21.5 KiB, more than its" in told[0]
    )


def test_a_segment_has_its_boundaries_and_its_policy(tmp_path: Path) -> None:
    session = prepare(segmented())
    assert [s.first for s in session.segments] == [1, 3, 6]
    first, second, third = session.segments
    assert [b for b, c in zip(first.boundaries, second.boundaries, strict=True) if b != c] == [0, 0, 0]
    assert OUT in second.boundaries and OUT not in third.boundaries and third.boundaries[0] == 0
    assert first.policy.preferred != second.policy.preferred
    found = rows(session, tmp_path / "run")
    for row in found[1:]:
        own = session.during(row["round"])
        assert row["cohort"] == session.draw(row["round"], 0)
        assert (
            row["boundaries"] == [own.boundaries[c] for c in row["cohort"]] and OUT not in row["boundaries"]
        )
        assert set(row["cohort"]) <= set(own.able)
    assert any(row["boundaries"] != [first.boundaries[c] for c in row["cohort"]] for row in found[6:])


def test_cohorts_of_a_segment_are_those_of_a_run_that_had_no_other() -> None:
    session = prepare(segmented())
    assert session.assigned is not None
    last = session.segments[-1]
    alone = draw_of(session.config, session.seen, [last])
    assert [session.draw(t, 0) for t in range(6, 40)] == [alone(t, 0) for t in range(6, 40)]


@pytest.mark.parametrize("stop", [2, 3, 4, 6, 7])
def test_resumed_in_a_segment_a_run_has_the_same_bits(stop: int, tmp_path: Path) -> None:
    straight = rows(prepare(segmented()), tmp_path / "straight")
    begun = rows(prepare(segmented()), tmp_path / "run", stop=stop)
    rest = rows(prepare(segmented()), tmp_path / "run", resume=True)
    assert bits(begun + rest) == bits(straight) and len(begun) == stop


def test_every_round_is_replayed(tmp_path: Path) -> None:
    found = rows(prepare(segmented()), tmp_path / "run")
    for row in found:
        assert rebuild(tmp_path / "run", row["round"])["state_sha256"] == row["state_sha256"]


def test_another_measurement_does_not_go_on(tmp_path: Path) -> None:
    """What a client that has moved since would send is another run's."""
    where = tmp_path / "run"
    rows(prepare(segmented()), where, stop=3)
    manifest = json.loads((where / "manifest.json").read_text())
    manifest["facts"]["budgets"]["segments"][1]["boundaries"][5] = 4
    (where / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordError, match="the boundaries that fit the budgets are not those this run had"):
        rows(prepare(segmented()), where, resume=True)


def test_changes_of_budgets_cannot_change_on_resume(tmp_path: Path) -> None:
    rows(prepare(segmented()), tmp_path / "run", stop=3)
    with pytest.raises(ConfigError, match=r"cohort\.budget_changes = .* was given, this run has"):
        rows(prepare(segmented("cohort.budget_changes=[]")), tmp_path / "run", resume=True)


def test_the_first_lines_name_the_segments() -> None:
    said = list(describe(prepare(segmented())))
    (shown,) = [part for part in said if isinstance(part, Table) and part.title.startswith("segments")]
    assert [row[0] for row in shown.rows] == ["1", "3", "6"]
    assert [row[1:4] for row in shown.rows] == [
        ("3 at 0, 3 at 2, 3 at 3", "3", "9"),
        ("3 at 2, 6 at 3", "3", "9"),
        ("1 at 0, 3 at 2, 8 at 3", "0", "12"),
    ]
    (needed,) = [part for part in said if isinstance(part, Table) and part.title.startswith("memory")]
    assert [row[0] for row in needed.rows] == ["0", "2", "3"]
    assert sum("left out" in part for part in said if isinstance(part, str)) == 2  # once, and in the cohort


def test_a_run_without_budgets_says_nothing_of_them() -> None:
    session = prepare(load(HO_FL))
    assert session.assigned is None and len(session.segments) == 1 and session.during(9) == session
    assert not any(
        isinstance(p, Table) and p.title.startswith(("memory", "segments")) for p in describe(session)
    )
    assert "budgets" not in session.task.facts


def test_fedavg_leaves_out_who_comes_and_goes(tmp_path: Path) -> None:
    """It has no boundary: budgets say who can take part."""
    changes = "cohort.budget_changes=[[3, 1, '1MiB']]"
    more = [*SHORT, "cohort.assign=budgets", 'cohort.budgets=["1MiB", "20KiB"]', changes]
    session = prepare(load(SYNTHETIC / "fedavg.toml", more))
    assert [len(s.able) for s in session.segments] == [6, 12]
    for row in rows(session, tmp_path / "run")[1:]:
        assert set(row["cohort"]) <= set(session.during(row["round"]).able) and set(row["boundaries"]) == {0}


def test_a_split_run_leaves_out_and_has_one_boundary(tmp_path: Path) -> None:
    path = SYNTHETIC / "ho_sfl.toml"
    own = [*SHORT, "cohort.boundaries=[]", "cohort.assign=budgets"]
    session = prepare(load(path, [*own, 'cohort.budgets=["1MiB", "1MiB", "1kB"]', "cohort.size=2"]))
    assert set(session.boundaries) == {1, OUT}
    for row in rows(session, tmp_path / "run")[1:]:
        assert set(row["cohort"]) <= set(session.able) and set(row["boundaries"]) == {1}


def test_who_declares_its_memory_alone() -> None:
    """An engine of nodes: what they declare is used as it is, and where they do not, their memory."""
    config = load(HO_FL, ["cohort.boundaries=[]", "cohort.assign=declared", "cohort.size=3"])
    nodes = LOCAL._replace(says=", elsewhere")
    declared = [3, -1, -1, -1, *[2] * 8]
    memory = [0, 40 << 10, 35 << 10, 20 << 10, *[1] * 8]
    session = prepare(config, nodes, declared=declared, memory=memory)
    assert session.boundaries == (3, 0, 3, OUT, *[2] * 8)
    assert session.able == [0, 1, 2, *range(4, 12)]
    with pytest.raises(ConfigError, match=r"client number 3 declares -1, outside 0\.\.4"):
        prepare(config, nodes, declared=declared, memory=[0, 40 << 10, 35 << 10, 0, *[1] * 8])
    with pytest.raises(ConfigError, match=r"client number 1 declares -1, outside 0\.\.4"):
        prepare(config, nodes, declared=declared)
    with pytest.raises(ConfigError, match=r"^cohort.assign = 'declared': no client can take part: 1000 B"):
        prepare(config, nodes, declared=[-1] * 12, memory=[1000] * 12)
