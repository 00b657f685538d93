# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperLink and SuperExec, and what is asked of them through the ``flwr`` command."""

import http.client
import json
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from hofl.errors import ConfigError, RunFailed
from hofl.runtime.flower.processes import Process, ending, environment, is_here, script, start

CONNECTION = "hofl"
"""Name of the connection in Flower's own settings."""

_CLI_SECONDS = 120.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Keys(Protocol):
    """What a server needs of a key folder."""

    @property
    def ca_certificate(self) -> Path:
        """Of the authority that both sides trust."""

    @property
    def server_certificate(self) -> Path:
        """The server's, with its names."""

    @property
    def server_key(self) -> Path:
        """The server's secret."""

    @property
    def nodes(self) -> Path:
        """Folder of the nodes' public keys, ``NAME.pub``."""


@dataclass(frozen=True)
class Site:
    """Where a server is and what it keeps.

    Attributes:
        state: folder of the database, Flower's own settings and the logs.
        host, port: the address it listens on.
        keys: for TLS and node authentication; None for neither, on loopback alone.
    """

    state: Path
    host: str
    port: int
    keys: Keys | None

    @property
    def home(self) -> Path:
        """Flower's own folder."""
        return self.state / "flwr"

    @property
    def database(self) -> Path:
        """Nodes, runs, messages: what a SuperLink goes on with after its death."""
        return self.state / "superlink.db"

    @property
    def address(self) -> str:
        """Where processes on this machine reach the server."""
        host = _ANY.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """Environment of every process of the server."""
        return environment(self.home, _ANY.get(self.host, self.host))


def app_folder() -> Path:
    """The Flower app that ships with this package: what ``flwr run`` is given."""
    return Path(__file__).parent / "app"


def require_safe(host: str, keyed: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without TLS and node authentication, and silently without.

    Raises:
        ConfigError: it would.
    """
    if keyed:
        return
    if not is_here(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: give --keys FOLDER (hofl keys makes one); "
            "without TLS a server listens on 127.0.0.1 only"
        )
    if not insecure:
        raise ConfigError(
            "--keys is missing: hofl keys makes a key folder; or give --insecure to serve this machine alone"
        )


def start_link(site: Site) -> Process:
    """Start a SuperLink on the site's database; it serves when :func:`wait_healthy` returns."""
    command = [sys.executable, "-P", "-m", "hofl.runtime.flower.link", "--isolation", "process"]
    command += ["--database", str(site.database.absolute())]
    command += ["--host", site.host, "--port", str(site.port), *_secret(site)]
    if site.keys:
        command += [
            "--ssl-ca-certfile",
            str(site.keys.ca_certificate),
            "--ssl-certfile",
            str(site.keys.server_certificate),
        ]
        command += ["--ssl-keyfile", str(site.keys.server_key), "--enable-supernode-auth"]
    else:
        command.append("--insecure")
    return start(command, site.env, site.state / "superlink.log")


def start_executor(site: Site) -> Process:
    """Start a SuperExec, which starts the server's half of each run submitted and outlives a SuperLink."""
    trust = ["--root-certificates", str(site.keys.ca_certificate)] if site.keys else ["--insecure"]
    command = [script("flower-superexec"), "--runtime-api-address", site.address, *trust, *_secret(site)]
    return start(command, site.env, site.state / "superexec.log")


def _secret(site: Site) -> list[str]:
    """The secret by which the SuperLink knows its SuperExec, made once: nobody else gets tasks."""
    file = (site.state / "superexec.secret").absolute()
    if not file.is_file() or not file.stat().st_size:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(secrets.token_bytes(32))
    return ["--superexec-auth-secret-file", str(file)]


def healthy(site: Site) -> bool:
    """Whether the SuperLink answers, with the certificate that the keys promise."""
    host = _ANY.get(site.host, site.host)
    context = ssl.create_default_context(cafile=str(site.keys.ca_certificate)) if site.keys else None
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    extra: dict[str, Any] = {"context": context} if context else {}
    connection = kind(host, site.port, timeout=5.0, **extra)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the server's certificate does not fit {host}: {error.verify_message}; make one: hofl keys"
        ) from None
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_healthy(site: Site, process: Process, seconds: float = 60.0) -> None:
    """Wait until a SuperLink serves.

    Raises:
        RunFailed: it ended, or does not answer in time.
        ConfigError: its certificate is not good for its address.
    """
    end = time.monotonic() + seconds
    while not healthy(site):
        code = process.poll()
        if code is not None or time.monotonic() > end:
            how = "does not answer" if code is None else ending(code)
            raise RunFailed(f"SuperLink {how}: {last_line(site.state / 'superlink.log')}")
        time.sleep(0.1)


