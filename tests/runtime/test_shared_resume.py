# SPDX-License-Identifier: Apache-2.0
"""Runs of the methods whose clients share steps, stopped and resumed: the clients' memory is gone."""

from pathlib import Path

import pytest
import tiny_run

from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.hiso import hiso
from hofl.algorithms.ho_sfl import ho_sfl
from hofl.core.optimizers import Optimizer
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.protocol.probing import Probing, Shared
from hofl.protocol.split import Split
from hofl.runtime import checkpoint, ledger
from hofl.runtime.local import local_call
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task

SGD, MOMENTUM = Optimizer("sgd", 0.05), Optimizer("sgd", 0.05, momentum=0.5)
METHODS = ("decomfl", "decomfl-models", "hiso", "ho_sfl")


def method(name: str, task: Task) -> Algorithm:
    optimizer = SGD if name == "hiso" else MOMENTUM
    setup = Training(tiny_run.SEED, 2, 5, optimizer, [len(shard) for shard in task.shards])
    probing, layout = Probing("forward", 1, 1e-3, "gaussian", optimizer), task.model.layout
    if name == "ho_sfl":
        return ho_sfl(layout, (1,) * len(task.clients), setup, probing, Split(task))
    shared = Shared(average="models" if name == "decomfl-models" else "scalars")
    return {"decomfl": decomfl, "hiso": hiso}[name.partition("-")[0]](layout, setup, probing, shared)


def session(name: str, where: Path, stop: int | None) -> None:
    """A process's worth of a run of five rounds, dead after round ``stop``."""
    task, meter = tiny_run.tiny_task(), Meter()
    algorithm = method(name, task)
    call = local_call(task, algorithm.actions, meter)
    parts = Parts(task, algorithm, call, meter, tiny_run.draw, print)
    rows = run(parts, where, tiny_run.settings(5), resume=where.exists())
    for row in rows:
        if row["round"] == stop:
            break
    rows.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_straight_run(tmp_path: Path, name: str) -> None:
    """Every row but for the bytes: who has forgotten what it held asks for a snapshot."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    session(name, straight, None)
    for stop in (2, 3, None):
        session(name, stopped, stop)
    (rows, summary), (others, other) = tiny_run.timeless(straight), tiny_run.timeless(stopped)
    fewer, more = ([sum(row.pop("bytes_down").values()) for row in part] for part in (rows, others))
    ups, others_ups = ([row.pop("bytes_up") for row in part] for part in (rows, others))
    assert rows == others
    assert len({row["state_sha256"] for row in rows}) == 6
    assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert (fewer == more) == (ups == others_ups) == (name == "decomfl-models")  # it asks before it gets one
    summaries = [{k: v for k, v in s.items() if not k.startswith("bytes_")} for s in (summary, other)]
    assert summaries[0] == summaries[1]
    finals = [(where / "final.safetensors").read_bytes() for where in (straight, stopped)]
    assert finals[0] == finals[1]


@pytest.mark.parametrize("name", METHODS)
def test_a_replay_of_the_ledger_gives_each_round(tmp_path: Path, name: str) -> None:
    session(name, tmp_path / "run", None)
    rows = tiny_run.timeless_rows(tmp_path / "run")
    for number in (1, 5):
        state = ledger.replay(tmp_path / "run", number, method(name, tiny_run.tiny_task()))
        assert checkpoint.state_sha256(state) == rows[number]["state_sha256"]
