# SPDX-License-Identifier: Apache-2.0
"""Processes of a deployment: what they are started with, how they end, and that none is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

from hofl.errors import ConfigError
from hofl.runtime.flower import keeper, processes
from hofl.runtime.flower.guard import allowed
from hofl.runtime.flower.job import Job
from hofl.runtime.flower.processes import Tail, alive, alone, members, require_free, start, stop
from hofl.runtime.flower.superlink import Site, app_folder, require_safe

ENV = dict(os.environ)


def until(true: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def doomed() -> Iterator[list[int]]:
    """Numbers of processes that a test lets live on; none does after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_nothing_calls_home_or_trusts_a_callers_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("no_proxy", "intranet")
    env = processes.environment(tmp_path, "10.0.0.5")
    for name in ("TELEMETRY_ENABLED", "DISABLE_UPDATE_CHECK", "DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"):
        assert env[f"FLWR_{name}"] == ("0" if "TELEMETRY" in name else "1")
    assert env["FLWR_HOME"] == str(tmp_path) and "FORWARDED_ALLOW_IPS" not in env
    assert env["NO_PROXY"].split(",") == ["intranet", "127.0.0.1", "localhost", "::1", "10.0.0.5"]
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_a_missing_command_is_said() -> None:
    with pytest.raises(ConfigError, match=r"flower-nothing is not installed beside .*hofl\[flower\]"):
        processes.script("flower-nothing")
    assert Path(processes.script("flwr")).is_file()


def test_a_child_dies_with_a_killed_parent(tmp_path: Path, doomed: list[int]) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from hofl.runtime.flower.processes import start\n"
        "print(start(['sleep', '60'], dict(os.environ), Path(sys.argv[1])).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(python(code, tmp_path / "log"), stdout=subprocess.PIPE)
    assert parent.stdout
    with parent.stdout:
        child = int(parent.stdout.readline())
    doomed += [child, parent.pid]
    assert alive(child)
    parent.kill()
    parent.wait()
    assert until(lambda: not alive(child), 5.0)


