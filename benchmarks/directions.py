# SPDX-License-Identifier: Apache-2.0
"""Directions, replay and cohorts against their budgets, as ratios measured interleaved in one process.

Run: python benchmarks/directions.py
"""

import numpy as np
import torch
from _timing import interleaved, report

from hofl.core.directions import BLOCK, Directions, blocks, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.replay import Step, replay_
from hofl.core.sampling import dimension_aware

KEY = Key.of(1, "directions", 0, 0)
SIZE = 1 << 22


def stream() -> None:
    def ours() -> None:
        for start, stop in blocks(SIZE, BLOCK):
            gaussian(KEY, start, stop)

    mine, theirs = interleaved(ours, lambda: torch.randn(SIZE))
    report("direction stream / single-thread torch.randn, values a second", theirs / mine, 0.8, at_least=True)


def replay(name: str, optimizer: Optimizer) -> None:
    steps = [Step(Directions(KEY.fold(e), "gaussian", 2, SIZE), np.float32([0.5, -1.0])) for e in range(5)]
    weights = np.zeros(SIZE, dtype=np.float32)

    def generate() -> None:
        for directions, _ in steps:
            for probe in range(2):
                for start, stop in blocks(SIZE, BLOCK):
                    directions.block(probe, start, stop)

    whole, directions_only = interleaved(lambda: replay_(weights, steps, optimizer), generate, repeats=5)
    report(f"server replay of one client, E=5 q=2 {name} / its directions", whole / directions_only, 3.0)


def cohorts(clients: int = 1_000_000) -> None:
    policy = dimension_aware(np.arange(clients) % 3, 1000, 0.75, Key.of(1, "tie_break"))
    (seconds,) = interleaved(lambda: policy.draw(1, 0), repeats=3)
    report(f"dependent rounding, N = {clients:,}, seconds", seconds, 2.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    stream()
    replay("SGD", Optimizer("sgd", 1e-2))
    replay("AdamW", Optimizer("adamw", 1e-3, weight_decay=5e-4))
    cohorts()
