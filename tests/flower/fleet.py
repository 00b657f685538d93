# SPDX-License-Identifier: Apache-2.0
"""A deployment of real processes on loopback, and the means to harm it.

Everything is ended by its own number; a part's number comes from its parent's list of children.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hofl.runtime.flower.processes import alive, start

PARTS = {"link": "runtime.flower.link", "executor": "flower-superexec", "worker": "runtime.flower.worker"}
"""What the command lines of a server's and a node's parts contain."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"


@dataclass(frozen=True)
class Undisturbed:
    """How a run in one process ended, and its rows."""

    final: str
    rows: list[dict[str, Any]]


Alone = Callable[..., Undisturbed]
"""(configuration, *settings) -> the run."""

SLOW = 180.0
"""Seconds that anything may take on a machine that is busy with other things."""

_TICKS = os.sysconf("SC_CLK_TCK")


def hofl(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hofl", *map(str, arguments)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(pid: int) -> dict[int, str]:
    """Command lines of a process's children."""
    try:
        numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {}
    lines = {}
    for number in map(int, numbers):
        with suppress(OSError):
            lines[number] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return lines


def family(pid: int) -> list[int]:
    """A process and all that it started, parents first."""
    return [pid, *(kin for child in children(pid) for kin in family(child))]


def part(pid: int, name: str) -> int:
    """The one child of a process that is this part of it; 0 if there is none now."""
    found = [child for child, line in children(pid).items() if PARTS[name] in line and alive(child)]
    assert len(found) <= 1, found
    return found[0] if found else 0


def seconds_used(pid: int) -> float:
    """Processor seconds that a process has used."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / _TICKS


def until(true: Callable[[], object], seconds: float, why: Callable[[], str]) -> None:
    """Wait for something; say what was there instead if it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s:\n{why()}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    """SIGKILL, and see that it is gone."""
    assert pid and alive(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), 5.0, lambda: f"{pid} lives on")


def comparable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what no two runs have the same: times and this process's own memory."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "peak_bytes")} for row in rows]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process hangs inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass
class Command:
    """A ``hofl`` command that runs, and what it has said."""

    log: Path
    arguments: Sequence[object]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = start(hofl(*self.arguments), ENVIRONMENT, self.log)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def count(self, said: str) -> int:
        """Lines that have this in them."""
        return sum(said in line for line in self.text.splitlines())

    def wait_for(self, true: Callable[[], object], seconds: float = SLOW) -> None:
        """Wait, for as long as the command runs."""

        def _or_dead() -> object:
            assert self.process.poll() is None, self.text
            return true()

        until(_or_dead, seconds, lambda: self.text)

    def part(self, name: str) -> int:
        return part(self.process.pid, name)

    def kill_tree(self) -> None:
        """SIGKILL of it and of everything under it, at once."""
        pids = family(self.process.pid)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        until(lambda: not any(map(alive, pids)), 10.0, lambda: f"alive: {[p for p in pids if alive(p)]}")

    def stop(self, seconds: float = 40.0) -> None:
        """End it as a user does."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise


@dataclass
class Node(Command):
    """``hofl node``, with its worker."""

    name: str = ""

    @property
    def worker(self) -> int:
        return self.part("worker")

    def wait_connected(self, times: int = 1, seconds: float = SLOW) -> None:
        self.wait_for(lambda: self.count(" connected to ") >= times, seconds)

    def wait_busy(self, seconds: float = 0.3) -> int:
        """Wait until its worker computes, and has for so long -> the worker."""
        pid = self.worker
        begun = seconds_used(pid)
        until(lambda: seconds_used(pid) - begun >= seconds, 60.0, lambda: f"{self.name} idles\n{self.text}")
        return pid


@dataclass
class Server(Command):
    """``hofl server``, serving one run."""

    out: Path = Path()
    state: Path = Path()

    @property
    def run_process(self) -> int:
        """The ServerApp's."""
        try:
            return int((self.state / "serverapp.pid").read_text())
        except (OSError, ValueError):
            return 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        file = self.out / "rounds.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_rows(self, count: int, seconds: float = SLOW) -> None:
        """Wait until so many rounds are done, round 0 among them."""
        self.wait_for(lambda: len(self.rows) >= count, seconds)

    def finish(self, seconds: float = 1.5 * SLOW) -> None:
        """Let the run end, as it should."""
        code = self.process.wait(seconds)
        assert code == 0, self.text
        assert [row["round"] for row in self.rows] == list(range(len(self.rows)))

    @property
    def final(self) -> str:
        return str(json.loads((self.out / "summary.json").read_bytes())["final_sha256"])


class Fleet:
    """Three resident nodes that stay, over TLS with keys, and servers that come and go on one state folder.

    Args:
        place: a folder for everything.
        names: of the clients.
    """

    def __init__(self, place: Path, names: Sequence[str]) -> None:
        self.place, self.names, self.port = place, tuple(names), free_port()
        self.state = place / "state"
        self.nodes: dict[str, Node] = {}
        self._servers: list[Server] = []
        subprocess.run(
            hofl("keys", place / "keys", *(f"--node={n}" for n in names)), check=True, capture_output=True
        )

    def start(self, name: str, *overrides: str) -> Node:
        """Start a node; its log goes on if it had one."""
        file = self.place / f"{name}.toml"
        if not file.is_file():
            file.write_text(
                f'client = "{name}"\nserver = "127.0.0.1:{self.port}"\nca = "keys/ca.crt"\n'
                f'key = "keys/nodes/{name}.key"\nfolder = "{name}"\n[consent]\nsplit = true\n'
                f'[data]\ntrain = "{name}.csv"\n'
            )
        self.nodes[name] = Node(self.place / f"{name}.log", ["node", file, *overrides], name=name)
        return self.nodes[name]

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """A node is away inside; it is there again afterwards, as before."""
        self.nodes[name].stop()
        try:
            yield
        finally:
            self.nodes[name].stop()
            self.start(name)

    def serve(self, config: Path, out: str, *settings: str, resume: bool = False) -> Server:
        """Start a server for a run of this fleet, new or resumed."""
        where = self.place / out
        given = ["--resume", where] if resume else [config, *settings, "--out", where]
        command = ["server", *given, "--keys", self.place / "keys", "--port", self.port]
        command += ["--state", self.state]
        self._servers.append(Server(self.place / f"{out}.log", command, out=where, state=self.state))
        return self._servers[-1]

    def end_servers(self) -> None:
        """End whatever a test has left, and see that nothing of a server lives on."""
        servers, self._servers = self._servers, []
        pids = [pid for server in servers for pid in family(server.process.pid)]
        pids += [server.run_process for server in servers if server.run_process]
        for server in servers:
            server.stop()
        until(lambda: not any(map(alive, pids)), 10.0, lambda: f"alive: {[p for p in pids if alive(p)]}")

    def close(self) -> None:
        """End everything."""
        self.end_servers()
        for node in self.nodes.values():
            node.process.terminate()
        for node in self.nodes.values():
            node.stop()
