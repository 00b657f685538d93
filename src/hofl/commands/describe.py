# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: before it starts, at each evaluation, and when it is done."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hofl.commands.participation import contact, effort
from hofl.report.rows import amount
from hofl.report.tables import Table, number, seconds, size
from hofl.tasks.metric_names import LOWER_IS_BETTER, beside, metric_of

if TYPE_CHECKING:
    from hofl.config import Config
    from hofl.session import Session
    from hofl.theory.communication import Traffic

_NEVER_KEPT = ("activations", "labels")
"""What no ledger holds."""
_LISTED = 12
"""Clients up to which the partition is shown one line each."""
_LARGE = 100e6
"""Bytes of a ledger above which a run says so before it starts."""
_OUT = -1
"""The boundary of a client that is left out."""
_TELLING = 0.1
"""Scalars for each coordinate of a bottom above which the server learns much of its gradient."""


def describe(session: "Session") -> Iterator[str | Table]:
    """The first lines of a run: mode, device, model, labels, partition, boundaries, cohort, bytes."""
    config, task, model = session.config, session.task, session.task.model
    settings = session.settings
    yield f"mode: {settings.mode}"
    yield f"device: {model.device} ({_threads()} threads)"
    yield (
        f"model: {settings.model}, {sum(p.numel() for p in model.module.parameters()):,} parameters, "
        f"{model.layout.size:,} trained, {model.blocks} blocks, backbone {config.model.dtype}"
    )
    yield f"labels: at the {settings.labels_at}; a client sends {', '.join(settings.leaves_device)}"
    if settings.top_at != "clients":
        yield f"top: at the {settings.top_at}"
    if session.engine.apart:
        yield privacy(config)
    yield from (f"warning: {text}" for text in (*task.facts.get("warnings", ()), *telling(session)))
    yield partition(task.facts.get("partition", ()), config.partition.kind)
    yield from memory(session)
    yield boundaries(session)
    yield from contact(session)
    yield cohort(session)
    yield from segments(session)
    yield effort(session)
    bytes_kept = ledger_bytes(session)
    if bytes_kept > _LARGE:
        yield (
            f"ledger: about {size(bytes_kept)} after {config.rounds} rounds, for hofl replay; "
            'run.ledger = "scalars" leaves out the weights'
        )


def privacy(config: "Config") -> str:
    """What the server can learn from what its clients send, in one line."""
    from hofl.algorithms import ALGORITHMS

    if ALGORITHMS[config.algorithm].split:
        return "privacy: the server sees activations of every batch; assume that it can reconstruct the data"
    return (
        "privacy: there is neither differential privacy nor secure aggregation; what a client sends can "
        "reveal training data"
    )


def telling(session: "Session") -> Iterator[str]:
    """A warning for each boundary whose few coordinates the scalars of one participation nearly fix."""
    from hofl.algorithms import ALGORITHMS

    if not ALGORITHMS[session.config.algorithm].hybrid:
        return
    for boundary in session.cuts:
        bottom, scalars = session.task.model.layout.bottom_size(boundary), scalars_up(session, boundary)
        if bottom and scalars > _TELLING * bottom:
            yield (
                f"the scalars then determine a large part of the bottom's gradient: boundary {boundary} has "
                f"{bottom:,} trainables and a participation sends {scalars} scalars; use fewer probes"
            )


def ledger_bytes(session: "Session") -> float:
    """What a full ledger will hold, in bytes: the replies of all rounds, and of split methods the tops."""
    from hofl.algorithms import ALGORITHMS
    from hofl.local_work import steps_taken
    from hofl.theory.communication import WEIGHT

    config, plan, layout = session.config, session.policy, session.task.model.layout
    if config.run.ledger != "full":
        return 0.0
    held = zip((session.boundaries[client] for client in session.able), steps_taken(session), strict=True)
    ups = (sent(session, boundary, steps)["up"].items() for boundary, steps in held)
    kept = [sum(n for category, n in up if category not in _NEVER_KEPT) for up in ups]
    split = ALGORITHMS[config.algorithm].split
    top = WEIGHT * (layout.size - layout.bottom_size(session.cuts[0])) if split else 0
    return config.rounds * (top + plan.cohort * float(plan.shares @ kept))


