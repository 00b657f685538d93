# SPDX-License-Identifier: Apache-2.0
"""Reports from the field on numbers: probes, averages, types (C07, C08, C16, C32, C33, C41, C65)."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clients import Clients
from families import NAMES, case, full_case, tokens
from hofl.algorithms import ALGORITHMS
from hofl.core.directions import Directions
from hofl.core.estimators import ESTIMATORS
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.models import export as exporting
from hofl.models.boundary import CutModel, cut
from hofl.models.export import export
from hofl.models.forward_mode import LossSurrogate
from hofl.models.load import load
from hofl.models.lora import add_lora
from hofl.models.tiny import tiny_config
from hofl.protocol.aggregate import Training, advance, loss_row, mean
from hofl.protocol.base import Algorithm, Entry, Replies
from hofl.runtime.local import local_call
from hofl.tasks.base import IGNORED, Batch, Task, cross_entropy, token_cross_entropy
from hofl.tasks.metrics import Sums, Tally
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

KEY = Key.of(8, "directions")


class Zero(Directions):
    """No displacement: what a radius of 0 would be."""

    def block(self, probe: int, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, dtype=np.float32)


class Counted(Directions):
    """Ones: each coordinate moves by the radius, once for each time that it is visited."""

    def block(self, probe: int, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, dtype=np.float32)


# --- two passes that differ by nothing but the displacement

DROPOUTS = {
    "opt": {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
}


@pytest.mark.parametrize("name", ["forward", "central"])
@pytest.mark.parametrize("family", DROPOUTS)
def test_c07_with_dropout_configured_a_probe_of_no_displacement_is_zero(family: str, name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        module = AutoModelForCausalLM.from_config(tiny_config(family, 2, **DROPOUTS[family])).train()
        one, other = (module(**tokens()).logits for _ in range(2))
        assert not torch.equal(one, other)  # it has dropouts, until it is cut
    model, scored = cut(add_lora(module, key=Key.of(5, "init"), rank=2)), lambda o: o.logsumexp(-1).mean()
    model.module.train()
    surrogate = LossSurrogate(model, tokens(), scored)
    for trial in range(10):
        zero = Zero(KEY.fold(trial), "gaussian", 10, model.layout.size)
        _, scalars = ESTIMATORS[name](surrogate, zero, 1e-3, True)
        found = scalars(torch.ones(1))
        assert found.values.tolist() == [0.0] * 10
        assert all(half.tolist() == [0.0] * 10 for half in found.halves)
    z = model.bottom(tokens(), 1)
    model.module.train()
    _, first, feedback = model.first_order(tokens(), 1, z, scored)
    _, again, _ = model.first_order(tokens(), 1, z, scored)
    assert feedback is not None and np.array_equal(first, again)  # the first-order top drops nothing either


@pytest.mark.parametrize("name", NAMES)
def test_c16_one_shape_one_result_and_nearly_so_for_others(name: str) -> None:
    subject = case(name)
    model, inputs = subject.model, subject.inputs
    with torch.no_grad():
        whole = model.full(inputs)
        assert torch.equal(model.full(inputs), whole)
        first = model.full({key: value[:1] for key, value in inputs.items()})
    assert (whole[:1] - first).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["forward", "central"])
def test_c16_every_pass_of_a_probe_reads_the_same_bytes(name: str) -> None:
    """The anchor, q = 2 displaced points and their mirror images: five passes over one batch."""
    subject, seen = case("llama"), list[str]()

    def read(_: nn.Module, args: Any, kwargs: Mapping[str, Tensor]) -> None:
        bits = b"".join(kwargs[key].numpy().tobytes() for key in sorted(subject.inputs))
        seen.append(hashlib.sha256(bits).hexdigest())

    handle = subject.model.module.get_base_model().register_forward_pre_hook(read, with_kwargs=True)
    u = Directions(KEY, "gaussian", 2, subject.model.layout.bottom_size(2))
    z, scalars = ESTIMATORS[name](subject.model.surrogate(subject.inputs, 2), u, 1e-3, True)
    scalars(torch.ones_like(z))
    handle.remove()
    assert len(seen) == 5 and len(set(seen)) == 1


# --- one tensor under two names


def test_c08_a_tied_tensor_is_visited_once() -> None:
    """From 0.5 a step of 2^-10 along ones ends at 0.5009765625; a second visit would end at 0.501953125."""
    model = full_case("llama", layers=2, untied=False)
    embedding, head = model.module.get_input_embeddings().weight, model.module.get_output_embeddings().weight
    slots = [slot for slot in model.layout.slots if "embed" in slot.name or "head" in slot.name]
    assert [slot.name for slot in slots] == ["model.embed_tokens.weight"]
    assert model.layout.size == sum(p.numel() for p in model.module.parameters())
    model.write(np.full(model.layout.size, 0.5, dtype=np.float32))
    moved = list[tuple[float, float]]()

    def scored(output: Tensor) -> Tensor:
        moved.append((float(embedding.detach().min()), float(head.detach().max())))
        return output.logsumexp(-1).mean()

    surrogate = LossSurrogate(model, tokens(), scored)
    ESTIMATORS["central"](surrogate, Counted(KEY, "gaussian", 1, model.layout.size), 2.0**-10, False)[1](
        torch.ones(1)
    )
    assert moved == [(0.5, 0.5), (0.5009765625, 0.5009765625), (0.4990234375, 0.4990234375)]
    assert float(head.detach().max()) == 0.5 and head.data_ptr() == embedding.data_ptr()


def test_c08_both_ends_agree_on_what_is_tied() -> None:
    """A client whose head has a tensor of its own has another layout, which its first request shows."""
    tied, untied = (full_case("llama", layers=2, untied=own).layout for own in (False, True))
    assert tied.fingerprint != untied.fingerprint and len(untied.slots) == len(tied.slots) + 1
    assert tied.fingerprint == full_case("llama", layers=2, untied=False).layout.fingerprint


# --- means


def entry(client: int, delta: np.ndarray, weight: float, loss: float = 0.0, examples: int = 1) -> Entry:
    plan = Record({}, {"weight": weight, "position": 0, "steps": 1})
    reply = Record({"weights/delta": delta}, {"loss_sum": loss * examples, "examples": examples})
    return Entry(client, plan, reply)


def averaged(parts: list[Entry], start: np.ndarray) -> np.ndarray:
    state = Record(
        {"weights/vector": start, "cursors/next": np.zeros(len(parts), dtype=np.int64)}, {"round": 0}
    )
    return advance(state, ((e, e.reply.arrays["weights/delta"]) for e in parts)).arrays["weights/vector"]


def test_c32_factors_are_averaged_apart_as_the_manual_says() -> None:
    """A, B of 1 and of 3: product of means 2 x 2 = 4, mean of products (1 + 9) / 2 = 5."""
    a, b = averaged(
        [entry(i, np.full(2, value, dtype=np.float32), 1.0) for i, value in enumerate((1, 3))],
        np.zeros(2, dtype=np.float32),
    )
    assert a * b == 4.0 and np.mean([1 * 1, 3 * 3]) - a * b == 1.0
    manual = Path(__file__).parents[2] / "docs" / "systems.md"
    assert "the mean of B times the mean of A is not the mean of the products B A" in manual.read_text()


def test_c41_one_rule_for_batches_clients_and_evaluation() -> None:
    """1 and 9 examples or tokens with losses 2 and 1: (2 + 9) / 10 = 1.1; a mean of means would be 1.5."""
    losses, counts = (2.0, 1.0), (1, 9)
    parts = [
        entry(i, np.full(1, loss, dtype=np.float32), float(n), loss, n)
        for i, (loss, n) in enumerate(zip(losses, counts, strict=True))
    ]
    assert loss_row(parts) == {"loss": pytest.approx(1.1, abs=1e-12), "examples": 10}
    assert averaged(parts, np.zeros(1, dtype=np.float32))[0] == np.float32(1.1)
    assert mean((e.plan.values["weight"], e.reply.arrays["weights/delta"]) for e in parts)[0] == np.float32(
        1.1
    )
    tallies = [Tally("perplexity", 1, n, loss * n) for loss, n in zip(losses, counts, strict=True)]
    assert (tallies[0] + tallies[1]).loss == pytest.approx(1.1, abs=1e-12)


def test_c41_a_batch_of_unequal_texts_is_averaged_by_token() -> None:
    """Texts with 1 and 9 scored tokens of cross-entropy 2 and 1, from logits of two classes by hand."""
    targets = torch.full((2, 9), IGNORED)
    targets[0, -1], targets[1] = 0, 0
    output = torch.zeros(2, 9, 2)  # cross-entropy of class 0 is log(1 + exp(x)) for logits (0, x)
    for row, loss in enumerate((2.0, 1.0)):
        output[row, :, 1] = np.log(np.expm1(loss))
    assert float(token_cross_entropy(output, Batch({}, targets))) == pytest.approx(1.1, abs=1e-6)


@pytest.mark.parametrize(("weighting", "weights"), [("examples", [1.0, 9.0]), ("equal", [1.0, 1.0])])
def test_c41_fedavg_weighs_clients_as_configured(weighting: Any, weights: list[float]) -> None:
    """Shards of 1 and 9: the mean is (delta_0 + 9 delta_1) / 10, or (delta_0 + delta_1) / 2."""
    task = synthetic_task(Partition(clients=2), seed=1, rows=10, width=6)
    task.shards[0], task.shards[1] = np.arange(1), np.arange(1, 10)
    training = Training(3, 2, 4, Optimizer("sgd", 0.1), (1, 9), weighting=weighting)
    algorithm = ALGORITHMS["fedavg"].build(layout=task.model.layout, training=training)
    start = task.model.read()
    outcome = algorithm.round(algorithm.init(start), (0, 1), local_call(task, algorithm.actions))
    deltas = [e.reply.arrays["weights/delta"].astype(np.float64) for e in outcome.entries]
    expected = start + np.average(deltas, axis=0, weights=weights)
    np.testing.assert_allclose(outcome.state.arrays["weights/vector"], expected, rtol=1e-6)


# --- types


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c33_adapters_are_float32_in_memory_on_the_wire_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """16 tensors of 896 numbers, 3584 bytes, whatever the type of the backbone."""
    loaded = load("tiny:llama", dtype=dtype)
    model = cut(add_lora(loaded.module, key=Key.of(1, "init"), rank=2))
    adapters = {p.dtype for n, p in model.module.named_parameters() if ".lora_" in n}
    assert adapters == {torch.float32} and model.read().nbytes == 3584
    sent = Record.from_bytes(Record({"weights/vector": model.read()}, {}).to_bytes())
    assert sent.arrays["weights/vector"].nbytes == 3584
    monkeypatch.setattr(exporting, "_verify", lambda *_: 0.0)  # it would start a process; see test_lora.py
    export(model.module, tmp_path / "adapter", facts=loaded.facts, inputs=tokens())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (len(saved), sum(t.numel() * t.element_size() for t in saved.values())) == (16, 3584)
    assert {t.dtype for t in saved.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_c33_a_client_that_changes_its_type_between_rounds_is_refused(dtype: str) -> None:
    task = synthetic_task(Partition(clients=2), seed=1, rows=40, width=6)
    training = Training(3, 1, 4, Optimizer("sgd", 0.1), (20, 20))
    algorithm = ALGORITHMS["fedavg"].build(layout=task.model.layout, training=training)
    whole = local_call(task, algorithm.actions)

    def changing(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        replies = whole(action, requests, deadline)
        if requests[1].values["round"] == 1:
            said = replies.records[1]
            delta = said.arrays["weights/delta"].astype(dtype)
            replies.records[1] = Record({"weights/delta": delta}, said.values)
        return replies

    first = algorithm.round(algorithm.init(task.model.read()), (0, 1), changing)
    second = algorithm.round(first.state, (0, 1), changing)
    size = task.model.layout.size
    assert not first.failures and second.failures == {
        1: f"refused: array 'weights/delta' is {dtype}[{size}], expected float32[{size}]"
    }


# --- buffers


def with_statistics() -> Task:
    """Images of 2 x 4 x 4 and a network with ordinary batch norms, in training mode when it is given."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in "ab"]
        network = nn.Sequential(
            layers[0], nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(16, 3)
        )
        images = torch.randn(20, 2, 4, 4)
    for name, buffer in network.named_buffers():
        buffer.fill_(
            {"running_mean": 0.25, "running_var": 2.0, "num_batches_tracked": 7}[name.split(".")[-1]]
        )
    return Task(
        "images", cut(network.train()), ("a", "b"), [np.arange(10), np.arange(10, 20)],
        lambda rows: Batch({"input": images[rows]}, torch.from_numpy(rows % 3)), cross_entropy,
        lambda keep=None: Sums.zero(3), seed=1,
    )  # fmt: skip


