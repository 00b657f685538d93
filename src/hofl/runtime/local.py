# SPDX-License-Identifier: Apache-2.0
"""The in-process runtime: every client runs here, one after the other, on the one model.

What a client is asked and what it answers crosses as bytes all the same, so that a message which
would not survive a network does not survive here, and bytes are counted on real blobs.
"""

import os
import re
import sysconfig
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hofl.core.record import Record
from hofl.errors import ClientError, HoflError, RecordError
from hofl.protocol.base import Action, Call, Memory, Replies
from hofl.runtime.meter import Meter
from hofl.tasks.base import Task

IN_PROCESS = (
    "federated, in-process simulation: all clients run in one process on this machine; "
    "no privacy is provided or measured"
)
"""What the manifest says about this runtime."""

MESSAGE_LIMIT = 2000
"""Characters of an exception's message that are kept."""


def local_call(
    task: Task,
    actions: Mapping[str, Action],
    meter: Meter | None = None,
    cuts: Sequence[int] | None = None,
) -> Call:
    """A call that runs the clients in order of their number.

    A client that raises, or whose reply is no record, is absent from the replies and explained. An
    interrupt passes through, and so does the error of a setting or model that serves no client. One
    that took longer than the deadline is absent as late: clients share this process, so its time is
    its own, not that of those before it. Each client has a memory of its own, as long as the call lives.

    Args:
        task: passed to every action; its model serves all clients.
        actions: what a client can be asked; a name not in it is a KeyError of the caller's.
        meter: told of every blob that crosses; its ``memory`` may measure clients.
        cuts: of a split method, the boundary up to which each client holds the model; None: all of it.
    """
    counted = Meter() if meter is None else meter
    memories: defaultdict[int, Memory] = defaultdict(Memory)

    def call(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        """Ask each client in turn."""
        act = actions[action]
        replies = Replies({}, {})
        for client in sorted(requests):
            request = requests[client]
            blob = request.to_bytes()
            counted.sent(request, len(blob))
            boundary, held = request.values.get("boundary"), None if cuts is None else cuts[client]
            try:
                with counted.memory.of(client, boundary, task.model, held):
                    replies.records[client] = _answer(act, task, blob, memories[client], deadline, counted)
            except Exception as error:  # any failure of a client is its own, never the run's
                if isinstance(error, HoflError) and not isinstance(error, RecordError):
                    raise  # the user's to mend, and the same for every client
                replies.failures[client] = explain(error)
                counted.traces.append(f"client {client}\n{trace()}")
        return replies

    return call


def _answer(
    act: Action, task: Task, blob: bytes, memory: Memory, deadline: float | None, meter: Meter
) -> Record:
    start = time.monotonic()
    reply = act(task, Record.from_bytes(blob), memory)
    answer = reply.to_bytes()
    meter.received(reply, len(answer))
    elapsed = time.monotonic() - start
    if deadline is not None and elapsed > deadline:
        raise ClientError(f"late: took {elapsed:.1f} s, the deadline is {deadline:g} s")
    return Record.from_bytes(answer)


def explain(error: BaseException) -> str:
    """One line such as ``ValueError: boom (file.py:12 in local_steps)``: the last frame of no library.

    The message is cut to 2000 characters and loses what must not reach a log: quoted sentences
    (they may be a client's text), secrets of the environment, the home folder, control characters.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))] or list(frames)
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    message = redact(str(error))
    return f"{type(error).__name__}: {message}{place}"


def trace() -> str:
    """The traceback of the error at hand, each line as :func:`redact` leaves it."""
    lines = traceback.format_exc().splitlines()
    return "\n".join(line[: len(line) - len(line.lstrip())] + redact(line) for line in lines)


def redact(text: str) -> str:
    """``text`` as one printable line without quoted sentences, secrets and the home folder, cut."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, f"<{name}>")
    text = _SENTENCE.sub(r"\1...\1", text[: 4 * MESSAGE_LIMIT])
    text = _CREDENTIALS.sub("://<redacted>@", text).replace(str(Path.home()) + os.sep, "~" + os.sep)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 3] + "..."


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_SECRET = re.compile(r"(TOKEN|_KEY|SECRET|PASSWORD)$", re.IGNORECASE)
_SENTENCE = re.compile(r"(['\"])(?:(?!\1).)*\s(?:(?!\1).)*\s(?:(?!\1).)*\1", re.DOTALL)
_CREDENTIALS = re.compile(r"://[^/\s@]+@")
