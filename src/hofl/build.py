# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the things a run is made of: sections become plain arguments here, once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hofl.algorithms import ALGORITHMS
from hofl.algorithms.aggregate import Training
from hofl.algorithms.base import Algorithm
from hofl.algorithms.ho_fl import Probing
from hofl.config import Config, OptimizerConfig, about, cohort_size
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.sampling import Policy, dimension_aware, uniform
from hofl.errors import ConfigError
from hofl.models.boundary import CutModel, cut
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition

if TYPE_CHECKING:
    from hofl.models.load import Loaded

Inputs = dict[str, torch.Tensor]
Draw = Callable[[int, int], list[int]]
"""``draw(round, attempt)`` -> the client numbers of a cohort, ascending."""

_TIERS, _MODEL, _ADAPTERS = (int.from_bytes(name, "big") for name in (b"tiers", b"model", b"adapter"))
"""Coordinates of the streams that deal clients to tiers, draw a head and adapters; no counter is as large."""


def device_of(setting: str) -> str:
    """``cpu`` or ``cuda`` for ``model.device``; auto takes an accelerator where one is visible.

    Raises:
        ConfigError: cuda was asked for and this process sees none; the message says why.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "is not set" if visible is None else f"is '{visible}'"
    built = "" if torch.version.cuda else ", and this PyTorch was built without CUDA"
    raise ConfigError(
        f'model.device = "cuda": no CUDA device is visible to this process (CUDA_VISIBLE_DEVICES {hidden}'
        f'{built}); use "cpu" or "auto"'
    )


def optimizer_of(section: OptimizerConfig) -> Optimizer:
    """The optimizer a section describes."""
    return Optimizer(**section.model_dump())


def build_task(config: Config) -> Task:
    """The clients, their data and the one model, on the device the configuration asks for.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    return _TASKS[config.task.name](config, device_of(config.model.device))


def _synthetic(config: Config, device: str) -> Task:
    from hofl.tasks.synthetic import synthetic_task

    sizes = {"rows": config.task.train_rows, "evaluation_rows": config.task.evaluation_rows}
    return synthetic_task(
        Partition(**config.partition.model_dump()),
        seed=config.seed,
        **{name: size for name, size in sizes.items() if size},
        checkpointing=config.model.checkpointing,
        device=device,
    )


