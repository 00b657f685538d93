# SPDX-License-Identifier: Apache-2.0
"""``serve_scratch.py ROOT HOST PORT [KEYS]``: serves the scratch app in ROOT, as hofl server would ours."""

import sys
from pathlib import Path

from hofl.runtime.flower.job import Job
from hofl.runtime.flower.keys import read_folder
from hofl.runtime.flower.superlink import Site
from hofl.runtime.flower.supervisor import serve
from hofl.runtime.start import CONFIG


def say(text: str) -> None:
    print(text, flush=True)


def main(root: Path, host: str, port: str, *keys: str) -> int:
    site = Site(root / "out-server", host, int(port), read_folder(keys[0]) if keys else None)
    out = root / "out"
    job = Job(site, root / "job.json", out, (out / CONFIG).is_file(), root / "app")
    return serve(job, (root / "settings.json").read_text(), say, say)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
