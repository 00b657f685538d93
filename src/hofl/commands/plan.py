# SPDX-License-Identifier: Apache-2.0
"""``hofl plan``: what every order needs of memory, compute and uplink, and what fits a budget."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hofl.commands.output import print_json, print_table, quiet_libraries, say
from hofl.errors import ConfigError
from hofl.memory.units import positive_bytes_of
from hofl.report.tables import Table, size

if TYPE_CHECKING:
    from hofl.memory.orders import Order
    from hofl.memory.plan import Plan
    from hofl.memory.subject import Subject, Workload


class Dtype(StrEnum):
    """Precisions of a backbone."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """Paths of attention."""

    CAUSAL = "causal"
    MASK = "mask"


class Estimator(StrEnum):
    """What trains a bottom."""

    FORWARD = "forward"
    CENTRAL = "central"
    TANGENT = "tangent"
    SKETCH = "sketch"
    NONE = "none"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A known shape, a folder with config.json, or a run's CONFIG.toml."
        ),
    ],
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Examples a step [16].")] = None,
    length: Annotated[int | None, typer.Option("--length", min=1, help="Tokens an example [1024].")] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", help="A device's memory, such as 12GiB; may be repeated.")
    ] = None,
    devices: Annotated[
        Path | None, typer.Option("--devices", help='A file with [devices] and lines phone = "4GiB".')
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="Of the adapters [8].")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="Of the adapters [16].")] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Of the backbone [bfloat16].")] = None,
    estimator: Annotated[
        list[Estimator] | None, typer.Option("--estimator", help="Only this one; may be repeated.")
    ] = None,
    probes: Annotated[int | None, typer.Option("--probes", min=1, help="Directions a step, q [2].")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Local steps, E [5].")] = None,
    attention: Annotated[
        Attention | None,
        typer.Option("--attention", help="causal: no row is padded; mask: rows are padded."),
    ] = None,
    margin: Annotated[float, typer.Option("--margin", min=1.0, help="A peak times this must fit.")] = 1.1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Draw the plan into this PNG.")] = None,
) -> None:
    """Plan the memory of a participation without allocating it, and choose the order for a budget."""
    budgets = budgets_of(budget or [], devices)
    quiet_libraries()
    given = {"batch": batch, "length": length, "probes": probes, "steps": steps, "attention": attention}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    subject, work = subject_and_work(model, dtype and dtype.value, rank, alpha)
    from hofl.memory.plan import ALL, recommend
    from hofl.memory.plan import plan as trace

    chosen = tuple(map(str, estimator)) if estimator else ALL
    # a device of a fleet that is too small is no error: it is told that nothing fits
    least = [budgets[text] for text in budget or []]
    with progress("tracing", json) as tell:
        found = trace(subject, replace(work, **changed), chosen, told=tell, budgets=least, margin=margin)
    answers = {name: recommend(found, size_, margin) for name, size_ in budgets.items()}
    if out:
        _draw(found, budgets, out)
    if json:
        return print_json({**found.to_json(), "recommended": answers})
    for part in lines(found, answers):
        say(part) if isinstance(part, str) else print_table(part)
    if out:
        say(f"drawn into {out}")


def budgets_of(given: Sequence[str], devices: Path | None) -> dict[str, int]:
    """Name -> bytes: a budget's name is its own text, a device's its own.

    Raises:
        ConfigError: one is no size above 0.
    """
    found: dict[str, int] = {}
    for text in given:
        try:
            found[text] = positive_bytes_of(text)
        except ValueError as error:
            raise ConfigError(f"--budget {text}: {error}") from None
    if devices:
        from hofl.memory.configured import fleet

        found |= {name: positive_bytes_of(text) for name, text in fleet(devices).items()}
    return found


def subject_and_work(
    model: str, dtype: str | None = None, rank: int | None = None, alpha: float | None = None
) -> "tuple[Subject, Workload]":
    """What a plan is about, from its name or a run's configuration.

    Raises:
        HoflError: one line that says what is wrong with the name.
    """
    from hofl.memory.subject import DTYPES, Adapters, Workload, subject_of

    lora: dict[str, Any] = {
        name: value for name, value in (("rank", rank), ("alpha", alpha)) if value is not None
    }
    if not model.endswith(".toml"):
        return subject_of(model, dtype or "bfloat16", replace(Adapters(), **lora)), Workload()
    from hofl.config import load
    from hofl.memory.configured import of_config

    subject, work = of_config(load(model))
    changed: dict[str, Any] = {"adapters": replace(subject.adapters, **lora)}
    if dtype and subject.sample is None:
        changed["dtype"] = DTYPES[dtype]
    return replace(subject, **changed), work


@contextmanager
def progress(doing: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """What shows on a terminal what is done next, on a line of standard error that ends up clear."""
    if quiet or not sys.stderr.isatty():
        yield lambda what: None
        return

    def _tell(what: str) -> None:
        sys.stderr.write(f"\r\x1b[K{doing} {what} ..." if what else "\r\x1b[K")
        sys.stderr.flush()

    try:
        yield _tell
    finally:
        _tell("")


def _draw(found: "Plan", budgets: dict[str, int], out: Path) -> None:
    from hofl.memory.draw import draw

    try:
        draw(found, budgets, out)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out}: {error}; name a .png file that can be written") from None


ATTENTION = {
    "causal": "no row is padded, so attention runs on its causal path without a mask tensor",
    "mask": "rows are padded, so attention is given a mask tensor",
}


def lines(found: "Plan", answers: dict[str, dict[str, Any]]) -> list[str | Table]:
    """What a terminal shows: the assumptions, the frontier, and an answer for each budget."""
    work, costs = found.work, found.costs
    example = (
        f"{work.batch} x {work.length} tokens" if found.subject.sample is None else f"batch {work.batch}"
    )
    dtype = str(found.subject.dtype).removeprefix("torch.")
    shown: list[str | Table] = [
        f"{found.subject.name}: {costs.blocks} blocks, backbone {dtype} {size(found.backbone)}, "
        f"{costs.trainables:,} trained; {example}, E = {work.steps}, q = {work.probes}",
        f"attention: {ATTENTION[work.attention]}",
        rows_table(found),
    ]
    if answers:
        shown += [answers_table(answers), *(line for a in answers.items() for line in _advice(*a))]
    return shown


def rows_table(found: "Plan") -> Table:
    """The orders on the frontier; those of all boundaries are in ``--json``."""
    shown = [row for row in found.rows if row.frontier and _telling(row, found.costs.blocks)]
    columns = ("order", "peak", "largest part", "forwards a step", "up a participation")
    rows = tuple(
        (
            row.label,
            size(row.peak_bytes),
            _largest(row),
            f"{row.forward_equivalents:.2f}",
            size(row.uplink_bytes),
        )
        for row in shown
    )
    title = "orders on the frontier, the most exact first (every boundary: --json)"
    return Table(title, columns, rows, frozenset({0, 2}))


def _telling(row: "Order", blocks: int) -> bool:
    """First and zeroth order, and about seven boundaries."""
    every = max(1, round(blocks / 7))
    return row.order != "hybrid" or row.boundary in (1, blocks) or row.boundary % every == 0


def _largest(row: "Order") -> str:
    name = max(row.parts, key=lambda part: row.parts[part])
    return f"{name} {size(row.parts[name])}"


def answers_table(answers: dict[str, dict[str, Any]]) -> Table:
    """What each budget allows."""
    rows = tuple(
        (name, size(a["budget_bytes"]), a["label"], size(a["peak_bytes"]), size(a["left_bytes"]))
        if a["fits"]
        else (name, size(a["budget_bytes"]), "nothing fits", size(a["needed_bytes"]), "–")
        for name, a in answers.items()
    )
    columns = ("budget", "memory", "most exact order that fits", "peak", "left")
    return Table("recommended", columns, rows, frozenset({0, 2}))


def _advice(name: str, answer: dict[str, Any]) -> list[str]:
    """Lines on what to change where nothing fits."""
    if answer["fits"]:
        return []
    ways = "".join(
        f"; {c['change']} {c['to']} needs {size(c['needed_bytes'])}{' (fits)' if c['fits'] else ''}"
        for c in answer["change"]
    )
    return [f"{name}: at least {size(answer['needed_bytes'])} are needed ({answer['needed_order']}){ways}"]
