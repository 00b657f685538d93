# SPDX-License-Identifier: Apache-2.0
"""The client's half of a conversation, the same in a resident node, a stock SuperNode and a simulation.

A client is asked two kinds of question. ``hello`` carries an invitation: the client builds its task, compares
its prints, checks its consent and says who it is. ``ask`` carries an action of the algorithm. A question that
comes twice is computed once: what it is called is a hash of what it asks, and the last answer is kept.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from flwr.app import RecordDict

from hofl import __version__
from hofl.algorithms import ALGORITHMS
from hofl.build import leaves_device, pooled, probes_of
from hofl.config import Config, parse
from hofl.core.record import Record
from hofl.errors import ClientError, ConfigError, DataError, HoflError, RecordError
from hofl.protocol.base import Action, Memory, shown
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.join import Invitation, Joined, numbered, prints_of, require_same, shard_print
from hofl.runtime.flower.wire import Envelope, seal, unseal
from hofl.runtime.local import explain, redact
from hofl.runtime.tracked import ClientMemory
from hofl.session import bare
from hofl.tasks.base import Task

LOG = logging.getLogger("hofl.node")

SLOWEST = 1.0
"""Seconds between two looks for a message, at most."""

Builder = Callable[[Invitation, Config], Task]
"""Builds a client's task from what the server's configuration says and what is on this machine."""


class Store(Protocol):
    """Bytes that outlive a message, by name."""

    def get(self, name: str) -> bytes | None:
        """What was put there last, or None."""

    def put(self, name: str, data: bytes) -> None:
        """Replace it."""


@dataclass(frozen=True)
class Self:
    """What a client knows of itself before any run.

    Attributes:
        client: its id.
        consent: what it agrees to.
        build: makes its task.
        boundary, memory: see :class:`~hofl.runtime.flower.join.Joined`.
        resident: whether this process stays between two messages.
        salt: a secret that it keeps.
    """

    client: str
    consent: Consent
    build: Builder
    boundary: int = -1
    memory: int = 0
    resident: bool = True
    salt: bytes = b""


@dataclass
class Run:
    """A run that this client is part of.

    Attributes:
        invitation: of the server.
        config: its configuration.
        joined: what this client says of itself.
        task: this client's data and the model.
        number: the client's.
        actions: what it can be asked.
        split: whether the run is a split method's.
        memory: what is kept from question to question.
        measured: of this client's actions.
        last: what the last question is called, and its answer.
        round: the last one it was asked about.
        cut: of a split method, the boundary up to which this client holds the model.
    """

    invitation: Invitation
    config: Config
    joined: Joined
    task: Task
    number: int
    actions: dict[str, Action]
    split: bool
    memory: Memory = field(default_factory=Memory)
    measured: ClientMemory = field(default_factory=lambda: ClientMemory(on=True))
    last: tuple[str, dict[str, Any], bytes] = ("", {}, b"")
    round: int = -1
    cut: int | None = None


class Role:
    """One client; it is in one run at a time.

    Attributes:
        me, store: see there.
        run: the one it is in.
        pace: seconds that the server asks to let go by between two looks for a message.
    """

    def __init__(self, me: Self, store: Store) -> None:
        self.me, self.store = me, store
        self.run: Run | None = None
        self.pace = 0.0

    def answer(self, content: RecordDict) -> RecordDict:
        """The reply to a question; whatever goes wrong is said in it, and never raised."""
        name = ""
        try:
            envelope = unseal(content)
            pace = envelope.header.get("pace")
            self.pace = min(pace, SLOWEST) if isinstance(pace, float) and pace > 0 else self.pace
            name = str(envelope.header.get("id", ""))[:64]
            header, blob = self._answer(envelope, name)
        except DataError as error:  # it may quote what must not leave: a label, a path
            LOG.error("%s", error)
            header, blob = (
                {"status": "failed", "why": "refused: its data does not fit this run; its log says how"},
                b"",
            )
        except (HoflError, ClientError) as error:
            why = redact(str(error)) if name.startswith("hello") else explain(error)
            LOG.warning("%s", why)
            header, blob = {"status": "failed", "why": why}, b""
        except Exception as error:  # a defect or a lack of memory is this client's own, and said
            LOG.exception("a question failed")
            header, blob = {"status": "failed", "why": explain(error)}, b""
        return seal({"id": name, "client": self.me.client, **header}, blob)

    def _answer(self, envelope: Envelope, name: str) -> tuple[dict[str, Any], bytes]:
        kind, run = envelope.header.get("kind"), envelope.header.get("run")
        if kind == "hello":
            invitation = Invitation.of(envelope.record())
            joined = self._join(invitation).joined
            self.store.put("invitation", envelope.blob)
            return {"status": "ok", "whole": self.me.resident}, joined.record().to_bytes()
        if kind != "ask":
            raise RecordError(f"a question of kind {shown(kind)}; this hofl knows hello and ask")
        known = self._known(run)
        if known is None:  # this process has never heard of the run: let the server introduce itself
            return {"status": "stranger"}, b""
        if name and known.last[0] == name:
            return known.last[1], known.last[2]
        return self._act(known, str(envelope.header.get("action")), envelope.record(), name)

    def _known(self, run: Any) -> Run | None:
        """The run, from memory or built again from the stored invitation."""
        if self.run is not None and self.run.invitation.run == run:
            return self.run
        stored = self.store.get("invitation")
        if stored is None:
            return None
        invitation = Invitation.of(Record.from_bytes(stored))
        if invitation.run != run:
            return None
        return self._join(invitation)

    def _join(self, invitation: Invitation) -> Run:
        """The run, entered if this client is not in it."""
        if self.run is None or self.run.invitation != invitation:
            self.run = None  # lets the last run's model go before the next is loaded
            self.run = self._entered(invitation)
        return self.run

    def _entered(self, invitation: Invitation) -> Run:
        """Build the task of a run that this client agrees to.

        Raises:
            HoflError, ClientError: it cannot or will not take part; the message says why.
        """
        me, config = self.me, _understood(invitation.config)
        number, method = numbered(invitation.clients, me.client), ALGORITHMS[config.algorithm]
        if method.split and not me.resident:
            raise ClientError(
                f"refused: {config.algorithm} talks several times a step, which a client that starts anew "
                "for each message cannot follow; run it with: hofl node"
            )
        me.consent.check_run(config, str(invitation.prints.get("model")))
        task = pooled(config, me.build(invitation, config))
        found = prints_of(task)
        require_same(found, invitation.prints, "server")
        examples, data = len(task.shards[number]), shard_print(task, number, me.salt)
        me.consent.check_run(config, found["model"], examples)
        joined = Joined(me.client, examples, me.boundary, me.memory, me.resident, data, found)
        actions = dict(bare(config.algorithm, task.model.layout).actions)
        if probes_of(config):
            task.model.self_test(task.batch(number, 0, 1).inputs)
        run = Run(invitation, config, joined, task, number, actions, method.split)
        self._restore(run)
        place, sent = f"client {number} of {len(invitation.clients)}", ", ".join(leaves_device(config))
        LOG.info("joined run %s (%s) as %s; leaves here: %s", invitation.run, config.algorithm, place, sent)
        return run

    def _act(self, run: Run, action: str, request: Record, name: str) -> tuple[dict[str, Any], bytes]:
        """Answer an action, measure it, and keep what the next one needs."""
        plan, me = request.values, self.me
        if action not in run.actions:
            raise RecordError(f"this method has no action '{shown(action)}'")
        if plan.get("client") != run.number:
            raise RecordError(f"the question is for client {shown(plan.get('client'))}, this is {run.number}")
        layout, examples = run.task.model.layout, run.joined.examples
        me.consent.check_request(request, layout, run.config, examples=examples)
        if plan.get("round") != run.round:
            run.round = plan.get("round", -1)
            run.measured.take()
        boundary, before = plan.get("boundary"), run.memory.kept
        run.cut = boundary if run.split and boundary is not None else run.cut
        with run.measured.of(run.number, boundary, run.task.model, run.cut):
            reply = run.actions[action](run.task, request, run.memory)
        peak = run.measured.largest(run.number)
        if me.memory and peak > me.memory:
            raise ClientError(f"refused: a step took {peak} bytes, this client may use {me.memory}")
        run.last = (name, {"status": "ok", "peak": peak}, reply.to_bytes())
        if run.memory.kept is not before:
            self._keep(run)
        return run.last[1], run.last[2]

    def _keep(self, run: Run) -> None:
        """Store what outlives this process, with the answer that was given when it was reached.

        A question that is asked again after a crash must not move the client a second time.
        """
        kept = run.memory.kept or Record()
        name, header, blob = run.last
        arrays = {**kept.arrays, "digests/answer": np.frombuffer(blob, dtype=np.uint8)}
        values = {"kept": kept.values, "name": name, "header": header, "run": run.invitation.run}
        self.store.put("kept", Record(arrays, values).to_bytes())

    def _restore(self, run: Run) -> None:
        stored = self.store.get("kept")
        if stored is None:
            return
        record = Record.from_bytes(stored)
        v, arrays = record.values, dict(record.arrays)
        if v.get("run") == run.invitation.run and isinstance(v.get("kept"), dict):
            answer = arrays.pop("digests/answer")
            run.memory.kept = Record(arrays, v["kept"])
            run.last = (v["name"], v["header"], answer.tobytes())


def _understood(config: str) -> Config:
    """The server's configuration.

    Raises:
        ConfigError: it says what this version does not know.
    """
    try:
        return parse(config, "the server's configuration")
    except ConfigError as error:
        why = f"{error}; this node has hofl {__version__}: install the server's version on both"
        raise ConfigError(why) from None
