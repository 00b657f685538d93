# SPDX-License-Identifier: Apache-2.0
"""The conversation of server and clients, over a Flower grid without sockets."""

import json
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from in_memory import InMemory

from hofl.build import pooled
from hofl.build_task import build_task
from hofl.config import load
from hofl.core.record import Record
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.role import Role, Self
from hofl.runtime.flower.serverapp import Order, attempt
from hofl.runtime.flower.wire import seal, unseal
from hofl.session import rebuild, run_to_end

CONFIGS = Path(__file__).parents[2] / "configs" / "synthetic"
SMALL = [
    "rounds=3",
    "partition.clients=4",
    "cohort.size=3",
    "evaluation.every=1",
    "fleet.deadline=2.0",
    "fleet.join=3.0",
]


class Dictionary(dict):
    """A store in memory."""

    def put(self, name, data):
        self[name] = data


def config_of(name, *more):
    return load(CONFIGS / f"{name}.toml", [*SMALL, *more])


def roles_of(config, **own):
    task = pooled(config, build_task(config))

    def build(invitation, config):
        return build_task(config)

    return {
        100 + i: Role(Self(client, Consent(split=True), build, **own), Dictionary())
        for i, client in enumerate(task.clients)
    }


def comparable(where, *but):
    """Rows without times and this process's own memory."""
    rows = [json.loads(line) for line in (where / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "peak_bytes", *but)} for row in rows]


@pytest.mark.parametrize("name", ["ho_fl", "ho_sfl", "fedavg", "hosl", "decomfl", "heron_sfl", "mu_splitfed"])
def test_a_fleet_gives_the_very_rows_of_one_process(name, tmp_path):
    config = config_of(name)
    code, message = attempt(lambda: Order(config, tmp_path / "fleet", False), InMemory(roles_of(config)))
    assert (code, message) == (0, "")
    summary = run_to_end(config, tmp_path / "alone", False)
    fleet = json.loads((tmp_path / "fleet" / "summary.json").read_bytes())
    assert fleet["final_sha256"] == summary["final_sha256"]
    assert comparable(tmp_path / "fleet") == comparable(tmp_path / "alone")


def changed(content, **header):
    """The same message with another header, or blob."""
    blob = header.pop("blob", None)
    found = unseal(content)
    return seal({**found.header, **header}, found.blob if blob is None else blob)


def edited(content, edit):
    """The same message, its record edited."""
    record = unseal(content).record()
    copied = Record({name: a.copy() for name, a in record.arrays.items()}, dict(record.values))
    return changed(content, blob=edit(copied).to_bytes())


def array_set(name, value):
    def edit(record):
        record.arrays[name] = value(record.arrays[name])
        return record

    return edit


def value_set(name, value):
    def edit(record):
        record.values[name] = value
        return record

    return edit


HUGE = b"x" * 10_000_000
ATTACKS = {
    "nan": (
        lambda c: edited(c, array_set("scalars/s", lambda s: s * np.float32("nan"))),
        "not finite|non-finite",
    ),
    "overflow": (
        lambda c: edited(c, array_set("weights/delta", lambda w: w + np.float32(1e30))),
        "beyond 1e",
    ),
    "shape": (lambda c: edited(c, array_set("scalars/s", lambda s: s[:1])), "expected float32"),
    "dtype": (
        lambda c: edited(c, array_set("scalars/s", lambda s: s.astype(np.float64))),
        "expected float32",
    ),
    "digest": (lambda c: edited(c, array_set("digests/bottom", lambda d: d ^ 1)), "differs from the replay"),
    "flipped scalar": (lambda c: edited(c, array_set("scalars/s", lambda s: -s)), "differs from the replay"),
    "stale round": (lambda c: edited(c, value_set("round", 0)), "reply is for round 0"),
    "foreign run": (lambda c: edited(c, value_set("run", "0123456789abcdef")), "reply is for run 0123"),
    "other client": (lambda c: edited(c, value_set("client", 1)), "reply is for client 1"),
    "examples": (lambda c: edited(c, value_set("examples", 10**12)), "counts 10000000000"),
    "10 MB": (lambda c: changed(c, blob=HUGE), "message of 10000000 bytes, where at most"),
    "no record": (lambda c: changed(c, blob=b"\x80\x04\x95."), "not a record"),
    "another question": (lambda c: changed(c, id="0" * 24), "to another question"),
    "another wire": (lambda c: changed(c, version=99), "message of version 99"),
    "not ours": (lambda c: RecordDict(), "not a message of hofl"),
    "escape codes": (lambda c: changed(c, status="failed", why="\x1b[2J boom"), "^ ?.?2J boom|boom"),
    "silence": (lambda c: None, "late: no answer within"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_answer_costs_its_sender_the_round_and_nobody_else_anything(attack, tmp_path):
    """Case after case: the reason is told, the others go on, and the result is what they alone make."""
    spoiled, reason = ATTACKS[attack]
    config = config_of(
        "ho_fl", "cohort.size=4", "fleet.deadline=0.4", "fleet.retries=0", "zo.estimator=tangent"
    )
    grid = InMemory(roles_of(config))

    def spoil(question, content):
        bad = question.metadata.dst_node_id == 102 and unseal(question.content).header["kind"] == "ask"
        second = bad and unseal(question.content).record().values["round"] == 1
        return spoiled(content) if second else content

    grid.spoil = spoil
    assert attempt(lambda: Order(config, tmp_path / "fleet", False), grid) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "fleet" / "rounds.jsonl").read_text().splitlines()]
    (failure,) = rows[2]["failures"]
    assert failure["client"] == 2
    assert re.search(reason, failure["why"])
    assert "\x1b" not in failure["why"]
    assert not rows[1]["failures"] and not rows[3]["failures"]
    assert rebuild(tmp_path / "fleet", 3)["equal"]


