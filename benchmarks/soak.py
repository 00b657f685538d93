# SPDX-License-Identifier: Apache-2.0
"""Hundreds of rounds of a real fleet whose nodes keep dying: whether it ends, and its memory stays flat.

    python benchmarks/soak.py [ROUNDS [FOLDER]]     # 500 rounds, 15 to 30 minutes; under 5 % or exit code 1

HO-SFL on clouds of points, whose clients keep their bottoms; 4 resident nodes on loopback over TLS with keys;
3 of 4 are asked each round and 2 are enough. Every 20 rounds the worker of one node is killed with SIGKILL:
of client-1, client-2 and client-3 in turn, so that client-0 shows what one process needs that lives through
it all, and each life of the others is compared from its 20th round to its end.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from fleet import ENVIRONMENT, free_port, rows_of, server, start_nodes, stop

NODES, COHORT, QUORUM, DEADLINE = 4, 3, 2, 10.0
KILLED_EVERY, LOOKED_AT_EVERY, WARM = 20, 5, 50
"""Rounds between two kills and between two looks, and until everything has been loaded once."""

LATER = 20
"""Rounds of a worker's life after which it has loaded everything once."""

FLAT = 5.0
"""Percent by which memory may grow after the warm-up."""

STUCK = 180.0
"""Seconds without a new round after which the run counts as hung."""

PARTS = {"hofl.runtime.flower.link": "SuperLink", "flower-superexec": "SuperExec", "serverapp": "ServerApp"}
"""What the processes of a server are called, by what stands in their command; the last match counts."""

METHOD = "ho_sfl"


@dataclass
class Watch:
    """What was seen.

    Attributes:
        seen: (round, MiB) of each process, by what it is called and its number.
        killed: (round, node) of each kill.
    """

    seen: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    killed: list[tuple[int, str]] = field(default_factory=list)

    def look(self, number: int, serving: int, nodes: list[int]) -> None:
        """Add the memory of every process of the fleet, that of round ``number``."""
        for name, process in processes_of(serving, nodes):
            with suppress(psutil.Error):
                self.seen[name, process.pid].append((number, process.memory_info().rss / 2**20))


