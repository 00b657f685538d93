# SPDX-License-Identifier: Apache-2.0
"""Laws that hold bit for bit for every row of the table (DESIGN 7)."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from rows import (
    ADAMW,
    BOUNDARIES,
    ROWS,
    SGD,
    cohort_of,
    final,
    hybrid,
    lossy,
    make_task,
    play,
    reordered,
    rounds,
    task_of,
)

from hofl.algorithms import ALGORITHMS
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.core.replay import hex_digest
from hofl.protocol.base import SERVER, Call, Entry, Replies, RoundVoid
from hofl.protocol.probing import step_directions
from hofl.runtime.local import local_call
from hofl.runtime.meter import Meter
from hofl.theory.communication import catch_up

each = pytest.mark.parametrize("name", ROWS)
shared = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.centralised])

REBUILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from rows import ROWS, task_of
from hofl.protocol.base import Entry
from hofl.core.record import Record
from hofl.core.replay import hex_digest
read = lambda path: Record.from_bytes(path.read_bytes())
for row in sorted(Path(sys.argv[1]).glob("row-*")):
    places = sorted(row.glob("plan_*"), key=lambda p: int(p.name.split("_")[1]))
    pairs = [(int(p.name.split("_")[2]), p, row / p.name.replace("plan", "reply")) for p in places]
    entries = [Entry(client, read(plan), read(reply)) for client, plan, reply in pairs]
    algorithm = ROWS[row.name[4:]].build(task_of(row.name[4:]))
    print(row.name[4:], hex_digest(algorithm.rebuild(read(row / "state"), entries).arrays["weights/vector"]))
"""


def arrays_equal(one: Record, other: Record) -> bool:
    """Whether two states have the same arrays, bit for bit, and the same values."""
    same = all(np.array_equal(a, other.arrays[n]) for n, a in one.arrays.items())
    return same and one.arrays.keys() == other.arrays.keys() and one.values == other.values


