# SPDX-License-Identifier: Apache-2.0
"""What a Flower message carries of ours: round trips in the bytes that travel, limits and fuzz (C49, T4)."""

import hashlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from in_memory import InMemory

from hofl.build import pooled
from hofl.build_task import build_task
from hofl.config import Config, dump, load
from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol.base import RoundVoid
from hofl.runtime.flower.attendance import Attendance
from hofl.runtime.flower.call import Fleet
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.internal import BROKEN, Inbox
from hofl.runtime.flower.join import Invitation, prints_of
from hofl.runtime.flower.role import Role, Self
from hofl.runtime.flower.wire import INLINE, MESSAGE_TYPE, VERSION, Envelope, seal, unseal
from hofl.runtime.meter import Meter
from hofl.session import prepare

MIB = 1 << 20
HEADER = {"kind": "ask", "id": "0" * 24, "pace": 0.05, "peak": 7}


def objects(content: RecordDict | Message) -> dict[str, bytes]:
    """Each object of a message by its hash, as Flower puts it on the wire, one HTTP call each."""
    return {name: part.deflate() for name, part in get_all_nested_objects(content).items()}


def carried(content: RecordDict) -> RecordDict:
    """What arrives."""
    arrived = inflate_object_from_contents(content.object_id, objects(content))
    assert isinstance(arrived, RecordDict)
    return arrived


def noise(size: int) -> bytes:
    return np.random.Generator(np.random.Philox(key=size)).bytes(size)


@pytest.mark.parametrize("size", [0, 1, 200, INLINE - 1, INLINE, INLINE + 1, 3 * MIB, 11 * MIB])
def test_a_message_arrives_as_it_was_sent(size: int) -> None:
    blob = noise(size)
    envelope = unseal(carried(seal(HEADER, blob)))
    assert envelope.header == HEADER
    assert envelope.blob == blob


def test_a_small_message_is_one_record_and_a_large_one_has_a_flat_array_more() -> None:
    small, large = seal(HEADER, noise(INLINE)), seal(HEADER, noise(INLINE + 1))
    assert (len(small), len(large)) == (1, 2)
    assert len(objects(small)) == 2  # itself and the record: as few HTTP calls as there can be
    (record,) = large.array_records.values()
    (array,) = record.values()
    assert (array.dtype, array.shape) == ("uint8", (INLINE + 1,))


@pytest.mark.parametrize("copies", [1, 20])  # below and above a mebibyte
def test_every_bfloat16_arrives_to_the_bit(copies: int) -> None:
    """As its 16 bits: quiet and signalling NaN, infinities, denormals and both zeros."""
    bits = np.tile(np.arange(1 << 16, dtype=np.uint16), copies)
    message = Record({"weights/adapter": bits}, {"dtype": "bfloat16"})
    arrived = unseal(carried(seal(HEADER, message.to_bytes()))).record()
    assert arrived.values == message.values
    assert arrived.arrays["weights/adapter"].dtype == np.uint16
    assert arrived.arrays["weights/adapter"].tobytes() == bits.tobytes()


def test_two_hundred_scalars_are_800_bytes_in_a_message_of_two_kibibytes() -> None:
    """C49: E = 20 steps of q = 10 probes; with Flower's own frame around it."""
    scalars = np.linspace(-1, 1, 200, dtype=np.float32).reshape(20, 10)
    blob = Record({"scalars/s": scalars}, {"run": "0" * 16, "round": 7, "client": 3}).to_bytes()
    content = seal(HEADER, blob)
    assert scalars.nbytes == 800 and len(blob) <= 2048
    assert sum(map(len, objects(content).values())) <= 2048
    assert np.array_equal(unseal(carried(content)).record().arrays["scalars/s"], scalars)


def test_a_model_beyond_any_message_limit_goes_in_chunks() -> None:
    """C49: 30 MB where Flower cuts every 5 MiB; no object is larger, so no size is."""
    weights = np.random.Generator(np.random.Philox(key=1)).standard_normal(7_500_000, dtype=np.float32)
    blob = Record({"weights/vector": weights}, {"round": 1}).to_bytes()
    content = seal(HEADER, blob)
    kinds = [data.partition(b" ")[0] for data in objects(content).values()]
    assert kinds.count(b"ArrayChunk") >= 6
    assert max(map(len, objects(content).values())) <= 5 * MIB + 100
    envelope = unseal(carried(content))
    assert hashlib.sha256(envelope.blob).digest() == hashlib.sha256(blob).digest()
    assert envelope.record().arrays["weights/vector"].tobytes() == weights.tobytes()


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, str(VERSION), None, b"\x01", [VERSION]])
def test_another_version_is_refused_with_the_remedy(version: object) -> None:
    content = seal(HEADER, b"")
    record = content.config_records["hofl"]
    if version is None:
        del record["version"]
    else:
        record["version"] = version
    with pytest.raises(RecordError, match=r"message of version .*, this hofl speaks 1: install the same one"):
        unseal(carried(content))


