# SPDX-License-Identifier: Apache-2.0
"""Laws that hold bit for bit for every row of the table (DESIGN 7)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rows import ADAMW, BOUNDARIES, COHORT, ROWS, SEED, SGD, final, hybrid, make_task, reordered, rounds

from hofl.algorithms.base import Replies, RoundVoid
from hofl.algorithms.ho_fl import step_directions
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.core.replay import hex_digest
from hofl.core.sampling import uniform
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter

each = pytest.mark.parametrize("name", ROWS)

REBUILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from rows import ROWS, make_task
from hofl.algorithms.base import Entry
from hofl.core.record import Record
from hofl.core.replay import hex_digest
folder = Path(sys.argv[1])
read = lambda path: Record.from_bytes(path.read_bytes())
state = read(folder / "state")
for row in sorted(folder.glob("row-*")):
    plans = sorted((row / "plans").iterdir(), key=lambda p: int(p.name))
    entries = [Entry(int(p.name), read(p), read(row / "replies" / p.name)) for p in plans]
    algorithm = ROWS[row.name[4:]].build(make_task().model.layout)
    print(row.name[4:], hex_digest(algorithm.rebuild(state, entries).arrays["weights/vector"]))
"""


@pytest.mark.parametrize("threads", ["1", "3"])
def test_another_process_rebuilds_the_same_bits(tmp_path: Path, threads: str) -> None:
    """Client steps here, server replay in another process and thread count: E=5, q=2, b = 0, middle, L."""
    expected = {}
    for name, row in ROWS.items():
        task = make_task()
        ((state, outcome),) = rounds(row, task, 1)
        (tmp_path / "state").write_bytes(state.to_bytes())
        for kind in ("plans", "replies"):
            (tmp_path / f"row-{name}" / kind).mkdir(parents=True)
        for client, plan, reply in outcome.entries:
            (tmp_path / f"row-{name}" / "plans" / str(client)).write_bytes(plan.to_bytes())
            (tmp_path / f"row-{name}" / "replies" / str(client)).write_bytes(reply.to_bytes())
        assert outcome.row["replay_ok"] is not False and not outcome.failures
        expected[name] = hex_digest(outcome.state.arrays["weights/vector"])
    command = [sys.executable, "-c", REBUILD, str(tmp_path), threads, str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert dict(line.split() for line in printed.splitlines()) == expected


@each
def test_same_seed_same_bits_and_it_moves(name: str) -> None:
    start = make_task().model.read()
    first, second = final(ROWS[name], make_task()), final(ROWS[name], make_task())
    assert hex_digest(first) == hex_digest(second) != hex_digest(start)


@each
def test_reply_order_does_not_matter(name: str) -> None:
    task = make_task()
    assert np.array_equal(final(ROWS[name], task, wrap=reordered), final(ROWS[name], task))


@each
def test_bytes_are_the_formula_and_headers(name: str) -> None:
    task, meter = make_task(), Meter()
    ((_, outcome),) = rounds(ROWS[name], task, 1, meter=meter)
    for counted, way in ((meter.up, "up"), (meter.down, "down")):
        expected: dict[str, int] = {}
        for entry in outcome.entries:
            for category, count in ROWS[name].traffic(task.model.layout, entry.client)[way].items():
                expected[category] = expected.get(category, 0) + count
        counted = {c: n for c, n in counted.items() if n}
        assert 0 < counted.pop("headers") <= 2048 * COHORT
        assert counted == {c: n for c, n in expected.items() if n}


@each
def test_a_lost_client_is_left_out_of_the_mean(name: str) -> None:
    """Replies from three of four: the state is the mean over the three, and the fourth is explained (C52)."""
    task = make_task()
    algorithm = ROWS[name].build(task.model.layout)
    whole, cohort = local_call(task, algorithm.actions), uniform(6, COHORT).draw(SEED, 0)

    def lossy(action, requests, deadline):
        records, failures = whole(action, requests, deadline)
        records.pop(cohort[1])
        return Replies(records, {**failures, cohort[1]: "gone"})

    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, cohort, lossy)
    complete = algorithm.round(state, cohort, whole)
    rest = [entry for entry in complete.entries if entry.client != cohort[1]]
    assert outcome.failures == {cohort[1]: "gone"}
    assert np.array_equal(
        outcome.state.arrays["weights/vector"], algorithm.rebuild(state, rest).arrays["weights/vector"]
    )


@each
def test_below_the_quorum_the_round_is_void(name: str) -> None:
    task = make_task()
    algorithm = ROWS[name].build(task.model.layout)
    state = algorithm.init(task.model.read())
    with pytest.raises(RoundVoid) as void:
        algorithm.round(state, [0, 1], lambda *_: Replies({}, {0: "gone", 1: "late"}))
    assert void.value.failures == {0: "gone", 1: "late"}