def test_a_lost_question_is_asked_again_and_nothing_shows(tmp_path):
    config = config_of("ho_sfl")
    grid, lost = InMemory(roles_of(config)), []

    def forget(question, content):
        role = grid.roles[question.metadata.dst_node_id]
        header = unseal(question.content).header
        if header.get("action") == "activate" and len(lost) < 2:
            lost.append(header)
            role.run = None  # the process died and came back without having answered
            role.store.clear()
            return seal({"id": header["id"], "client": role.me.client, "status": "stranger"}, b"")
        return content

    grid.spoil = forget
    assert attempt(lambda: Order(config, tmp_path / "fleet", False), grid) == (0, "")
    summary = run_to_end(config, tmp_path / "alone", False)
    assert len(lost) == 2
    assert (
        json.loads((tmp_path / "fleet" / "summary.json").read_bytes())["final_sha256"]
        == summary["final_sha256"]
    )


def test_a_question_that_comes_twice_moves_a_client_once():
    config = config_of("ho_sfl")
    role = roles_of(config)[100]
    grid = InMemory({100: role})
    calls = []

    def twice(question, content):
        if unseal(question.content).header["kind"] == "ask":
            calls.append(unseal(role.answer(question.content)).blob == unseal(content).blob)
        return content

    grid.spoil = twice
    one = load(CONFIGS / "ho_sfl.toml", [*SMALL, "partition.clients=1", "cohort.size=1"])
    role = roles_of(one)[100]
    grid.roles = {100: role}
    code, message = attempt(lambda: Order(one, Path(tempfile.mkdtemp()) / "run", False), grid)
    assert (code, message) == (0, "")
    assert len(calls) == 9 and all(calls)


def test_a_crashed_client_goes_on_from_what_it_stored(tmp_path):
    """HO-SFL keeps the bottom at the client: after a crash between two rounds no snapshot is sent again."""
    config = config_of("ho_sfl", "rounds=5", "partition.clients=2", "cohort.size=2")
    roles = roles_of(config)
    grid = InMemory(roles)

    def crash(question, content):
        header = unseal(question.content).header
        if header.get("action") == "settle":
            old = grid.roles[100]
            grid.roles[100] = Role(old.me, old.store)
        return content

    grid.spoil = crash
    assert attempt(lambda: Order(config, tmp_path / "fleet", False), grid) == (0, "")
    run_to_end(config, tmp_path / "alone", False)
    assert comparable(tmp_path / "fleet") == comparable(tmp_path / "alone")


def test_too_few_clients_are_said_and_end_the_wait(tmp_path):
    """C50: 1 of 2 connected."""
    config = config_of("ho_fl", "partition.clients=2", "cohort.size=2", "fleet.join=0.5")
    roles = roles_of(config)
    del roles[101]
    code, message = attempt(lambda: Order(config, tmp_path / "run", False), InMemory(roles))
    assert code == 3
    assert message.startswith("1 of 2 connected after 0.5 s")
    assert not (tmp_path / "run").exists()


