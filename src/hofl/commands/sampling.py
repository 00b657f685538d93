# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling``: what each preference covers and costs, a pilot that picks one, and the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from hofl.commands.arguments import Required
from hofl.commands.output import print_json, print_table, quiet_libraries, say, warn
from hofl.commands.segments import HELP, Span, spans
from hofl.errors import ConfigError
from hofl.report.tables import Table, number, size

if TYPE_CHECKING:
    from hofl.session import Session
    from hofl.theory.sampling_policy import Average, Row

BETAS = (0.0, 0.25, 0.5, 0.75)
"""The preferences of the paper."""
DRAWS = 160

Profile = Mapping[int, float]
"""What one participation needs at each boundary."""


def sampling(
    arguments: Required,
    beta: Annotated[
        list[float] | None,
        typer.Option("--beta", help="A preference; once for each [0 0.25 0.5 0.75]."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option("--coverage", help="Rounds in which every client is to be expected: the largest beta."),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option("--plan", help="A file of hofl plan --json: adds the memory of a round's clients."),
    ] = None,
    pilot: Annotated[
        bool, typer.Option("--pilot", help="Try the preferences in short runs and recommend one.")
    ] = False,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Estimate the reference policy from repeated local runs.")
    ] = False,
    runs: Annotated[int, typer.Option("--runs", help="Oracle: local runs of each client.")] = 8,
    seeds: Annotated[int, typer.Option("--seeds", help="Pilot: runs of each preference.")] = 2,
    floor: Annotated[
        float, typer.Option("--floor", help="Oracle: epsilon, the least part of a uniform share.")
    ] = 0.25,
    smoothness: Annotated[
        float, typer.Option("--smoothness", help="Oracle: L; its local steps are SGD with eta E L = 0.1.")
    ] = 1.0,
    of_round: Annotated[
        int | None, typer.Option("--round", help=f"Pilot, oracle: {HELP[0].lower()}{HELP[1:]}")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show the sampling plan of a configuration for several preferences, with what a round costs."""
    from hofl.config import load, placed

    if pilot and oracle:
        raise click.UsageError("--pilot and --oracle are two things; give one of them")
    if of_round is not None and not (pilot or oracle):
        raise click.UsageError("--round goes with --pilot or --oracle; the plan shows every segment")
    if memory and (pilot or oracle):
        raise click.UsageError("--plan goes with neither --pilot nor --oracle; leave it out")
    file, overrides = arguments[0], arguments[1:]
    config, betas = load(file, overrides), preferences(beta)
    quiet_libraries()
    with placed(file, overrides):
        if pilot:
            from hofl.commands.pilot import run_pilot, show_pilot

            found = run_pilot(config, betas, seeds, of_round or 1)
            return print_json(found) if json else show_pilot(found)
        if oracle:
            from hofl.commands.oracle import run_oracle, show_oracle

            found = run_oracle(config, betas, runs, floor, smoothness, of_round or 1)
            return print_json(found) if json else show_oracle(found)
        from hofl.session import prepare

        session = prepare(config)
        found = plan(session, betas, memory=memory_of(session, memory) if memory else None, least=coverage)
    return print_json(found) if json else show_plan(found)


def preferences(given: Sequence[float] | None) -> tuple[float, ...]:
    """The preferences to show, ascending, each once.

    Raises:
        ConfigError: one is outside [0, 1).
    """
    betas = tuple(sorted(set(given or BETAS)))
    for value in betas:
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"--beta {value:g}: must be in [0, 1)")
    return betas


def memory_of(session: "Session", file: Path) -> Profile:
    """Bytes that a participation needs at each boundary of a session, from a plan in a file.

    Raises:
        ConfigError: it is no plan, or of another model or method.
    """
    from hofl.algorithms import ALGORITHMS
    from hofl.build import probes_of
    from hofl.memory.planned import other_work, read_plan, require_peaks

    config, layout = session.config, session.task.model.layout
    method, found = ALGORITHMS[config.algorithm], read_plan(file)
    if method.split:
        raise ConfigError(
            f"--plan: {config.algorithm} splits the model; a plan is of clients that hold it all"
        )
    if (found["blocks"], found["trainables"]) != (layout.blocks, layout.size):
        raise ConfigError(
            f"--plan {file}: is of {found['model']} with {found['blocks']} blocks and "
            f"{found['trainables']:,} trainables; this configuration has {layout.blocks} and {layout.size:,}"
        )
    if differs := other_work(found, config):
        warn(f"--plan {file}: {differs}")
    estimator = config.zo.estimator if method.estimators else None
    whole = not method.hybrid and probes_of(config) > 0
    cuts, again = session.cuts, config.model.checkpointing and not whole
    return require_peaks(found, cuts, estimator, whole=whole, checkpointing=again)


def plan(
    session: "Session",
    betas: Sequence[float],
    *,
    memory: Profile | None = None,
    draws: int = DRAWS,
    least: float | None = None,
) -> dict[str, Any]:
    """The policy table of a session as JSON values, for each segment of the run.

    Args:
        session: its clients with data, boundaries, cohort and rounds.
        betas: preferences, ascending; a method that favours nobody has one row, uniform.
        memory: peak bytes of one participation at each boundary, from a plan or a measurement.
        draws: rounds drawn for the averages, from the first of a segment on.
        least: rounds in which everybody is to be expected, for the largest beta that does.

    Raises:
        ConfigError: not even uniform sampling expects that many.
    """
    from hofl.commands.describe import sent
    from hofl.theory.sampling_policy import largest_preference

    config, largest = session.config, None
    profiles = {"uplink": {b: float(sum(sent(session, b)["up"].values())) for b in session.cuts}}
    profiles |= {"memory": dict(memory)} if memory else {}
    parts = [_segment(session, span, betas, profiles, draws) for span in spans(session)]
    if least is not None:
        sizes = ((part["clients"], part["cohort"], part["rounds"]) for part in parts)
        largest = largest_preference(least, *sizes)
    return {
        "rounds": config.rounds,
        "draws": draws,
        "preference": config.cohort.preference if session.policy.preferred else 0.0,
        "schedule": config.cohort.schedule,
        "final": config.cohort.final if config.cohort.schedule != "constant" else None,
        "coverage": least,
        "largest_preference": largest,
        "segments": parts,
    }


def _segment(
    session: "Session", span: Span, betas: Sequence[float], profiles: Mapping[str, Profile], draws: int
) -> dict[str, Any]:
    """The policy table of the rounds in which nobody's boundary moves."""
    from hofl.theory.sampling_policy import policy_row, round_averages
    from hofl.theory.schedules import policy_of_round

    now, config = session.during(span.first_round), session.config
    cuts = [now.boundaries[client] for client in now.able]
    bottom, base = session.task.model.layout.bottom_size, now.policy
    dimensions = {b: bottom(b) / config.zo.probes for b in sorted(set(cuts))}
    shown = betas if base.preferred else (0.0,)
    rows = [
        policy_row(b, policy_of_round(base, b), cuts, span.rounds, dimensions=dimensions, profiles=profiles)
        for b in shown
    ]
    first = span.first_round
    averages = {
        name: round_averages(profile, cuts, base, shown, seed=config.seed, draws=draws, first=first)
        for name, profile in profiles.items()
    }
    return {
        "first_round": first,
        "last_round": span.last_round,
        "rounds": span.rounds,
        "clients": len(cuts),
        "cohort": base.cohort,
        "boundaries": {str(b): cuts.count(b) for b in dimensions},
        "left_out": sum(boundary not in session.sizes for boundary in now.boundaries),
        "preferred": [session.task.clients[now.able[place]] for place in base.preferred],
        "rows": [
            _json_row(row, {name: each[k] for name, each in averages.items()}) for k, row in enumerate(rows)
        ],
    }


def _json_row(row: "Row", averages: Mapping[str, "Average"]) -> dict[str, Any]:
    drawn = {name: {"mean": a.drawn, "largest": a.largest} for name, a in averages.items()}
    counts = {str(boundary): n for boundary, n in row.cohort.items()}
    return asdict(row) | {"cohort": counts, "drawn": drawn}


def show_plan(found: dict[str, Any]) -> None:
    """The tables of :func:`plan`, and what they mean."""
    several = len(found["segments"]) > 1
    for part in found["segments"]:
        if several:
            say(f"rounds {part['first_round']} to {part['last_round']} of {found['rounds']}: {_who(part)}")
        size_, of, rounds = part["cohort"], part["clients"], part["rounds"]
        say(f"cohort: {size_} of {of} clients with data a round, {rounds} rounds")
        say(_preferred(part, found))
        print_table(policy_table(part))
        print_table(cost_table(part, found["draws"]))
    if found["largest_preference"] is not None:
        say(
            f"coverage: {found['coverage']:g} or more rounds are expected of every client"
            f"{' that can be drawn in all of them' * several} up to a preference "
            f"of {found['largest_preference']:.4g}; an expectation, no guarantee"
        )


def _who(part: dict[str, Any]) -> str:
    """The boundaries of a segment in words."""
    spread = ", ".join(f"{count} at boundary {b}" for b, count in part["boundaries"].items())
    return spread + (f", {part['left_out']} left out" if part["left_out"] else "")


def _preferred(part: dict[str, Any], found: dict[str, Any]) -> str:
    names, kind = part["preferred"], found["schedule"]
    if not names:
        return _NOBODY
    moves = {"constant": "", "measured": f", as measured down to {found['final'] or 0:g}"}
    how = moves.get(kind, f", {kind} to {found['final'] or 0:g} in the last round")
    who = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"preferred: {who}; this configuration has preference {found['preference']:g}{how}"


_NOBODY = "preferred: nobody; the method samples uniformly, or all clients cost the same"


def _pair(values: Sequence[float | None], digits: int) -> str:
    first, other = values
    return number(other, digits) if first is None else f"{first:.{digits}f} / {other:.{digits}f}"


def policy_table(part: dict[str, Any]) -> Table:
    """Of a segment, chances and participations; of two numbers, the first is a preferred client's."""
    rows = tuple(
        (
            f"{row['preference']:g}",
            number(row["skew"]),
            f"{row['dimension']:,.0f}",
            _pair(row["inclusion"], 3),
            _pair(row["participations"], 1),
            f"{row['never']:.1e}",
            *(f"{n:.2f}" for n in row["cohort"].values()),
        )
        for row in part["rows"]
    )
    cuts = tuple(f"at boundary {b}" for b in part["rows"][0]["cohort"])
    columns = ("preference", "chi^2", "D", "chance in a round", "expected rounds", "never drawn", *cuts)
    return Table("policy: preferred / other clients, and the expected cohort", columns, rows)


def cost_table(part: dict[str, Any], draws: int) -> Table:
    """What a round of a segment costs: by expectation, and in drawn rounds."""
    names = list(part["rows"][0]["totals"])
    rows = tuple(
        (
            f"{row['preference']:g}",
            *(
                size(value)
                for name in names
                for value in (row["totals"][name], row["drawn"][name]["mean"], row["drawn"][name]["largest"])
            ),
        )
        for row in part["rows"]
    )
    columns = [f"{name}, {what}" for name in names for what in ("expected", "drawn mean", "largest round")]
    return Table(f"a round's total, and over {draws} drawn rounds", ("preference", *columns), rows)
