# SPDX-License-Identifier: Apache-2.0
"""``hofl theory``: the convergence analysis in a run's own numbers. Diagnostics: nothing depends on them."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hofl.commands.arguments import Required
from hofl.commands.output import print_json, print_table, quiet_libraries, say
from hofl.commands.segments import HELP, alone, say_segment
from hofl.errors import ConfigError
from hofl.report.tables import Table, number

if TYPE_CHECKING:
    from hofl.session import Session
    from hofl.theory.convergence import Assumptions, Guarantee


def theory(
    arguments: Required,
    smoothness: Annotated[float, typer.Option("--smoothness", help="L of a client's objective.")] = 1.0,
    surrogate: Annotated[float, typer.Option("--surrogate", help="L_s of the bottom's surrogate.")] = 1.0,
    variance: Annotated[float, typer.Option("--variance", help="sigma^2 of a minibatch gradient.")] = 1.0,
    affine: Annotated[float, typer.Option("--affine", help="a_H of Assumption C.4.")] = 0.0,
    heterogeneity: Annotated[float, typer.Option("--heterogeneity", help="zeta^2 of Assumption C.4.")] = 1.0,
    gap: Annotated[float, typer.Option("--gap", help="f(w_0) less its infimum.")] = 1.0,
    of_round: Annotated[int, typer.Option("--round", help=HELP)] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the analysis of a configuration: D, constants, horizon, step size, radius and bound."""
    from hofl.config import load, placed
    from hofl.theory.convergence import Assumptions

    given = {
        "smoothness": smoothness,
        "surrogate": surrogate,
        "variance": variance,
        "affine": affine,
        "heterogeneity": heterogeneity,
        "gap": gap,
    }
    for name, value in given.items():
        least = name not in ("smoothness", "surrogate")
        if not (0 <= value < float("inf")) or (value == 0 and not least):
            raise ConfigError(f"--{name} {value:g}: must be a finite number {'>= 0' if least else '> 0'}")
    config = load(arguments[0], arguments[1:])
    quiet_libraries()
    from hofl.session import prepare

    with placed(arguments[0], arguments[1:]):
        session = prepare(config)
    found = diagnostics(session, Assumptions(**given), of_round)
    return print_json(found) if json else show(found)


def diagnostics(session: "Session", assumptions: "Assumptions", of_round: int = 1) -> dict[str, Any]:
    """What the analysis says of a session, as JSON values.

    Its policy is fixed, so where budgets change it speaks of one segment, as of a run that begins there: T
    is its rounds.

    Args:
        session: gives clients, boundaries, shares, q, E, T and mu.
        assumptions: the constants that nobody can know.
        of_round: of the segment that is meant.

    Raises:
        ConfigError: the run has no such round.
    """
    from hofl.algorithms import ALGORITHMS

    if session.config.local.epochs is not None:
        raise ConfigError(
            "local.epochs: the analysis has one number of local steps for all clients: leave it out"
        )
    session, span = alone(session, of_round)
    config, layout = session.config, session.task.model.layout
    cuts = [session.boundaries[client] for client in session.able]
    shared = {
        "algorithm": config.algorithm,
        "rate": ALGORITHMS[config.algorithm].rate,
        "assumptions": asdict(assumptions),
        "clients": [_client(session, boundary, assumptions) for boundary in sorted(set(cuts))],
        **span.to_json(),
    }
    rounds = span.rounds
    if ALGORITHMS[config.algorithm].boundary == "each":
        return shared | _ho_fl(session, [layout.bottom_size(b) for b in cuts], assumptions, rounds)
    return shared | _others(session, layout.bottom_size(max(cuts)), rounds)


def _client(session: "Session", boundary: int, a: "Assumptions") -> dict[str, Any]:
    """Lemma C.5's constants of one boundary, at the run's own q and mu."""
    from hofl.algorithms import ALGORITHMS
    from hofl.theory.moments import moments

    config, layout = session.config, session.task.model.layout
    method = ALGORITHMS[config.algorithm]
    pure = bool(method.estimators) and method.boundary == "none"
    d = layout.size if pure else layout.bottom_size(boundary) if method.estimators else 0
    exact = config.zo.estimator in ("tangent", "sketch")  # no finite difference: no bias, no remainder
    radius = 0.0 if exact else config.zo.radius
    found = moments(d, config.zo.probes, radius, surrogate=a.surrogate, variance=a.variance)
    return {"boundary": boundary, "d_zo": d} | asdict(found)


