# SPDX-License-Identifier: Apache-2.0
"""Seconds a round of a deployment takes: resident nodes on loopback over TLS with keys, every process real.

    python benchmarks/fleet.py [NODES [ROUNDS]]

The no-op round is FedAvg with one tiny step of a network of a thousand weights; HO-SFL's has three exchanges.
Budgets: no-op 0.5 s with 2 nodes and 2.5 s with 10; HO-SFL 2 s with 2.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {("fedavg", 2): 0.5, ("fedavg", 10): 2.5, ("ho_sfl", 2): 2.0}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def hofl(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hofl", *map(str, arguments)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_nodes(place: Path, ports: Sequence[int], keyed: bool = True) -> list[subprocess.Popen[bytes]]:
    """A resident node for each port of a server, with keys of their own or over plain HTTP."""
    names = [f"client-{i}" for i in range(len(ports))]
    if keyed:
        made = hofl("keys", place / "keys", *(f"--node={n}" for n in names))
        subprocess.run(made, check=True, capture_output=True)
    nodes = []
    for name, port in zip(names, ports, strict=True):
        file, trust = place / f"{name}.toml", f'ca = "keys/ca.crt"\nkey = "keys/nodes/{name}.key"\n'
        where = f'client = "{name}"\nserver = "127.0.0.1:{port}"\nfolder = "{name}"\n'
        file.write_text(f"{where}{trust if keyed else ''}[consent]\nsplit = true\n")
        with (place / f"{name}.log").open("wb") as log:
            nodes.append(subprocess.Popen(hofl("node", file), stdout=log, stderr=log, env=ENVIRONMENT))
    return nodes


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, then wait for each."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(40)


def server(
    place: Path, name: str, settings: Sequence[str], port: int, keyed: bool = True, out: str = ""
) -> list[str]:
    """The command that serves a run of a method on the clouds of points, in a folder of ``place``."""
    config = ROOT / "configs" / "synthetic" / f"{name}.toml"
    trust = ("--keys", place / "keys") if keyed else ("--insecure",)
    alike = ["partition.kind=iid", "run.threads=1"]
    return hofl("server", config, *alike, *settings, *trust, "--port", port, "--out", place / (out or name))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run so far: round 0, which asks nobody, and on."""
    file = folder / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def seconds_a_round(place: Path, name: str, count: int, rounds: int, port: int) -> list[float]:
    """Serve one run; what the rounds after the first two spent on their clients."""
    settings = [f"rounds={rounds}", f"partition.clients={count}", f"cohort.size={count}", "local.steps=1"]
    settings += [f"evaluation.every={rounds}"]
    command = server(place, name, settings, port)
    subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    rows = rows_of(place / name)
    assert not any(row["failures"] for row in rows), [row["failures"] for row in rows]
    return [row["seconds"]["clients"] for row in rows[3:]]


def main() -> int:
    count, rounds = [*map(int, sys.argv[1:3]), *(2, 20)[len(sys.argv) - 1 :]]
    missed, port = 0, free_port()
    with tempfile.TemporaryDirectory() as folder:
        nodes = start_nodes(Path(folder), [port] * count)
        try:
            for name in ("fedavg", "ho_sfl"):
                times = seconds_a_round(Path(folder), name, count, rounds, port)
                median, budget = statistics.median(times), BUDGETS.get((name, count))
                line = f"{name}, {count} nodes: median {median:.2f} s a round"
                line += f" ({min(times):.2f} to {max(times):.2f})"
                print(line + (f", budget {budget:g} s" if budget else ""), flush=True)
                missed += bool(budget) and median > budget
        finally:
            stop(nodes)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
