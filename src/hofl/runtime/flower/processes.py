# SPDX-License-Identifier: Apache-2.0
"""The processes of a deployment: their environment, start, life and end. None outlives its parent."""

import ctypes
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hofl.errors import ConfigError

Process = subprocess.Popen[bytes]

_FIXED = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Nothing calls home, nothing is installed for a run, and a task waits 0.5 s at most to be picked up."""

_DROPPED = ("FORWARDED_ALLOW_IPS", "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
"""What would make a server believe what a caller says of its own address, or open a second port."""

_HERE = "127.0.0.1,localhost,::1"
_PR_SET_PDEATHSIG = 1
_POLL = 0.05


def environment(home: Path, host: str = "") -> dict[str, str]:
    """What every process of a deployment is started with.

    Args:
        home: the folder that Flower keeps its own settings and apps in.
        host: the server's; reached without a proxy, as loopback is.
    """
    given = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    near = ",".join(filter(None, (given.get("no_proxy") or given.get("NO_PROXY"), _HERE, host)))
    found = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), given.get("PATH"))))
    ours = {"FLWR_HOME": str(home.absolute()), "PATH": found, "NO_PROXY": near, "no_proxy": near}
    return {"OMP_WAIT_POLICY": "PASSIVE", **given, **_FIXED, **ours}


def script(name: str) -> str:
    """A command of Flower, beside the Python that runs.

    Raises:
        ConfigError: it is not installed there.
    """
    file = Path(sys.executable).parent / name
    if not file.is_file():
        raise ConfigError(f"{name} is not installed beside {sys.executable}: pip install 'hofl[flower]'")
    return str(file)


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path | None = None,
    stdin: int = subprocess.DEVNULL,
) -> Process:
    """Start a child in a session of its own, which is killed when this process dies.

    Args:
        command: program and arguments.
        env: its whole environment.
        log: file that its output is appended to; the parent's own output if None.
        stdin: its standard input, as for ``subprocess.Popen``.
    """
    if log is None:
        return _spawn(command, env, None, stdin)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return _spawn(command, env, file.fileno(), stdin)


def _spawn(command: Sequence[str], env: Mapping[str, str], output: int | None, stdin: int) -> Process:
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_bound() if sys.platform == "linux" else None,
    )


def _bound() -> Callable[[], None]:
    """What a child does before it becomes the program: ask the kernel to die with its parent."""
    parent, libc = os.getpid(), ctypes.CDLL(None, use_errno=True)

    def _bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return _bind


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    status = _status(pid)
    return status is None or status[0] not in "ZX"


def _status(pid: int) -> tuple[str, int] | None:
    """State and process group of a process from /proc; None where that is not to be had."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, _, group = text.rpartition(")")[2].split()[:3]
    return state, int(group)


def members(group: int) -> list[int]:
    """The processes alive in a process group; only itself where there is no /proc."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] or [group]
    found = {pid: _status(pid) for pid in numbers}
    return [pid for pid, status in found.items() if status and status[1] == group and status[0] not in "ZX"]


def stop(process: Process, grace: float = 10.0) -> None:
    """End a child and all that it started: asked first, killed after ``grace`` seconds.

    Safe to call on one that has ended; what it started is ended all the same.
    """
    if process.poll() is None:
        process.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and (process.poll() is None or members(process.pid)):
        time.sleep(_POLL)
    for pid in members(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin:
        with suppress(OSError):
            process.stdin.close()


def stop_pid(pid: int, grace: float = 10.0) -> None:
    """End a process that is no child of this one: asked first, killed after ``grace`` seconds."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        end = time.monotonic() + seconds
        while alive(pid) and time.monotonic() < end:
            time.sleep(_POLL)
        if not alive(pid):
            return


def is_here(host: str) -> bool:
    """Whether a host is this machine alone for certain, without asking a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on.

    Raises:
        ConfigError: the port is in use, or the host is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; give an address of this machine"
        ) from None
    with socket.socket(found[0], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(found[4])
        except OSError as error:
            if error.strerror and "in use" in error.strerror:
                raise ConfigError(
                    f"--port {port}: port in use on {host}; stop what listens there, or give another"
                ) from None
            raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None


def ending(code: int) -> str:
    """How a process ended, in words, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


class Tail:
    """The lines of a file that grows, from where it ends now."""

    def __init__(self, file: Path) -> None:
        self._file, self._rest = file, b""
        self._at = file.stat().st_size if file.is_file() else 0

    def lines(self, last: bool = False) -> Iterator[str]:
        """Whole lines that have come since; with ``last`` also one that has no end."""
        if not self._file.is_file():
            return
        if self._file.stat().st_size < self._at:  # begun anew
            self._at, self._rest = 0, b""
        with self._file.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        yield from (line.decode("utf-8", "replace") for line in whole)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder; the lock goes with this process, however it ends.

    Raises:
        ConfigError: another process holds it.
    """
    with (folder / "lock").open("wb") as file:
        if not _locked(file):
            raise ConfigError(f"{folder} is in use by another hofl; stop that, or give another folder")
        yield


def _locked(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks here: the port is the only guard
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
