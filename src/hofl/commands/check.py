# SPDX-License-Identifier: Apache-2.0
"""``hofl check``: a short look at a configuration before its run; what to expect of it, in words."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from hofl.commands.arguments import Required, named
from hofl.commands.output import print_json, print_table, quiet_libraries, say
from hofl.report.tables import Table, number, seconds, size

Row = Mapping[str, Any]


def check(
    arguments: Required,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look at a configuration for at most a minute or so: what it costs, and what to expect of it.

    Exit status 1: the model's cut fails its test. Nothing is written.
    """
    from hofl.config import load, placed

    file, overrides = named(arguments)
    config = load(file, overrides)
    quiet_libraries()
    from hofl.checkup.examine import examine
    from hofl.commands.plan import progress

    with placed(file, overrides), progress("check:", json) as tell:
        found = examine(config, tell)
    if json:
        print_json(found)
    else:
        for part in lines(found):
            say(part) if isinstance(part, str) else print_table(part)
    if not found["self_test"]["ok"]:
        raise typer.Exit(1)


def lines(found: Row) -> Iterator[str | Table]:
    """What a terminal shows."""
    yield _subject(found)
    yield from (f"assumed: {text}" for text in found["assumed"])
    yield from _self_test(found)
    if not found["self_test"]["ok"]:
        return
    if probes := _probes(found):
        yield probes
    yield _costs(found)
    yield from _memory(found)
    yield _evaluation(found["evaluation"])
    yield _totals(found)
    yield "what to expect:"
    yield from (f"{'!' if one['level'] == 'warning' else '-'} {one['text']}" for one in found["findings"])
    yield f"checked in {seconds(found['seconds'])}; nothing was written"


def _subject(found: Row) -> str:
    probing = f", {found['estimator']}" if found["estimator"] else ""
    probing += f" q = {found['probes']}" if found["probes"] else ""
    probing += f" radius {found['radius']:g}" if found["probes"] and found["radius"] else ""
    return (
        f"{found['algorithm']}{probing}; {found['model']}, {found['dtype']}, {found['blocks']} blocks, "
        f"{found['trained']:,} trained; {found['device']} ({found['threads']} threads)"
    )


def _self_test(found: Row) -> Iterator[str]:
    bad = [row for row in found["self_test"]["cuts"] if not row["ok"]]
    for row in bad:
        yield f"self-test FAILED {_at(row['boundary'])}: {row['why']}"
    if not bad:
        cuts = [str(row["boundary"]) for row in found["self_test"]["cuts"] if row["boundary"] is not None]
        where = f"at boundary {', '.join(cuts)}" if cuts else "in the middle"
        yield f"self-test: the model cut {where} equals the whole bit for bit, and its gradients arrive"


def _at(boundary: int | None) -> str:
    return "in the middle" if boundary is None else f"at boundary {boundary}"


def _probes(found: Row) -> Table | None:
    """Signal and cosine of the tiers that probe."""
    tiers = [tier for tier in found["tiers"] if tier["probes"]]
    rows = []
    for tier in tiers:
        probes = tier["probes"]
        measured = probes["why"] or f"{_small(probes['cosine'])} (mean of {probes['draws']})"
        signal = f"{number(probes['signal'], 2)} ({probes['pairs']} probes)"
        rows.append(
            (
                _name(found, tier),
                f"{probes['dimension']:,}",
                signal,
                measured,
                _small(probes["expected_cosine"]),
            )
        )
    columns = ("boundary", "numbers probed", "zo_signal", "cosine with the gradient", "exact scalars have")
    return Table("probes at the starting point", columns, tuple(rows)) if rows else None


def _name(found: Row, tier: Row) -> str:
    """A tier's boundary; of methods without one, a dash."""
    from hofl.algorithms import ALGORITHMS

    return str(tier["boundary"]) if ALGORITHMS[found["algorithm"]].hybrid else "–"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _costs(found: Row) -> Table:
    """What a participation costs by boundary."""
    rows = tuple(
        (
            _name(found, tier),
            f"{tier['expected_clients']:.1f}",
            size(tier["planned_bytes"]),
            size(tier["bytes"]["up"]),
            size(tier["bytes"]["down"]),
            size(tier["bytes"]["first_down"]),
            seconds(tier["step_seconds"]),
            seconds(tier["participation_seconds"]),
        )
        for tier in found["tiers"]
    )
    columns = (
        "boundary", "clients a round", "planned peak", "payload up", "down", "down at first contact",
        "a local step", "a participation",
    )  # fmt: skip
    return Table("a participation", columns, rows)


def _memory(found: Row) -> Iterator[str]:
    plan = found["memory"]
    if plan["first_order_bytes"] is not None:
        yield (
            f"full first order would need {size(plan['first_order_bytes'])}, with gradient checkpointing "
            f"{size(plan['first_order_checkpointed_bytes'])}; free here beside the model: "
            f"{size(plan['free_bytes'])}"
        )


def _evaluation(found: Row) -> str:
    if found["why"]:
        return f"evaluation: n = {found['n']}; zero-shot not measured: {found['why']}"
    majority = f", commonest class {number(found['majority'])}" if found["majority"] is not None else ""
    return (
        f"evaluation: zero-shot {found['metric']} {number(found['value'])} on {found['sampled']} of "
        f"{found['n']}{majority}; one takes {seconds(found['seconds'])}"
    )


def _totals(found: Row) -> Table:
    """An expected round and the run."""
    one, run = found["round"], found["run"]
    rows = (
        (
            f"a round of {one['clients']}",
            size(one["bytes_up"]),
            size(one["bytes_down"]),
            seconds(one["seconds"]),
        ),
        (
            f"the run: {found['rounds']} rounds, {run['evaluations']} evaluations",
            size(run["bytes_up"]),
            size(run["bytes_down"]),
            seconds(run["seconds"]),
        ),
    )
    return Table("in all, as expected of the cohort", ("", "payload up", "down", "on this machine"), rows)