def processes_of(serving: int, nodes: list[int]) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of a fleet by what it is called; the keepers of server and nodes as well."""
    yield "hofl server", psutil.Process(serving)
    for child in psutil.Process(serving).children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(child.cmdline())
            found = [name for text, name in PARTS.items() if text in command]
            if found:
                yield found[-1], child
    for i, node in enumerate(nodes):
        yield f"keeper of client-{i}", psutil.Process(node)
        for child in psutil.Process(node).children():
            yield f"client-{i}", child


def kill_worker(node: int) -> None:
    """SIGKILL to what a keeper has started; nothing where it is just starting it again."""
    for child in psutil.Process(node).children():
        with suppress(psutil.Error):
            child.send_signal(signal.SIGKILL)


def follow(
    run: Path, serving: subprocess.Popen[bytes], nodes: list[int], show: Callable[[str], None]
) -> Watch:
    """Look and kill until the server has ended.

    Raises:
        TimeoutError: no new round for ``STUCK`` seconds.
    """
    watch, done, moved, looked = Watch(), 0, time.monotonic(), -1
    while serving.poll() is None:
        time.sleep(0.2)
        before, done = done, max(0, len(rows_of(run)) - 1)
        moved = time.monotonic() if done > before else moved
        if time.monotonic() - moved > STUCK:
            raise TimeoutError(f"no new round for {STUCK:g} s after round {done}")
        if done // LOOKED_AT_EVERY > looked // LOOKED_AT_EVERY and done:
            looked = done
            watch.look(done, serving.pid, nodes)
        if done // KILLED_EVERY > before // KILLED_EVERY:
            victim = 1 + len(watch.killed) % (NODES - 1)
            kill_worker(nodes[victim])
            watch.killed.append((done, f"client-{victim}"))
            show(f"round {done}: killed the worker of client-{victim}")
    return watch


def soak(rounds: int, place: Path, show: Callable[[str], None]) -> tuple[int, Watch, list[dict[str, Any]]]:
    """Serve the run -> (exit code of the server, what was seen, rows)."""
    settings = [f"rounds={rounds}", f"partition.clients={NODES}", f"cohort.size={COHORT}", f"quorum={QUORUM}"]
    settings += [f"fleet.deadline={DEADLINE}", "evaluation.every=50"]
    port = free_port()
    nodes = start_nodes(place, [port] * NODES)
    try:
        with (place / "server.log").open("wb") as log:
            command = server(place, METHOD, settings, port)
            serving = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        try:
            watch = follow(place / METHOD, serving, [node.pid for node in nodes], show)
        finally:
            stop([serving])
    finally:
        stop(nodes)
    return serving.returncode, watch, rows_of(place / METHOD)


def growth(seen: list[tuple[int, float]], begin: int) -> tuple[float, float, float] | None:
    """MiB (at first, at last) from round ``begin`` on and percent between them; None if it ended before.

    Both are medians of as many looks as 40 rounds have, or half of all if these are fewer.
    """
    sizes = [size for number, size in seen if number >= begin]
    span = min(40 // LOOKED_AT_EVERY, len(sizes) // 2)
    if not span:
        return None
    first, last = statistics.median(sizes[:span]), statistics.median(sizes[-span:])
    return first, last, 100 * (last - first) / first


def memory_table(watch: Watch, rounds: int) -> list[tuple[str, float]]:
    """Print how each process grew; returns those that count, with percent."""
    print(f"{'process':<20}{'rounds':>12}{'first MiB':>11}{'last MiB':>10}{'growth %':>10}{'most MiB':>10}")
    grown = []
    for (name, pid), seen in sorted(watch.seen.items(), key=lambda item: (item[0][0], item[1][0][0])):
        begin, end = seen[0][0], seen[-1][0]
        whole = begin <= WARM and end >= rounds - WARM
        found = growth(seen, WARM if whole else begin + LATER)
        label = f"{name} {pid}" if name.startswith("client") else name
        if found is None:
            continue
        first, last, percent = found
        most = max(size for _, size in seen)
        print(f"{label:<20}{f'{begin} to {end}':>12}{first:>11.1f}{last:>10.1f}{percent:>10.2f}{most:>10.1f}")
        grown.append((label, percent))
    return grown


def report(code: int, watch: Watch, rows: list[dict[str, Any]], rounds: int, place: Path) -> bool:
    """Print what came of it; returns whether all is well."""
    times = [sum(row["seconds"].values()) for row in rows[1:]]
    why = Counter(re.sub(r"client-\d+|\d+", "N", f["why"])[:100] for row in rows for f in row["failures"])
    print(f"rounds done: {len(rows) - 1} of {rounds}, the server's exit code {code}")
    print(f"workers killed: {len(watch.killed)}; clients that failed a round: {sum(why.values())}")
    for reason, count in why.most_common():
        print(f"  {count:>5}  {reason}")
    print(f"seconds a round: median {statistics.median(times):.2f}, longest {max(times):.2f}")
    stored = sum(file.stat().st_size for file in place.glob(f"{METHOD}-server/superlink.db*"))
    print(f"SuperLink's database at the end: {stored / 2**20:.1f} MiB")
    grown = [(name, percent) for name, percent in memory_table(watch, rounds) if percent > FLAT]
    for name, percent in grown:
        print(f"NOT FLAT: {name} grew by {percent:.1f} %, allowed {FLAT:g} %")
    return code == 0 and len(rows) == rounds + 1 and not grown


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it ends the fleet
    rounds, begun = int(sys.argv[1]) if len(sys.argv) > 1 else 500, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(folder)
        place.mkdir(parents=True, exist_ok=True)

        def show(line: str) -> None:
            print(f"{time.monotonic() - begun:7.1f} s  {line}", file=sys.stderr, flush=True)

        code, watch, rows = soak(rounds, place, show)
        good = report(code, watch, rows, rounds, place)
    minutes = (time.monotonic() - begun) / 60
    print(f"{'passed' if good else 'FAILED'} after {minutes:.1f} minutes on {os.cpu_count()} cores")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
