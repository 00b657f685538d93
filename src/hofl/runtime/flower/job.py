# SPDX-License-Identifier: Apache-2.0
"""A run that a server serves, and the files by which its own process tells how it fares."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hofl.runtime.flower.superlink import Site, app_folder
from hofl.runtime.start import CONFIG

INTERRUPTED = 130
"""Exit code of a run that was broken off and can be resumed."""

_ROUNDS = "rounds.jsonl"


@dataclass(frozen=True)
class Job:
    """A run and where it is served.

    Attributes:
        site: the server.
        config: the resolved configuration.
        out: run folder.
        resume: whether to go on in it.
        app: folder of the Flower app.
    """

    site: Site
    config: Path
    out: Path
    resume: bool
    app: Path = field(default_factory=app_folder)

    @property
    def pid(self) -> Path:
        """File with the number of the run's own process."""
        return self.site.state / "serverapp.pid"

    @property
    def log(self) -> Path:
        """File with the lines of the run."""
        return self.site.state / "serverapp.log"

    @property
    def ended(self) -> Path:
        """File that is there when the run is over: ``{"exit": code, "message": text}``."""
        return self.site.state / "ended.json"

    def settings(self) -> dict[str, str | bool]:
        """Run configuration of a submission; it resumes as soon as there is something to resume."""
        keys = self.site.keys.nodes.parent if self.site.keys else None
        paths = {
            "config": self.config,
            "out": self.out,
            "log": self.log,
            "pid": self.pid,
            "ended": self.ended,
        }
        resume = self.resume or (self.out / CONFIG).is_file()
        absolute = {name: str(path.absolute()) for name, path in paths.items()}
        return {**absolute, "keys": str(keys.absolute()) if keys else "", "resume": resume}

    def forget(self) -> None:
        """Before a submission: what an earlier process said counts no more."""
        self.pid.unlink(missing_ok=True)
        self.ended.unlink(missing_ok=True)

    def process(self) -> int:
        """The number of the run's own process; 0 while it is unknown."""
        try:
            return int(self.pid.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def end(self) -> tuple[int, str] | None:
        """Exit code and message of the run; None while it has not ended."""
        try:
            said: dict[str, Any] = json.loads(self.ended.read_bytes())
            return int(said["exit"]), str(said.get("message") or "")
        except (OSError, ValueError, KeyError):  # not there, or half written
            return None

    def progress(self) -> int:
        """Bytes of the run's rows: they grow with every round."""
        file = self.out / _ROUNDS
        return file.stat().st_size if file.is_file() else 0
