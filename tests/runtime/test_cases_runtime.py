# SPDX-License-Identifier: Apache-2.0
"""Reports from the field on runs: data, what is said, devices (C13, C26, C39, C47, C48, C53, C78)."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import killed_run
import numpy as np
import pytest
import tiny_run
import torch

from hofl.algorithms import ALGORITHMS
from hofl.build_task import node_task
from hofl.cli import main
from hofl.commands.describe import describe, line, result
from hofl.config import load, parse
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ConfigError, RunFailed
from hofl.protocol.aggregate import Training, advance
from hofl.protocol.base import Entry, Outcome, Replies
from hofl.report.tables import Table
from hofl.runtime import checkpoint, totals
from hofl.runtime.local import local_call
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter
from hofl.session import prepare
from hofl.tasks.base import Task
from hofl.tasks.metrics import Sums

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
STATM = Path("/proc/self/statm")


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in {text}")

    return json.loads(text, parse_constant=refuse)


# --- order of data


def noting(where: Path, rounds: int, ids: Path, *, resume: bool = False, lost: int = 0) -> None:
    """A run of 3 steps of 4 on 10 examples a client, so that rounds end within a pass; notes what is read.

    Args:
        where: the run folder.
        rounds: in all.
        ids: gets a line for each batch, the numbers of its examples.
        resume: go on.
        lost: the round in which the process kills itself after its first client.
    """
    task = tiny_run.tiny_task()
    collate = task.collate

    def noted(numbers: Any) -> Any:
        with ids.open("a") as file:
            file.write(json.dumps([int(n) for n in numbers]) + "\n")
        return collate(numbers)

    task = replace(task, collate=noted)
    training = Training(tiny_run.SEED, 3, 4, Optimizer("sgd", 0.05), [len(s) for s in task.shards])
    algorithm = ALGORITHMS["fedavg"].build(layout=task.model.layout, training=training)
    meter = Meter()
    call = killed_run.dying_client(lost)(local_call(task, algorithm.actions, meter))
    parts = Parts(task, algorithm, call, meter, tiny_run.draw, print)
    for _ in run(parts, where, tiny_run.settings(rounds, evaluate_every=20), resume=resume):
        pass


def test_c13_a_resumed_run_reads_the_examples_of_a_straight_one(tmp_path: Path) -> None:
    """10 rounds, or 5, SIGKILL in the sixth and a new process: examples, scalars and final bits."""
    noting(tmp_path / "straight", 10, tmp_path / "straight.ids")
    command = [sys.executable, __file__, str(tmp_path / "killed"), str(tmp_path / "killed.ids")]
    died = subprocess.run([*command, "6"], capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    before = (tmp_path / "killed.ids").read_text().splitlines()
    (tmp_path / "killed.ids").unlink()
    subprocess.run([*command, "0"], check=True, capture_output=True)
    after = (tmp_path / "killed.ids").read_text().splitlines()
    straight = (tmp_path / "straight.ids").read_text().splitlines()
    rounds = 3 * 3  # three clients, three steps
    assert len(straight) == 10 * rounds and len(set(straight)) > 6 * rounds
    assert before[: 5 * rounds] + after == straight
    assert len(before) == 5 * rounds + 3 and before[5 * rounds :] == after[:3]  # of the round that was lost
    assert tiny_run.timeless(tmp_path / "killed") == tiny_run.timeless(tmp_path / "straight")


# --- what a run says of itself


@pytest.mark.parametrize(
    ("name", "paradigm", "top", "labels"),
    [
        ("ho_fl", "federated", "clients", "clients"),
        ("ho_sfl", "split", "server: one for all clients, their gradients averaged", "clients and server"),
        (
            "splitfed_v1",
            "split",
            "server: a replica for each client of a round, then averaged",
            "clients and",
        ),
        ("splitfed_v2", "split", "server: one", "clients and server"),
    ],
)
def test_c26_first_lines_and_manifest_say_where_each_half_lives(
    tmp_path: Path, name: str, paradigm: str, top: str, labels: str
) -> None:
    session = prepare(load(SYNTHETIC / f"{name}.toml", ["rounds=1"]))
    said = list(describe(session))
    assert str(said[0]).startswith(f"mode: {paradigm}")
    assert str(said[3]).startswith(f"labels: at the {labels}")
    assert str(said[4]).startswith(f"top: at the {top}") == (paradigm == "split")
    (halves,) = (p for p in said if isinstance(p, Table) and p.title.startswith("boundaries: blocks below"))
    assert {int(row[0]) for row in halves.rows} == set(session.cuts)
    list(session.rows(tmp_path / "run", resume=False, warn=print))
    manifest = strict((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["mode"].startswith(paradigm) and manifest["top_at"].startswith(top)
    assert manifest["labels_at"].startswith(labels)


def test_c26_accuracy_majority_and_balanced_accuracy_are_shown_together() -> None:
    """Labels 67/33 and a constant answer, in a round's line and in the result."""
    logits = torch.zeros(100, 2)
    logits[:, 0] = 1.0
    metrics = Sums.from_logits(logits, torch.tensor([0] * 67 + [1] * 33)).to_row()
    row = row_of(metrics)
    assert "accuracy 0.670  (balanced 0.500, n 100)" in line(row, 1)
    counted = totals.Totals()
    counted.add(row)
    settings = tiny_run.settings(1)
    shown = dict(result(totals.summary(settings, "synthetic", counted, 0, "0" * 64, {"status": "done"})).rows)
    (accuracy,) = (value for name, value in shown.items() if name.startswith("accuracy of the final model"))
    assert (accuracy, shown["majority class"], shown["balanced accuracy"]) == ("0.670", "0.670", "0.500")