def test_stop_ends_who_will_not_listen_and_whom_it_started(tmp_path: Path, doomed: list[int]) -> None:
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "logs" / "child.log"
    child = start(python(code), ENV, log)
    assert until(lambda: log.is_file() and log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    doomed += [child.pid, grandchild]
    assert set(members(child.pid)) == {child.pid, grandchild}
    stop(child, grace=0.3)
    assert child.returncode == -signal.SIGKILL and until(lambda: not alive(grandchild), 2.0)
    stop(child)  # again: nothing to do


def test_one_that_ended_and_was_not_waited_for_is_not_alive() -> None:
    child = subprocess.Popen(python("pass"))
    assert until(lambda: not alive(child.pid))
    assert child.wait() == 0


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: port in use on 127.0.0.1"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 203.0.113.9 .*[Cc]annot assign"):
        require_free("203.0.113.9", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.2", "::", "server.example"])
def test_beyond_this_machine_only_with_keys(host: str) -> None:
    """T15."""
    for insecure in (False, True):
        with pytest.raises(ConfigError, match=f"--host {host} can be reached .* --keys"):
            require_safe(host, False, insecure)
    require_safe(host, True, False)


def test_without_keys_only_if_asked() -> None:
    with pytest.raises(ConfigError, match="--keys is missing"):
        require_safe("127.0.0.1", False, False)
    for host in ("127.0.0.1", "localhost", "::1"):
        require_safe(host, False, True)


@pytest.mark.parametrize(
    ("path", "client", "passes"),
    [
        ("/v1/fleet/pull-messages", "198.51.100.7", True),
        ("/health", "198.51.100.7", True),
        ("/v1/control/start-run", "198.51.100.7", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "192.0.2.2", True),
        ("/v1/control/start-run", "unix", False),
        ("/v1/control/start-run", None, False),
        ("/v1/runtime/acquire-task", "198.51.100.7", False),
        ("/docs", "198.51.100.7", False),
    ],
)
def test_other_machines_are_answered_as_nodes_only(path: str, client: str | None, passes: bool) -> None:
    assert allowed(path, (client, 5) if client else None, ("192.0.2.2", 9092)) is passes


def test_one_process_holds_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from hofl.runtime.flower.processes import alone\n"
        "with alone(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(python(code, tmp_path), stdout=subprocess.PIPE)
    assert other.stdout
    with other.stdout:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is in use by another hofl"), alone(tmp_path):
            pass
    other.kill()
    other.wait()
    with alone(tmp_path):
        pass


def test_a_tail_gives_whole_lines_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("of an earlier run\n")
    tail = Tail(file)
    assert list(tail.lines()) == []
    with file.open("a") as stream:
        stream.write("one\ntw")
    assert list(tail.lines()) == ["one"]
    with file.open("a") as stream:
        stream.write("o\nthree")
    assert list(tail.lines()) == ["two"]
    assert list(tail.lines(last=True)) == ["three"]
    file.write_text("anew\n")
    assert list(tail.lines()) == ["anew"]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # raised inside flwr
def test_the_app_is_thin_and_has_every_key_that_a_submission_sets(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    app = tomllib.loads((app_folder() / "pyproject.toml").read_text())
    job = Job(Site(tmp_path, "127.0.0.1", 9092, None), tmp_path / "c", tmp_path / "out", False)
    defaults = app["tool"]["flwr"]["app"]["config"]
    assert {name: type(value) for name, value in job.settings().items()} == {
        name: type(value) for name, value in defaults.items()
    }
    assert app["project"]["dependencies"] == []
    bundle = build_fab_from_disk(app_folder())
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    assert {"pyproject.toml", "hofl_app/server_app.py", "hofl_app/client_app.py"} <= names
    assert len(bundle) < 10_000


WORKER = """
import json, os, sys, time
from pathlib import Path
given = json.loads(sys.stdin.read())
starts = Path(given["starts"])
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
number = len(starts.read_text().splitlines())
if number <= given["deaths"]:
    os.kill(os.getpid(), 9)
if given["stays"]:
    time.sleep(60)
print("wrong CA")
sys.exit(2)
"""


def test_a_worker_is_started_again_until_refused(tmp_path: Path) -> None:
    """C62: a worker that the kernel killed is said to be."""
    said: list[str] = []
    settings = json.dumps({"starts": str(tmp_path / "starts"), "deaths": 2, "stays": False})
    before = time.monotonic()
    assert keeper.keep(settings, tmp_path / "node", ENV, said.append, python(WORKER)) == keeper.REFUSED
    assert said == [
        "worker killed by signal 9 (out of memory?); started again in 1 s",
        "worker killed by signal 9 (out of memory?); started again in 2 s",
    ]
    assert len((tmp_path / "starts").read_text().splitlines()) == 3
    assert 3.0 <= time.monotonic() - before < 6.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_no_worker_outlives_its_node(tmp_path: Path, doomed: list[int], number: int, code: int) -> None:
    driver = (
        "import os, sys; from pathlib import Path; from hofl.runtime.flower.keeper import keep\n"
        "command = [sys.executable, '-c', sys.argv[3]]\n"
        "sys.exit(keep(sys.argv[1], Path(sys.argv[2]), dict(os.environ), print, command))"
    )
    starts = tmp_path / "starts"
    settings = json.dumps({"starts": str(starts), "deaths": 0, "stays": True})
    node = subprocess.Popen(python(driver, settings, tmp_path / "node", WORKER), stdout=subprocess.PIPE)
    assert until(lambda: starts.is_file() and starts.read_text().endswith("\n"))
    worker = int(starts.read_text())
    doomed += [node.pid, worker]
    node.send_signal(number)
    out, _ = node.communicate(timeout=20)
    assert node.returncode == code and until(lambda: not alive(worker), 5.0)
    assert (b"node stopped" in out) is (code == 0)
