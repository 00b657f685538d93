# SPDX-License-Identifier: Apache-2.0
"""A server that outlives its parts: SuperLink, SuperExec and the run are started, watched and started again.

A SuperLink that dies comes back on the same database and the run goes on. With a SuperExec the run's own
process dies too; the run is submitted anew and resumes in its folder.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hofl.errors import RunFailed
from hofl.runtime.flower import registry, superlink
from hofl.runtime.flower.job import INTERRUPTED, Job
from hofl.runtime.flower.processes import (
    Process,
    Tail,
    alive,
    alone,
    ending,
    members,
    require_free,
    stop,
    stop_pid,
)
from hofl.runtime.flower.superlink import Site
from hofl.runtime.signals import interruptible, unhurried
from hofl.runtime.start import CONFIG

RESTARTS = 5
"""How often parts may die without a new round in between."""

_TICK = 0.2
_STATUS_SECONDS = 8.0
_KEYS_SECONDS = 5.0
_KEYS_AGAIN_SECONDS = 60.0
_END_SECONDS = 20.0
_RAISED = "failed with exception"
_LINK, _EXECUTOR = "link", "executor"

Tell = Callable[[str], None]


@dataclass
class _Watch:
    """What runs now."""

    job: Job
    tell: Tell
    parts: dict[str, Process]
    tail: Tail
    run: int = 0
    deaths: int = 0
    rounds: int = 0
    asked: float = 0.0
    keys: float = 0.0


def serve(job: Job, config: str, tell: Tell, warn: Tell) -> int:
    """Serve a run to its end.

    Args:
        job: what and where.
        config: the resolved configuration as TOML, written to where the job says.
        tell: gets the lines of the run, and what happens to its parts.
        warn: gets the reason when the exit code is not 0.

    Returns:
        the run's exit code; 130 when interrupted by Ctrl-C or SIGTERM.

    Raises:
        ConfigError: the address, the state folder or the certificate cannot be used.
        RunFailed: a part cannot be started, or dies again and again.
    """
    job.site.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone(job.site.state), interruptible():
        job.config.write_text(config, encoding="utf-8")
        parts: dict[str, Process] = {}
        try:
            code, message = _follow(_start(job, tell, parts))
        except KeyboardInterrupt:
            code, message = INTERRUPTED, _stopped(job)
        finally:
            with unhurried():
                _stop_all(job, parts)
    if code and message:
        warn(f"hofl: {message}")
    return code


def _stopped(job: Job) -> str:
    if not (job.out / CONFIG).is_file():
        return "stopped before the run began"
    return f"stopped; go on with: hofl server --resume {job.out} and the same options"


def _start(job: Job, tell: Tell, parts: dict[str, Process]) -> _Watch:
    """Start everything, and submit the run."""
    site = job.site
    require_free(site.host, site.port)
    _end_left(job)
    before = site.database.is_file()
    if not before:
        registry.forget(site)
    began = time.monotonic()
    superlink.connect(site)
    parts[_LINK] = superlink.start_link(site)
    superlink.wait_healthy(site, parts[_LINK])
    parts[_EXECUTOR] = _first_executor(site, before)
    tell(f"serving at {site.host}:{site.port} ({'TLS, nodes known by key' if site.keys else 'without TLS'})")
    watch = _Watch(job, tell, parts, Tail(job.log), rounds=job.progress())
    _register(watch)
    _submit(watch)
    tell(f"run {watch.run} submitted {time.monotonic() - began:.1f} s after the start")
    return watch


def _first_executor(site: Site, before: bool) -> Process:
    """Runs that an earlier server left are ended first: this SuperExec would start what was still waiting."""
    if before:
        for run in superlink.unfinished(site):
            with suppress(RunFailed):
                superlink.stop_run(site, run)
    return superlink.start_executor(site)


def _register(watch: _Watch) -> None:
    watch.keys = time.monotonic()
    if not registry.changed(watch.job.site):
        return
    came, left = registry.register(watch.job.site)
    for names, what in ((came, "known from now on"), (left, "refused from now on, its key is gone")):
        if names:
            watch.tell(f"{what}: {', '.join(names)}")


def _register_late(watch: _Watch) -> None:
    """As :func:`_register`, while a run goes on: that a key cannot be registered does not end it."""
    try:
        _register(watch)
    except RunFailed as error:
        watch.tell(str(error))
        watch.keys += _KEYS_AGAIN_SECONDS


def _submit(watch: _Watch) -> None:
    job = watch.job
    job.forget()
    watch.run = 0
    watch.run = superlink.submit(job.site, job.app, job.settings())
    watch.asked = time.monotonic()


def _follow(watch: _Watch) -> tuple[int, str]:
    """Watch until the run has ended; returns its exit code and message.

    With its SuperExec a run's process is interrupted: what it then says of its end is not the run's.
    """
    while True:
        for line in watch.tail.lines():
            watch.tell(line)
        ended = watch.job.end()
        executor = watch.parts[_EXECUTOR].poll()
        if ended and ended[0] != INTERRUPTED and (ended[0] == 0 or executor is None):
            _last_words(watch)
            return ended
        if watch.parts[_LINK].poll() is not None:
            _revive_link(watch)
        why = _lost(watch, ended)
        if why:
            _resubmit(watch, why)
        if time.monotonic() - watch.keys > _KEYS_SECONDS:
            _register_late(watch)
        time.sleep(_TICK)


def _last_words(watch: _Watch) -> None:
    """Let the run's process leave by itself, so that the SuperLink knows how it ended."""
    end = time.monotonic() + _END_SECONDS
    while (pid := watch.job.process()) and alive(pid) and time.monotonic() < end:
        time.sleep(_TICK)
    for line in watch.tail.lines(last=True):
        watch.tell(line)


