# SPDX-License-Identifier: Apache-2.0
"""What split methods share: messages of a step, their identity, and the server's half of the model.

A step is a short conversation. Each message is a record that says of which run, round, client, step and
batch it is; no graph crosses it: a client that waits for feedback keeps its batch, and runs its bottom again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hofl.core.record import Record
from hofl.errors import ClientError, RecordError
from hofl.protocol.base import LARGEST, Call, Entry, Memory, Vector, recorded, shown, usable
from hofl.tasks.base import IGNORED, Batch, Task, aligned

Wire = Literal["float32", "bfloat16"]
IDENTITY = ("run", "round", "client", "step")
"""What every message of a step says; from the first reply on also ``batch_id``."""


@dataclass(frozen=True)
class Split:
    """Settings of split methods.

    Attributes:
        task: whose model the server runs the top of; None where nothing is trained (a replay).
        wire: type in which activations and feedback travel.
        history: rounds a client may lag before it gets a snapshot.
        upload_every: k, local steps between two uploads (HERON-SFL).
        server_steps: tau, steps of the server a round (MU-SplitFed).
        global_lr: eta_g, the rate of the aggregation (MU-SplitFed).
        delay: mean of a client's exponential delay in server steps, 0 for none (MU-SplitFed).
    """

    task: Task | None = None
    wire: Wire = "float32"
    history: int = 1024
    upload_every: int = 1
    server_steps: int = 2
    global_lr: float = 1.0
    delay: float = 0.0

    def top(self, boundary: int, batch: int) -> "Top":
        """The server's half at the clients' boundary; ``batch`` is the most examples of one step."""
        assert self.task is not None
        return Top(self.task, boundary, self.wire, batch)


def pack(values: Tensor, wire: Wire) -> NDArray[Any]:
    """A tensor as it travels: float32, or the bits of bfloat16 as uint16; same shape.

    Raises:
        RecordError: it is not finite, or leaves the range of the wire's type.
    """
    sent = values.detach().to(getattr(torch, wire)).cpu().contiguous()
    if not bool(torch.isfinite(sent).all()):
        raise RecordError(f"activations or feedback are non-finite, or too large for split.wire = '{wire}'")
    bits: NDArray[Any] = sent.view(torch.uint16).numpy() if wire == "bfloat16" else sent.numpy()
    return bits


def unpack(bits: NDArray[Any], dtype: str) -> Tensor:
    """The inverse of :func:`pack`, in ``dtype``, the type the model computes in.

    Raises:
        RecordError: it is neither of the wire's types, or not finite.
    """
    if bits.dtype not in (np.uint16, np.float32) or dtype not in ("float32", "bfloat16", "float64"):
        raise RecordError(f"activations of type {bits.dtype} for a model in {shown(dtype)}")
    tensor = torch.from_numpy(bits.copy())
    tensor = tensor.view(torch.bfloat16) if bits.dtype == np.uint16 else tensor
    if not bool(torch.isfinite(tensor).all()):
        raise RecordError("activations or feedback are non-finite")
    return tensor.to(getattr(torch, dtype))


def identity(values: Mapping[str, Any], step: int = 0) -> dict[str, Any]:
    """Of which run, round, client and step a message is.

    Args:
        values: of the plan.
        step: the local step, from 0.
    """
    return {**{name: values[name] for name in IDENTITY[:3]}, "step": step}


def ask(
    call: Call, action: str, requests: Mapping[int, Record], failures: dict[int, str]
) -> dict[int, Record]:
    """What answers the question, by client number; the others are explained in ``failures``."""
    replies = call(action, requests, None)
    failures.update(replies.failures)
    answers: dict[int, Record] = {}
    for client in sorted(replies.records):
        reply, asked = replies.records[client], requests[client].values
        foreign = [n for n in (*IDENTITY, "batch_id") if n in asked and reply.values.get(n) != asked[n]]
        if foreign:
            name = foreign[0]
            found = shown(reply.values.get(name))
            failures[client] = f"refused: reply is for {name} {found}, not {asked[name]}"
        else:
            answers[client] = reply
    return answers


def batch_id(batch: Batch) -> str:
    """A hash of a minibatch: feedback for one must never meet another."""
    h = hashlib.blake2b(digest_size=8)
    for tensor in (*batch.inputs.values(), batch.targets):
        h.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return h.hexdigest()


def smashed(task: Task, batch: Batch, z: Tensor, wire: Wire) -> dict[str, NDArray[Any]]:
    """What a client sends of a batch: z [batch, ...], labels and, of texts, lengths, int32 [batch]."""
    arrays = {"activations/z": pack(z, wire), "labels/targets": batch.targets.cpu().numpy().astype(np.int32)}
    return arrays if task.lengths is None else arrays | {"labels/lengths": task.lengths(batch)}


def sent_values(values: Mapping[str, Any], step: int, batch: Batch, z: Tensor) -> dict[str, Any]:
    """What goes with :func:`smashed`: the identity, the batch's hash, and the type z was computed in."""
    dtype = str(z.dtype).removeprefix("torch.")
    return {**identity(values, step), "batch_id": batch_id(batch), "dtype": dtype}


def about(message: Record, arrays: dict[str, NDArray[Any]]) -> Record:
    """The next message of the conversation that ``message`` is of."""
    values = identity(message.values, message.values["step"])
    return Record(arrays, values | {"batch_id": message.values["batch_id"]})


def counted(client: int, plan: Record, reply: Record, sent: Record, loss: float) -> Entry:
    """An entry for the ledger: the scalars, and the loss that the server measured; no activation."""
    examples = len(sent.arrays["labels/targets"])
    counts = {"loss_sum": loss * examples, "examples": examples}
    kept = recorded(reply)
    return Entry(client, plan, Record(kept.arrays, {**kept.values, **counts}))


