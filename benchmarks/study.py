# SPDX-License-Identifier: Apache-2.0
"""A study: every configuration of a folder, for every seed, with the same overrides.

    python benchmarks/study.py FOLDER OUT [SEED ...] [section.key=value ...] [--jobs N]

Each run is one `hofl run` in OUT/NAME/SEED; finished ones are skipped and broken-off ones resumed, so a study
can be stopped at any time. Then: hofl compare OUT/*/* --out OUT/compare
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def one(config: Path, seed: str, out: Path, overrides: list[str]) -> str | None:
    """Run or resume; the name of what failed, or None."""
    folder = out / config.stem / seed
    if (folder / "summary.json").exists():
        return None
    where = ["--resume" if folder.exists() else "--out", str(folder)]
    command = [sys.executable, "-m", "hofl", "run", str(config), *overrides, f"seed={seed}", *where, "--json"]
    print(f"== {config.stem} seed {seed}", flush=True)
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{config.stem} seed {seed}: {done.stderr.strip()[-600:]}", flush=True)
    return f"{config.stem} seed {seed}" if done.returncode else None


def main(arguments: list[str]) -> None:
    jobs = int(arguments.pop(arguments.index("--jobs") + 1)) if "--jobs" in arguments else 1
    folder, out, *rest = (a for a in arguments if a != "--jobs")
    overrides = [a for a in rest if "=" in a]
    seeds = [a for a in rest if "=" not in a] or ["42", "43", "44"]
    configs = sorted(Path(folder).glob("*.toml")) if Path(folder).is_dir() else [Path(folder)]
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(one, c, seed, Path(out), overrides) for seed in seeds for c in configs]
        failed = [name for run in runs if (name := run.result())]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
