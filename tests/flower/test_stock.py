# SPDX-License-Identifier: Apache-2.0
"""Sites that run Flower's own SuperNode and nothing of ours but the package: slow, the same result."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import Fleet, Server, comparable, free_port

from hofl.runtime.flower.processes import environment, script, start, stop

pytestmark = pytest.mark.slow

SYNTHETIC = Path(__file__).parents[2] / "configs" / "synthetic"
NAMES = ("client-0", "client-1")
SETTINGS = (
    "rounds=2",
    "partition.kind=iid",
    "partition.clients=2",
    "cohort.size=2",
    "evaluation.every=1",
    "run.threads=1",
)


@dataclass
class Site:
    """A fleet of plain SuperNodes: unlike ours they give up where their key is not known yet."""

    fleet: Fleet
    ends: ExitStack

    def serve(self, name: str, out: str, join: float, *more: str) -> Server:
        """A server, and both nodes once it knows their keys."""
        server = self.fleet.serve(SYNTHETIC / f"{name}.toml", out, *SETTINGS, f"fleet.join={join}", *more)
        server.wait_for(lambda: server.count(" submitted "))
        for node in NAMES:
            self.ends.callback(stop, start(self._command(node), self._env(node), self.log(node)))
        return server

    def file(self, name: str) -> Path:
        return self.fleet.place / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.fleet.place / f"{name}.log"

    def _env(self, name: str) -> dict[str, str]:
        return {**environment(self.fleet.place / f"{name}-flwr"), "OMP_NUM_THREADS": "1"}

    def _command(self, name: str) -> list[str]:
        keys = self.fleet.place / "keys"
        return [
            *(sys.executable, script("flower-supernode"), "--superlink", f"127.0.0.1:{self.fleet.port}"),
            *("--root-certificates", str(keys / "ca.crt")),
            *("--auth-supernode-private-key", str(keys / "nodes" / f"{name}.key")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"node='{self.file(name)}'"),
        ]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Keys and node files; afterwards every process is gone."""
    fleet = Fleet(tmp_path, NAMES)
    with ExitStack() as ends:
        ends.callback(fleet.end_servers)
        made = Site(fleet, ends)
        for name in NAMES:
            made.file(name).write_text(
                f'client = "{name}"\nserver = "127.0.0.1:{fleet.port}"\nca = "keys/ca.crt"\n'
                f'key = "keys/nodes/{name}.key"\nfolder = "{name}"\n[consent]\nsplit = true\n'
            )
        yield made


@pytest.mark.parametrize("name", ["fedavg", "ho_fl"])
def test_plain_supernodes_give_the_very_rows_of_one_process(site: Site, alone, name: str) -> None:
    more = ("cohort.boundaries=[1,3]",) if name == "ho_fl" else ()
    server = site.serve(name, "run", 240.0, *more)
    expected = alone(SYNTHETIC / f"{name}.toml", *SETTINGS, "fleet.join=240.0", *more)
    server.finish(500)
    assert server.final == expected.final
    but = "client_peak_bytes"  # a fresh process holds less or more than the one of all clients
    assert [{k: v for k, v in row.items() if k != but} for row in comparable(server.rows)] == [
        {k: v for k, v in row.items() if k != but} for row in comparable(expected.rows)
    ]


def test_a_split_method_asks_for_a_node_that_stays(site: Site) -> None:
    """And a node whose file is gone says that, instead of being greeted for ever."""
    site.file("client-1").unlink()
    server = site.serve("ho_sfl", "split", 60.0)
    assert server.process.wait(300) == 3
    assert "refused: client-0: " in server.text and "cannot follow; run it with: hofl node" in server.text
    assert "this node's own settings are wrong; its log says how" in server.text
    assert "client-1.toml" not in server.text and "client-1.toml" in site.log("client-1").read_text()
    assert "0 of 2 connected after 60 s (fleet.join)" in server.text
    assert not server.out.exists()