def sent(session: "Session", boundary: int, steps: int | None = None) -> "Traffic":
    """Payload bytes by category of one participation of a client that is in step; unset, the most steps."""
    from hofl.local_work import sizes_at
    from hofl.theory import traffic

    return traffic.of(session.config.algorithm, sizes_at(session, boundary, steps))


def scalars_up(session: "Session", boundary: int) -> int:
    """Scalars that a client sends in one participation: none where the server forms them, or weights go."""
    from hofl.theory.communication import SCALAR

    return sent(session, boundary)["up"].get("scalars", 0) // SCALAR


def partition(rows: Sequence[dict[str, Any]], kind: str) -> Table:
    """Who holds what: a line a client, or the spread over the clients where they are many."""
    classes = list(rows[0]["classes"]) if rows else []
    columns = ("client", "examples", *classes)
    cells = [(str(r["client"]), int(r["examples"]), *(int(r["classes"][c]) for c in classes)) for r in rows]
    if len(cells) > _LISTED:
        ordered = [sorted(column) for column in list(zip(*cells, strict=True))[1:]]
        middle = len(cells) // 2
        spread = ("fewest", 0), ("median", middle), ("most", -1)
        shown = tuple(
            (f"{name} of {len(cells)}", *(str(c[place]) for c in ordered)) for name, place in spread
        )
    else:
        shown = tuple(tuple(str(cell) for cell in row) for row in cells)
    return Table(f"partition: {kind}, {len(cells)} clients", columns, shown)


def memory(session: "Session") -> Iterator[str | Table]:
    """What a participation needs at each boundary in use, and who is left out or has moved for it."""
    found = session.assigned
    if found is None:
        return
    needs = found.needs
    rows = [
        (str(b), size(needs.planned[b]), size(needs.of(b)), size(needs.measured.get(b)))
        for b in needs.planned
        if b in session.cuts or b in needs.measured
    ]
    title = f"memory: the smallest boundary that fits a budget, margin {needs.margin:g}"
    yield Table(title, ("boundary", "planned peak", "a budget needs", "a dry run took"), tuple(rows))
    yield from moves(session)


def moves(session: "Session") -> Iterator[str]:
    """A line for each reason to be left out, or to have moved, that is new in its segment."""
    found, clients = session.assigned, session.seen.clients
    before: dict[str, str] = {}
    for place, segment in enumerate(session.segments):
        if found is None:
            return
        told = {name: f"left out: {why}" for name, why in found.left_out(clients, place).items()}
        for name, (was, now, why) in found.moved(clients, place).items():
            told[name] = f"moved from boundary {was} to {now}: {why}"
        news = {name: what for name, what in told.items() if before.get(name) != what}
        since = f"from round {segment.first} on, " if place else ""
        for what in dict.fromkeys(news.values()):
            names = [name for name in news if news[name] == what]
            yield f"{since}{_few(names)} {'is' if len(names) == 1 else 'are'} {what}"
        before = told


def _few(names: Sequence[str]) -> str:
    """As many of them as fit a line."""
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def segments(session: "Session") -> Iterator[Table]:
    """Where budgets change: who has which boundary, and who is drawn, from a round on."""
    if len(session.segments) == 1:
        return
    rows = []
    for segment in session.segments:
        counts = Counter(segment.boundaries)
        out = counts.pop(_OUT, 0)
        spread = ", ".join(f"{count} at {boundary}" for boundary, count in sorted(counts.items()))
        names = [session.seen.clients[segment.able[place]] for place in segment.policy.preferred]
        rows.append((str(segment.first), spread, str(out), str(len(segment.able)), _few(names) or "nobody"))
    columns = ("from round", "clients at boundary", "left out", "can be drawn", "preferred")
    yield Table("segments: budgets change", columns, tuple(rows), frozenset({0, 1, 4}))


