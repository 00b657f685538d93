# SPDX-License-Identifier: Apache-2.0
"""hofl server with the real SuperLink, SuperExec and flwr: what dies comes back, nothing is left behind."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scratch_app
from fleet import children, free_port

from hofl.commands.server import server
from hofl.errors import ConfigError
from hofl.runtime.flower import keys
from hofl.runtime.flower.processes import alive

SCRIPT = Path(__file__).with_name("serve_scratch.py")


@dataclass
class Served:
    """A server of the scratch app, and what it has said."""

    root: Path
    process: subprocess.Popen[bytes]

    @property
    def said(self) -> list[str]:
        return (self.root / "said").read_text().splitlines()

    @property
    def rows(self) -> list[dict[str, Any]]:
        file = self.root / "out" / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def until(self, true: Callable[[], object], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None and time.monotonic() < end, "\n".join(self.said)
            time.sleep(0.05)

    def finish(self) -> int:
        """Let the run end; its rounds must be there once each. Returns the exit code."""
        (self.root / "enough").touch()
        code = self.process.wait(60)
        assert [row["round"] for row in self.rows] == list(range(len(self.rows))), self.said
        return code

    @property
    def runs(self) -> list[int]:
        """Processes that have written rows, in their order."""
        return list(dict.fromkeys(row["pid"] for row in self.rows))

    def kill(self, part: str) -> None:
        [pid] = [pid for pid, line in children(self.process.pid).items() if part in line]
        os.kill(pid, signal.SIGKILL)

    def kill_run(self) -> None:
        os.kill(int((self.root / "out-server" / "serverapp.pid").read_text()), signal.SIGKILL)

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers; afterwards no process of theirs may be alive."""
    scratch_app.write(tmp_path / "app")
    started: list[subprocess.Popen[bytes]] = []

    def begin(port: int, key_folder: Path | None = None, host: str = "127.0.0.1", **settings: Any) -> Served:
        given = {"rounds": 3, "pause": 0.2, "until": str(tmp_path / "enough"), **settings}
        (tmp_path / "settings.json").write_text(json.dumps(given))
        command = [sys.executable, SCRIPT, tmp_path, host, str(port), *([key_folder] if key_folder else [])]
        with (tmp_path / "said").open("wb") as said:
            started.append(subprocess.Popen(command, stdout=said, stderr=said))
        return Served(tmp_path, started[-1])

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    pid = tmp_path / "out-server" / "serverapp.pid"
    assert not pid.is_file() or not alive(int(pid.read_text()))
    left = [line for line in commands() if str(tmp_path) in line]
    assert not left


def commands() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


