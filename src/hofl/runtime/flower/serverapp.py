# SPDX-License-Identifier: Apache-2.0
"""The ServerApp: waits for the clients, then runs the very loop that a run in one process has.

It is told what to do by Flower's run configuration: ``config`` and ``out`` name the configuration and the
run folder on the server's disk, ``resume`` goes on in it. The supervisor of ``hofl server`` adds files to
write to: ``log`` for lines, ``pid``, and ``ended`` for the exit code.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hofl.build import pooled
from hofl.build_task import build_task, with_sizes
from hofl.commands.output import quiet_libraries, say
from hofl.commands.run import train
from hofl.config import Config, dump, load, run_id
from hofl.errors import ConfigError, HoflError, RunFailed
from hofl.protocol.base import Call
from hofl.runtime import files
from hofl.runtime.flower import internal, keys
from hofl.runtime.flower.attendance import Attendance
from hofl.runtime.flower.call import Fleet
from hofl.runtime.flower.job import INTERRUPTED
from hofl.runtime.flower.join import Invitation, prints_of
from hofl.runtime.flower.roster import Roster
from hofl.runtime.flower.wire import Envelope
from hofl.runtime.local import explain
from hofl.runtime.meter import Meter
from hofl.runtime.start import refuse_folder
from hofl.schema import FleetConfig, RunConfig
from hofl.session import Engine, Session, prepare
from hofl.tasks.nodes import told
from hofl.theory import traffic

MARGIN, HEADERS = 1.1, 1 << 16
"""An answer may be this many times its payload, and have so many bytes of headers."""

TOO_FEW = 3
"""Exit code where not enough clients connected in time."""

SAYS = {
    "deployment": ", Flower deployment: every client is a process of its own, which keeps its data",
    "simulation": ", Flower simulation: all clients run on this machine; no privacy is provided or measured",
}
"""What the manifest says of each engine."""


@dataclass(frozen=True)
class Order:
    """What this process is to do.

    Attributes:
        config: the run's configuration.
        out: the run folder.
        resume: go on in it.
        keys: folder with the nodes' public keys; None where nodes need none.
        kind: deployment or simulation.
        json: show the summary as JSON and nothing else.
        whole: whether the SuperLink is one of ``hofl server``, which passes on small messages whole.
    """

    config: Config
    out: Path
    resume: bool
    keys: Path | None = None
    kind: str = "deployment"
    json: bool = False
    whole: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any], kind: str) -> "Order":
        """From Flower's run configuration, and the kind of its nodes.

        Raises:
            ConfigError: a setting is missing or the configuration is wrong.
        """
        for name in ("config", "out"):
            if not values.get(name):
                raise ConfigError(f"{name} is missing: give -c \"{name}='/path'\" (a path on the server)")
        out, secrets = Path(str(values["out"])), str(values.get("keys") or "")
        resume = bool(values.get("resume"))
        whole = bool(values.get("ended"))  # the supervisor's
        config, known = load(str(values["config"])), Path(secrets) if secrets else None
        return cls(config, out, resume, known, kind, whole=whole)


def play(order: Order, grid: Grid) -> None:
    """Join the clients and run to the end, saying what ``hofl run`` says.

    Raises:
        HoflError: bad input. RunFailed: diverged, or too few clients in a round.
        TimeoutError: too few connected before the first.
    """
    config = order.config
    refuse_folder(order.out, order.resume)
    quiet_libraries()
    show: Callable[[str], None] = (lambda line: None) if order.json else say
    if config.model.source:
        show(f"loading the evaluation data and the model {config.model.source} ...")
    task = build_task(config)
    known = {} if order.keys is None else keys.public_keys(order.keys)
    roster = Roster(config, pooled(config, task), prints_of(task), known)
    if order.resume:
        roster.load(order.out)
    fleet = _fleet(config, roster, grid, show, order.whole)
    fleet.join(config.quorum if order.resume else None)
    if config.partition.kind == "nodes":
        task = with_sizes(task, roster.sizes())

    def _call(session: Session, meter: Meter) -> Call:
        limits = _limits(session)
        fleet.meter, fleet.inbox.limit = meter, max(limits.values())
        cuts = [segment.boundaries for segment in session.segments]
        fleet.limit = lambda client: max(limits[c[client]] for c in cuts if c[client] in limits)
        return fleet.call

    engine = Engine(SAYS[order.kind], _call, apart=order.kind == "deployment")
    session = prepare(config, engine, task, roster.declared(), roster.memory())
    train(session, order.out, order.resume, order.json, lambda: roster.begin(order.out))


def _fleet(config: Config, roster: Roster, grid: Grid, show: Callable[[str], None], whole: bool) -> Fleet:
    """The clients of a run, not joined yet."""
    task = roster.task
    facts = told(task)
    labels, images = tuple(facts["names"]), facts.get("images", {})
    invitation = Invitation(_run_of(config), dump(config), task.clients, labels, images, roster.prints)
    public: dict[int, bytes] = {}

    def _key_of(node: int) -> bytes:
        if roster.keys and node not in public:
            public.update(internal.public_keys(grid))
        return public.get(node, b"")

    def _accept(node: int, envelope: Envelope) -> int:
        return roster.accept(_key_of(node), envelope)

    def _owner(node: int) -> str | None:
        return roster.owner(_key_of(node))

    greeting = invitation.record().to_bytes()
    settings = config.fleet
    present = Attendance(
        grid, task.clients, invitation.run, greeting, _accept, _owner, settings.join, show, whole
    )
    return Fleet(present, settings, Meter(), quorum=config.quorum)


def _run_of(config: Config) -> str:
    """The run's id for its clients: a hash of what decides its result, so that it survives a resume."""
    same = config.model_copy(update={"rounds": 1, "fleet": FleetConfig(), "run": RunConfig()})
    return run_id(same)