def test_every_algorithm_is_a_row() -> None:
    assert {name.partition("-")[0] for name in ROWS} == set(ALGORITHMS)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_another_process_rebuilds_the_same_bits(tmp_path: Path, threads: str) -> None:
    """Client steps here, server replay in another process and thread count."""
    expected = {}
    for name, row in ROWS.items():
        *_, (state, outcome) = rounds(row, task_of(name), 2)
        folder = tmp_path / f"row-{name}"
        folder.mkdir()
        (folder / "state").write_bytes(state.to_bytes())
        for place, (client, plan, reply) in enumerate(outcome.entries):
            (folder / f"plan_{place}_{client}").write_bytes(plan.to_bytes())
            (folder / f"reply_{place}_{client}").write_bytes(reply.to_bytes())
        assert outcome.row["replay_ok"] is not False and not outcome.failures
        expected[name] = hex_digest(outcome.state.arrays["weights/vector"])
    command = [sys.executable, "-c", REBUILD, str(tmp_path), threads, str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert dict(line.split() for line in printed.splitlines()) == expected


@each
def test_same_seed_same_bits_and_it_moves(name: str) -> None:
    start = task_of(name).model.read()
    first, second = final(ROWS[name], task_of(name)), final(ROWS[name], task_of(name))
    assert hex_digest(first) == hex_digest(second) != hex_digest(start)


@each
def test_reply_order_does_not_matter(name: str) -> None:
    task = task_of(name)
    assert np.array_equal(final(ROWS[name], task, wrap=reordered), final(ROWS[name], task))


@each
def test_a_round_is_rebuilt_from_its_entries_as_they_are_stored(name: str) -> None:
    """Every array and value of the state, after both went through bytes, without a client or the model."""
    row, task = ROWS[name], task_of(name)
    for state, outcome in rounds(row, task, 3):
        stored = [
            Entry(c, Record.from_bytes(p.to_bytes()), Record.from_bytes(r.to_bytes()))
            for c, p, r in outcome.entries
        ]
        task.model.write(np.zeros_like(task.model.read()))
        again = row.build(task).rebuild(Record.from_bytes(state.to_bytes()), stored)
        assert arrays_equal(Record.from_bytes(again.to_bytes()), Record.from_bytes(outcome.state.to_bytes()))


@each
def test_no_activation_label_or_feedback_is_in_the_ledger(name: str) -> None:
    for _, outcome in rounds(ROWS[name], task_of(name), 1):
        kept = {n.partition("/")[0] for e in outcome.entries for r in (e.plan, e.reply) for n in r.arrays}
        assert not kept & {"activations", "labels", "feedback"}


@each
def test_a_state_keeps_its_arrays(name: str) -> None:
    """A checkpoint of any round has the arrays of the first, by name, type and shape."""
    shapes = [
        {n: (a.dtype, a.shape) for n, a in state.arrays.items()}
        for before, outcome in rounds(ROWS[name], task_of(name), 2)
        for state in (before, outcome.state)
    ]
    assert all(found == shapes[0] for found in shapes)


@each
def test_a_run_goes_on_from_a_checkpoint_whatever_the_clients_have_forgotten(name: str) -> None:
    """Killed after round 2 of 4: other processes, no client memory, the same bits."""
    row = ROWS[name]
    straight = final(row, task_of(name), 4)
    *_, (_, outcome) = rounds(row, task_of(name), 2)
    state, task = Record.from_bytes(outcome.state.to_bytes()), task_of(name)
    algorithm = row.build(task)
    *_, last = play(algorithm, state, task, local_call(task, algorithm.actions), 2)
    assert not last.failures and np.array_equal(last.state.arrays["weights/vector"], straight)


@each
def test_every_message_says_what_it_is_of(name: str) -> None:
    def checking(call: Call) -> Call:
        def checked(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
            replies = call(action, requests, deadline)
            for client, reply in replies.records.items():
                for message in (requests[client], reply):
                    assert (message.values["run"], message.values["client"]) == ("laws", client), action
                    assert message.values["round"] == requests[client].values["round"], action
            return replies

        return checked

    for _, outcome in rounds(ROWS[name], task_of(name), 2, checking):
        assert not outcome.failures


@each
def test_bytes_are_the_formula_and_headers(name: str) -> None:
    task, meter, messages = task_of(name), Meter(), [0]

    def counting(call: Call) -> Call:
        def counted(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
            messages[0] += len(requests)
            return call(action, requests, deadline)

        return counted

    ((_, outcome),) = rounds(ROWS[name], task, 1, counting, meter)
    clients = [entry.client for entry in outcome.entries if entry.client != SERVER]
    for counted, way in ((meter.up, "up"), (meter.down, "down")):
        expected: dict[str, int] = {}
        for client in clients:
            for category, count in ROWS[name].traffic(task, client)[way].items():
                expected[category] = expected.get(category, 0) + count
        counted = {c: n for c, n in counted.items() if n}
        assert 0 < counted.pop("headers") <= 2048 * messages[0]
        assert counted == {c: n for c, n in expected.items() if n}


@each
def test_later_rounds_send_what_each_client_lacks(name: str) -> None:
    """Bytes of rounds 1 to 6 are those of first contact with the snapshot replaced by the missed rounds."""
    task, meter = task_of(name), Meter()
    for before, outcome in rounds(ROWS[name], task, 7, meter=meter):
        up, down, _ = meter.take()
        marks = before.arrays.get("cursors/synced")
        expected: dict[str, int] = {}
        for client in (e.client for e in outcome.entries if e.client != SERVER):
            traffic = Counter(ROWS[name].traffic(task, client)["down"])
            if marks is not None:
                moments, (window, *shape) = (
                    before.arrays["weights/moments"],
                    before.arrays["scalars/history"].shape,
                )
                size, lag = moments.shape[1], before.values["round"] - int(marks[client])
                near = marks[client] >= 0 and lag <= window
                traffic.subtract(catch_up(size, *shape, lag=None, moments=len(moments)))
                traffic.update(catch_up(size, *shape, lag=lag if near else None, moments=len(moments)))
            for category, count in traffic.items():
                expected[category] = expected.get(category, 0) + count
        found = {c: n for c, n in down.items() if n and c != "headers"}
        assert found == {c: n for c, n in expected.items() if n}, before.values["round"]
        assert up["headers"] > 0


@shared
def test_a_lost_client_is_as_if_it_had_not_been_drawn(name: str) -> None:
    """It is explained, and the state is that of a round of the other three (C52)."""
    task = task_of(name)
    algorithm, cohort = ROWS[name].build(task), cohort_of(task, 0)
    state = algorithm.init(task.model.read())
    call = lossy(cohort[1])(local_call(task, algorithm.actions))
    outcome = algorithm.round(state, cohort, call)
    rest = algorithm.round(state, [c for c in cohort if c != cohort[1]], local_call(task, algorithm.actions))
    assert outcome.failures == {cohort[1]: "gone"}
    assert np.array_equal(outcome.state.arrays["weights/vector"], rest.state.arrays["weights/vector"])


@each
def test_below_the_quorum_the_round_is_void(name: str) -> None:
    task = task_of(name)
    algorithm = ROWS[name].build(task)
    cohort = cohort_of(task, 0)[:2]
    why = dict(zip(cohort, ("gone", "late"), strict=False))
    with pytest.raises(RoundVoid) as void:
        algorithm.round(algorithm.init(task.model.read()), cohort, lambda *_: Replies({}, why))
    assert void.value.failures == why


def tampered(reply: Record, change: str, array: str) -> Record:
    """A reply with one thing wrong."""
    arrays, values = dict(reply.arrays), dict(reply.values)
    if change == "nan":
        arrays[array] = arrays[array] * arrays[array].dtype.type("nan")
    elif change == "shape":
        arrays[array] = arrays[array][1:]
    elif change == "dtype":
        arrays[array] = arrays[array].astype(np.int16)
    elif change == "missing":
        del arrays[array]
    else:
        values[change] = {"round": 99, "client": 5, "run": "other"}[change]
    return Record(arrays, values)


def attacks(name: str, victim: int) -> list[tuple[str, str, str]]:
    """(action, change, array) for everything this client sends in a round."""
    sent: dict[str, Record] = {}

    def spying(call: Call) -> Call:
        def spied(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
            replies = call(action, requests, deadline)
            if victim in replies.records:
                sent.setdefault(action, replies.records[victim])
            return replies

        return spied

    next(rounds(ROWS[name], task_of(name), 1, spying))
    found = [(action, change, "") for action in sent for change in ("round", "client", "run")]
    for action, reply in sent.items():
        for array, values in reply.arrays.items():
            changes = ("shape", "dtype", "missing") + (("nan",) if values.dtype.kind == "f" else ())
            found += [(action, change, array) for change in changes]
    return found


@each
def test_a_bad_reply_is_refused_and_the_rest_counts(name: str) -> None:
    """Whatever is wrong with whatever a client sends: it alone is explained, and the state stays sound."""
    task = task_of(name)
    victim, cohort = cohort_of(task, 0)[0], cohort_of(task, 0)
    algorithm = ROWS[name].build(task)
    state = algorithm.init(task.model.read())
    for action, change, array in attacks(name, victim):
        whole = local_call(task, algorithm.actions)

        def hostile(asked, requests, deadline, whole=whole, action=action, change=change, array=array):
            replies = whole(asked, requests, deadline)
            if asked == action and victim in replies.records:
                replies.records[victim] = tampered(replies.records[victim], change, array)
            return replies

        try:
            outcome = algorithm.round(state, cohort, hostile)
        except RoundVoid as void:  # the only client there was
            assert len(cohort) == 1 and void.failures, (action, change, array)
            continue
        assert set(outcome.failures) == {victim}, (action, change, array, outcome.failures)
        assert outcome.failures[victim].startswith("refused: "), (action, change, array)
        assert {e.client for e in outcome.entries} >= set(cohort[1:])
        assert np.isfinite(outcome.state.arrays["weights/vector"]).all()


@pytest.mark.parametrize(("change", "value"), [("examples", 10**9), ("loss_sum", "low")])
@pytest.mark.parametrize("name", ["fedavg-sgd", "ho_fl-forward-sgd"])
def test_impossible_counts_are_refused(name: str, change: str, value: object) -> None:
    task = make_task()
    algorithm = ROWS[name].build(task)
    whole = local_call(task, algorithm.actions)

    def hostile(action, requests, deadline):
        records, failures = whole(action, requests, deadline)
        return Replies(
            {**records, 2: Record(records[2].arrays, {**records[2].values, change: value})}, failures
        )

    outcome = algorithm.round(algorithm.init(task.model.read()), [1, 2, 3], hostile)
    assert set(outcome.failures) == {2} and outcome.failures[2].startswith("refused: ")
    assert [entry.client for entry in outcome.entries] == [1, 3]


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
    algorithm = ROWS["ho_fl-tangent-adamw"].build(task)
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