def buffers(model: CutModel) -> str:
    h = hashlib.sha256()
    for name, buffer in model.module.named_buffers():
        h.update(f"{name}:{buffer.dtype};".encode() + buffer.numpy().tobytes())
    return h.hexdigest()


def test_c65_probes_and_rounds_leave_all_buffers_as_they_are() -> None:
    """Statistics and counters of a model are constants: 10 probes and two rounds of FedAvg change no bit."""
    task = with_statistics()
    model, before = task.model, buffers(task.model)
    u = Directions(KEY, "gaussian", 10, model.layout.bottom_size(2))
    for name in ("forward", "central", "sketch"):
        model.module.train()
        inputs = task.batch(0, 0, 4).inputs
        z, scalars = ESTIMATORS[name](model.surrogate(inputs, 2), u, 1e-2, True)
        assert np.abs(scalars(torch.ones_like(z)).values).max() > 0
        assert buffers(model) == before
    training = Training(3, 2, 4, Optimizer("sgd", 0.1), (10, 10))
    algorithm: Algorithm = ALGORITHMS["fedavg"].build(layout=model.layout, training=training)
    state, call = algorithm.init(model.read()), Clients(task, algorithm.actions)
    for _ in range(2):
        model.module.train()
        outcome = algorithm.round(state, (0, 1), call)
        assert not outcome.failures
        state = outcome.state
    assert buffers(model) == before and not model.module.training
    counter = dict(model.module.named_buffers())["0.1.num_batches_tracked"]
    assert (counter.dtype, int(counter)) == (torch.int64, 7)