def _ho_fl(session: "Session", d_zo: list[int], a: "Assumptions", rounds: int) -> dict[str, Any]:
    """Theorem C.9 at the run's horizon and at the least one, and of a uniform cohort beside it."""
    from hofl.core.sampling import uniform
    from hofl.theory.convergence import guarantee, preference_cap

    config, policy = session.config, session.policy
    clients, cohort = len(d_zo), policy.cohort
    of = partial(guarantee, d_zo=d_zo, probes=config.zo.probes, steps=config.local.steps, assumptions=a)
    even = uniform(clients, cohort).shares
    return {
        "run": _values(of(policy.shares, rounds=rounds)),
        "at_least_rounds": _values(of(policy.shares)),
        "uniform": _values(of(even, rounds=rounds)),
        "preference": config.cohort.preference if policy.preferred else 0.0,
        "preference_cap": preference_cap(a.affine, clients, cohort),
        "radius": config.zo.radius,
        "learning_rate": config.optimizer.lr,
    }


def _values(found: "Guarantee") -> dict[str, Any]:
    return asdict(found) | {"bound": found.bound}


def _others(session: "Session", d_c: int, rounds: int) -> dict[str, Any]:
    """The rate of a system that HO-FL's theorem does not cover, up to its constant."""
    from hofl.build import steps_of
    from hofl.theory import split_rates

    config, layout = session.config, session.task.model.layout
    probes = config.zo.probes
    scale = split_rates.Scale(
        rounds=rounds,
        d=layout.size,
        d_c=d_c,
        probes=probes,
        steps=steps_of(config),
        batch=config.local.batch,
        clients=len(session.able),
        cohort=session.policy.cohort,
        server_steps=config.split.server_steps,
    )
    found: dict[str, Any] = {"rate_value": split_rates.rate(config.algorithm, scale), "scale": asdict(scale)}
    if config.algorithm == "ho_sfl" and d_c:
        found["step_size"] = split_rates.step_size(rounds, d_c, probes)
        found["radius"] = split_rates.radius(rounds, d_c, probes)
    return found


_LINES = (
    ("D, sampling-weighted dimension", "dimension", ",.0f"),
    ("chi^2, skew of the policy", "skew", ".3f"),
    ("epsilon, least share of a uniform one", "floor", ".3g"),
    ("C_0", "c0", ",.0f"),
    ("C_*", "c_star", ".3e"),
    ("T_min = C_* D", "least_rounds", ".3e"),
    ("T", "rounds", ".4g"),
    ("eta", "step_size", ".3e"),
    ("mu, at most", "radius", ".3e"),
    ("bound: falls as sqrt(D/T)", "progress", ".4g"),
    ("bound: stays, 6 zeta^2 chi^2", "bias", ".4g"),
    ("T >= T_min", "horizon_holds", ""),
    ("a_H chi^2 <= 1/12", "skew_holds", ""),
)


def show(found: dict[str, Any]) -> None:
    """Tables, and what to make of them."""
    say("diagnostics of the analysis: no run depends on them, and no practical run meets its horizon")
    say_segment(found)
    say("assumed: " + ", ".join(f"{name} {value:g}" for name, value in found["assumptions"].items()))
    names = ("d_zo", "kappa", "rho2", "omega2", "nu")
    rows = tuple((str(c["boundary"]), *(f"{c[name]:.4g}" for name in names)) for c in found["clients"])
    columns = ("boundary", "d_zo", "kappa", "rho^2", "omega^2", "nu")
    print_table(Table("Lemma C.5: one estimate, at the run's q and radius", columns, rows))
    say(f"rate: {found['rate']}")
    (_show_ho_fl if "run" in found else _show_others)(found)


def _show_ho_fl(found: dict[str, Any]) -> None:
    columns = ("this run", "at T_min", "uniform cohort")
    sides = [found[key] for key in ("run", "at_least_rounds", "uniform")]
    rows = tuple((line, *(_cell(side[key], style) for side in sides)) for line, key, style in _LINES)
    print_table(Table("Theorem C.9", ("", *columns), rows))
    say(f"the run's own: rate {found['learning_rate']:g}, radius {found['radius']:g}")
    ratio = found["run"]["dimension"] / found["uniform"]["dimension"]
    say(
        f"of use: at preference {found['preference']:g} D is {ratio:.3f} of a uniform cohort's, and so are "
        "the rounds for the same sqrt(D/T); the price is zeta^2 chi^2, and the largest preference with "
        f"a_H chi^2 <= 1/12 is {number(found['preference_cap'])}"
    )


def _show_others(found: dict[str, Any]) -> None:
    value = found["rate_value"]
    say("value without its constant: " + ("unknown" if value is None else f"{value:.4g}"))
    if "step_size" in found:
        say(f"its analysis: eta = {found['step_size']:.3e}, mu = {found['radius']:.3e}")


def _cell(value: Any, style: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(None) if value is None else format(value, style)
