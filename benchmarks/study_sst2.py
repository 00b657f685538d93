# SPDX-License-Identifier: Apache-2.0
"""The SST-2 study of docs/LOG.md: what the bottom contributes, by estimator, optimizer and rate.

Run: python benchmarks/study_sst2.py TRAIN.parquet VALIDATION.parquet OUT [SEED ...]

Each arm and seed is one `hofl run` in a folder of its own; finished ones are skipped and broken-off ones
resumed, so the study can be stopped at any time. Then: hofl compare OUT/*/* --out OUT/compare
"""

import os
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "sst2"
SGD = ("zo.optimizer.name=sgd",)
SKETCH = ("zo.estimator=sketch", "zo.directions=hadamard")

ARMS = {
    "fedavg": ("fedavg.toml",),
    "control": ("ho_fl.toml", "zo.estimator=none"),
    "tangent-q2": ("ho_fl.toml",),
    "sketch-q512": ("ho_fl.toml", *SKETCH, "zo.probes=512"),
    "forward-q2": ("ho_fl.toml", "zo.estimator=forward"),
    "sketch-q512-sgd": ("ho_fl.toml", *SKETCH, "zo.probes=512", *SGD, "zo.optimizer.lr=0.03"),
    "tangent-q2-sgd": ("ho_fl.toml", *SGD, "zo.optimizer.lr=0.03"),
    "control-beta0": ("ho_fl.toml", "zo.estimator=none", "cohort.preference=0"),
    "forward-q2-beta0": ("ho_fl.toml", "zo.estimator=forward", "cohort.preference=0"),
    "sketch-q512-beta0": ("ho_fl.toml", *SKETCH, "zo.probes=512", "cohort.preference=0"),
    "tangent-q2-adamw-1e-4": ("ho_fl.toml", "zo.optimizer.lr=1e-4"),
    "sketch-q64": ("ho_fl.toml", *SKETCH, "zo.probes=64"),
    "sketch-q2": ("ho_fl.toml", *SKETCH),
}


def main(train: str, validation: str, out: Path, seeds: list[str]) -> None:
    failed = []
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    for seed in seeds:
        for name, (config, *overrides) in ARMS.items():
            folder = out / name / seed
            if (folder / "summary.json").exists():
                continue
            settings = [*overrides, f"seed={seed}", f"task.train={train}", f"task.evaluation={validation}"]
            where = ["--resume" if folder.exists() else "--out", str(folder)]
            command = [sys.executable, "-m", "hofl", "run", str(CONFIGS / config), *settings, *where]
            print(f"== {name} seed {seed}", flush=True)
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(f"{name} seed {seed}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:] or ["42", "43", "44"])
