# SPDX-License-Identifier: Apache-2.0
"""A preference that follows what rounds showed: bits of a resumed run, replay, arrival, bounds, segments."""

import json
import warnings
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hofl.algorithms.ho_fl import reconstruct
from hofl.config import Config, load
from hofl.core.record import Record
from hofl.errors import ConfigError
from hofl.protocol.base import Call, Replies
from hofl.protocol.measuring import measured_in
from hofl.rebuilding import bare
from hofl.runtime import checkpoint, ledger
from hofl.runtime.local import local_call
from hofl.session import Session, prepare

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
# plain SGD: beta comes to lie between its ends, not at one of them
SETTINGS = ("rounds=8", "evaluation.every=4", "cohort.preference=0.75", "cohort.final=0.02",
            "optimizer.name=sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0.0")  # fmt: skip
BITS = ("round", "cohort", "preference", "boundaries", "loss", "state_sha256", "bytes_up", "bytes_down")


def configured(*more: str, file: str = "ho_fl.toml") -> Config:
    return load(SYNTHETIC / file, [*SETTINGS, "cohort.schedule=measured", *more])


def run(session: Session, where: Path, *, resume: bool = False, stop: int | None = None) -> list[Any]:
    found = session.rows(where, resume=resume, warn=warnings.warn)
    kept = list(islice(found, stop))
    found.close()
    return [{name: row[name] for name in BITS} for row in kept]