def row_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A row of round 0 with these metrics."""
    columns = {
        "bytes_up": {},
        "bytes_down": {},
        "seconds": {"clients": 0.0, "server": 0.0, "evaluate": 0.0, "save": 0.0},
        "failures": [],
        "peak_bytes": None,
        "client_peak_bytes": None,
    }
    return totals.make_row(0, [], Outcome(Record({}), (), {}), 0, columns) | {"metrics": dict(metrics)}


# --- clients without examples


def test_c39_an_empty_client_has_no_weight_and_is_never_asked(tmp_path: Path) -> None:
    """Weights (0, 5): the state moves by the second client's update alone."""
    (tmp_path / "idle.csv").write_text("sentence,label\n")
    (tmp_path / "work.csv").write_text("sentence,label\n" + "good,1\nbad,0\n" * 2 + "fine,1\n")
    given = f'train = "{tmp_path}/*.csv"\nevaluation = "{tmp_path}/work.csv"\nlength = 16\n'
    text = f'algorithm = "fedavg"\nrounds = 2\n[model]\nsource = "tiny:llama"\n[task]\n{given}'
    cohort = '[partition]\nkind = "files"\n[cohort]\nsize = "all"\nweighting = "examples"\n'
    session = prepare(parse(f"{text}{cohort}[optimizer]\nlr = 0.01\n", "x"))
    assert session.task.clients == ("idle", "work") and [len(s) for s in session.task.shards] == [0, 5]
    assert any("1 clients hold no data and are never drawn" in str(part) for part in describe(session))
    state = session.algorithm.init(session.task.model.read())
    call = local_call(session.seen, session.algorithm.actions)
    outcome = session.algorithm.round(state, session.draw(1), call)
    (entry,) = outcome.entries
    assert entry.client == 1 and entry.plan.values["weight"] == 5.0
    expected = state.arrays["weights/vector"] + entry.reply.arrays["weights/delta"]
    assert np.array_equal(outcome.state.arrays["weights/vector"], expected) and expected.any()
    rows = list(session.rows(tmp_path / "run", resume=False, warn=print))
    assert [row["cohort"] for row in rows] == [[], [1], [1]]
    for row in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        found = strict(row)
        assert found["metrics"] is None or found["metrics"]["n"] == 5