def tampered(reply: Record, change: str) -> Record:
    arrays, values = dict(reply.arrays), dict(reply.values)
    if change == "nan":
        arrays["weights/delta"] = arrays["weights/delta"] * np.float32("nan")
    elif change == "shape":
        arrays["weights/delta"] = arrays["weights/delta"][1:]
    elif change == "dtype":
        arrays["weights/delta"] = arrays["weights/delta"].astype(np.float64)
    elif change == "missing":
        del arrays["weights/delta"]
    else:
        values[change] = {"round": 99, "client": 5, "examples": 10**9, "loss_sum": "low"}[change]
    return Record(arrays, values)


@each
@pytest.mark.parametrize(
    "change", ["nan", "shape", "dtype", "missing", "round", "client", "examples", "loss_sum"]
)
def test_a_bad_reply_is_refused_and_the_rest_counts(name: str, change: str) -> None:
    task = make_task()
    algorithm = ROWS[name].build(task.model.layout)
    whole, cohort = local_call(task, algorithm.actions), [1, 2, 3]

    def hostile(action, requests, deadline):
        records, failures = whole(action, requests, deadline)
        return Replies({**records, 2: tampered(records[2], change)}, failures)

    state = algorithm.init(task.model.read())
    outcome = algorithm.round(state, cohort, hostile)
    assert set(outcome.failures) == {2} and outcome.failures[2].startswith("refused: ")
    assert [entry.client for entry in outcome.entries] == [1, 3]
    assert np.isfinite(outcome.state.arrays["weights/vector"]).all()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("nan", "non-finite"),
        ("inf", "non-finite"),
        ("bit", "differs"),
        ("extra", "expected"),
        ("digest", "differs"),
        ("huge", ""),
        ("agreement", "negative"),
    ],
)
def test_bad_scalars_are_refused(change: str, word: str) -> None:
    """NaN and wrong scalars never reach the model; a flipped bit is caught by the digest (C12, C69, T2)."""
    task = make_task()
    algorithm = ROWS["ho_fl-tangent-adamw"].build(task.model.layout)
    whole = local_call(task, algorithm.actions)

    def hostile(action, requests, deadline):
        records, failures = whole(action, requests, deadline)
        reply = records[3]
        s, d = reply.arrays["scalars/s"].copy(), reply.arrays["digests/bottom"].copy()
        a = reply.arrays["metrics/agreement"]
        if change == "bit":
            s.view(np.uint32)[2, 1] ^= 1 << 22  # the last bit may vanish in the rounding of an update
        elif change == "extra":
            s = np.vstack([s, s])
        elif change == "digest":
            d[0] ^= 1
        elif change == "agreement":
            a = np.array([0.0, -1e9, 1.0])
        else:
            s[1, 0] = {"nan": np.nan, "inf": np.inf, "huge": 3e38}[change]
        return Replies(
            {
                **records,
                3: Record(
                    {**reply.arrays, "scalars/s": s, "digests/bottom": d, "metrics/agreement": a},
                    reply.values,
                ),
            },
            failures,
        )

    outcome = algorithm.round(algorithm.init(task.model.read()), [1, 2, 3], hostile)
    assert set(outcome.failures) == {3} and word in outcome.failures[3]
    assert outcome.row["replay_ok"] is (change not in ("bit", "digest", "huge"))
    assert np.isfinite(outcome.state.arrays["weights/vector"]).all()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ho_fl_at_boundary_0_is_fedavg(optimizer: str) -> None:
    task = make_task()
    name = f"fedavg-{optimizer}"
    settings = {"sgd": SGD, "adamw": ADAMW}[optimizer]
    zero = hybrid("forward", settings, boundaries=(0,) * 6)
    assert np.array_equal(final(zero, task, 3), final(ROWS[name], task, 3))


def test_a_first_order_client_gets_no_seed_and_sends_no_scalar() -> None:
    task = make_task()
    ((_, outcome),) = rounds(ROWS["ho_fl-forward-sgd"], task, 1)
    for client, plan, reply in outcome.entries:
        assert ("seeds/root" in plan.arrays) == ("scalars/s" in reply.arrays) == (BOUNDARIES[client] > 0)


def test_frozen_bottom_stays_and_gets_no_seed() -> None:
    task = make_task()
    boundary = 3
    row = hybrid("none", SGD, boundaries=(boundary,) * 6)
    start, d_zo = task.model.read(), task.model.layout.bottom_size(boundary)
    ((_, outcome),) = rounds(row, task, 1)
    end = outcome.state.arrays["weights/vector"]
    assert np.array_equal(end[:d_zo], start[:d_zo]) and not np.array_equal(end[d_zo:], start[d_zo:])
    assert all("seeds/root" not in entry.plan.arrays for entry in outcome.entries)
    assert outcome.row["zo_signal"] is None


def test_private_directions_differ_by_client_round_and_step() -> None:
    task = make_task()
    played = enumerate(rounds(hybrid("tangent", SGD, boundaries=(2,) * 6), task, 4))
    directions = {
        (t, entry.client, e, j): step_directions(
            entry.plan.values, Key.from_array(entry.plan.arrays["seeds/root"]), e, 20
        )
        .block(j, 0, 20)
        .tobytes()
        for t, (_, outcome) in played
        for entry in outcome.entries
        for e in range(5)
        for j in range(2)
    }
    assert len(set(directions.values())) == len(directions) == 4 * 4 * 5 * 2
