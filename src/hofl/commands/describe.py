# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: before it starts, at each evaluation, and when it is done."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hofl.report.rows import amount, read_run
from hofl.report.tables import Table, number, seconds, size

if TYPE_CHECKING:
    from hofl.session import Session

_LISTED = 12
"""Clients up to which the partition is shown one line each."""


def describe(session: "Session") -> Iterator[str | Table]:
    """The first lines of a run: mode, device, model, labels, partition, boundaries, cohort, bytes."""
    from hofl.session import settings_of

    config, task, model = session.config, session.task, session.task.model
    settings = settings_of(config)
    yield f"mode: {settings.mode}"
    yield f"device: {model.device} ({_threads()} threads)"
    yield (
        f"model: {settings.model}, {sum(p.numel() for p in model.module.parameters()):,} parameters, "
        f"{model.layout.size:,} trained, {model.blocks} blocks, backbone {config.model.dtype}"
    )
    yield f"labels: at the {settings.labels_at}; a client sends {', '.join(settings.leaves_device)}"
    yield from (f"warning: {text}" for text in task.facts.get("warnings", ()))
    yield partition(task.facts.get("partition", ()), config.partition.kind)
    yield boundaries(session)
    yield cohort(session)
    steps, batch = config.local.steps, config.local.batch
    probes = config.zo.probes if config.algorithm == "ho_fl" and config.zo.estimator != "none" else 0
    yield (
        f"each participation: {steps} optimizer steps, {steps * probes} probes, "
        f"up to {steps * batch} example visits (batches of {batch}; a smaller client gives what it has)"
    )


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


def boundaries(session: "Session") -> Table:
    """Clients, dimensions and payload bytes of a participation, one line a boundary."""
    config, layout = session.config, session.task.model.layout
    zo = config.algorithm == "ho_fl" and config.zo.estimator != "none"
    rows = []
    for boundary, count in sorted(Counter(session.boundaries).items()):
        bottom = layout.bottom_size(boundary)
        scalars = config.local.steps * config.zo.probes if zo and bottom else 0
        payload = 4 * scalars + 4 * (layout.size - bottom) + 32 * bool(scalars)
        cells = (boundary, count, f"{bottom:,}", f"{layout.size - bottom:,}", scalars)
        rows.append((*map(str, cells), size(payload), size(4 * layout.size)))
    columns = ("boundary", "clients", "bottom", "top", "scalars up", "payload up", "payload down")
    return Table(f"boundaries: blocks below the cut, of {layout.blocks}", columns, tuple(rows))


def cohort(session: "Session") -> str:
    """The sampling plan in words."""
    plan, config = session.policy, session.config
    base = f"cohort: {plan.cohort} of {len(session.able)} clients with data a round, quorum {config.quorum}"
    idle = len(session.task.clients) - len(session.able)
    idlers = f"; {idle} clients hold no data and are never drawn" if idle else ""
    if not plan.preferred:
        return f"{base}, uniform{idlers}"
    names = [session.task.clients[session.able[place]] for place in plan.preferred]
    shown = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f"{base}, preference {config.cohort.preference:g} for {shown}{idlers}"


def line(row: dict[str, Any], rounds: int) -> str:
    """A round in one line."""
    metrics = row["metrics"] or {}
    parts = [f"round {row['round']}/{rounds}", f"accuracy {number(metrics.get('accuracy'))}"]
    parts += [f"(balanced {number(metrics.get('balanced_accuracy'))}, n {metrics.get('n')})"]
    if row["loss"] is not None:
        parts += [f"training loss {number(row['loss'], 4)}"]
    if row["zo_signal"] is not None:
        parts += [f"zo_signal {number(row['zo_signal'], 2)}"]
    up, down = size(amount(row["bytes_up"])), size(amount(row["bytes_down"]))
    return "  ".join([*parts, f"up {up}", f"down {down}", seconds(amount(row["seconds"]))])


def result(where: Path) -> Table:
    """What a finished run came to, from its summary."""
    end = read_run(where).summary or {}
    metric = end["metric"]
    n = int(metric["n"])
    rows = (
        (
            f"{metric['name']} of the final model (n = {n}, one is {1 / max(n, 1):.4f})",
            number(metric["value"]),
        ),
        ("balanced accuracy", number(end.get("balanced_accuracy"))),
        ("zero-shot", number(end.get("zero_shot"))),
        ("majority class", number(end.get("majority_class"))),
        ("rounds", str(end["rounds"])),
        ("examples seen", str(end["examples_seen"])),
        ("uplink", size(amount(end["bytes_up"]))),
        ("downlink", size(amount(end["bytes_down"]))),
        ("peak memory of this process", size(end.get("peak_bytes"))),
        ("time", seconds(amount(end["seconds"]))),
        ("client failures", str(end.get("failures", 0))),
        ("final model, SHA-256", str(end["final_sha256"])),
    )
    return Table("result", ("", ""), rows)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
