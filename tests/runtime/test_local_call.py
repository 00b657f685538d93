# SPDX-License-Identifier: Apache-2.0
"""The in-process runtime: bytes cross, clients fail alone, and every byte is counted."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

from hofl.core.record import CATEGORIES, Record
from hofl.errors import ClientError, ConfigError, DataError, ModelError, RecordError
from hofl.protocol.base import Replies, RoundVoid
from hofl.runtime import tracked
from hofl.runtime.local import MESSAGE_LIMIT, explain, local_call, redact
from hofl.runtime.loop import Parts, run
from hofl.runtime.meter import Meter, metered


@pytest.fixture(scope="module")
def task() -> Any:
    return tiny_run.tiny_task()


def asked(*clients: int) -> dict[int, Record]:
    return {c: Record({"weights/x": np.arange(3, dtype=np.float32)}, {"client": c}) for c in clients}


def echo(task: Any, request: Record, memory: Any) -> Record:
    return Record({"scalars/s": request.arrays["weights/x"][:1]}, request.values)


def failing(error: BaseException, client: int = 3) -> Any:
    def action(task: Any, request: Record, memory: Any) -> Record:
        if request.values["client"] == client:
            raise error
        return echo(task, request, memory)

    return action


def test_clients_run_in_order_of_their_number_on_copies(task: Any) -> None:
    seen: list[int] = []

    def action(task: Any, request: Record, memory: Any) -> Record:
        seen.append(request.values["client"])
        request.arrays["weights/x"][:] = 9.0
        return echo(task, request, memory)

    requests = asked(4, 1, 3)
    replies = local_call(task, {"do": action})("do", requests, None)
    assert seen == [1, 3, 4] == list(replies.records)
    assert all(r.arrays["weights/x"].tolist() == [0, 1, 2] for r in requests.values())


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (ValueError("boom"), "ValueError: boom (test_local_call.py:"),
        (ClientError("non-finite loss"), "ClientError: non-finite loss (test_local_call.py:"),
        (RecordError("array 'x' is missing"), "RecordError: array 'x' is missing (test_local_call.py:"),
        (MemoryError(), "MemoryError:  (test_local_call.py:"),
        (KeyError("steps"), "KeyError: 'steps' (test_local_call.py:"),
    ],
)
def test_a_failing_client_is_absent_and_explained(task: Any, error: Exception, start: str) -> None:
    """C53."""
    replies = local_call(task, {"do": failing(error)})("do", asked(1, 3, 5), None)
    assert list(replies.records) == [1, 5]
    assert replies.failures[3].startswith(start)
    assert replies.failures[3].endswith(" in action)")


@pytest.mark.parametrize(
    "interrupt",
    [KeyboardInterrupt(), SystemExit(3), ConfigError("zo"), ModelError("no rule"), DataError("gone")],
)
def test_an_interrupt_or_a_setting_is_no_client_failure(task: Any, interrupt: BaseException) -> None:
    with pytest.raises(type(interrupt)):
        local_call(task, {"do": failing(interrupt)})("do", asked(1, 3), None)


@pytest.mark.parametrize(
    "reply",
    [Record({"nonsense/x": np.zeros(1)}), Record({}, {"loss": float("nan")}), None],
    ids=["category", "nan", "none"],
)
def test_a_reply_that_is_no_message_is_a_failure(task: Any, reply: Any) -> None:
    meter = Meter()
    replies = local_call(task, {"do": lambda task, request, memory: reply}, meter)("do", asked(0), None)
    assert replies.records == {} and list(replies.failures) == [0]
    assert not meter.up and meter.down


def test_a_request_that_is_no_message_is_the_servers_fault(task: Any) -> None:
    with pytest.raises(RecordError, match="finite JSON"):
        local_call(task, {"do": echo})("do", {0: Record({}, {"radius": float("inf")})}, None)


def test_a_late_client_is_absent_by_its_own_time(task: Any) -> None:
    def action(task: Any, request: Record, memory: Any) -> Record:
        time.sleep(0.06 if request.values["client"] == 1 else 0.0)
        return echo(task, request, memory)

    replies = local_call(task, {"do": action})("do", asked(0, 1, 2), 0.05)
    assert list(replies.records) == [0, 2]
    assert "late: took 0.1 s, the deadline is 0.05 s" in replies.failures[1]


def test_last_frame_is_the_users_not_a_librarys() -> None:
    try:
        np.zeros(3).reshape(2, 2)
    except ValueError as error:
        assert "(test_local_call.py:" in explain(error)
    try:
        np.linalg.inv(np.zeros((2, 2)))
    except np.linalg.LinAlgError as error:
        assert "(test_local_call.py:" in explain(error)


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canarycanary")
    text = "could not convert 'the canary sings at dawn' with hf_canarycanary at https://me:pw@host "
    text += f"{Path.home()}/x\x1b[2J\n<b>"
    line = redact(text)
    for secret in ("canary", "pw@", str(Path.home()) + "/", "\x1b", "\n"):
        assert secret not in line
    assert line.startswith("could not convert '...' with <HF_TOKEN> at https://<redacted>@host ~/x")


@pytest.mark.parametrize("length", [MESSAGE_LIMIT, MESSAGE_LIMIT + 1, 10**6])
def test_messages_are_cut(length: int) -> None:
    assert len(redact("x" * length)) == MESSAGE_LIMIT


def test_counted_bytes_are_those_of_the_blobs(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES C79: a counting transport and the meter agree exactly, in both directions and in sum."""
    crossed: Counter[str] = Counter()
    original = Record.from_bytes.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, blob: bytes) -> Record:
        crossed["blobs"] += 1
        crossed["bytes"] += len(blob)
        return original(cls, blob)  # type: ignore[no-any-return]

    monkeypatch.setattr(Record, "from_bytes", classmethod(counted))
    meter = Meter()
    algorithm = tiny_run.tiny_algorithm(task)
    state = algorithm.init(task.model.read())
    call = metered(local_call(task, algorithm.actions, meter), meter)
    outcome = algorithm.round(state, [0, 1, 2], call)
    up, down, seconds = meter.take()
    assert crossed["blobs"] == 6 and sum(up.values()) + sum(down.values()) == crossed["bytes"]
    assert sum(up.values()) == sum(len(e.reply.to_bytes()) for e in outcome.entries)
    assert up["scalars"] == 4 * 2 * 2 * 2 and down["seeds"] == 2 * 16  # two clients with a bottom, E = q = 2
    assert down["weights"] == 3 * 4 * task.model.layout.size
    assert set(up) | set(down) <= {*CATEGORIES, "headers"} and seconds > 0
    assert meter.take() == ({}, {}, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_reply_order_and_foreign_replies_do_not_matter(seed: int) -> None:
    """CASES C11: 1e8, 1, -1e8 in any order; a reply of a client not asked never enters."""
    values = {0: 1e8, 1: 1.0, 2: -1e8, 7: 5.0}
    order = np.random.Generator(np.random.PCG64(seed)).permutation(list(values))

    def scrambled(action: str, requests: Any, deadline: Any) -> Replies:
        return Replies({int(c): Record({}, {"v": values[int(c)]}) for c in order}, {})

    replies = metered(scrambled, Meter())("do", asked(2, 0, 1, 4), None)
    assert list(replies.records) == [0, 1, 2]
    assert replies.failures == {4: "no reply", 7: "not asked: its reply is dropped"}


@pytest.mark.parametrize("name", ["ho_fl", "fedavg"])
def test_shuffled_replies_give_the_same_round(task: Any, name: str) -> None:
    algorithm = tiny_run.tiny_algorithm(task, name)
    state = algorithm.init(np.array(task.model.read()))
    call = local_call(task, algorithm.actions)

    def backwards(*arguments: Any) -> Replies:
        replies = call(*arguments)
        return Replies(dict(reversed(replies.records.items())), replies.failures)

    vectors = [
        algorithm.round(state, cohort, metered(c, Meter())).state.arrays["weights/vector"]
        for c, cohort in ((call, [0, 1, 2]), (backwards, [2, 0, 1]))
    ]
    assert vectors[0].tobytes() == vectors[1].tobytes()


def test_all_clients_failing_voids_the_round(task: Any) -> None:
    algorithm = tiny_run.tiny_algorithm(task)
    call = local_call(task, {"local_steps": failing(ValueError("boom"), client=1)})
    with pytest.raises(RoundVoid) as void:
        algorithm.round(algorithm.init(task.model.read()), [1], call)
    assert "boom" in void.value.failures[1]


def test_one_model_serves_all(task: Any) -> None:
    """CASES C63: the parameters stay where they are through a round of many clients."""
    before = [p.data_ptr() for p in task.model.module.parameters()]
    algorithm = tiny_run.tiny_algorithm(task)
    algorithm.round(algorithm.init(task.model.read()), range(6), local_call(task, algorithm.actions))
    assert [p.data_ptr() for p in task.model.module.parameters()] == before


@pytest.mark.parametrize("name", ["ho_fl", "fedavg"])
def test_measuring_clients_changes_no_bit(tmp_path: Path, name: str) -> None:
    """The loop asks its own meter; a call that reports to another one is not watched."""
    ends = {}
    for watched in (True, False):
        task = tiny_run.tiny_task()
        algorithm, meter = tiny_run.tiny_algorithm(task, name), Meter()
        call = local_call(task, algorithm.actions, meter if watched else Meter())
        parts = Parts(task, algorithm, call, meter, tiny_run.draw, print)
        rows = list(run(parts, tmp_path / str(watched), tiny_run.settings()))
        summary = json.loads((tmp_path / str(watched) / "summary.json").read_text())
        ends[watched] = [row["client_peak_bytes"] for row in rows], summary
    assert ends[True][1]["final_sha256"] == ends[False][1]["final_sha256"]
    assert ends[False][0] == [None] * 5 and ends[False][1]["client_peak_bytes"] is None
    peaks, summary = ends[True]
    assert peaks[0] is None and summary["client_peak_bytes"] == max(p for p in peaks if p)
    assert peaks[1] > tracked.resident_bytes(task.model, None)


def test_a_boundary_is_measured_in_the_first_round_it_takes_part_in(task: Any) -> None:
    algorithm, meter = tiny_run.tiny_algorithm(task), Meter()
    meter.memory.on = True
    call = local_call(task, algorithm.actions, meter)
    state, found = algorithm.init(task.model.read()), []
    for cohort in ([1], [2, 4], [0], [3, 4, 5]):  # boundaries 1; 2 and 1; 0; 0, 1 and 2
        algorithm.round(state, cohort, call)
        found.append(meter.memory.take()[0])
    assert None not in found[:3] and found[3] is None


def test_a_client_of_a_split_method_holds_its_bottom_alone(task: Any) -> None:
    def idle(task: Any, request: Record, memory: Any) -> Record:
        return Record({}, request.values)

    for cuts, held in (([1] * 6, 1), ([2] * 6, 2), (None, None)):
        meter = Meter()
        meter.memory.on = True
        local_call(task, {"do": idle}, meter, cuts)("do", asked(0, 3), None)
        assert meter.memory.take()[0] == tracked.resident_bytes(task.model, held)