@pytest.fixture
def key_folder(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys", ["localhost"], ["clinic-a"])
    return tmp_path / "keys"


def ask(address: str, port: int, path: str, ca: Path, source: str) -> int:
    """HTTP status of a request from one of this machine's addresses."""
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection(
        address, port, timeout=10, context=context, source_address=(source, 0)
    )
    connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
    status = connection.getresponse().status
    connection.close()
    return status


def outside() -> str | None:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return None


def test_a_run_survives_the_death_of_its_parts(serve: Callable[..., Served], key_folder: Path) -> None:
    """SIGKILL of the SuperLink and of the run's process, over TLS with node keys: every round once."""
    port = free_port()
    served = serve(port, key_folder, "0.0.0.0")
    served.until(lambda: len(served.rows) >= 2)
    assert any("known from now on: clinic-a" in line for line in served.said)
    if address := outside():
        ca = key_folder / "ca.crt"
        assert ask("127.0.0.1", port, "/v1/control/start-run", ca, address) == 403
        assert ask("127.0.0.1", port, "/v1/runtime/acquire-task", ca, address) == 403
        assert ask("127.0.0.1", port, "/v1/fleet/pull-messages", ca, address) not in (200, 403)
        assert ask("127.0.0.1", port, "/v1/runtime/acquire-task", ca, "127.0.0.1") == 401

    served.kill("runtime.flower.link")
    rows = len(served.rows)
    served.until(lambda: len(served.rows) >= rows + 3)
    assert len(served.runs) == 1
    assert any("SuperLink killed by signal 9" in line for line in served.said)

    keys.create(key_folder, ["localhost"], ["clinic-b"])  # a late comer
    served.until(lambda: any("known from now on: clinic-b" in line for line in served.said))
    served.kill_run()
    served.until(lambda: len(served.runs) == 2)
    assert served.finish() == 0, served.said
    started = [line for line in served.said if line.startswith("started in")]
    assert [line.partition(", ")[2] for line in started] == [
        "resume False, keys keys",
        "resume True, keys keys",
    ]
    assert (served.root / "out-server").stat().st_mode & 0o077 == 0


def test_the_runs_own_failure_is_the_servers(serve: Callable[..., Served]) -> None:
    served = serve(free_port(), exit=2, message="optimizer.lr: too large", rounds=1, until="")
    assert served.wait() == 2
    assert served.said[-1] == "hofl: optimizer.lr: too large"
    assert len(served.rows) == 1 and not any("again" in line for line in served.said)


@pytest.mark.slow
def test_a_superexec_that_dies_takes_the_run_with_it_and_both_come_back(serve: Callable[..., Served]) -> None:
    served = serve(free_port())
    served.until(lambda: len(served.rows) >= 3)
    served.kill("flower-superexec")
    served.until(lambda: len(served.runs) == 2)
    assert served.finish() == 0, served.said


@pytest.mark.slow
def test_everything_dies_at_once_and_comes_back(serve: Callable[..., Served]) -> None:
    served = serve(free_port())
    served.until(lambda: len(served.rows) >= 3)
    served.kill_run()
    served.kill("runtime.flower.link")
    served.kill("flower-superexec")
    served.until(lambda: len(served.runs) == 2)
    assert served.finish() == 0, served.said


@pytest.mark.slow
def test_a_run_that_always_dies_is_given_up(serve: Callable[..., Served]) -> None:
    served = serve(free_port(), die=True)
    assert served.wait(180) == 1
    assert sum("submitted again" in line for line in served.said) == 5
    assert "RunFailed: the run's process died, 6 times without a new round" in served.said[-1]


@pytest.mark.slow
def test_a_server_that_cannot_start_its_run_says_why(serve: Callable[..., Served]) -> None:
    served = serve(free_port())
    (served.root / "app" / "scratch" / "server_app.py").write_text("import nothing_like_it\napp = 1\n")
    assert served.wait(40) == 1
    assert "did not start" in served.said[-1] and "nothing_like_it" in served.said[-1]
    assert not any("again" in line for line in served.said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_server_goes_on(serve: Callable[..., Served], key_folder: Path, number: int) -> None:
    """Nothing of it lives on; the next one knows its nodes, and shuts out whose key is gone."""
    port = free_port()
    served = serve(port, key_folder)
    served.until(lambda: len(served.rows) >= 2)
    served.process.send_signal(number)
    assert served.wait() == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert served.said[-1].startswith("hofl: stopped; go on with: hofl server --resume")
    keys.create(key_folder, ["localhost"], ["clinic-b"])
    (key_folder / "nodes" / "clinic-a.pub").unlink()
    again = serve(port, key_folder)
    again.until(lambda: len(again.runs) == 2)
    assert again.finish() == 0, again.said
    assert "known from now on: clinic-b" in again.said
    assert "refused from now on, its key is gone: clinic-a" in again.said


CONFIG = 'algorithm = "ho_fl"\nrounds = 2\n[task]\nname = "synthetic"\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0", "insecure": True}, "--host 0.0.0.0 can be reached from other machines"),
        ({}, "--keys is missing"),
        ({"keys": "nowhere"}, "nowhere: no ca.crt"),
        ({"arguments": ["run.toml", "rounds=-1"], "insecure": True}, "command line: rounds = -1"),
        ({"out": "full", "insecure": True}, "full exists and is not empty"),
        ({"resume": "empty", "insecure": True}, "empty: nothing to resume"),
        ({"port": 0, "insecure": True}, "port in use"),
    ],
    ids=["public", "keyless", "keys", "config", "out", "resume", "port"],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    """T15 among others; nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    Path("full").mkdir()
    Path("full", "file").touch()
    before = sorted(Path().rglob("*"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"arguments": ["run.toml"], "port": free_port()} | options
        given["port"] = given["port"] or taken.getsockname()[1]
        paths = {n: Path(given.pop(n)) for n in ("keys", "out", "resume") if n in given}
        with pytest.raises(ConfigError, match=message):
            server(**given, **paths)
    assert sorted(Path().rglob("*")) == before