def last_line(log: Path) -> str:
    """The last line of a log that says something; says where the rest is."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace")[-4000:].split("\n")
    except OSError:
        lines = []
    said = [line.strip() for line in lines if line.strip()]
    return f"{said[-1][:300] if said else 'it said nothing'} (see {log})"


def connect(site: Site) -> None:
    """Write the connection to the SuperLink into Flower's own settings."""
    entry: dict[str, Any] = {"address": site.address}
    entry |= (
        {"root-certificates": str(site.keys.ca_certificate.absolute())} if site.keys else {"insecure": True}
    )
    site.home.mkdir(parents=True, exist_ok=True)
    text = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: entry}})
    (site.home / "config.toml").write_text(text, encoding="utf-8")


def flwr(site: Site, *arguments: str) -> dict[str, Any]:
    """Run a ``flwr`` command, 1 to 2 s, and return what it says as JSON.

    Raises:
        RunFailed: it did not succeed; the message is Flower's.
    """
    command = [script("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=site.env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLI_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"flwr {arguments[0]} did not answer within {_CLI_SECONDS:.0f} s") from None
    text = done.stdout.decode("utf-8", "replace")
    try:
        answer: dict[str, Any] = json.loads(text[text.index("{") :])
    except ValueError:
        answer = {}
    if answer.get("success") is not True:
        said = answer.get("error-message") or text + done.stderr.decode("utf-8", "replace")
        raise RunFailed(
            f"flwr {arguments[0]}: {' '.join(str(said).split())[:500] or ending(done.returncode)}"
        )
    return answer


def submit(site: Site, app: Path, overrides: Mapping[str, str | bool | int | float]) -> int:
    """Start a run of a Flower app.

    Args:
        site: where.
        app: its folder.
        overrides: of its run configuration; only keys that its ``pyproject.toml`` has.

    Returns:
        the run's number.

    Raises:
        RunFailed: Flower refuses it.
    """
    file = site.state / "run.toml"  # Flower's own quoting on the command line cannot carry every path
    file.write_text(tomli_w.dumps(dict(overrides)), encoding="utf-8")
    return int(flwr(site, "run", str(app), CONNECTION, "-c", str(file.absolute()))["run-id"])


def status(site: Site, run: int) -> tuple[str, str]:
    """A run's status, such as ``running`` or ``finished:failed``, and its details.

    Raises:
        RunFailed: the SuperLink does not answer, or does not know the run.
    """
    found = flwr(site, "list", CONNECTION, "--run-id", str(run))["runs"][0]
    return found["status"], found["status-details"]


def unfinished(site: Site) -> list[int]:
    """Runs that the SuperLink holds for unfinished."""
    runs = flwr(site, "list", CONNECTION)["runs"]
    return [int(run["run-id"]) for run in runs if not run["status"].startswith("finished")]


def stop_run(site: Site, run: int) -> None:
    """Tell the SuperLink that a run is over.

    Raises:
        RunFailed: it is over already, or the SuperLink does not answer.
    """
    flwr(site, "stop", str(run), CONNECTION)
