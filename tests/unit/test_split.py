# SPDX-License-Identifier: Apache-2.0
"""The messages of a split step, and the server's half from messages alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from families import CAUSAL
from hofl.algorithms import ALGORITHMS
from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.models.boundary import CutModel
from hofl.protocol import split
from hofl.protocol.base import Memory, Replies
from hofl.protocol.split import Top, about, ask, feedback_of, opened, pack, sent_values, smashed, unpack
from hofl.runtime.local import local_call
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task
from two_numbers import built, played, texts

PLAN = {"run": "r", "round": 3, "client": 0}


def points() -> Task:
    return synthetic_task(Partition(clients=2), seed=1, rows=40, width=6)


def sent_of(task: Task, boundary: int, wire: split.Wire = "float32", position: int = 0) -> Record:
    """What a client sends, through bytes."""
    batch = task.batch(0, position, 4)
    z = task.model.bottom(batch.inputs, boundary)
    message = Record(smashed(task, batch, z, wire), sent_values(PLAN, 0, batch, z))
    return Record.from_bytes(message.to_bytes())


def changed(sent: Record, **arrays: np.ndarray | None) -> Record:
    """The message with other arrays; None takes one away."""
    named = {"z": "activations/z", "targets": "labels/targets", "lengths": "labels/lengths"}
    new = sent.arrays | {named[name]: a for name, a in arrays.items()}
    return Record({name: a for name, a in new.items() if a is not None}, sent.values)


def top_of(task: Task, boundary: int) -> np.ndarray:
    return task.model.read()[task.model.layout.bottom_size(boundary) :]


# --- what travels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_tensor_survives_the_wire_rounded_to_its_type(wire: split.Wire, dtype: str) -> None:
    values = torch.tensor([[1.0, -2.5], [3.0e-5, 1.0 / 3.0]], dtype=getattr(torch, dtype))
    bits = pack(values, wire)
    assert bits.dtype == (np.uint16 if wire == "bfloat16" else np.float32) and bits.shape == (2, 2)
    back = unpack(bits, dtype)
    assert back.dtype == values.dtype and torch.equal(back, values.to(getattr(torch, wire)).to(values.dtype))


def test_halves_are_half_the_bytes() -> None:
    z = torch.ones(3, 5)
    assert (pack(z, "float32").nbytes, pack(z, "bfloat16").nbytes) == (60, 30)


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (float("nan"), "float32"),
        (float("inf"), "bfloat16"),
        (3.4e38, "bfloat16"),  # a float32 that rounds to infinity
        (1e39, "float32"),  # a float64 that does
    ],
)
def test_what_leaves_the_range_of_the_wire_is_refused(value: float, wire: split.Wire) -> None:
    with pytest.raises(RecordError, match=f"too large for split.wire = '{wire}'"):
        pack(torch.tensor([1.0, value], dtype=torch.float64), wire)


def test_bits_of_another_type_or_not_finite_are_refused() -> None:
    for bits, dtype in ((np.zeros(2, dtype=np.int32), "float32"), (np.zeros(2, dtype=np.float32), "int8")):
        with pytest.raises(RecordError, match="activations of type"):
            unpack(bits, dtype)
    for bits in (np.float32([np.nan]), np.array([0x7F80], dtype=np.uint16)):  # the latter: infinity
        with pytest.raises(RecordError, match="non-finite"):
            unpack(bits, "float32")


# --- who a message is of


def test_an_answer_to_another_question_is_refused() -> None:
    asked = {i: Record({}, {**PLAN, "client": i, "step": 2, "batch_id": "b"}) for i in range(6)}
    wrong = {1: ("run", "s"), 2: ("round", 4), 3: ("client", 9), 4: ("step", 1), 5: ("batch_id", "c")}

    def call(action, requests, deadline):
        answers = {i: dict(r.values) for i, r in requests.items()}
        for i, (name, value) in wrong.items():
            answers[i][name] = value
        return Replies({i: Record({}, values) for i, values in reversed(answers.items())}, {})

    failures: dict[int, str] = {}
    assert list(ask(call, "x", asked, failures)) == [0]
    for i, (name, value) in wrong.items():
        assert failures[i] == f"refused: reply is for {name} {value}, not {asked[i].values[name]}"


def test_a_runtimes_failures_are_passed_on_and_answers_come_in_client_order() -> None:
    asked = {i: Record({}, {**PLAN, "client": i}) for i in (4, 1, 3)}
    failures: dict[int, str] = {}
    answers = ask(lambda a, r, d: Replies({4: r[4], 1: r[1]}, {3: "gone"}), "x", asked, failures)
    assert list(answers) == [1, 4] and failures == {3: "gone"}


@pytest.mark.parametrize(
    ("name", "value"), [("run", "s"), ("round", 2), ("client", 1), ("step", 1), ("batch_id", "stale")]
)
def test_a_stale_message_never_meets_another_step(name: str, value: object) -> None:
    values = {**PLAN, "step": 0, "batch_id": "b"}
    memory = Memory(open={**values, "z": 1})
    assert opened(memory, Record({}, values))["z"] == 1
    with pytest.raises(ClientError, match=f"not in the step that the message is of .{name} {value}"):
        opened(memory, Record({}, values | {name: value}))


def test_a_client_that_was_started_anew_or_has_ended_its_step_says_so() -> None:
    for memory in (Memory(), Memory(kept=Record())):
        with pytest.raises(ClientError, match="started anew"):
            opened(memory, Record({}, {**PLAN, "step": 0, "batch_id": "b"}))


def test_a_batch_has_its_own_id() -> None:
    task = points()
    ids = {split.batch_id(task.batch(client, position, 4)) for client in (0, 1) for position in range(4)}
    assert len(ids) == 8 and split.batch_id(task.batch(0, 0, 4)) in ids
    batch = task.batch(0, 0, 4)
    assert split.batch_id(replace(batch, targets=batch.targets + 1)) not in ids


def test_the_next_message_is_about_the_last() -> None:
    sent = sent_of(points(), 2)
    assert about(sent, {}).values == {**PLAN, "step": 0, "batch_id": sent.values["batch_id"]}


@pytest.mark.parametrize("shape", [(4, 5), (3, 6), (24,)])
def test_feedback_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    z = torch.zeros(4, 6)
    with pytest.raises(RecordError, match=r"for activations of shape \[4, 6\]"):
        feedback_of(Record({"feedback/delta": np.zeros(shape, dtype=np.float32)}), z)
    with pytest.raises(RecordError, match="feedback of shape None"):
        feedback_of(Record(), z)
    bad = Record({"feedback/delta": np.full((4, 6), np.nan, dtype=np.float32)})
    with pytest.raises(RecordError, match="non-finite"):
        feedback_of(bad, z)


# --- the server's half


def whole_step(model: CutModel, task: Task, boundary: int) -> tuple[float, np.ndarray, torch.Tensor]:
    """The step on the real inputs, nothing sent."""
    batch = task.batch(0, 0, 4)
    z = model.bottom(batch.inputs, boundary)
    loss, gradient, feedback = model.first_order(batch.inputs, boundary, z, task.loss_on(batch))
    assert feedback is not None
    return loss, gradient, feedback


def check_same(task: Task, boundary: int) -> None:
    """The top fed from a message gives the bits of the whole model on the real batch."""
    expected, gradient, feedback = whole_step(task.model, task, boundary)
    sent, top = sent_of(task, boundary), top_of(task, boundary)
    task.model.write(np.zeros_like(task.model.read()))  # whatever the live model held
    half = Top(task, boundary, "float32")
    loss, of_top, delta = half.first_order(top, sent)
    assert loss == expected == half.loss(top, sent)
    assert np.array_equal(of_top, gradient) and np.array_equal(delta, feedback.float().numpy())
    assert np.abs(of_top).max() > 0 and np.abs(delta).max() > 0


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_split_step_is_the_whole_step_on_points(boundary: int) -> None:
    check_same(points(), boundary)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_split_step_is_the_whole_step_on_texts_padded_on_the_left(family: str) -> None:
    """C20: the server's half has the positions too, from the lengths."""
    task = texts(family)
    mask = task.batch(0, 0, 4).inputs["attention_mask"]
    assert 0 < mask[:, 0].sum() < 4 and bool(mask[:, -1].all())  # pads, and on the left
    start = task.model.read()
    for boundary in range(1, task.model.blocks):
        task.model.write(start)
        check_same(task, boundary)