def _limits(session: Session) -> dict[int, int]:
    """By boundary, the bytes that an answer may have: the uplink of a whole round, and some more."""
    name, longest = session.config.algorithm, int(session.task.facts.get("length", 0))
    limits = {}
    for boundary, sizes in session.sizes.items():
        up = traffic.of(name, sizes)["up"]
        inputs = session.seen.batch(session.able[0], 0, session.config.local.batch).inputs
        shape = next(iter(inputs.values())).shape  # a text batch may be padded to the longest text
        padded = longest / shape[1] if longest and len(shape) > 1 else 1.0
        payload = sum(up.values()) + (padded - 1.0) * up.get("activations", 0)
        limits[boundary] = int(MARGIN * payload) + HEADERS
    return limits


@contextlib.contextmanager
def _told(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines go to the file ``log``, the process id to ``pid`` and how it ended to ``ended``, where named.

    Without a word on how it ended the supervisor starts the run again: so it is when the network broke.
    """
    ending: dict[str, Any] = {}
    named = {name: Path(str(values[name])) for name in ("log", "pid", "ended") if values.get(name)}
    if "pid" in named:
        files.replace(named["pid"], str(os.getpid()).encode())
    with contextlib.ExitStack() as stack:
        if "log" in named:
            lines = stack.enter_context(named["log"].open("a", encoding="utf-8", buffering=1))
            stack.enter_context(contextlib.redirect_stdout(lines))
            stack.enter_context(contextlib.redirect_stderr(lines))
        try:
            yield ending
        finally:
            if "ended" in named and ending:
                files.replace(named["ended"], json.dumps(ending).encode())


def attempt(order: Callable[[], Order], grid: Grid) -> tuple[int, str]:
    """:func:`play`, with its exit code and the one line that says why it failed."""
    try:
        play(order(), grid)
    except HoflError as error:
        return 2, str(error)
    except RunFailed as error:
        return 1, str(error)
    except TimeoutError as error:
        return TOO_FEW, str(error)
    except (KeyboardInterrupt, SystemExit, click.exceptions.Exit):
        return INTERRUPTED, "interrupted"
    except internal.TRANSPORT:
        raise
    except Exception as error:
        traceback.print_exc()
        return 1, f"unexpected {explain(error)} (a defect of hofl)"
    return 0, ""


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What Flower starts."""
    values = context.run_config
    with _told(values) as ending:
        kind = "simulation" if internal.simulated(grid) else "deployment"
        code, message = attempt(lambda: Order.of(values, kind), grid)
        ending.update({"exit": code, "message": message})
        if code and not values.get("ended"):
            print(f"hofl: {message}", file=sys.stderr)
    if code:
        raise RuntimeError(message)  # Flower then lists the run as failed
