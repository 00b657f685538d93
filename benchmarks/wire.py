# SPDX-License-Identifier: Apache-2.0
"""Bytes on a node's wire against the bytes that a run says it moved, counted by a proxy on loopback.

    python benchmarks/wire.py [ROUNDS [FOLDER]]

HO-FL and HO-SFL on clouds of points, 2 resident nodes, once over plain HTTP and once over TLS with keys. Each
node talks to the server through a proxy of its own, which sees every request and its answer. ``metered`` is
what rounds.jsonl counts: the serialised records. ``wire`` is every byte of TCP payload of the requests by
which a message comes and its answer goes; looks that find no message, and heartbeats, are apart.
A message needs 9 requests: a look, its 3 objects, a receipt, the answer and its 3 objects; a node that is
early asks for an object again, so that there are more on a busy machine.
"""

import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import ENVIRONMENT, free_port, rows_of, server, start_nodes, stop

NODES = 2
METHODS = {"ho_fl": 1, "ho_sfl": 3}
"""Messages to a client in a round, by method."""

TIER = "cohort.boundaries=[2]"

REST, WATCHED = 25.0, 20.0
"""Seconds until a node that is asked nothing looks as seldom as it ever does, and of watching it then."""

_REQUEST = re.compile(rb"(?:GET|POST|PUT) (\S+) HTTP/1\.1\r\n")


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        at: when it began, of time.monotonic.
        path: what was asked; empty where TLS hides it.
        up, down: bytes to and from the server.
        opens: whether the connection was new, so that the bytes of its TLS handshake are among these.
    """

    at: float
    path: str
    opens: bool
    up: int = 0
    down: int = 0


@dataclass
class Proxy:
    """Passes a node's connections on to the server and writes down what crosses.

    Attributes:
        target: the server's port.
        port: its own.
        seen: in the order in which they began.
    """

    target: int
    seen: list[Exchange] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # no server yet: the node tries again
                near.close()
                continue
            line = _Line(self.seen)
            for source, sink, up in ((near, far, True), (far, near, False)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass, args=(source, sink, line, up), daemon=True).start()


@dataclass
class _Line:
    """One TCP connection: a request begins wherever the node speaks after the server has.

    Attributes:
        seen: gets its exchanges; the first over TLS is its handshake, with nothing else in it.
        now: the last of them.
        answered: whether the server spoke last.
        due: records of TLS 1.3's handshake that the server has still to send: its two session tickets.
    """

    seen: list[Exchange]
    first: Exchange | None = None
    now: Exchange | None = None
    answered: bool = True
    due: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def crossed(self, data: bytes, up: bool) -> None:
        with self.lock:
            data = self._shaken(data, up) if self.first else data
            if data and up and self.answered:
                found = _REQUEST.match(data)
                self.now = Exchange(time.monotonic(), found[1].decode() if found else "", self.now is None)
                self.first = self.first or self.now
                self.seen.append(self.now)
            if data and self.now:
                self.now.up += len(data) * up
                self.now.down += len(data) * (not up)
                self.answered = not up

    def _shaken(self, data: bytes, up: bool) -> bytes:
        """Take off what belongs to the handshake: it ends with a piece that may hold a request as well."""
        ends = up and data[:1] == b"\x14"  # change of cipher, then Finished
        size, left = 0, 2 * ends if up else self.due
        while left and size < len(data):
            size += 5 + int.from_bytes(data[size + 3 : size + 5], "big")
            left -= 1
        self.due = 2 * ends + self.due * (not ends) if up else left
        assert self.first is not None
        self.first.up += size * up
        self.first.down += size * (not up)
        return data[size:]


def _pass(source: socket.socket, sink: socket.socket, line: _Line, up: bool) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            line.crossed(data, up)
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
            end.close()


@dataclass(frozen=True)
class Idle:
    """How a node behaves that is asked nothing: its looks for a message and its heartbeats.

    Attributes:
        up, down: bytes of the largest of both, to and from the server.
        calls: a second.
        rates: bytes a second to and from the server.
    """

    up: int
    down: int
    calls: float
    rates: tuple[float, float]

    def covers(self, exchange: Exchange) -> bool:
        """Whether nothing of a message is in it; sizes of both vary a little."""
        return exchange.up <= self.up + 8 and exchange.down <= 1.5 * self.down

    def begins(self, exchange: Exchange) -> bool:
        """Whether a look has found a message: as small a question as any, and more for an answer."""
        return not exchange.opens and exchange.up <= self.up + 8 and exchange.down > 1.5 * self.down


@dataclass(frozen=True)
class Counted:
    """What all nodes' wires saw of one run.

    Attributes:
        messages: questions, each with its answer.
        calls, up, down: requests that carried a part of one, and bytes.
        handshakes: connections opened meanwhile over TLS, and bytes both ways of opening them.
        looks: requests a second and node that found no message, and heartbeats.
        paths: requests by what they ask; empty over TLS.
    """

    messages: int
    calls: int
    up: int
    down: int
    handshakes: tuple[int, int]
    looks: float
    paths: Counter[str]


def counted(proxies: Sequence[Proxy], quiet: Idle, each: int) -> Counted:
    """Add up a run, from its first question to its last answer; ``each`` node was asked so often."""
    lines = [conversation(proxy.seen, quiet, each) for proxy in proxies]
    every = [e for line in lines for e in line]
    opened = [e for e in every if e.opens and not e.path]
    parts = [e for e in every if not (e.opens and not e.path) and not quiet.covers(e)]
    return Counted(
        sum(quiet.begins(e) for e in every),
        len(parts),
        sum(e.up for e in parts),
        sum(e.down for e in parts),
        (len(opened), sum(e.up + e.down for e in opened)),
        sum(map(quiet.covers, every)) / sum(line[-1].at - line[0].at for line in lines),
        Counter(e.path.rpartition("/")[2] for e in parts if e.path),
    )


def conversation(seen: Sequence[Exchange], quiet: Idle, asked: int) -> list[Exchange]:
    """What a node says from the first of its last ``asked`` messages on; a greeting, in no row, is before."""
    first = [i for i, e in enumerate(seen) if quiet.begins(e)][-asked]
    last = max(i for i, e in enumerate(seen) if not quiet.covers(e) and not e.opens)
    return list(seen[first : last + 1])


def rest(place: Path, proxies: Sequence[Proxy], keyed: bool) -> Idle:
    """Let nodes wait for a run that never begins, as one client more is missing, and watch them."""
    settings = [f"partition.clients={NODES + 1}", f"cohort.size={NODES}", TIER]
    log = place / "rest.log"
    with log.open("wb") as output:
        command = server(place, "ho_fl", settings, proxies[0].target, keyed, "rest")
        waiting = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        while f"{NODES} of {NODES + 1} connected" not in log.read_text():
            if waiting.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.5)
        time.sleep(REST)
        begun = time.monotonic()
        time.sleep(WATCHED)
        found = [e for proxy in proxies for e in proxy.seen if e.at >= begun and not e.opens]
    finally:
        stop([waiting])
    seconds = NODES * WATCHED
    rates = sum(e.up for e in found) / seconds, sum(e.down for e in found) / seconds
    usual = [size for size, n in Counter((e.up, e.down) for e in found).items() if n > 2]
    return Idle(max(up for up, _ in usual), max(down for _, down in usual), len(found) / seconds, rates)


def measure(place: Path, keyed: bool, rounds: int) -> None:
    """One pass over all methods, its tables printed."""
    place.mkdir()
    port = free_port()
    proxies = [Proxy(port) for _ in range(NODES)]
    nodes = start_nodes(place, [proxy.port for proxy in proxies], keyed)
    try:
        quiet = rest(place, proxies, keyed)
        print(f"\n{'TLS with keys' if keyed else 'plain HTTP'}, {NODES} nodes, {rounds} rounds")
        print(
            f"a node at rest: {quiet.calls:.2f} requests a second (a look for a message, or a heartbeat), "
            f"{quiet.rates[0]:.0f} B/s up and {quiet.rates[1]:.0f} B/s down"
        )
        for method in METHODS:
            for proxy in proxies:
                proxy.seen.clear()
            settings = [f"rounds={rounds}", f"partition.clients={NODES}", f"cohort.size={NODES}"]
            settings += [f"evaluation.every={rounds}", TIER]
            command = server(place, method, settings, port, keyed)
            with (place / f"{method}.log").open("wb") as log:
                subprocess.run(command, check=True, env=ENVIRONMENT, stdout=log)
            found = counted(proxies, quiet, rounds * METHODS[method])
            show(method, rows_of(place / method), found)
    finally:
        stop(nodes)


def show(method: str, rows: Sequence[dict[str, Any]], wire: Counted) -> None:
    """Print metered against counted bytes, a message: its question goes down and its answer up."""
    rounds, n = len(rows) - 1, wire.messages
    assert not any(row["failures"] for row in rows), "a client failed: measure again on a quieter machine"
    print(f"{method}: {n} messages, {METHODS[method]} a client and round; bytes a message")
    print(f"  {'':<6}{'metered':>10}{'wire':>10}{'overhead':>10}   what is metered")
    for name, bytes_ in (("down", wire.down), ("up", wire.up)):
        kinds = sum((Counter(row[f"bytes_{name}"]) for row in rows), Counter[str]())
        metered = kinds.total() / n
        said = ", ".join(f"{kind} {count / n:.0f}" for kind, count in sorted(kinds.items()))
        print(f"  {name:<6}{metered:>10.0f}{bytes_ / n:>10.0f}{bytes_ / n - metered:>10.0f}   {said}")
    print(f"  requests: {wire.calls / n:.2f} a message, {wire.calls / rounds / NODES:.1f} a client and round")
    for path, count in wire.paths.most_common():
        print(f"    {count / n:>5.2f}  {path}")
    print(f"  besides: {wire.looks:.2f} looks and heartbeats a second and node during the run")
    opened, size = wire.handshakes
    if opened:
        print(f"  TLS handshakes: {opened} in the run, {size / opened:.0f} B each, not in the table")


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[2] if len(sys.argv) > 2 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for keyed in (False, True):
            measure(folder / ("tls" if keyed else "plain"), keyed, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
