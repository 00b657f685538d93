# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as Ctrl-C, and neither while something is put in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is like Ctrl-C inside: both raise KeyboardInterrupt, so that everything is stopped in order."""

    def _interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unhurried() -> Iterator[None]:
    """Neither Ctrl-C nor SIGTERM breaks off what is inside: ending what was started, say."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