def boundaries(session: "Session") -> Table:
    """Clients, dimensions and payload bytes of a participation, one line a boundary."""
    from hofl.algorithms import ALGORITHMS

    layout = session.task.model.layout
    hybrid = ALGORITHMS[session.config.algorithm].hybrid
    rows = []
    for boundary, count in sorted(Counter(b for b in session.boundaries if b in session.sizes).items()):
        bottom = layout.bottom_size(boundary)
        halves = (boundary, count, f"{bottom:,}", f"{layout.size - bottom:,}") if hybrid else (count,)
        cells = (*halves, scalars_up(session, boundary))
        ways = sent(session, boundary)
        rows.append((*map(str, cells), *(size(sum(ways[way].values())) for way in ("up", "down"))))
    halves_of = ("boundary", "clients", "bottom", "top") if hybrid else ("clients",)
    title = f"boundaries: blocks below the cut, of {layout.blocks}" if hybrid else "boundaries: none"
    title += "; bytes of the client with the most steps" if session.config.local.epochs is not None else ""
    return Table(title, (*halves_of, "scalars up", "payload up", "payload down"), tuple(rows))


def cohort(session: "Session") -> str:
    """The sampling plan in words."""
    from hofl.algorithms import ALGORITHMS

    plan, config = session.policy, session.config
    if ALGORITHMS[config.algorithm].centralised:
        return f"cohort: one client with the data of all {len(session.task.clients)}"
    base = f"cohort: {plan.cohort} of {len(session.able)} clients with data a round, quorum {config.quorum}"
    left_out = sum(boundary not in session.sizes for boundary in session.boundaries)
    idle = len(session.task.clients) - len(session.able) - left_out
    idlers = f"; {idle} clients hold no data and are never drawn" if idle else ""
    idlers += f"; {left_out} are left out" if left_out else ""
    if not plan.preferred:
        return f"{base}, uniform{idlers}"
    names = [session.task.clients[session.able[place]] for place in plan.preferred]
    moved = config.cohort.schedule != "constant"
    later = f" at first ({config.cohort.schedule} to {config.cohort.final:g})" if moved else ""
    return f"{base}, preference {config.cohort.preference:g}{later} for {_few(names)}{idlers}"


def line(row: dict[str, Any], rounds: int) -> str:
    """A round in one line."""
    metrics = row["metrics"] or {}
    metric = metric_of(metrics)
    heading, second = beside(metric)
    parts = [f"round {row['round']}/{rounds}", f"{metric} {number(metrics.get(metric))}"]
    parts += [f"({heading} {number(metrics.get(second))}, n {metrics.get('n')})"]
    if row["loss"] is not None:
        parts += [f"training loss {number(row['loss'], 4)}"]
    if row["zo_signal"] is not None:
        parts += [f"zo_signal {number(row['zo_signal'], 2)}"]
    up, down = size(amount(row["bytes_up"])), size(amount(row["bytes_down"]))
    return "  ".join([*parts, f"up {up}", f"down {down}", seconds(amount(row["seconds"]))])


def result(end: dict[str, Any]) -> Table:
    """What a finished run came to, from its summary."""
    metric = end["metric"]
    n, name = int(metric["n"]), str(metric["name"])
    weight = f"{end['tokens']} tokens" if name in LOWER_IS_BETTER else f"one is {1 / max(n, 1):.4f}"
    second = beside(name)[1]
    rows = (
        (f"{name} of the final model (n = {n}, {weight})", number(metric["value"])),
        (second.replace("_", " "), number(end.get(second))),
        ("zero-shot", number(end.get("zero_shot"))),
        ("majority class", number(end.get("majority_class"))),
        ("rounds", str(end["rounds"])),
        ("examples seen", str(end["examples_seen"])),
        ("uplink, headers included", size(amount(end["bytes_up"]))),
        ("downlink, headers included", size(amount(end["bytes_down"]))),
        ("peak memory of a client", size(end.get("client_peak_bytes"))),
        ("peak memory of this process", size(end.get("peak_bytes"))),
        ("time", seconds(amount(end["seconds"]))),
        ("client failures", str(end.get("failures", 0))),
        ("final model, SHA-256", str(end["final_sha256"])),
    )
    return Table("result", ("", ""), rows)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
