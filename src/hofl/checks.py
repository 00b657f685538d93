# SPDX-License-Identifier: Apache-2.0
"""Settings that are fine alone and wrong together, known before there is a model."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hofl.algorithms import ALGORITHMS, Method
from hofl.errors import ConfigError
from hofl.memory.units import positive_bytes_of
from hofl.tasks.partition import UNLABELLED

if TYPE_CHECKING:
    from hofl.schema import Config

TEXTS = ("text", "generation", "language")
"""Tasks of language models, which bring no network of their own."""
_EPOCHS = ("ho_fl", "fedavg", "fedprox", "fedzo")
"""Methods whose clients may take different numbers of local steps."""
RESNETS = ("resnet18", "resnet8")
"""Those of ``models.resnet``, said here again because that module needs PyTorch; a test compares them."""


def percent(text: str) -> float | None:
    """The number in ``"50%"``; None if it is no percentage in (0, 100]."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    return float(found[1]) if found and 0 < float(found[1]) <= 100 else None


def memory(text: str) -> str:
    """A size above 0, as it is written.

    Raises:
        ValueError: what is allowed.
    """
    positive_bytes_of(text)
    return text


def dated_budgets(given: Any) -> Any:
    """Changes of budgets, as they are written: each a round, whose budget, and a size.

    Raises:
        ValueError: what is allowed.
    """
    for change in given if isinstance(given, tuple) else ((),):
        kinds = [type(part) for part in change] if isinstance(change, tuple) else []
        shaped = kinds in ([int, int, str], [int, str, str])
        if not shaped or change[0] < 2 or (kinds[1] is int and change[1] < 0):
            raise ValueError(
                'must be changes such as [40, 0, "1GiB"]: a round from 2 on, the place of a budget in '
                "cohort.budgets or a client's id in quotes, and a size"
            )
        memory(change[2])
    return given


def contradictions(c: "Config") -> Iterator[tuple[str, bool, str]]:
    """Settings that are fine alone and wrong together: (key, is it wrong, what is allowed)."""
    text, fixed, nodes = c.task.name in TEXTS, c.partition.kind != "files", c.partition.kind == "nodes"
    yield "model.source", text and not c.model.source, "is missing; name a hub id, a folder or a .gguf file"
    own = c.task.name == "synthetic" and bool(c.model.source)
    yield "model.source", own, "must be absent: the synthetic task brings its own network"
    yield from _own_data(c, ALGORITHMS[c.algorithm])
    read = c.task.name != "synthetic"
    yield (
        "task.train",
        read and not nodes and not c.task.train,
        "is missing; name a file, a glob or hub:dataset:split",
    )
    yield "task.evaluation", read and not c.task.evaluation, "is missing; name a file or hub:dataset:split"
    if fixed and not ALGORITHMS[c.algorithm].centralised:
        size, clients = c.cohort.size, len(c.partition.names) if nodes else c.partition.clients
        all_of = f"the {clients} of partition.names" if nodes else f"partition.clients = {clients}"
        yield "cohort.size", isinstance(size, int) and size > clients, f"must be at most {all_of}"
        members = cohort_size(size, clients)
        yield "quorum", c.quorum > members, f"must be at most the cohort, {members} clients"
        listed = c.cohort.assign == "listed" and len(c.cohort.boundaries) != clients
        yield (
            "cohort.boundaries",
            listed,
            f"must list one number per client, {clients}, when assign is 'listed'",
        )
    yield from _image_settings(c)
    yield from _generated(c)
    yield from _unfit(c, ALGORITHMS[c.algorithm])
    yield from _budgets(c, ALGORITHMS[c.algorithm])


def _own_data(c: "Config", method: Method) -> Iterator[tuple[str, bool, str]]:
    """Settings of runs whose data is at the nodes, and of boundaries that they declare."""
    nodes, names, told = c.partition.kind == "nodes", c.partition.names, c.cohort.assign == "declared"
    synthetic, at_nodes = c.task.name == "synthetic", "the data is at the nodes (partition.kind = 'nodes')"
    yield "partition.kind", nodes and synthetic, "must not be 'nodes': the synthetic task makes its own data"
    reason = f"must not be 'nodes': {c.algorithm} needs all data in one place"
    yield "partition.kind", nodes and method.centralised, reason
    missing = "is missing; list the client ids of the nodes, such as ['clinic-a', 'clinic-b']"
    yield "partition.names", nodes and not names, missing
    yield "partition.names", bool(names) and not nodes, "must be absent unless partition.kind is 'nodes'"
    yield "task.train", nodes and bool(c.task.train), f"must be absent: {at_nodes}"
    yield "task.train_rows", nodes and c.task.train_rows > 0, f"must be 0: {at_nodes}"
    reason = f"must be 'tiers' or 'listed': in {c.algorithm} no client has a boundary of its own"
    yield "cohort.assign", told and method.boundary != "each", reason
    reason = "must be absent: assign is 'declared', so each node says its own"
    yield "cohort.boundaries", told and bool(c.cohort.boundaries), reason


