# SPDX-License-Identifier: Apache-2.0
"""One hybrid local step of the demo's model by estimator, against the bare passes it is made of.

Run: python benchmarks/step.py [boundary] (needs the demo's packages; ratios interleaved in one process).
"""

import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from _timing import interleaved, report

from hofl.algorithms.ho_fl import hybrid_step
from hofl.build_task import build_task
from hofl.config import load
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.replay import Step, replay_
from hofl.runtime.memory import peak_bytes, reset_peak

REPEATS = 3
KEY = Key.of(1, "directions", 0, 0)


def main(boundary: int) -> None:
    config = load("configs/demo/ho_fl.toml", ["task.evaluation_rows=8", "task.train_rows=400"])
    task = build_task(config)
    model, batch, adamw = task.model, task.batch(0, 0, 8), Optimizer("adamw", 1e-3)
    start, d_zo = model.read(), model.layout.bottom_size(boundary)
    z = model.bottom(batch.inputs, boundary)

    def step(estimator: str, q: int, family: str = "gaussian") -> Callable[[], None]:
        def run() -> None:
            plan = {"boundary": boundary, "estimator": estimator, "radius": 1e-3}
            directions, vector = Directions(KEY, family, q, d_zo), start.copy()
            _, gradient, learnt = hybrid_step(task, batch, plan, directions, check=False)
            replay_(vector[:d_zo], [Step(directions, learnt.values.astype("float32"))], adamw)
            adamw.update_(vector[d_zo:], gradient, adamw.init(len(gradient)), 1)
            model.write(start)

        return run

    def bare(q: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(1 + q):
                model.bottom(batch.inputs, boundary)
            model.first_order(batch.inputs, boundary, z, task.loss_on(batch))

        return run

    runs = {"bare q=2": bare(2), "bare q=4": bare(4)}
    runs |= {f"{name} q={q}": step(name, q) for name in ("forward", "tangent") for q in (2, 4)}
    runs["sketch q=512"] = step("sketch", 512, "hadamard")
    seconds = dict(zip(runs, interleaved(*runs.values(), repeats=REPEATS), strict=True))
    shape = "x".join(map(str, batch.inputs["input_ids"].shape))
    print(f"boundary {boundary} of {model.blocks}, batch {shape}, median of {REPEATS}")
    for name, value in seconds.items():
        print(f"{name:<14} {value:7.3f} s")
    for q in (2, 4):
        report(
            f"forward step / its bare passes, q={q}", seconds[f"forward q={q}"] / seconds[f"bare q={q}"], 1.1
        )
        report(
            f"tangent step / forward step, q={q}", seconds[f"tangent q={q}"] / seconds[f"forward q={q}"], 1.5
        )
    for name in ("forward q=2", "tangent q=2", "sketch q=512"):
        reset_peak(model.device)
        before = peak_bytes(model.device)
        runs[name]()
        after = peak_bytes(model.device)
        if before and after:
            print(f"peak resident memory above rest, {name:<14} {(after - before) / 2**20:7.1f} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