def test_over_sampling_takes_the_first_and_names_the_others(tmp_path):
    config = config_of("ho_fl", "cohort.size=4", "fleet.enough=3", "fleet.deadline=5.0")
    grid = InMemory(roles_of(config))
    grid.spoil = lambda question, content: (
        None
        if question.metadata.dst_node_id == 103 and unseal(question.content).header["kind"] == "ask"
        else content
    )
    begun = time.monotonic()
    assert attempt(lambda: Order(config, tmp_path / "run", False), grid)[0] == 0
    assert time.monotonic() - begun < 10
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [f["why"] for f in rows[1]["failures"]] == ["not waited for: 3 others were enough (fleet.enough)"]


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ({"prints": {"layout": "0" * 64}}, "layout: other trainables"),
        ({"prints": {"directions": "0" * 64}}, "direction stream: another version"),
        ({"prints": {"model": "0" * 64}}, "frozen weights: another model"),
        ({"client": "nobody"}, "this run has no client 'nobody'"),
        ({"examples": 10**6}, "has 1000000 examples, this run deals it"),
        ({"boundary": -7}, "says the impossible"),
        ({"memory": "much"}, "says memory = much when it joins"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_the_reason(spoiled, reason, tmp_path, capsys):
    config = config_of("ho_fl", "partition.clients=3", "cohort.size=3", "fleet.minimum=2", "rounds=1")
    grid = InMemory(roles_of(config))

    def lie(question, content):
        if question.metadata.dst_node_id == 101 and unseal(question.content).header["kind"] == "hello":
            for name, value in spoiled.items():
                if isinstance(value, dict):
                    value = {**unseal(content).record().values[name], **value}
                content = edited(content, value_set(name, value))
        return content

    grid.spoil = lie
    begun = time.monotonic()
    assert attempt(lambda: Order(config, tmp_path / "run", False), grid)[0] == 0
    assert time.monotonic() - begun < config.fleet.deadline  # nobody waits for a client that was refused
    assert reason in capsys.readouterr().out


def test_a_resumed_fleet_ends_where_an_undisturbed_one_does(tmp_path):
    config = config_of("ho_sfl")
    roles = roles_of(config)
    assert attempt(lambda: Order(config, tmp_path / "run", False), InMemory(roles))[0] == 0
    longer = config_of("ho_sfl", "rounds=6")
    grid = InMemory({node: Role(role.me, role.store) for node, role in roles.items()})
    assert attempt(lambda: Order(longer, tmp_path / "run", True), grid) == (0, "")
    run_to_end(longer, tmp_path / "alone", False)
    measured = "client_peak_bytes"  # once a boundary and session
    assert comparable(tmp_path / "run", measured) == comparable(tmp_path / "alone", measured)


def test_another_data_set_is_not_let_in_on_resume(tmp_path, capsys):
    config = config_of("ho_fl", "fleet.minimum=3")
    roles = roles_of(config, salt=b"one")
    assert attempt(lambda: Order(config, tmp_path / "run", False), InMemory(roles))[0] == 0
    others = roles_of(config, salt=b"another")
    longer = config_of("ho_fl", "rounds=4", "fleet.join=1.0")
    code, _ = attempt(lambda: Order(longer, tmp_path / "run", True), InMemory(others))
    assert code == 3
    assert "its data is" in capsys.readouterr().out


def test_a_late_answer_is_dropped_by_name(tmp_path, capsys):
    """C51, C52: what comes after the deadline changes nothing, and is told."""
    config = config_of("ho_fl", "cohort.size=4", "fleet.deadline=0.5", "rounds=2")
    grid, held = InMemory(roles_of(config)), []

    def hold(question, content):
        asked = unseal(question.content).header["kind"] == "ask"
        if asked and question.metadata.dst_node_id == 101 and not held:
            held.append((question, content))
            return None
        if held and len(held) == 1 and asked:  # round 2 has begun: only now it arrives
            late, answer = held[0]
            if unseal(question.content).record().values["round"] == 1:
                grid.waiting[late.metadata.message_id] = Message(answer, reply_to=late)
                held.append(None)
        return content

    grid.spoil = hold
    assert attempt(lambda: Order(config, tmp_path / "run", False), grid) == (0, "")
    assert "late: client-1, local_steps of round 1: dropped" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [f["why"] for f in rows[1]["failures"]] == ["late: no answer within 0.5 s (fleet.deadline)"]
    assert not rows[2]["failures"]
    assert rebuild(tmp_path / "run", 2)["equal"]


def test_a_node_that_starts_anew_is_asked_again_at_once(tmp_path):
    """Its process took the question with it; Flower alone would wait until the deadline."""
    config = config_of("ho_fl", "cohort.size=4", "fleet.deadline=30.0", "rounds=2")
    grid, died = InMemory(roles_of(config)), []

    def die(question, content):
        if (
            unseal(question.content).header["kind"] == "ask"
            and question.metadata.dst_node_id == 101
            and not died
        ):
            died.append(question)
            grid.activated[101] = "again"
            return None
        return content

    grid.spoil = die
    begun = time.monotonic()
    assert attempt(lambda: Order(config, tmp_path / "fleet", False), grid) == (0, "")
    assert died and time.monotonic() - begun < 10
    summary = run_to_end(config, tmp_path / "alone", False)
    assert (
        json.loads((tmp_path / "fleet" / "summary.json").read_bytes())["final_sha256"]
        == summary["final_sha256"]
    )


def test_a_round_waits_for_its_quorum_instead_of_using_up_its_attempts(tmp_path, capsys):
    """All nodes leave for longer than three deadlines: nothing is lost but time."""
    config = config_of(
        "ho_fl", "cohort.size=4", "quorum=3", "fleet.deadline=1.2", "fleet.join=20.0", "rounds=2"
    )
    roles = roles_of(config)
    grid, away = InMemory(roles), []

    def leave(question, content):
        header = unseal(question.content).header
        if header["kind"] == "ask" and unseal(question.content).record().values["round"] == 1 and not away:
            away.append(time.monotonic())
            grid.roles = {}
            return None
        return content

    grid.spoil = leave
    plain = grid.get_nodes

    def nodes():
        if away and not grid.roles and time.monotonic() - away[0] > 5.0:
            grid.roles = roles
        return plain()

    grid.get_nodes = nodes
    assert attempt(lambda: Order(config, tmp_path / "run", False), grid) == (0, "")
    assert "of 3 connected (waiting" in capsys.readouterr().out
    assert rebuild(tmp_path / "run", 2)["equal"]