def opened(memory: Memory, request: Record) -> dict[str, Any]:
    """What this client keeps of the step that the request goes on with.

    Raises:
        ClientError: it waits for nothing, or for another step's message.
    """
    for name in (*IDENTITY, "batch_id"):
        if memory.open.get(name) != request.values.get(name):
            raise ClientError(
                f"this client is not in the step that the message is of ({name} {request.values.get(name)}, "
                f"not {memory.open.get(name)}): it was started anew, or the message is late"
            )
    return memory.open


def feedback_of(request: Record, z: Tensor) -> Tensor:
    """The feedback in a message, checked against the activation it is of: shape and type of ``z``.

    Raises:
        RecordError: it is not of that shape, or not finite.
    """
    bits = request.arrays.get("feedback/delta")
    if bits is None or bits.shape != tuple(z.shape):
        shape = None if bits is None else list(bits.shape)
        raise RecordError(f"feedback of shape {shape} for activations of shape {list(z.shape)}")
    return unpack(bits, str(z.dtype).removeprefix("torch.")).to(z.device)


def proves(reply: Record, expected: NDArray[np.uint8]) -> bool:
    """Whether a client's digest uint8 [32] of its bottom is the expected one."""
    proof = reply.arrays.get("digests/bottom")
    return proof is not None and proof.dtype == np.uint8 and np.array_equal(proof, expected)


@dataclass(frozen=True)
class Top:
    """The server's half: the model's own forward from the boundary on, fed from messages alone.

    Attributes:
        task: its model and its loss.
        boundary: of all clients.
        wire: type in which feedback travels.
        batch: examples of a step, the most that a client may send; 0 for no limit.
    """

    task: Task
    boundary: int
    wire: Wire
    batch: int = 0

    def first_order(self, top: Vector, sent: Record) -> tuple[float, Vector, NDArray[Any]]:
        """Mean loss of a client's batch, its gradient float32 [d_s] and the feedback dloss/dz, packed.

        Args:
            top: the server's trainables float32 [d_s] to evaluate at.
            sent: a client's :func:`smashed` and :func:`sent_values`.

        Raises:
            RecordError: what it sent does not fit the top, or loss or gradient are not finite.
        """
        z, batch = self._received(sent, sent.arrays.get("activations/z"))
        loss, gradient, feedback = self._run(
            top, lambda: self.task.model.first_order(batch.inputs, self.boundary, z, self.task.loss_on(batch))
        )
        if not (np.isfinite(loss) and usable(gradient)):
            raise RecordError(f"non-finite loss or gradient of the top, or one beyond {LARGEST:g}")
        return loss, gradient, pack(feedback, self.wire)

    @torch.no_grad()
    def loss(self, top: Vector, sent: Record, bits: NDArray[Any] | None = None) -> float:
        """Mean loss alone; of ``bits``, other activations of the same batch, where given.

        Raises:
            RecordError: as :meth:`first_order`.
        """
        z, batch = self._received(sent, sent.arrays.get("activations/z") if bits is None else bits)
        model = self.task.model
        loss = self._run(top, lambda: float(self.task.loss(model.top(batch.inputs, self.boundary, z), batch)))
        if not np.isfinite(loss):
            raise RecordError("non-finite loss")
        return float(loss)

    def serve(
        self, top: Vector, sent: Mapping[int, Record], failures: dict[int, str]
    ) -> dict[int, tuple[float, Vector, NDArray[Any]]]:
        """:meth:`first_order` at one ``top`` for every client; one that cannot be served is explained."""
        served = {}
        for client, message in sent.items():
            try:
                served[client] = self.first_order(top, message)
            except RecordError as error:
                failures[client] = f"refused: {error}"
        return served

    def _received(self, sent: Record, bits: NDArray[Any] | None) -> tuple[Tensor, Batch]:
        targets, lengths = sent.arrays.get("labels/targets"), sent.arrays.get("labels/lengths")
        if bits is None or targets is None or targets.dtype != np.int32 or targets.ndim > 2:
            raise RecordError("activations and labels are not of one batch")
        if targets.shape[:1] != bits.shape[:1] or (targets.ndim == 2 and targets.shape[1] > bits.shape[1]):
            raise RecordError("activations and labels are not of one batch")
        named = sent.values.get("batch_id")
        if not targets.ndim or type(named) is not str or len(named) > 64:
            raise RecordError("activations of no batch: it needs examples and a batch_id")
        if self.batch and len(targets) > self.batch:
            raise RecordError(f"{len(targets)} examples, where a batch has at most {self.batch}")
        classes = len(self.task.facts.get("labels", ())) or self.task.facts.get("vocabulary", 0)
        scored = targets[targets != IGNORED] if targets.ndim == 2 else targets
        if not scored.size or scored.min() < 0 or (classes and scored.max() >= classes):
            raise RecordError(f"labels outside 0..{classes - 1}")
        device = self.task.model.device
        z = unpack(bits, str(sent.values.get("dtype"))).to(device)
        if lengths is not None and (lengths.dtype != np.int32 or lengths.shape != targets.shape[:1]):
            raise RecordError("lengths of texts are not of the batch that the labels are of")
        inputs = self.task.top_inputs(lengths, z)
        return z, aligned(inputs, torch.from_numpy(targets.astype(np.int64)).to(device))

    def _run(self, top: Vector, run: Any) -> Any:
        model = self.task.model
        model.write(top, model.layout.bottom_size(self.boundary))
        try:
            return run()
        except (RuntimeError, ValueError, IndexError) as error:  # a shape that the top cannot take
            line = (str(error).splitlines() or [""])[0]
            raise RecordError(f"activations do not fit the top: {line}") from error