@pytest.mark.parametrize("family", ["bert", "llama", "opt", "gpt2"])
def test_a_split_step_is_the_whole_step_on_texts_padded_on_the_right(family: str) -> None:
    task = texts(family, "head-v1")
    mask = task.batch(0, 0, 4).inputs["attention_mask"]
    assert 0 < mask[:, -1].sum() < 4 and bool(mask[:, 0].all())
    start = task.model.read()
    for boundary in range(1, task.model.blocks):
        task.model.write(start)
        check_same(task, boundary)


def test_the_server_sees_no_input_of_a_batch() -> None:
    """Of a text it gets z, its class and its length; of a point z and its class."""
    assert set(sent_of(texts("llama"), 2).arrays) == {"activations/z", "labels/targets", "labels/lengths"}
    assert set(sent_of(points(), 2).arrays) == {"activations/z", "labels/targets"}


def test_half_precision_on_the_wire_is_the_step_at_the_rounded_activation() -> None:
    task, boundary = points(), 2
    batch = task.batch(0, 0, 4)
    z = task.model.bottom(batch.inputs, boundary).bfloat16().float()
    expected, gradient, feedback = task.model.first_order(batch.inputs, boundary, z, task.loss_on(batch))
    sent = sent_of(task, boundary, "bfloat16")
    loss, of_top, delta = Top(task, boundary, "bfloat16").first_order(top_of(task, boundary), sent)
    assert feedback is not None and loss == expected and np.array_equal(of_top, gradient)
    assert torch.equal(unpack(delta, "float32"), feedback.bfloat16().float())


