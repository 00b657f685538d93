# SPDX-License-Identifier: Apache-2.0
"""A node that stays: its worker is started again whenever it dies, however often."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hofl.runtime.flower.processes import alone, ending, start, stop
from hofl.runtime.signals import interruptible, unhurried

WORKER = (sys.executable, "-P", "-m", "hofl.runtime.flower.worker")
"""The command of a worker; it reads its settings, JSON, from standard input."""

REFUSED = 2
"""Exit code of a worker that no waiting will help: a bad setting, a wrong certificate. It has said why."""

LONGEST = 30.0
"""Seconds between two starts at most; they begin with 1 and double with every worker that dies early."""

_SETTLED = 60.0


def keep(
    settings: str,
    folder: Path,
    env: Mapping[str, str],
    tell: Callable[[str], None],
    command: Sequence[str] = WORKER,
) -> int:
    """Run workers, one after the other, until one is refused for good or this process is asked to stop.

    Args:
        settings: what each worker reads from its standard input.
        folder: what the node keeps; one node at a time uses it.
        env: a worker's environment.
        tell: gets a line when a worker died.
        command: of a worker.

    Returns:
        0 when asked to stop (Ctrl-C, SIGTERM), 2 when refused.

    Raises:
        ConfigError: another node uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder), interruptible():
        wait = 1.0
        try:
            while True:
                began = time.monotonic()
                code = _work(settings, env, command)
                if code == REFUSED:
                    return REFUSED
                wait = 1.0 if time.monotonic() - began > _SETTLED else wait
                tell(f"worker {ending(code)}; started again in {wait:g} s")
                time.sleep(wait)
                wait = min(LONGEST, 2.0 * wait)
        except KeyboardInterrupt:
            tell("node stopped")
            return 0


def _work(settings: str, env: Mapping[str, str], command: Sequence[str]) -> int:
    """One worker from start to end; returns its return code."""
    worker = start(command, env, stdin=subprocess.PIPE)
    try:
        if worker.stdin:
            with suppress(BrokenPipeError):  # it died at once: its return code says more
                worker.stdin.write(settings.encode())
                worker.stdin.close()
        return worker.wait()
    finally:
        with unhurried():
            stop(worker)