def load_text(config: Config, device: str) -> "tuple[Task, Loaded]":
    """The text task and the model it was made with; data is read first, so bad data is said at once.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    from hofl.models.load import load, restrict_head
    from hofl.tasks.text import read_text, text_task
    from hofl.tasks.tokens import word_tokens

    task = config.task
    data = read_text(
        task.train,
        task.evaluation,
        Partition(**config.partition.model_dump()),
        template_id=task.template,
        seed=config.seed,
        text=task.text,
        label=task.label,
        train_rows=task.train_rows,
        evaluation_rows=task.evaluation_rows,
    )
    head = len(data.names) if data.template.head else None
    # A tiny model stands for a pretrained one: the same for every seed, so that an export finds it again.
    key = None if config.model.source.startswith("tiny:") else Key.of(config.seed, "init", _MODEL)
    with about("model.source"):
        loaded = load(config.model.source, dtype=config.model.dtype, device=device, head=head, key=key)
        if head is None:
            restrict_head(loaded.module, word_tokens(loaded.tokenizer, data.template))
        model = cut_of(config, loaded)
        built = text_task(data, model, loaded.tokenizer, length=task.length, batch=config.evaluation.batch)
    return replace(built, facts={**built.facts, "model": loaded.facts}), loaded


def cut_of(config: Config, loaded: "Loaded") -> CutModel:
    """The loaded model with what is to be trained chosen, cut into blocks."""
    from hofl.models.lora import add_lora, select

    module, lora = loaded.module, config.model.lora
    if config.model.train == "lora":
        key = Key.of(config.seed, "init", _ADAPTERS)
        module = add_lora(module, key=key, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    select(module, config.model.train)
    return cut(module, blocks=config.model.blocks or None, checkpointing=config.model.checkpointing)


def _text(config: Config, device: str) -> Task:
    return load_text(config, device)[0]


_TASKS: dict[str, Callable[[Config, str], Task]] = {"synthetic": _synthetic, "text": _text}


def build_algorithm(
    config: Config, layout: Layout, boundaries: Sequence[int], sizes: Sequence[int]
) -> Algorithm:
    """The algorithm a configuration names, over a layout, with one boundary and one shard size a client."""
    training = Training(
        seed=config.seed,
        steps=config.local.steps,
        batch=config.local.batch,
        optimizer=optimizer_of(config.optimizer),
        sizes=tuple(sizes),
        quorum=config.quorum,
        weighting=config.cohort.weighting,
    )
    zo = config.zo
    probing = Probing(
        zo.estimator, zo.probes, zo.radius, zo.directions, optimizer_of(config.bottom_optimizer)
    )
    return ALGORITHMS[config.algorithm].build(layout, boundaries, training, probing)


def probes_of(config: Config) -> int:
    """Directions a local step probes in: 0 for the frozen control and for methods without a bottom."""
    hybrid = ALGORITHMS[config.algorithm].hybrid
    return config.zo.probes if hybrid and config.zo.estimator != "none" else 0


def leaves_device(config: Config) -> tuple[str, ...]:
    """What a client sends, in words."""
    method = ALGORITHMS[config.algorithm]
    sent = method.leaves_device[-1:] if method.hybrid and not probes_of(config) else method.leaves_device
    return (*sent, "the sum of training losses", "counts of examples")


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
    count, layout = probes_of(config), task.model.layout
    cuts = [b for b in sorted(set(boundaries)) if count and layout.bottom_size(b)]
    for boundary in cuts:
        Directions(Key(0, 0), config.zo.directions, count, layout.bottom_size(boundary))
    if cuts and config.zo.estimator == "tangent":  # the deepest bottom has the operations of all
        direction = torch.zeros(1, layout.bottom_size(cuts[-1]), device=task.model.device)
        task.model.surrogate(inputs, cuts[-1]).tangents(direction)


def boundaries_of(config: Config, layout: Layout, clients: int) -> tuple[int, ...]:
    """The boundary of each client: 0 where there is no bottom, as listed, or tiers dealt equally.

    Tiers follow one seeded permutation of the client numbers that no label has a say in; their
    sizes differ by at most one.

    Raises:
        ConfigError: none is given, one is outside ``0 .. L``, or a list does not fit the clients.
    """
    given, allowed = config.cohort.boundaries, f"0..{layout.blocks}, the blocks of this model"
    if not ALGORITHMS[config.algorithm].hybrid:
        return (0,) * clients
    if not given:
        raise ConfigError(f"cohort.boundaries is missing; name one number a tier, each in {allowed}")
    for boundary in given:
        if not 0 <= boundary <= layout.blocks:
            raise ConfigError(f"cohort.boundaries = {list(given)}: {boundary} is outside {allowed}")
    if config.cohort.assign == "listed":
        if len(given) != clients:
            raise ConfigError(
                f"cohort.boundaries lists {len(given)} numbers for {clients} clients; name one each"
            )
        return given
    if len(given) > clients:
        raise ConfigError(f"cohort.boundaries = {list(given)}: more tiers than the {clients} clients")
    dealt = [0] * clients
    for place, client in enumerate(Key.of(config.seed, "init", _TIERS).permutation(clients)):
        dealt[client] = given[place % len(given)]
    return tuple(dealt)


def build_policy(config: Config, layout: Layout, boundaries: tuple[int, ...], sizes: list[int]) -> Policy:
    """Selection shares over the clients that hold data: dimension-aware for hybrid methods, else uniform.

    Args:
        config: its cohort, probes and seed.
        layout: gives d_zo of a boundary.
        boundaries: one a client.
        sizes: examples of each client; one without any is never drawn.

    Returns:
        a policy over the places in ``active(sizes)``.

    Raises:
        ConfigError: the cohort is larger than the clients with data.
    """
    able = active(sizes)
    cohort = cohort_size(config.cohort.size, len(able))
    if config.quorum > cohort:
        raise ConfigError(f"quorum = {config.quorum}: must be at most the cohort, {cohort} clients")
    if not ALGORITHMS[config.algorithm].hybrid:
        return uniform(len(able), cohort)
    scores = [layout.bottom_size(boundaries[i]) / config.zo.probes for i in able]
    return dimension_aware(scores, cohort, config.cohort.preference, Key.of(config.seed, "tie_break"))


def active(sizes: list[int]) -> list[int]:
    """The numbers of the clients that hold data, ascending."""
    return [client for client, size in enumerate(sizes) if size]


def build_draw(config: Config, policy: Policy, sizes: list[int]) -> Draw:
    """Who takes part in a round: a pure function of (seed, round, attempt)."""
    able = active(sizes)

    def _draw(round_number: int, attempt: int = 0) -> list[int]:
        return [able[place] for place in policy.draw(config.seed, round_number, attempt)]

    return _draw