def without_examples(rounds: Mapping[int, int], states: list[tuple[int, int, str]]) -> Parts:
    """FedAvg whose clients say, in some rounds and for so many attempts, that they used no example."""
    task, meter, tried = tiny_run.tiny_task(), Meter(), dict[int, int]()
    algorithm = tiny_run.tiny_algorithm(task, "fedavg")
    whole = local_call(task, algorithm.actions, meter)

    def call(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = whole(action, requests, deadline)
        number = next(iter(requests.values())).values["round"] + 1
        tried[number] = tried.get(number, 0) + 1
        if tried[number] <= rounds.get(number, 0):
            empty = {i: Record(r.arrays, {**r.values, "examples": 0}) for i, r in replies.records.items()}
            return Replies(empty, replies.failures)
        return replies

    def draw(number: int, attempt: int, state: Record) -> list[int]:
        states.append((number, attempt, checkpoint.state_sha256(state)))
        return tiny_run.draw(number, attempt)

    return Parts(task, algorithm, call, meter, draw, print)


def test_c39_a_round_without_an_example_changes_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    """Weights (0, 0, 0): the round is listed with the reason, the next attempt starts from the same bits."""
    states: list[tuple[int, int, str]] = []
    rows = list(run(without_examples({2: 1}, states), tmp_path / "run", tiny_run.settings(3)))
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert [(f["attempt"], f["client"]) for f in rows[2]["failures"]] == [
        (0, client) for client in sorted(tiny_run.draw(2, 0))
    ]
    assert all(f["why"] == "refused: reply counts 0 examples, expected 1 to 10" for f in rows[2]["failures"])
    assert [each[:2] for each in states] == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert states[1][2] == states[2][2] == rows[1]["state_sha256"] != rows[2]["state_sha256"]
    for row in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        strict(row)


def test_c39_a_run_whose_clients_never_have_an_example_keeps_the_last_weights(tmp_path: Path) -> None:
    """After three attempts it ends by name, with the model of the round before."""
    with pytest.raises(RunFailed, match=r"round 2: all of clients .* reply counts 0 examples"):
        list(run(without_examples({2: 3}, []), tmp_path / "run", tiny_run.settings(3)))
    summary = strict((tmp_path / "run" / "summary.json").read_text())
    rows = [strict(row) for row in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert (summary["status"], summary["rounds"]) == ("failed", 1)
    assert summary["final_sha256"] == rows[1]["state_sha256"]


# --- clients that fail


def test_c53_a_failing_client_is_named_and_a_run_of_failing_ones_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Client, round, type, message and the last line of our code, on standard error and in the folder."""
    batch, who = Task.batch, {3}

    def failing(self: Task, client: int, position: int, size: int) -> Any:
        if client in who and size > 2:  # with 2 the server proves its cut before the run
            raise ValueError("boom")
        return batch(self, client, position, size)

    def command(where: str) -> int:
        config = str(SYNTHETIC / "fedavg.toml")
        with pytest.raises(SystemExit) as left:
            main(["run", config, "rounds=3", "cohort.size=all", "--out", str(tmp_path / where)])
        return int(left.value.code or 0)

    monkeypatch.setattr(Task, "batch", failing)
    place = r"ValueError: boom \(test_cases_runtime\.py:\d+ in failing\)"
    assert command("one") == 0
    assert re.search(rf"^round 1: client 3: {place}$", capsys.readouterr().err, re.MULTILINE)
    traces = (tmp_path / "one" / "failures.log").read_text()
    assert traces.count("Traceback (most recent call last)") == traces.count("ValueError: boom") == 3
    assert traces.startswith("round 1\n\nclient 3\n") and 'raise ValueError("boom")' in traces
    assert str(Path.home()) + os.sep not in traces
    rows = [strict(row) for row in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()]
    assert [[f["client"] for f in row["failures"]] for row in rows] == [[], [3], [3], [3]]
    assert re.fullmatch(place, rows[1]["failures"][0]["why"])
    who.update(range(100))
    assert command("all") == 1
    assert re.search(rf"hofl: round 1: all of clients 0, 1, .* failed: {place}", capsys.readouterr().err)
    assert len((tmp_path / "all" / "rounds.jsonl").read_text().splitlines()) == 1  # of round 0


# --- one machine


def test_c47_clients_of_one_process_share_its_memory_one_after_the_other() -> None:
    """Each holds what it allocates until it answers: no second one begins before."""
    alive, most = [0], [0]

    def allocating(task: Any, request: Record, memory: Any) -> Record:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        taken = np.ones(1 << 20)
        alive[0] -= 1
        return Record({}, {"client": request.values["client"], "sum": float(taken[0])})

    requests = {client: Record({}, {"client": client}) for client in range(8)}
    replies = local_call(tiny_run.tiny_task(), {"do": allocating})("do", requests, None)
    assert len(replies.records) == 8 and most == [1]


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="the resident set is read from /proc")
def test_c47_fifty_rounds_stay_flat_and_a_second_run_in_the_process_is_the_first(tmp_path: Path) -> None:
    """Resident bytes after round 50 at most 1.05 times those after round 5."""

    def rounds(where: Path) -> Iterator[int]:
        for _ in run(tiny_run.parts(), where, tiny_run.settings(50, evaluate_every=10)):
            yield resident()

    found = list(rounds(tmp_path / "one"))
    assert len(found) == 51 and found[50] <= 1.05 * found[5]
    again = list(rounds(tmp_path / "two"))
    assert again[50] <= 1.05 * found[50]
    assert tiny_run.timeless(tmp_path / "one") == tiny_run.timeless(tmp_path / "two")


def hofl(place: Path, *arguments: str) -> tuple[int, str, float]:
    """The command in a process that sees no device: exit code, standard error and seconds of a processor."""
    shown = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hofl", "run", str(SYNTHETIC / "fedavg.toml"), *arguments]
    done = subprocess.run(command, cwd=place, env=shown, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stderr, seconds


def test_c48_cuda_that_is_hidden_is_refused_at_once_and_auto_says_cpu(tmp_path: Path) -> None:
    code, said, seconds = hofl(tmp_path, "model.device=cuda", "--out", "refused")
    assert code == 2 and "CUDA_VISIBLE_DEVICES is ''" in said and said.count("\n") == 1
    assert seconds <= 10  # nearly all of it the import of PyTorch; on a busy machine a clock says anything
    assert not (tmp_path / "refused").exists()
    code, said, _ = hofl(tmp_path, "rounds=1", "--out", "auto")
    assert code == 0, said
    manifest = strict((tmp_path / "auto" / "manifest.json").read_text())
    assert (manifest["hardware"]["device"], manifest["hardware"]["accelerator"]) == ("cpu", None)


def test_c48_a_node_says_the_same_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"no CUDA device is visible .*CUDA_VISIBLE_DEVICES is ''"):
        node_task(load(SYNTHETIC / "fedavg.toml"), "client-0", device="cuda")


# --- cohorts


@pytest.mark.parametrize(
    ("size", "clients", "said"), [('"all"', 10, "10 of 10"), ('"50%"', 5, "3 of 5"), ("4", 10, "4 of 10")]
)
def test_c78_one_setting_says_how_many_and_the_plan_is_shown(size: str, clients: int, said: str) -> None:
    given = [f"cohort.size={size}", f"partition.clients={clients}", "partition.minimum=1"]
    session = prepare(load(SYNTHETIC / "fedavg.toml", given))
    assert any(str(part).startswith(f"cohort: {said} clients") for part in describe(session))
    for number in range(1, 9):
        assert len(set(session.draw(number))) == int(said.split()[0])


@pytest.mark.parametrize("size", ["0", "11", '"0%"', '"101%"', '"half"', "-1"])
def test_c78_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=r"cohort\.size = .*must be "):
        prepare(load(SYNTHETIC / "fedavg.toml", [f"cohort.size={size}", "partition.clients=10"]))


def test_c78_weights_by_examples() -> None:
    """Weights .4, .3 and .3: of (1, 2, 3) that is 1.9, where equal ones give 2."""
    state = Record({"weights/vector": np.zeros(1, np.float32), "cursors/next": np.zeros(3, np.int64)})
    state = Record(state.arrays, {"round": 0})
    for weights, mean in (((4.0, 3.0, 3.0), 1.9), ((1.0, 1.0, 1.0), 2.0)):
        plans = [Record({}, {"weight": weight, "position": 0, "steps": 1}) for weight in weights]
        entries = [Entry(client, plan, Record({})) for client, plan in enumerate(plans)]
        moved = advance(state, [(e, np.full(1, e.client + 1, np.float32)) for e in entries])
        assert moved.arrays["weights/vector"].tolist() == [np.float32(mean)]


if __name__ == "__main__":  # of C13: FOLDER IDS ROUND, the round in which to die, 0 to resume
    folder, noted_in, dies = sys.argv[1:]
    noting(Path(folder), 10, Path(noted_in), resume=dies == "0", lost=int(dies))
