# SPDX-License-Identifier: Apache-2.0
"""The server's half of a conversation: asks clients over Flower's Message API and waits with a deadline.

Flower's own round loop sleeps three seconds between two looks; this one looks often while answers are young
and seldom while they are old. A question is pushed to a client once it is connected, sent again where Flower
says that it was lost, and given up at the deadline: whatever comes later is dropped by its id.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from hofl.core.record import Record
from hofl.errors import RecordError
from hofl.protocol.base import Replies, shown
from hofl.runtime.flower.attendance import NAMED, ROLL_CALL, Attendance, said
from hofl.runtime.flower.internal import BROKEN, NODE_GONE, Inbox
from hofl.runtime.flower.wire import Envelope, seal, unseal
from hofl.runtime.local import redact
from hofl.runtime.meter import Meter
from hofl.schema import FleetConfig

LOOK, SLOWEST = 0.03, 1.0
"""Seconds between two looks for answers: at first, and at most."""

LINE, SOON = 10.0, 2.0
"""Seconds between two lines that say who is waited for, and before the first where a round cannot begin."""

STRANGE = 3
"""Times that a client may ask for an introduction before its question is given up."""


@dataclass
class Question:
    """What one client is asked, until it has answered.

    Attributes:
        header, blob: of the message.
        record: what the blob is of, for the meter.
        limit: bytes that the answer may have; None for any.
        node: it was sent to.
        message: its id at Flower; empty while it waits to be sent.
        former: ids under which it was sent before; an answer to one of them is as good.
        sent: how often.
        introduced: how often the client had to be told of the run first.
    """

    header: dict[str, Any]
    blob: bytes
    record: Record
    limit: int | None
    node: int = 0
    message: str = ""
    former: list[str] = field(default_factory=list)
    sent: int = 0
    introduced: int = 0

    def lost(self, retries: int, why: str) -> str | None:
        """That it was lost too often, if it was."""
        times = self.sent - self.introduced
        return f"lost {times} times: {why}" if times > retries else None


@dataclass
class Fleet:
    """The clients of one run, as the server asks them.

    Attributes:
        present: who is connected.
        settings: deadline, retries and the like.
        meter: told of every blob that crosses.
        limit: (client number) -> bytes an answer may have; None for any.
        quorum: answers without which a round is void.
        inbox: of this run.
    """

    present: Attendance
    settings: FleetConfig
    meter: Meter
    limit: Callable[[int], int | None] = lambda client: None
    quorum: int = 1
    inbox: Inbox = field(init=False)
    _late: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.present.grid)

    def join(self, needed: int | None = None) -> None:
        """Wait until enough clients have joined.

        Args:
            needed: how many; None for as many as ``fleet.minimum`` says, 0 being all.

        Raises:
            TimeoutError: ``fleet.join`` seconds went by; the message says who is there.
        """
        present = self.present
        needed = needed or self.settings.minimum or len(present.clients)
        begun, told = time.monotonic(), -LINE
        while len(present.nodes) < needed:
            now, line = time.monotonic() - begun, f"{len(present.nodes)} of {needed} connected"
            if now > self.settings.join:
                why = "".join(f"; {reason}" for _, reason in present.refused.values())
                raise TimeoutError(
                    f"{line} after {self.settings.join:g} s (fleet.join): start the others{why}"
                )
            if now - told >= LINE:
                present.say(f"{line} (waiting {now:.0f} s)")
                told = now
            present.roll_call()
            self._take({})
            time.sleep(LOOK)
        present.begun = True
        present.say(f"connected: {present.listed()}")

    def call(self, action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        """Ask each client; the :data:`~hofl.protocol.base.Call` of this runtime."""
        seconds = self.settings.deadline if deadline is None else deadline
        questions = {client: self._question(action, client, record) for client, record in requests.items()}
        self._gather(list(requests))
        replies, enough = Replies({}, {}), min(self.settings.enough or len(questions), len(questions))
        begun, told = time.monotonic(), 0.0
        while questions and len(replies.records) < enough:
            now = time.monotonic() - begun
            if now > seconds:
                break
            if now > ROLL_CALL:
                self._recall(questions)
            self._push(questions, replies, seconds - now)
            asked = time.monotonic()
            answers = self._take(questions)
            waited = time.monotonic() - asked  # a SuperLink of ours lets us wait for the bell
            for client, answer in answers.items():
                self._settle(client, answer, questions, replies)
            if questions and now - told >= LINE:
                self._tell(action, questions, len(requests), now)
                told = now
            if questions:
                pause = LOOK if answers else min(SLOWEST, max(LOOK, now / 20))
                time.sleep(max(0.0, pause - waited))
        for client, question in questions.items():
            replies.failures[client] = self._given_up(client, question, seconds, len(replies.records))
        return replies

    def _gather(self, clients: Sequence[int]) -> None:
        """Wait, up to ``fleet.join`` seconds, until a quorum is there: without it a round is void."""
        begun, told = time.monotonic(), SOON
        while (now := time.monotonic() - begun) < self.settings.join:
            welcome = [client for client in clients if self.present.unwelcome(client) is None]
            there = sum(client in self.present.nodes for client in clients)
            needed = min(self.quorum, len(welcome))
            if there >= needed:
                return
            if now >= told:
                self.present.say(f"{there} of {needed} connected (waiting {now:.0f} s)")
                told = now + LINE
            self.present.roll_call()
            self._take({})
            time.sleep(LOOK)

    def _question(self, action: str, client: int, record: Record) -> Question:
        blob = record.to_bytes()
        name = hashlib.blake2b(blob, digest_size=12, key=action.encode()[:64]).hexdigest()
        header = {
            "kind": "ask",
            "run": self.present.run,
            "action": action,
            "id": name,
            "pace": self.present.pace,
        }
        return Question(header, blob, record, self.limit(client))

    def _recall(self, questions: Mapping[int, Question]) -> None:
        """Take back what was sent to a node that has left or started anew: it will be asked again."""
        self.present.roll_call()
        for client, question in questions.items():
            if question.message and self.present.nodes.get(client) != question.node:
                question.former.append(question.message)
                question.message = ""
                self._lost(client, "its node left, or started anew")

    def _lost(self, client: int, why: str) -> None:
        self.present.say(f"{self.present.clients[client]}: lost on the way, will be asked again: {why}")

    def _push(self, questions: dict[int, Question], replies: Replies, left: float) -> None:
        """Send what waits for a client that is connected now; give up what no client will answer."""
        nodes = self.present.nodes
        waiting = [client for client, question in questions.items() if not question.message]
        for client in waiting:
            why = questions[client].lost(self.settings.retries, "its node left, or started anew")
            why = why or (None if client in nodes else self.present.unwelcome(client))
            if why is not None:
                replies.failures[client] = why
                self._forget(questions.pop(client))
        ready = [client for client in waiting if client in nodes and client in questions]
        for client in ready:
            questions[client].node = self.present.nodes[client]
        letters = [(questions[c].node, seal(questions[c].header, questions[c].blob)) for c in ready]
        for client, name in zip(ready, self.present.post(letters, left), strict=True):
            question = questions[client]
            question.message, question.sent = name, question.sent + bool(name)
            if name:
                self.meter.sent(question.record, len(question.blob))

    def _take(self, questions: Mapping[int, Question]) -> dict[int, Message]:
        """The answers that are there now, by client; late ones are dropped, those to a greeting heard."""
        asked = {name: client for client, q in questions.items() for name in (q.message, *q.former) if name}
        hellos = self.present.hellos
        ids = [*asked, *hellos, *self._late]
        answers: dict[int, Message] = {}
        for name, message in self.inbox.look(ids):
            if name in self._late:
                line = self._late.pop(name)
                if line and not message.has_error():  # else it is Flower that says it never came
                    self.present.say(line)
            elif name in hellos:
                self.present.heard(hellos[name], message)
            elif name in asked and not (message.has_error() and name in questions[asked[name]].former):
                answers[asked[name]] = message
        return answers

    def _settle(
        self, client: int, message: Message, questions: dict[int, Question], replies: Replies
    ) -> None:
        """One answer: a record, a failure, or a reason to ask again."""
        question = questions[client]
        try:
            envelope = self._delivered(client, question, message)
            if envelope is None:
                question.message = ""
                return
            replies.records[client] = self._opened(client, question, envelope)
        except RecordError as error:
            replies.failures[client] = str(error)
        self._forget(questions.pop(client))

    def _forget(self, question: Question, line: str = "") -> None:
        """Drop whatever answer a question that is over still gets, with a line if there is one to say."""
        self._late |= dict.fromkeys(filter(None, (question.message, *question.former)), line)

    def _delivered(self, client: int, question: Question, message: Message) -> Envelope | None:
        """An answer that arrived; None where the question is to be asked again.

        Raises:
            RecordError: it is no message of ours, or the question was lost too often.
        """
        if message.has_error() and message.error.code == BROKEN:
            raise RecordError(f"refused: {message.error.reason}")
        if message.has_error():
            if message.error.code == NODE_GONE:
                self.present.gone(question.node)
            reason = redact(str(message.error.reason))
            if why := question.lost(self.settings.retries, reason):
                raise RecordError(why)
            self._lost(client, reason)
            return None
        envelope = unseal(message.content)
        if envelope.header.get("status") == "stranger" and question.introduced < STRANGE:
            question.introduced += 1
            self.present.gone(question.node)
            return None
        return envelope

    def _opened(self, client: int, question: Question, envelope: Envelope) -> Record:
        """The record in an answer, checked to be one to this question.

        Raises:
            RecordError: it is not, or the client says that it failed.
        """
        header = envelope.header
        if header.get("status") != "ok":
            raise RecordError(said(envelope))
        if header.get("id") != question.header["id"]:
            raise RecordError(f"refused: the answer is to another question ({shown(header.get('id'))})")
        record = envelope.record(question.limit)
        self.meter.received(record, len(envelope.blob))
        peak = header.get("peak", 0)
        if type(peak) is int and 0 < peak < 1 << 50:
            self.meter.memory.note(client, question.record.values.get("boundary"), peak)
        return record

    def _given_up(self, client: int, question: Question, seconds: float, answered: int) -> str:
        """Why a client is left out; its answer, should it come, is late."""
        name, number = self.present.clients[client], question.record.values.get("round", -1) + 1
        self._forget(question, f"late: {name}, {question.header['action']} of round {number}: dropped")
        if self.settings.enough and answered >= self.settings.enough:
            return f"not waited for: {answered} others were enough (fleet.enough)"
        if not question.message:
            return f"not connected within {seconds:g} s"
        return f"late: no answer within {seconds:g} s (fleet.deadline)"

    def _tell(self, action: str, questions: Mapping[int, Question], total: int, now: float) -> None:
        names = ", ".join(self.present.clients[client] for client in sorted(questions)[:NAMED])
        answered = total - len(questions)
        self.present.say(f"{action}: {answered} of {total} answered (waiting {now:.0f} s for {names})")
