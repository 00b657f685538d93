# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the things a run is made of: sections become plain arguments here, once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from hofl.algorithms import ALGORITHMS
from hofl.algorithms.ho_fl import Boundaries
from hofl.checks import TEXTS
from hofl.config import Config, OptimizerConfig, cohort_size, run_id
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.sampling import Policy, dimension_aware, uniform
from hofl.errors import ConfigError
from hofl.models.forward_mode import LossSurrogate
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm
from hofl.protocol.measuring import Preferred, measured_in
from hofl.protocol.probing import Probing, Shared
from hofl.protocol.split import Split
from hofl.tasks.base import Batch, Task
from hofl.theory.schedules import Schedule, policy_of_round, preference

Inputs = dict[str, torch.Tensor]
Draw = Callable[..., list[int]]
"""``draw(round, attempt=0, state=None)`` -> the client numbers of a cohort, ascending; the state is the one
before the round, and only a measured schedule reads it."""

OUT = -1
"""In the place of a boundary: none yet, or none at all, for a client that is left out."""
Dealt = TypeVar("Dealt")
_TIERS = int.from_bytes(b"tiers", "big")
"""Coordinate of the stream that deals clients to tiers; no counter is as large."""


def optimizer_of(section: OptimizerConfig) -> Optimizer:
    """The optimizer a section describes."""
    return Optimizer(**section.model_dump())


def pooled(config: Config, task: Task) -> Task:
    """The task as the method sees it: one client with every example for a centralised one, else as it is."""
    if not ALGORITHMS[config.algorithm].centralised:
        return task
    return replace(task, clients=("centre",), shards=[np.unique(np.concatenate(task.shards))])


def build_algorithm(
    config: Config, task: Task, boundaries: Boundaries, preferred: Preferred | None = None
) -> Algorithm:
    """The algorithm a configuration names, for a :func:`pooled` task.

    Args:
        config: the whole.
        task: its model, and the sizes of its shards.
        boundaries: one a client, or, for HO-FL alone, one for each round and client.
        preferred: of HO-FL, where its rounds are measured: whom the policy prefers.
    """
    zo, split, training = config.zo, config.split, training_of(config, task)
    optimizer = optimizer_of(config.bottom_optimizer)
    probing = Probing(zo.estimator or "forward", zo.probes, zo.radius, zo.directions, optimizer)
    return ALGORITHMS[config.algorithm].build(
        layout=task.model.layout,
        boundaries=boundaries,
        training=training,
        probing=probing,
        preferred=preferred,
        split=Split(task, **split.model_dump()),
        shared=Shared(split.history, zo.average, zo.curvature, zo.curvature_floor, zo.curvature_every),
        proximal=config.local.proximal,
    )


def training_of(config: Config, task: Task) -> Training:
    """How the clients of a :func:`pooled` task train."""
    return Training(
        seed=config.seed,
        steps=config.local.steps,
        batch=config.local.batch,
        optimizer=optimizer_of(config.optimizer),
        sizes=tuple(len(shard) for shard in task.shards),
        quorum=config.quorum,
        weighting=config.cohort.weighting,
        run=run_id(config),
        epochs=config.local.epochs,
    )


def probes_of(config: Config) -> int:
    """Directions a local step probes in: 0 for the frozen control and for first-order methods."""
    probing = bool(ALGORITHMS[config.algorithm].estimators)
    return config.zo.probes if probing and config.zo.estimator != "none" else 0


def steps_of(config: Config) -> int:
    """Local steps of a client in a round: one where the method aggregates after each."""
    single = ALGORITHMS[config.algorithm].local_steps.startswith("1")
    return 1 if single else config.local.steps


def leaves_device(config: Config) -> tuple[str, ...]:
    """What a client sends, in words."""
    method = ALGORITHMS[config.algorithm]
    texts = config.task.name in TEXTS
    sent = tuple(what for what in method.leaves_device if texts or "texts" not in what)
    if method.estimators and not probes_of(config):
        sent = sent[-1:] if method.boundary == "each" else tuple(s for s in sent if "scalars" not in s)
    losses = () if method.split else ("the sum of training losses",)  # where the top is, so is the loss
    return (*sent, *losses, "counts of examples")


