# SPDX-License-Identifier: Apache-2.0
"""``hofl sampling``: what each preference covers and costs, a pilot that picks one, and the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from hofl.commands.arguments import Required
from hofl.commands.output import print_json, print_table, quiet_libraries, say
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
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show the sampling plan of a configuration for several preferences, with what a round costs."""
    from hofl.config import load, placed

    if pilot and oracle:
        raise click.UsageError("--pilot and --oracle are two things; give one of them")
    file, overrides = arguments[0], arguments[1:]
    config, betas = load(file, overrides), preferences(beta)
    quiet_libraries()
    with placed(file, overrides):
        if pilot:
            from hofl.commands.pilot import run_pilot, show_pilot

            found = run_pilot(config, betas, seeds)
            return print_json(found) if json else show_pilot(found)
        if oracle:
            from hofl.commands.oracle import run_oracle, show_oracle

            found = run_oracle(config, betas, runs, floor, smoothness)
            return print_json(found) if json else show_oracle(found)
        from hofl.session import prepare

        found = plan(prepare(config), betas, least=coverage)
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


def plan(
    session: "Session",
    betas: Sequence[float],
    *,
    memory: Profile | None = None,
    draws: int = DRAWS,
    least: float | None = None,
) -> dict[str, Any]:
    """The policy table of a session as JSON values.

    Args:
        session: its clients with data, boundaries, cohort and rounds.
        betas: preferences, ascending; a method that favours nobody has one row, uniform.
        memory: peak bytes of one participation at each boundary, from a plan or a measurement.
        draws: rounds drawn for the averages.
        least: rounds in which everybody is to be expected, for the largest beta that does.

    Raises:
        ConfigError: not even uniform sampling expects that many.
    """
    from hofl.commands.describe import sent
    from hofl.theory.sampling_policy import largest_preference, policy_row, round_averages
    from hofl.theory.schedules import policy_of_round

    config, base = session.config, session.policy
    cuts = [session.boundaries[client] for client in session.able]
    layout, clients, cohort = session.task.model.layout, len(cuts), base.cohort
    bytes_up = {b: float(sum(sent(session, b)["up"].values())) for b in sorted(set(cuts))}
    profiles = {"uplink": bytes_up} | ({"memory": memory} if memory else {})
    dimensions = {b: layout.bottom_size(b) / config.zo.probes for b in bytes_up}
    shown = betas if base.preferred else (0.0,)
    rows = [
        policy_row(b, policy_of_round(base, b), cuts, config.rounds, dimensions=dimensions, profiles=profiles)
        for b in shown
    ]
    averages = {
        name: round_averages(profile, cuts, base, shown, seed=config.seed, draws=draws)
        for name, profile in profiles.items()
    }
    largest = None if least is None else largest_preference(least, clients, cohort, config.rounds)
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": config.rounds,
        "draws": draws,
        "preferred": [session.task.clients[session.able[place]] for place in base.preferred],
        "preference": config.cohort.preference if base.preferred else 0.0,
        "coverage": least,
        "largest_preference": largest,
        "rows": [
            _json_row(row, {name: each[k] for name, each in averages.items()}) for k, row in enumerate(rows)
        ],
    }


def _json_row(row: "Row", averages: Mapping[str, "Average"]) -> dict[str, Any]:
    drawn = {name: {"mean": a.drawn, "largest": a.largest} for name, a in averages.items()}
    counts = {str(boundary): n for boundary, n in row.cohort.items()}
    return asdict(row) | {"cohort": counts, "drawn": drawn}


def show_plan(found: dict[str, Any]) -> None:
    """The table of :func:`plan`, and what it means."""
    who = ", ".join(found["preferred"][:12]) + (", ..." if len(found["preferred"]) > 12 else "")
    say(
        f"cohort: {found['cohort']} of {found['clients']} clients with data a round, {found['rounds']} rounds"
    )
    say(f"preferred: {who}; this configuration has preference {found['preference']:g}" if who else _NOBODY)
    print_table(policy_table(found))
    print_table(cost_table(found))
    if found["largest_preference"] is not None:
        say(
            f"coverage: {found['coverage']:g} or more rounds are expected of every client up to a preference "
            f"of {found['largest_preference']:.4g}; an expectation, no guarantee"
        )


_NOBODY = "preferred: nobody; the method samples uniformly, or all clients cost the same"


def _pair(values: Sequence[float | None], digits: int) -> str:
    first, other = values
    return number(other, digits) if first is None else f"{first:.{digits}f} / {other:.{digits}f}"


def policy_table(found: dict[str, Any]) -> Table:
    """Chances and participations; of two numbers, the first is a preferred client's."""
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
        for row in found["rows"]
    )
    cuts = tuple(f"at boundary {b}" for b in found["rows"][0]["cohort"])
    columns = ("preference", "chi^2", "D", "chance in a round", "expected rounds", "never drawn", *cuts)
    return Table("policy: preferred / other clients, and the expected cohort", columns, rows)


def cost_table(found: dict[str, Any]) -> Table:
    """What a round costs: by expectation, and in drawn rounds."""
    names = list(found["rows"][0]["totals"])
    rows = tuple(
        (
            f"{row['preference']:g}",
            *(
                size(value)
                for name in names
                for value in (row["totals"][name], row["drawn"][name]["mean"], row["drawn"][name]["largest"])
            ),
        )
        for row in found["rows"]
    )
    columns = [f"{name}, {what}" for name in names for what in ("expected", "drawn mean", "largest round")]
    return Table(f"a round's total, and over {found['draws']} drawn rounds", ("preference", *columns), rows)