def _lost(watch: _Watch, ended: tuple[int, str] | None) -> str:
    """Why the run goes on no more; empty while it does."""
    code = watch.parts[_EXECUTOR].poll()
    if code is not None:
        return f"SuperExec {ending(code)}"
    if ended:
        return "the run's process was interrupted"
    if not watch.run:
        return "the run could not be submitted"
    pid = watch.job.process()
    if pid:
        return "" if alive(pid) or watch.job.end() else "the run's process died"
    if time.monotonic() - watch.asked < _STATUS_SECONDS:
        return ""
    watch.asked = time.monotonic()
    try:
        what, details = superlink.status(watch.job.site, watch.run)
    except RunFailed:  # the SuperLink may be on its way back; it is asked again
        return ""
    if not what.startswith("finished"):
        return ""
    why = f"the run's process did not start: {details or what}"
    if _RAISED in details:  # it would again
        raise RunFailed(f"{why} (see {watch.job.site.state / 'superexec.log'})")
    return why


def _revive_link(watch: _Watch) -> None:
    """A new SuperLink on the same database and port; the run and the nodes wait for it by themselves."""
    why = f"SuperLink {ending(watch.parts[_LINK].wait())}"
    _count(watch, why)
    watch.tell(f"{why}; started again on the same database")
    watch.parts[_LINK] = link = superlink.start_link(watch.job.site)
    try:
        superlink.wait_healthy(watch.job.site, link)
    except RunFailed:  # it is found dead, and counted, at the next look
        stop(link)


def _resubmit(watch: _Watch, why: str) -> None:
    """End what is left of the run, then submit it anew: two processes must never write one run folder."""
    _count(watch, why)
    watch.tell(f"{why}; the run is submitted again")
    pid, executor = watch.job.process(), watch.parts[_EXECUTOR]
    if pid and alive(pid):
        stop_pid(pid)
    if executor.poll() is not None or members(executor.pid) != [executor.pid]:
        stop(executor)
        watch.parts[_EXECUTOR] = superlink.start_executor(watch.job.site)
    with suppress(RunFailed):
        superlink.stop_run(watch.job.site, watch.run)
    try:
        _submit(watch)
    except RunFailed as error:  # the SuperLink died too, say: tried again, and counted, at the next look
        watch.tell(str(error))


def _count(watch: _Watch, why: str) -> None:
    """Count a death; a new round since the last one starts the count again."""
    rounds = watch.job.progress()
    watch.deaths = watch.deaths + 1 if rounds == watch.rounds else 1
    watch.rounds = rounds
    if watch.deaths > RESTARTS:
        where = watch.job.site.state
        raise RunFailed(f"{why}, {watch.deaths} times without a new round: gave up (logs: {where})")


def _end_left(job: Job) -> None:
    """End a run's process that outlived a server that was killed. A number that was given anew is spared."""
    pid = job.process()
    if pid and alive(pid) and _is_run(pid):
        stop_pid(pid)
    job.pid.unlink(missing_ok=True)


def _is_run(pid: int) -> bool:
    with suppress(OSError):
        return b"serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _stop_all(job: Job, parts: dict[str, Process]) -> None:
    """The run's process first, which goes with its SuperExec; then the SuperLink."""
    for name in (_EXECUTOR, _LINK):
        if name in parts:
            stop(parts[name])
    pid = job.process()
    if pid and alive(pid) and _is_run(pid):
        stop_pid(pid)