def check_probes(config: Config, task: Task, boundaries: Sequence[int], inputs: Inputs) -> None:
    """Whether every bottom can be probed as asked: enough directions, and forward-mode rules.

    Args:
        config: its algorithm and ``[zo]``.
        task: its model is asked.
        boundaries: one a client.
        inputs: a small batch.

    Raises:
        ConfigError: more probes than a family has directions.
        ModelError: ``tangent`` on a model without forward-mode rules.
    """
    count, layout, method = probes_of(config), task.model.layout, ALGORITHMS[config.algorithm]
    if count and not method.hybrid:
        Directions(Key(0, 0), config.zo.directions, count, layout.size)
        if config.zo.estimator == "tangent":
            targets = torch.zeros(
                len(inputs[next(iter(inputs))]), dtype=torch.int64, device=task.model.device
            )
            loss = task.loss_on(Batch(inputs, targets))
            LossSurrogate(task.model, inputs, loss).tangents(torch.zeros(1, layout.size))
        return
    cuts = [b for b in sorted(set(boundaries)) if count and layout.bottom_size(b)]
    for boundary in cuts:
        Directions(Key(0, 0), config.zo.directions, count, layout.bottom_size(boundary))
    if cuts and config.zo.estimator == "tangent":  # the deepest bottom has the operations of all
        direction = torch.zeros(1, layout.bottom_size(cuts[-1]), device=task.model.device)
        task.model.surrogate(inputs, cuts[-1]).tangents(direction)