LENGTHS = {
    "absent": None,
    "one too few": np.int32([3, 3, 3]),
    "zero": np.int32([0, 9, 9, 9]),
    "too long": np.int32([99, 1, 1, 1]),
    "in a table": np.int32([[1], [1], [1], [1]]),
    "not whole": np.array([1.5, 1, 1, 1]),
    "none that long": np.int32([1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_do_not_fit_are_refused(name: str) -> None:
    task = texts("llama")
    with pytest.raises(RecordError, match="lengths of texts"):
        Top(task, 2, "float32").first_order(top_of(task, 2), changed(sent_of(task, 2), lengths=LENGTHS[name]))


@pytest.mark.parametrize("label", [-1, 4, 2**31 - 1])
def test_labels_out_of_range_are_refused(label: int) -> None:
    task = points()
    sent = changed(sent_of(task, 2), targets=np.int32([0, 1, 2, label]))
    for run in (Top(task, 2, "float32").first_order, Top(task, 2, "float32").loss):
        with pytest.raises(RecordError, match=r"labels outside 0\.\.3"):
            run(top_of(task, 2), sent)


SHAPES = {
    "narrow": {"z": np.zeros((4, 5), dtype=np.float32)},
    "fewer activations": {"z": np.zeros((3, 6), dtype=np.float32)},
    "no batch": {"z": np.zeros((0, 6), dtype=np.float32), "targets": np.zeros(0, dtype=np.int32)},
    "no activations": {"z": None},
    "no labels": {"targets": None},
    "labels of another type": {"targets": np.zeros(4, dtype=np.int64)},
    "labels in a table": {"targets": np.zeros((4, 1), dtype=np.int32)},
    "not finite": {"z": np.full((4, 6), np.inf, dtype=np.float32)},
    "whole numbers": {"z": np.zeros((4, 6), dtype=np.int32)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_messages_that_do_not_fit_the_top_are_refused(name: str) -> None:
    task = points()
    with pytest.raises(RecordError):
        Top(task, 2, "float32").first_order(top_of(task, 2), changed(sent_of(task, 2), **SHAPES[name]))


def test_more_examples_than_a_batch_has_are_refused() -> None:
    task = points()
    with pytest.raises(RecordError, match="4 examples, where a batch has at most 3"):
        Top(task, 2, "float32", batch=3).first_order(top_of(task, 2), sent_of(task, 2))
    Top(task, 2, "float32", batch=4).first_order(top_of(task, 2), sent_of(task, 2))


def test_one_bad_client_is_explained_and_the_others_are_served() -> None:
    task, failures = points(), {}
    sent = {0: sent_of(task, 2), 1: changed(sent_of(task, 2), **SHAPES["narrow"]), 2: sent_of(task, 2)}
    served = Top(task, 2, "float32").serve(top_of(task, 2), sent, failures)
    assert set(served) == {0, 2} and set(failures) == {1} and failures[1].startswith("refused: ")


def test_a_loss_that_is_not_finite_is_refused() -> None:
    task = points()
    top = np.full_like(top_of(task, 2), 1e38)
    for run in (Top(task, 2, "float32").first_order, Top(task, 2, "float32").loss):
        with pytest.raises(RecordError, match="non-finite"):
            run(top, sent_of(task, 2))


# --- the methods of the family on texts


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["ho_sfl", "hosl", "zo_sfl", "mu_splitfed"])
def test_every_method_plays_and_is_rebuilt_on_texts_of_unequal_length(name: str, wire: str) -> None:
    """The ledger is enough: a fresh instance, without boundaries, model or data, gives the same bits."""
    task = texts("llama")
    if ALGORITHMS[name].centralised:
        task = replace(task, clients=("centre",), shards=[np.concatenate(task.shards)])
    cohort = range(len(task.clients))
    settings = {"probes": 2, "radius": 0.01, "directions": "gaussian", "batch": 4, "steps": 2}
    algorithm = built(name, task, 2, wire=wire, **settings)
    nobody = replace(task, clients=(), shards=())  # boundaries and sizes of nobody
    ledger = built(name, nobody, 2, **settings)
    state = algorithm.init(task.model.read())
    for outcome in played(algorithm, task, local_call(task, algorithm.actions), 2, cohort):
        assert not outcome.failures and outcome.row["replay_ok"] is True
        again = ledger.rebuild(state, outcome.entries)
        assert again.to_bytes() == outcome.state.to_bytes()
        assert not np.array_equal(again.arrays["weights/vector"], state.arrays["weights/vector"])
        state = outcome.state


@pytest.mark.parametrize(("name", "each"), [("ho_sfl", 1), ("hosl", 3), ("zo_sfl", 3), ("mu_splitfed", 1)])
def test_every_step_of_every_round_has_the_next_batch(name: str, each: int) -> None:
    task, uploads = replace(points(), clients=("c",), shards=[np.arange(40)]), []
    algorithm = built(name, task, 2, steps=3, batch=4, directions="gaussian", radius=0.01)
    whole = local_call(task, algorithm.actions)

    def spying(action, requests, deadline):
        replies = whole(action, requests, deadline)
        sent = replies.records[0].arrays
        uploads.extend([sent["labels/targets"]] if "labels/targets" in sent else [])
        return replies

    outcomes = [*played(algorithm, task, spying, 4)]
    assert outcomes[-1].state.arrays["cursors/next"].tolist() == [4 * each]
    expected = [task.batch(0, position, 4).targets.numpy() for position in range(4 * each)]
    assert np.array_equal(uploads, expected)
    assert sum(outcome.row["examples"] for outcome in outcomes) == 4 * each * 4
