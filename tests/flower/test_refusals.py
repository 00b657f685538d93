# SPDX-License-Identifier: Apache-2.0
"""Nodes and servers that must not be trusted, as real processes over TLS: T2 to T6 and T11 to T16."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import bad_node
import pytest
from bad_node import ATTACKS, FLIPPED, TWICE
from fleet import ENVIRONMENT, Command, Fleet, Server, until

from hofl.config import load
from hofl.errors import ClientError
from hofl.runtime import ledger
from hofl.runtime.flower import keys
from hofl.runtime.flower.processes import start, stop
from hofl.runtime.local import local_call
from hofl.session import Engine, Session, prepare, rebuild

CONFIG = Path(__file__).parents[2] / "configs" / "synthetic" / "ho_sfl.toml"
ROUNDS = max(ATTACKS) + 2
SETTINGS = [
    f"rounds={ROUNDS}",
    "partition.kind=iid",
    "partition.clients=6",
    "cohort.size=6",
    "evaluation.every=4",
    "run.threads=1",
    "fleet.minimum=4",
    "fleet.join=120.0",
    "fleet.deadline=60.0",
]
BAD, MISFIT, LIAR = 3, 4, 5
"""Numbers of the clients that are no good; those below are the honest nodes that stay."""


@dataclass
class Served:
    """A run that has ended, and who took part or tried to."""

    server: Server
    stranger: Command
    wrong: Command


def node_file(place: Path, port: int, name: str, client: str, secret: str, ca: str = "keys/ca.crt") -> Path:
    """The file of a node; its folder is its own."""
    file = place / f"{name}.toml"
    file.write_text(
        f'client = "{client}"\nserver = "127.0.0.1:{port}"\nca = "{ca}"\nkey = "{secret}"\n'
        f'folder = "{name}"\n[consent]\nsplit = true\n'
    )
    return file


@pytest.fixture(scope="module")
def served(resident: Fleet) -> Iterator[Served]:
    """One run with every bad node there is; it must end by itself, and well."""
    place = resident.place
    bad, misfit, liar = (f"client-{number}" for number in (BAD, MISFIT, LIAR))
    keys.create(place / "keys", (), [bad, misfit, liar, "spare"])
    keys.create(place / "others", (), ["stranger"])
    files = {
        name: node_file(place, resident.port, name, client, secret, ca)
        for name, client, secret, ca in (
            ("attacker", bad, f"keys/nodes/{bad}.key", "keys/ca.crt"),
            ("thief", "client-0", "keys/nodes/spare.key", "keys/ca.crt"),
            ("misfit", misfit, f"keys/nodes/{misfit}.key", "keys/ca.crt"),
            ("liar", liar, f"keys/nodes/{liar}.key", "keys/ca.crt"),
            ("stranger", "client-1", "others/nodes/stranger.key", "keys/ca.crt"),
            ("wrong", "client-2", "keys/nodes/client-2.key", "others/ca.crt"),
        )
    }
    with ExitStack() as stack:
        stack.callback(resident.end_servers)
        for name, node in resident.nodes.items():
            if node.process.poll() is not None:
                resident.start(name)
        server = resident.serve(CONFIG, "bad-run", *SETTINGS)
        bads = (files[name] for name in ("thief", "misfit", "liar", "attacker"))
        line = [sys.executable, bad_node.__file__, *map(str, bads)]
        stack.callback(stop, start(line, ENVIRONMENT, place / "bad.log"))
        stranger, wrong = (Command(place / f"{n}.log", ["node", files[n]]) for n in ("stranger", "wrong"))
        stack.callback(stranger.stop)
        stack.callback(wrong.stop)
        server.finish(600)
        until(lambda: "waiting for" in stranger.text, 60, lambda: stranger.text)
        yield Served(server, stranger, wrong)


def reference(where: Path) -> list[dict]:
    """The run in one process, where the action that was spoiled raises after it was done."""

    def engine(session: Session, meter):
        def spoiled(name, action):
            def act(task, request, memory):
                client, attack = request.values["client"], ATTACKS.get(request.values["round"])
                if client in (MISFIT, LIAR):
                    raise ClientError("never joined")
                reply = action(task, request, memory)
                if client == BAD and attack and attack.action == name and attack.why:
                    raise ClientError(attack.why)
                return reply

            return act

        actions = {name: spoiled(name, action) for name, action in session.algorithm.actions.items()}
        return local_call(session.seen, actions, meter, session.boundaries)

    session = prepare(load(CONFIG, SETTINGS), Engine(", in one process", engine))
    for _ in session.rows(where, resume=False, warn=print):
        pass
    return [json.loads(line) for line in (where / "rounds.jsonl").read_text().splitlines()]


def test_a_run_with_bad_nodes_is_what_the_others_alone_make_of_it(served: Served, tmp_path: Path) -> None:
    """Nine attacks over the wire, one a round; the state after each is that of a client that failed."""
    fleet, alone = served.server.rows, reference(tmp_path / "alone")
    assert len(fleet) == ROUNDS + 1
    same = ("round", "cohort", "loss", "metrics", "examples_seen", "zo_signal", "state_sha256", "replay_ok")
    for row, other in zip(fleet, alone, strict=True):
        assert {name: row.get(name) for name in same} == {name: other.get(name) for name in same}
        assert [f["client"] for f in row["failures"]] == [f["client"] for f in other["failures"]]
    assert rebuild(served.server.out, ROUNDS)["equal"]


@pytest.mark.parametrize("number", ATTACKS)
def test_the_row_of_a_bad_round_names_the_client_and_the_reason(served: Served, number: int) -> None:
    row = served.server.rows[number + 1]
    reasons = {failure["client"]: failure["why"] for failure in row["failures"]}
    assert set(reasons) == {MISFIT, LIAR} | ({BAD} if ATTACKS[number].why else set())
    if ATTACKS[number].why:
        assert re.search(ATTACKS[number].why, reasons[BAD])


def test_an_answer_pushed_twice_and_then_contradicted_counts_once(served: Served) -> None:
    rows = served.server.rows
    assert rows[TWICE + 1]["bytes_up"] == rows[ROUNDS]["bytes_up"]
    assert rows[TWICE + 1]["bytes_up"]["scalars"] == 4 * 2 * 4  # clients x probes x float32
    with closing(ledger.read(served.server.out / "ledger.sqlite")) as book:
        entries = book.entries(TWICE + 1)
    assert sorted(entry.client for entry in entries) == [-1, 0, 1, 2, BAD]


def test_a_bottom_that_rotted_on_a_node_is_replaced_by_a_snapshot(served: Served) -> None:
    """The digest is caught before anything is computed with it, and the client takes part in that round."""
    rows = served.server.rows
    before, after = rows[ROUNDS]["bytes_down"], rows[FLIPPED + 1]["bytes_down"]
    assert "weights" not in before and after["weights"] > 0
    assert rows[FLIPPED + 1]["replay_ok"]


def test_nodes_that_do_not_fit_are_refused_at_the_server_with_the_reason(served: Served) -> None:
    said = served.server.text
    assert re.search(r"refused: client-4: .*the layout: other trainables.*\(here \w+, server \w+\)", said)
    assert re.search(
        r"refused: client-5: .*the direction stream: .*\(here \w+, client-5 000000000000\)", said
    )
    assert "refused: client-0: its key is not the one that was made for this client" in said
    assert re.search(r"connected: client-0, client-1, client-2, client-3\n", said)
    assert "Traceback" not in said


def test_a_key_that_nobody_registered_keeps_waiting_and_says_why(served: Served) -> None:
    said = served.stranger.text
    assert "not let in: either its key is not registered" in said
    assert served.stranger.process.poll() is None
    assert "stranger" not in served.server.text


def test_a_server_that_another_authority_vouches_for_is_not_spoken_to(served: Served) -> None:
    assert served.wrong.process.wait(30) == 2
    lines = [line for line in served.wrong.text.splitlines() if "hofl:" in line]
    assert len(lines) == 1 and "not signed by this node's ca" in lines[0]
    assert "Traceback" not in served.wrong.text


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["server", CONFIG, "--host", "0.0.0.0"], "can be reached from other machines: give --keys"),
        (["server", CONFIG, "--host", "0.0.0.0", "--insecure"], "--host 0.0.0.0 can be reached from other"),
        (["server", CONFIG], "--keys is missing"),
        (["node", "plain.toml"], 'server = "192.0.2.1:9092": is another machine, which is reached over TLS'),
    ],
)
def test_what_would_be_open_to_others_does_not_start(command, line, tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text('client = "a"\nserver = "192.0.2.1:9092"\n')
    done = subprocess.run(
        [sys.executable, "-m", "hofl", *map(str, command)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and line in done.stderr
    assert not done.stdout and sorted(os.listdir(tmp_path)) == ["plain.toml"]