def boundaries_of(
    config: Config,
    layout: Layout,
    clients: int,
    declared: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The boundary of each client: 0 where there is no bottom, as listed or declared, or tiers dealt equally.

    Tiers follow one seeded permutation of the client numbers that no label has a say in; their
    sizes differ by at most one.

    Args:
        config: its algorithm and ``[cohort]``.
        layout: has L blocks.
        clients: how many.
        declared: what each said when it joined; read only where ``cohort.assign`` is "declared".
        memory: bytes that each said it has, 0 for none; who then declares no boundary gets ``OUT``.

    Returns:
        one a client; ``OUT`` where it has to follow from the client's memory.

    Raises:
        ConfigError: none is given, one is outside ``0 .. L``, or a list does not fit the clients.
    """
    method = ALGORITHMS[config.algorithm]
    if config.cohort.assign == "budgets":
        return (OUT,) * clients
    if not method.hybrid:
        return (0,) * clients
    low, high = (1, layout.blocks - 1) if method.split else (0, layout.blocks)
    given, allowed = config.cohort.boundaries, f"{low}..{high}, the blocks of this model"
    allowed += f"; {method.name} needs both halves" if method.split else ""
    if config.cohort.assign == "declared":
        return _declared(declared, clients, range(low, high + 1), allowed, memory)
    if not given:
        raise ConfigError(f"cohort.boundaries is missing; name one number a tier, each in {allowed}")
    for boundary in given:
        if not low <= boundary <= high:
            raise ConfigError(f"cohort.boundaries = {list(given)}: {boundary} is outside {allowed}")
    if config.cohort.assign == "listed":
        if len(given) != clients:
            raise ConfigError(
                f"cohort.boundaries lists {len(given)} numbers for {clients} clients; name one each"
            )
        return given
    if len(given) > clients:
        raise ConfigError(f"cohort.boundaries = {list(given)}: more tiers than the {clients} clients")
    return deal(config.seed, given, clients)


def deal(seed: int, tiers: Sequence[Dealt], clients: int) -> tuple[Dealt, ...]:
    """What each client gets where tiers are dealt in turn along a seeded permutation of the clients."""
    places = np.argsort(Key.of(seed, "init", _TIERS).permutation(clients))
    return tuple(tiers[int(place) % len(tiers)] for place in places)


def _declared(
    given: Sequence[int] | None, clients: int, good: range, allowed: str, memory: Sequence[int] | None
) -> tuple[int, ...]:
    """What the clients declared, once each is good; ``OUT`` of one that declares its memory instead."""
    if given is None or len(given) != clients:
        raise ConfigError(
            f"cohort.assign = 'declared': {len(given or ())} of {clients} clients have declared a boundary; "
            "nodes do when they join: run it with hofl server"
        )
    for client, boundary in enumerate(given):
        if boundary not in good and not (boundary == OUT and memory and memory[client] > 0):
            raise ConfigError(
                f"cohort.assign = 'declared': client number {client} declares {boundary}, outside {allowed}"
            )
    return tuple(given)


def require_local_data(config: Config) -> None:
    """Refuse to run in one process what only nodes can: their data, or the boundaries they declare.

    Raises:
        ConfigError: names the setting.
    """
    if config.partition.kind == "nodes":
        raise ConfigError("partition.kind = 'nodes': the data is at the nodes; run it with hofl server")
    if config.cohort.assign == "declared":
        raise ConfigError("cohort.assign = 'declared': nodes say it when they join; run it with hofl server")


def build_policy(config: Config, layout: Layout, boundaries: tuple[int, ...], sizes: list[int]) -> Policy:
    """Selection shares over the clients that hold data: dimension-aware for HO-FL, else uniform.

    Args:
        config: its cohort, probes and seed.
        layout: gives d_zo of a boundary.
        boundaries: one a client.
        sizes: examples of each client; one without any, or left out, is never drawn.

    Returns:
        a policy over the places in ``active(sizes)``.

    Raises:
        ConfigError: the cohort is larger than the clients with data.
    """
    able = active(sizes, boundaries)
    alone = ALGORITHMS[config.algorithm].centralised
    who = "that have data and can run some boundary" if OUT in boundaries else "that have data"
    cohort = 1 if alone else cohort_size(config.cohort.size, len(able), who)
    if config.quorum > cohort:
        raise ConfigError(
            f"quorum = {config.quorum}: must be at most the cohort, {cohort} client{'s' * (cohort > 1)}"
        )
    if ALGORITHMS[config.algorithm].boundary != "each":
        return uniform(len(able), cohort)
    scores = [layout.bottom_size(boundaries[i]) / config.zo.probes for i in able]
    return dimension_aware(scores, cohort, config.cohort.preference, Key.of(config.seed, "tie_break"))


def active(sizes: list[int], boundaries: Sequence[int] = ()) -> list[int]:
    """The numbers of the clients that hold data and are not left out, ascending."""
    left_out = {client for client, boundary in enumerate(boundaries) if boundary == OUT}
    return [client for client, size in enumerate(sizes) if size and client not in left_out]


def preference_of(config: Config, policy: Policy, round_number: int, state: Record | None = None) -> float:
    """Beta in force in a round, by the schedule; 0 where nobody is preferred.

    Args:
        config: its cohort and rounds.
        policy: of the round's segment.
        round_number: from 1.
        state: before the round; a measured schedule without one is at its start.
    """
    if not policy.preferred:
        return 0.0
    schedule = Schedule(config.cohort.schedule, config.cohort.preference, config.cohort.final)
    return preference(schedule, round_number, config.rounds, len(policy.shares), measured_in(state))


def build_draw(config: Config, policy: Policy, sizes: list[int], boundaries: Sequence[int] = ()) -> Draw:
    """Who takes part in a round: a pure function of (seed, round, attempt, state before it)."""
    able, constant = active(sizes, boundaries), config.cohort.schedule == "constant"

    def _draw(round_number: int, attempt: int = 0, state: Record | None = None) -> list[int]:
        now = policy
        if not constant:
            now = policy_of_round(policy, preference_of(config, policy, round_number, state))
        return [able[place] for place in now.draw(config.seed, round_number, attempt)]

    return _draw
