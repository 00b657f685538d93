# SPDX-License-Identifier: Apache-2.0
"""How rounds and runs end badly: divergence, void rounds, failing clients, weak signals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from hofl.algorithms import ALGORITHMS
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import RunFailed
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Outcome, Replies
from hofl.protocol.probing import Probing, Shared
from hofl.protocol.split import Split
from hofl.runtime import checkpoint, totals
from hofl.runtime.local import local_call
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter
from hofl.runtime.rows import read_rows


def strict(path: Path) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("start", "classes", "loss", "why"),
    [
        (0.01, 3, 10.9, None),
        (0.01, 3, 11.0, "its loss 11 is over 10 times the 1.099 of a guess"),
        (2.0, 3, 19.9, None),
        (2.0, 3, 20.1, "its loss 20.1 is over 10 times the 2 before training"),
        (None, 3, 1e9, None),
    ],
)
def test_what_a_loss_is_held_against(start: float | None, classes: int, loss: float, why: str | None) -> None:
    outcome = Outcome(Record({}), (), {"loss": loss})
    assert totals.divergence(outcome, start, 10.0, classes) == why


def test_divergence_and_failure_leave_a_summary(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"round 2: diverged: its loss is inf; the model of round 1 is in"):
        list(
            tiny_run.rows_of(
                tiny_run.counting(lambda r: {"loss": float("inf") if r == 2 else 1.0}), tmp_path / "a", 4
            )
        )
    summary, rows = strict(tmp_path / "a" / "summary.json"), list(read_rows(tmp_path / "a" / "rounds.jsonl"))
    assert (summary["status"], summary["diverged_round"], summary["rounds"]) == ("diverged", 2, 1)
    assert summary["metric"]["value"] is None and summary["final_sha256"] == rows[1]["state_sha256"]
    assert rows[2]["loss"] is None and rows[2]["diverged"] == "its loss is inf"
    assert checkpoint.load(tmp_path / "a" / "checkpoint")[1]["round"] == 1


@pytest.mark.parametrize(("loss", "status"), [(14.0, "done"), (14.2, "diverged")])  # 1.409 before training
def test_loss_that_grows(tmp_path: Path, loss: float, status: str) -> None:
    rows = tiny_run.rows_of(
        tiny_run.counting(lambda r: {"loss": loss if r == 3 else 1.0}), tmp_path / "run", 3
    )
    if status == "diverged":
        with pytest.raises(RunFailed, match=r"over 10 times the 1\.409 before training"):
            list(rows)
    else:
        list(rows)
    assert strict(tmp_path / "run" / "summary.json")["status"] == status


def test_real_divergence(tmp_path: Path) -> None:
    """CASES C67: a learning rate that blows up ends with its status and the round, the checkpoint finite."""
    with pytest.raises(RunFailed, match=r"round \d+: "):
        tiny_run.finish(tmp_path / "run", 8, lr=1e30)
    summary = strict(tmp_path / "run" / "summary.json")
    assert summary["status"] == "diverged" and summary["diverged_round"] == summary["rounds"] + 1
    assert checkpoint.is_finite(checkpoint.load(tmp_path / "run" / "checkpoint")[0])


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 3e38) for name in ("ho_sfl", "decomfl", "hiso", "fedavg", "splitfed_v2", "heron_sfl")),
        *((name, 1e20) for name in ("ho_sfl", "decomfl", "splitfed_v1", "heron_sfl")),
    ],
)
@pytest.mark.parametrize("optimizer", [Optimizer("sgd", 0.01), Optimizer("adamw", 1e-3)])
def test_one_clients_huge_numbers_never_reach_a_state(
    tmp_path: Path, name: str, number: float, optimizer: Optimizer
) -> None:
    """3e38 is a float32, and a sixth of it, times a learning rate, would be a finite weight."""
    task = tiny_run.tiny_task()
    training = Training(5, 1, 5, optimizer, (1,) * len(task.clients), run="huge")
    probing = Probing("central", 2, 1e-2, "gaussian", optimizer)
    cuts = (1,) * len(task.clients)
    given = {"layout": task.model.layout, "boundaries": cuts, "training": training, "probing": probing}
    algorithm = ALGORITHMS[name].build(**given, preferred=None, split=Split(task), shared=Shared())
    whole = local_call(task, algorithm.actions)

    def huge(action: str, requests: Any, deadline: float | None) -> Replies:
        replies = whole(action, requests, deadline)
        reply = replies.records.get(1)
        if reply is not None:
            sent = {n: np.full_like(a, number) for n, a in reply.arrays.items() if a.dtype == np.float32}
            replies.records[1] = Record({**reply.arrays, **sent}, reply.values)
        return replies

    everyone = list(range(len(task.clients)))
    parts = Parts(task, algorithm, huge, Meter(), lambda round, attempt, state: everyone, print)
    rows = list(run(parts, tmp_path / "run", tiny_run.settings(3)))
    assert [[f["client"] for f in row["failures"]] for row in rows] == [[], [1], [1], [1]]
    assert all("finite" in f["why"] for row in rows for f in row["failures"])
    state, start = (checkpoint.load(tmp_path / "run" / n)[0] for n in ("checkpoint", "initial.safetensors"))
    moved = state.arrays["weights/vector"] - start.arrays["weights/vector"]
    assert 0 < np.abs(moved).max() < 1


def test_void_rounds_are_repeated_and_logged(tmp_path: Path) -> None:
    tries: list[int] = []

    def fail(number: int) -> bool:
        tries.append(number)
        return number == 2 and tries.count(2) < 3

    rows = list(tiny_run.rows_of(tiny_run.counting(fail=fail), tmp_path / "run", 3))
    assert tries == [1, 2, 2, 2, 3] and rows[2]["cohort"] == tiny_run.draw(2, 2)


def test_all_clients_failing_ends_the_run(tmp_path: Path) -> None:
    def boom(task: Any, request: Any, memory: Any) -> Any:
        raise ValueError("boom")

    algorithm = tiny_run.counting()._replace(actions={"add": boom})
    with pytest.raises(
        RunFailed, match=r"round 1: all of clients .* failed: ValueError: boom \(test_endings.py:"
    ):
        list(tiny_run.rows_of(algorithm, tmp_path / "run", 3))
    summary = strict(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed" and summary["failures"] == 9 and "boom" in summary["error"]


def test_one_failing_client_is_in_the_row_and_the_rest_go_on(tmp_path: Path) -> None:
    plain = tiny_run.counting()

    def boom(task: Any, request: Any, memory: Any) -> Any:
        if request.values["client"] == 3:
            raise ValueError("boom")
        return plain.actions["add"](task, request, memory)

    rows = list(tiny_run.rows_of(plain._replace(actions={"add": boom}), tmp_path / "run", 5))
    hit = [r for r in rows if 3 in r["cohort"]]
    assert hit and all(f["client"] == 3 and f["attempt"] == 0 for r in hit for f in r["failures"])
    assert all(len(r["failures"]) == (3 in r["cohort"]) for r in rows)
    assert strict(tmp_path / "run" / "summary.json")["failures"] == len(hit)


@pytest.mark.parametrize(
    ("signals", "count"), [({1: 0.03, 2: 0.04}, 1), ({1: 0.9}, 0), ({5: 0.1}, 0), ({3: 0.49}, 1)]
)
def test_weak_signal_warns_once(tmp_path: Path, signals: dict[int, float], count: int) -> None:
    said: list[str] = []
    algorithm = tiny_run.counting(lambda r: {"zo_signal": signals.get(r)})
    list(tiny_run.rows_of(algorithm, tmp_path / "run", 5, warn=said.append, radius=1e-3))
    assert len(said) == count
    if 1 in signals and count:
        assert said[0].startswith(
            "zo_signal 0.03 in round 1: at radius 0.001 the finite differences are mostly"
        )
        assert 'zo.estimator = "tangent"' in said[0]