def _budgets(c: "Config", method: Method) -> Iterator[tuple[str, bool, str]]:
    """Settings of runs whose boundaries follow from memory."""
    cohort, asked, places = c.cohort, c.cohort.assign == "budgets", len(c.cohort.budgets)
    missing = "is missing; name a size a tier, or one per client, such as ['2GiB', '700MiB']"
    yield "cohort.budgets", asked and not places, missing
    yield "cohort.budgets", places > 0 and not asked, "must be absent unless assign is 'budgets'"
    yield "cohort.boundaries", asked and bool(cohort.boundaries), "must be absent: assign is 'budgets'"
    alone = asked and method.centralised and places > 1
    yield "cohort.budgets", alone, f"must be one size: in {c.algorithm} one client has all the data"
    changes = bool(cohort.budget_changes)
    yield "cohort.budget_changes", changes and not asked, "must be absent unless assign is 'budgets'"
    reason = f"must be absent: {c.algorithm} has one boundary for all clients and the whole run"
    yield "cohort.budget_changes", changes and method.split, reason
    beyond = any(isinstance(which, int) and which >= places for _, which, _ in cohort.budget_changes)
    reason = f"must name places 0..{places - 1} of cohort.budgets, or clients by their ids in quotes"
    yield "cohort.budget_changes", asked and beyond, reason


def _image_settings(c: "Config") -> Iterator[tuple[str, bool, str]]:
    """Settings of the networks for images, where there are none and where there must be."""
    vision, model = c.task.name == "vision", c.model
    named = " or ".join(f"'{name}'" for name in RESNETS)
    yield "model.source", vision and model.source not in RESNETS, f"must be {named} for the vision task"
    yield "model.train", vision and model.train != "full", "must be 'full' for the vision task: no adapters"
    yield "model.dtype", vision and model.dtype != "float32", "must be 'float32': every weight is trained"
    yield "model.blocks", vision and bool(model.blocks), "must be absent: the network for images has its own"
    yield "partition.kind", vision and c.partition.kind == "files", "must not be 'files' for the vision task"
    yield "model.norm", not vision and model.norm != "group", "must be absent: only the vision task has it"
    yield "model.width", not vision and model.width > 0, "must be absent: only the vision task has it"


def _generated(c: "Config") -> Iterator[tuple[str, bool, str]]:
    """Settings of tasks whose answer is text, where there are none and where there must be."""
    task, classified = c.task, c.task.name not in ("generation", "language")
    yield "task.new_tokens", task.new_tokens is not None and task.name != "generation", _NO_ANSWER
    reason = f"must be iid, files or nodes for the {task.name} task: it has no classes"
    yield "partition.kind", not classified and c.partition.kind not in UNLABELLED, reason
    reason = f"must not be heron_sfl for the {task.name} task: its auxiliary head is a classifier"
    yield "algorithm", not classified and c.algorithm == "heron_sfl", reason


_NO_ANSWER = "must be absent: only the generation task writes answers"


def _unfit(c: "Config", method: Method) -> Iterator[tuple[str, bool, str]]:
    """Settings that this method cannot use."""
    cuts, name = c.cohort.boundaries, c.algorithm
    yield "cohort.boundaries", not method.hybrid and any(cuts), f"must be absent or 0: {name} has no boundary"
    moved = c.cohort.schedule != "constant" and method.boundary != "each"
    yield "cohort.schedule", moved, f"must be 'constant': {name} prefers nobody"
    least = c.cohort.schedule == "measured" and c.cohort.final > c.cohort.preference
    yield "cohort.final", least, f"must be at most cohort.preference = {c.cohort.preference:g} when measured"
    several = method.split and len(set(cuts)) > 1
    yield "cohort.boundaries", several, f"must be one boundary: in {name} all clients have the same"
    yield "cohort.boundaries", method.split and 0 in cuts, f"must be 1 or more: {name} needs both halves"
    wrong = bool(method.estimators) and c.zo.estimator not in method.estimators
    yield "zo.estimator", wrong, f"must be {' or '.join(method.estimators)} for {name}"
    section = "zo.optimizer" if c.zo.optimizer != c.optimizer else "optimizer"
    paced = c.local.epochs is not None
    reason = f"must be absent: in {name} all clients take the same steps; allowed for {', '.join(_EPOCHS)}"
    yield "local.epochs", paced and name not in _EPOCHS, reason
    unsaid = "steps" not in c.local.model_fields_set
    reason = "needs local.steps, the most that any client takes: plans count with it"
    yield "local.epochs", paced and unsaid, reason
    counted = c.partition.kind == "nodes" and c.cohort.weighting == "examples"
    reason = "must be absent: with cohort.weighting = 'examples' a large node counts as fewer examples"
    yield "local.epochs", paced and counted, reason
    late, steps = name == "heron_sfl" and c.split.upload_every > c.local.steps, c.local.steps
    yield "split.upload_every", late, f"must be at most local.steps = {steps}: later uploads never come"
    own = name in ("hiso", "mu_splitfed")
    reason = f"must be sgd: {name} has an update law of its own"
    yield f"{section}.name", own and c.bottom_optimizer.name != "sgd", reason
    yield f"{section}.momentum", own and c.bottom_optimizer.momentum > 0, f"must be 0 for {name}"
    adaptive = name == "decomfl" and c.zo.average == "scalars" and c.bottom_optimizer.name == "adamw"
    reason = "must be sgd: under adamw averaged scalars are not averaged models; or set zo.average = 'models'"
    yield f"{section}.name", adaptive, reason
    adapted = c.task.name in TEXTS and c.model.train == "lora"
    reason = "must be 'lora', on a text task: splitlora trains adapters"
    yield "model.train", name == "splitlora" and not adapted, reason


def cohort_size(size: int | str, clients: int, who: str = "that have data") -> int:
    """Clients a round: a count as it is, a percentage of the clients rounded up, or all of them.

    Args:
        size: ``cohort.size``.
        clients: those that can be drawn.
        who: they are, in words.

    Raises:
        ConfigError: more are asked for than there are.
    """
    if isinstance(size, str):
        share = percent(size)
        return clients if share is None else math.ceil(round(share * clients / 100, 9))
    if size > clients:
        raise ConfigError(f"cohort.size = {size}: must be at most the {clients} clients {who}")
    return size