OURS = ConfigRecord({"version": VERSION})
FOREIGN = {
    "nothing": {},
    "another app's": {"config": OURS},
    "metrics under our name": {"hofl": MetricRecord({"version": VERSION})},
    "text for a blob": {"hofl": ConfigRecord({**OURS, "blob": "text"})},
    "numbers for a blob": {"hofl": ConfigRecord({**OURS, "blob": [1, 2]})},
    "no blob": {"hofl": OURS},
    "a wrong array": {"hofl": OURS, "blob": ArrayRecord({"x": Array("uint8", (1,), "hofl", b"x")})},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_message_of_ours_is_no_record(name: str) -> None:
    with pytest.raises(RecordError, match=r"not a message of hofl|not a record"):
        unseal(carried(RecordDict(FOREIGN[name]))).record()


def test_a_blob_larger_than_is_due_is_refused_unread() -> None:
    blob = Record({}, {"round": 1}).to_bytes()
    assert Envelope({}, blob).record(len(blob)).values == {"round": 1}
    with pytest.raises(RecordError, match=f"message of {len(blob)} bytes, where at most {len(blob) - 1} are"):
        Envelope({}, blob).record(len(blob) - 1)
    with pytest.raises(RecordError, match="message of 9000000 bytes, where at most 2048 are due"):
        Envelope({}, b"\x00" * 9_000_000).record(2048)


VALUES = [0, -1, 1 << 62, 0.5, float("nan"), float("inf"), "", "ok", "\x1b[2J", b"", b"x" * 99, [1, 2], ["a"]]


def mutated(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """A message with bytes of its blob or a value of its header changed, cut or added."""
    envelope = unseal(content)
    header, blob = dict(envelope.header), bytearray(envelope.blob)
    kind = int(rng.integers(10))
    if kind < 6:
        begin = 0 if kind < 3 else len(blob) // 2  # JSON and offsets lie before the numbers
        for place in rng.integers(begin, len(blob), rng.integers(1, 4)):
            blob[place] = rng.integers(256)
    elif kind == 6:
        blob = blob[: rng.integers(len(blob))] + blob[rng.integers(len(blob)) :]
    elif kind == 7:
        blob += rng.bytes(int(rng.integers(1, 99)))
    else:
        name = list(header)[rng.integers(len(header))]
        del header[name]
        if kind == 9:
            header[name if rng.integers(3) else name[:-1]] = VALUES[rng.integers(len(VALUES))]
    return seal(header, bytes(blob))


def test_a_mutated_message_is_a_record_error_or_a_record_no_larger_than_it() -> None:
    """T4, the layout alone: no other error, and a length that lies makes nothing large."""
    blob = Record({"scalars/s": np.ones((5, 2), np.float32)}, {"run": "0" * 16, "round": 1}).to_bytes()
    content, rng = seal({**HEADER, "status": "ok"}, blob), np.random.Generator(np.random.Philox(key=5))
    seen = Counter[str]()
    for _ in range(2000):
        try:
            record = unseal(carried(mutated(content, rng))).record(4096)
        except RecordError:
            seen["refused"] += 1
            continue
        assert sum(array.nbytes for array in record.arrays.values()) <= len(blob) + 99
        seen["read"] += 1
    assert min(seen["refused"], seen["read"]) > 400, seen


class Link:
    """A server's grid with one answer, whose objects are these; it says what a SuperLink would."""

    def __init__(self, answer: Message, parts: dict[str, bytes]) -> None:
        proto, tree = message_to_proto(remove_content_from_message(answer)), get_object_tree(answer)
        proto.metadata.message_id = answer.object_id
        self.announced = PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])
        self.parts, self._runtime_client, self.run = parts, self, SimpleNamespace(run_id=1)

    def PullMessages(self, request: object) -> PullAppMessagesResponse:
        return self.announced

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.parts[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: object) -> None:
        """Nothing is kept."""


