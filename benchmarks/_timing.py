# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing and the line every benchmark prints."""

import time
from collections.abc import Callable
from statistics import median


def interleaved(*runs: Callable[[], object], repeats: int = 9) -> list[float]:
    """Median CPU seconds of each, in turn after one warm-up: other processes distort those least."""
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, times in zip(runs, seconds, strict=True):
            start = time.process_time()
            run()
            if repeat:
                times.append(time.process_time() - start)
    return [median(times) for times in seconds]


def report(what: str, ratio: float, budget: float, at_least: bool = False) -> None:
    """Print a ratio beside its budget."""
    met = ratio >= budget if at_least else ratio <= budget
    bound = f"{'>=' if at_least else '<='} {budget:g}"
    print(f"{what:<64} {ratio:6.2f}   budget {bound}   {'met' if met else 'MISSED'}", flush=True)
