# SPDX-License-Identifier: Apache-2.0
"""The demo: HO-FL, its control and FedAvg fine-tune one language model on one set of sentences.

Each arm is a `hofl run` in a process of its own, so that its peak memory is its own. Then `hofl compare`
puts them on one table and picture, and `hofl export` writes the sketch arm's PEFT adapter.

Usage: python examples/demo.py [OUT]
"""

import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "demo"

ARMS = {
    "ho_fl-tangent": ("ho_fl.toml",),
    "ho_fl-sketch": ("ho_fl.toml", "zo.estimator=sketch", "zo.probes=512", "zo.directions=hadamard"),
    "ho_fl-frozen-bottom": ("ho_fl.toml", "zo.estimator=none"),
    "fedavg": ("fedavg.toml",),
    "fedavg-checkpointed": ("fedavg.toml", "model.checkpointing=true"),
}


def hofl(*arguments: str) -> None:
    """Run the command line; stop the demo with its exit status if it fails."""
    status = subprocess.run([sys.executable, "-m", "hofl", *arguments], check=False).returncode
    if status:
        sys.exit(status)


def main(out: Path) -> None:
    for name, (config, *overrides) in ARMS.items():
        if (out / name / "summary.json").exists():
            print(f"\n== {name}: already there", flush=True)
            continue
        print(f"\n== {name}", flush=True)
        where = ["--resume", str(out / name)] if (out / name).exists() else ["--out", str(out / name)]
        hofl("run", str(CONFIGS / config), *overrides, *where)
    print("\n== comparison", flush=True)
    hofl("compare", *(str(out / name) for name in ARMS), "--out", str(out / "compare"))
    if not (out / "adapter").exists():
        hofl("export", str(out / "ho_fl-sketch"), "--out", str(out / "adapter"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