def broken(parts: dict[str, bytes], rng: np.random.Generator) -> dict[str, bytes]:
    """Objects of an answer, the body of one of them changed: its head is right, or no SuperLink takes it."""
    name = list(parts)[rng.integers(len(parts))]
    body = parts[name].index(b"\0") + 1
    changed = bytearray(parts[name])
    for place in rng.integers(body, min(len(changed), body + 400), rng.integers(1, 4)):
        changed[place] = rng.integers(256)
    return {**parts, name: bytes(changed)}


@pytest.mark.parametrize(("size", "times"), [(200, 2000), (INLINE + 1, 200)])
def test_an_answer_whose_parts_are_broken_costs_its_sender_the_question_alone(size: int, times: int) -> None:
    """T4, what Flower itself reads: what it cannot parse ends its own grid's loop, and would end the run."""
    grid = InMemory({})
    question = Message(seal({"kind": "ask"}, b""), 5, MESSAGE_TYPE, ttl=9.0)
    (name,) = grid.push_messages([question])
    blob = noise(size)
    answer = Message(seal({**HEADER, "status": "ok"}, blob), reply_to=question)
    parts, rng = objects(answer), np.random.Generator(np.random.Philox(key=size))
    link, seen = Link(answer, parts), Counter[str]()
    for spoiled in (parts, *(broken(parts, rng) for _ in range(times))):
        link.parts = spoiled
        ((found, message),) = Inbox(link, 2 * INLINE).look([name])
        assert found == name
        if message.has_error():
            seen[f"error {message.error.code}"] += 1
            continue
        try:
            seen["equal" if unseal(message.content).blob == blob else "another blob"] += 1
        except RecordError:
            seen["refused"] += 1
    assert seen["equal"] >= 1 and seen[f"error {BROKEN}"] > times / 4, seen


BINDING = (("run", "round", "client"), ("scalars/s", "digests/bottom"))
"""Values and arrays of an answer that a single changed bit must undo."""


def bound(record: Record) -> list[object]:
    values, arrays = BINDING
    return [*(record.values.get(n) for n in values), *(record.arrays[n].tobytes() for n in arrays)]


class Shelf(dict[str, bytes]):
    """A store in memory."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


def conversation(config: Config) -> tuple[InMemory, Fleet, Record, object]:
    """One client that has joined, and what a round of HO-FL needs to ask it."""
    task = pooled(config, build_task(config))
    role = Role(Self(task.clients[0], Consent(), lambda invitation, config: build_task(config)), Shelf())
    invitation = Invitation("fuzz", dump(config), task.clients, (), {}, prints_of(task))
    greeting = invitation.record().to_bytes()
    assert unseal(role.answer(seal({"kind": "hello"}, greeting))).header["status"] == "ok"
    grid = InMemory({100: role})
    known = {"accept": lambda node, envelope: 0, "owner": lambda node: None, "nodes": {0: 100}}
    present = Attendance(grid, task.clients, "fuzz", greeting, patience=1.0, say=print, **known)
    session = prepare(config)
    fleet = Fleet(present, config.fleet, Meter(), lambda client: 1 << 20)
    return grid, fleet, session.algorithm.init(session.task.model.read()), session.algorithm


def test_of_two_thousand_mutated_answers_none_counts_that_says_something_else() -> None:
    """T4: through the server's own checks; an answer that counts is to this question and of these scalars."""
    one = ["partition.clients=1", "cohort.size=1", "cohort.boundaries=[2]", "local.steps=1"]
    config = load(Path(__file__).parents[2] / "configs" / "synthetic" / "ho_fl.toml", one)
    grid, fleet, state, algorithm = conversation(config)
    truth, rng, seen = [], np.random.Generator(np.random.Philox(key=4)), Counter[str]()
    grid.spoil = lambda question, content: truth.append(content) or content
    true = algorithm.round(state, [0], fleet.call)
    grid.spoil = lambda question, content: mutated(truth[0], rng)
    for _ in range(2000):
        try:
            outcome = algorithm.round(state, [0], fleet.call)
        except RoundVoid as void:
            assert set(void.failures) == {0}
            seen["refused"] += 1
            continue
        assert bound(outcome.entries[0].reply) == bound(true.entries[0].reply)
        assert np.isfinite(outcome.state.arrays["weights/vector"]).all()
        seen["counted"] += 1
    assert min(seen["refused"], seen["counted"]) > 400, seen