def stored(where: Path) -> list[Any]:
    lines = (where / "rounds.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in BITS} for line in lines]


def states(where: Path) -> list[Record]:
    """The states of all rounds from the initial one and the ledger: no client, data or model."""
    state, _ = checkpoint.load(where / "initial.safetensors")
    _, layout = checkpoint.load_final(where / "initial.safetensors")
    found, algorithm = [state], bare("ho_fl", layout)
    with closing(ledger.read(where / "ledger.sqlite")) as book:
        for number in range(1, len(stored(where))):
            found.append(algorithm.rebuild(found[-1], book.entries(number)))
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("measured") / "run"
    run(prepare(configured()), where)
    return where


def test_beta_moves_and_stays_between_its_ends(straight: Path) -> None:
    rows = stored(straight)
    betas = [row["preference"] for row in rows[1:]]
    assert rows[0]["preference"] is None and betas[0] == 0.75
    assert all(0.02 <= beta <= 0.75 for beta in betas)
    assert len(set(betas)) > 2 and any(0.02 < beta < 0.75 for beta in betas)


@pytest.mark.parametrize("stop", [1, 5])
def test_a_killed_and_resumed_run_has_the_same_bits(straight: Path, tmp_path: Path, stop: int) -> None:
    where = tmp_path / "run"
    run(prepare(configured()), where, stop=stop)
    run(prepare(configured()), where, resume=True)
    assert stored(where) == stored(straight)
    assert (where / "final.safetensors").read_bytes() == (straight / "final.safetensors").read_bytes()
    one, other = (checkpoint.load(folder / "checkpoint")[0] for folder in (where, straight))
    assert one.values == other.values and len(one.values["measured"]) == 6


def test_the_ledger_gives_every_beta_again(straight: Path) -> None:
    """What round t drew with is a function of the state before it, and that of the ledger."""
    session, rows, before = prepare(configured()), stored(straight), states(straight)
    assert before[-1].values == checkpoint.load(straight / "checkpoint")[0].values
    for row, state in zip(rows[1:], before, strict=False):
        assert row["preference"] == session.preference(row["round"], state)
        assert row["cohort"] == session.draw(row["round"], 0, state)


def test_the_sums_are_those_of_the_deltas(straight: Path) -> None:
    """Round 1 by NumPy: relative variance (d + 1) / q, spread less the mean noise."""
    session, state = prepare(configured()), states(straight)
    layout, vector = session.task.model.layout, state[0].arrays["weights/vector"]
    with closing(ledger.read(straight / "ledger.sqlite")) as book:
        entries = book.entries(1)
    deltas = np.stack([reconstruct(layout, vector, e) for e in entries]).astype(np.float64)
    chosen = {session.able[place] for place in session.policy.preferred}
    noise: dict[bool, list[float]] = {True: [], False: []}
    for entry, delta in zip(entries, deltas, strict=True):
        d = layout.bottom_size(session.boundaries[entry.client])
        kappa = (d + 1) / 2
        noise[entry.client in chosen].append((delta[:d] ** 2).sum() * kappa / (5 + kappa))
    apart = deltas.var(axis=0, ddof=1).sum() - np.mean(noise[True] + noise[False])
    found = measured_in(state[1])
    assert found.drift == pytest.approx(apart) and found.drift_weight == 1
    assert noise[True] and found.preferred == pytest.approx(np.mean(noise[True]))
    assert not noise[False] or found.other == pytest.approx(np.mean(noise[False]))


def test_the_order_of_arrival_does_not_matter() -> None:
    session = prepare(configured())
    call = local_call(session.seen, session.algorithm.actions)

    def backwards(action: str, requests: Any, deadline: float | None) -> Replies:
        replies = call(action, requests, deadline)
        return Replies(dict(reversed(replies.records.items())), replies.failures)

    start = session.algorithm.init(session.task.model.read())
    ends = []
    for ask in (call, backwards):
        state = start
        for number in range(1, 4):
            state = session.algorithm.round(state, session.draw(number, 0, state), ask).state
        ends.append(state)
    assert ends[0].values == ends[1].values
    assert (ends[0].arrays["weights/vector"] == ends[1].arrays["weights/vector"]).all()


def test_pinned_between_equal_ends_it_is_constant(tmp_path: Path) -> None:
    measured = run(prepare(configured("cohort.final=0.75", "rounds=4")), tmp_path / "measured")
    constant = run(prepare(configured("cohort.schedule=constant", "rounds=4")), tmp_path / "constant")
    sizes = ("bytes_up", "bytes_down")
    bare_of = [
        [{k: v for k, v in row.items() if k not in sizes} for row in rows] for rows in (measured, constant)
    ]
    assert bare_of[0] == bare_of[1]
    assert [row["bytes_up"] for row in measured] == [row["bytes_up"] for row in constant]


def test_a_constant_run_measures_nothing_and_says_nothing_of_it() -> None:
    session, asked = prepare(configured("cohort.schedule=constant")), []
    call = local_call(session.seen, session.algorithm.actions)

    def seen(action: str, requests: Any, deadline: float | None) -> Replies:
        asked.extend(requests.values())
        return call(action, requests, deadline)

    listening: Call = seen
    state = session.algorithm.init(session.task.model.read())
    state = session.algorithm.round(state, session.draw(1, 0), listening).state
    assert set(state.values) == {"round"}
    assert asked and all("preferred" not in request.values for request in asked)
    assert session.draw(1, 0) == [session.able[p] for p in session.policy.draw(42, 1)]


def test_the_preferred_are_those_of_the_rounds_segment(tmp_path: Path) -> None:
    changes = 'cohort.budget_changes=[[3, 0, "35KiB"], [5, 3, "36KiB"]]'
    config = configured(changes, "rounds=6", "optimizer.name=adamw", file="budgets.toml")
    session, where = prepare(config), tmp_path / "run"
    rows = run(session, where)
    flags: dict[int, dict[int, bool]] = {}
    with closing(ledger.read(where / "ledger.sqlite")) as book:
        for number in range(1, 7):
            flags[number] = {e.client: e.plan.values["preferred"] for e in book.entries(number)}
    for number, told in flags.items():
        now = session.during(number)
        chosen = {now.able[place] for place in now.policy.preferred}
        assert told == {client: client in chosen for client in rows[number]["cohort"]}
    assert session.during(1).policy.preferred != session.during(3).policy.preferred
    run(prepare(config), tmp_path / "other", stop=4)
    run(prepare(config), tmp_path / "other", resume=True)
    assert stored(tmp_path / "other") == stored(where)


@pytest.mark.parametrize(("more", "message"), [
    (["cohort.final=0.8"], "cohort.final = 0.8: must be at most cohort.preference = 0.75 when measured"),
    (["cohort.schedule=adaptive"], "cohort.schedule"),
])  # fmt: skip
def test_bad_settings(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*more)


def test_methods_without_a_preference_have_none_in_their_rows(tmp_path: Path) -> None:
    rows = run(prepare(load(SYNTHETIC / "fedavg.toml", ["rounds=2"])), tmp_path / "run")
    assert [row["preference"] for row in rows] == [None] * 3
    rows = run(
        prepare(load(SYNTHETIC / "ho_fl.toml", ["rounds=1", "cohort.boundaries=[2]"])), tmp_path / "even"
    )
    assert [row["preference"] for row in rows] == [None, 0.0]
