# SPDX-License-Identifier: Apache-2.0
"""From what a user names, a configuration or a fleet's file, to what a plan is about."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hofl.build import optimizer_of, steps_of
from hofl.build_task import build_task
from hofl.build_texts import NEW_TOKENS
from hofl.checks import TEXTS
from hofl.config import Config, read
from hofl.errors import ConfigError
from hofl.memory.subject import Adapters, Subject, Workload, subject_of
from hofl.memory.units import positive_bytes_of
from hofl.tasks.templates import template


def of_config(config: Config) -> tuple[Subject, Workload]:
    """The model and the participation of a run; texts are padded to a common length, so with a mask.

    Where the loss is of many tokens, their logits are in it: of the longest prompt with the longest answer.

    Raises:
        HoflError: as building the task does. The weights of a text model are not read.
    """
    moments = tuple(
        len(optimizer_of(section).init(0)) for section in (config.optimizer, config.bottom_optimizer)
    )
    work = Workload(
        batch=config.local.batch,
        length=config.task.length,
        attention="mask",
        steps=steps_of(config),
        probes=config.zo.probes,
        moments=(moments[0], moments[1]),
        checkpointing=config.model.checkpointing,
    )
    model = config.model
    lora = model.lora
    adapters = Adapters(model.train, lora.rank, lora.alpha, lora.targets, model.blocks)
    if config.task.name not in TEXTS:
        return _of_network(config, adapters), work
    if config.task.name != "text":
        return subject_of(model.source, model.dtype, adapters), _of_tokens(config, work)
    asked = template(config.task.template)
    found = subject_of(model.source, model.dtype, adapters, head=asked.head)
    return found, replace(work, classes=max(2, len(asked.words)))


def _of_tokens(config: Config, work: Workload) -> Workload:
    """The longest text of a task whose loss is of many tokens, and how many."""
    if config.task.name == "language":
        return replace(work, scored=work.length)
    answer = config.task.new_tokens or NEW_TOKENS
    return replace(work, length=work.length + answer - 1, scored=answer)


def _of_network(config: Config, adapters: Adapters) -> Subject:
    """A network for other data than text: it is small, and its data says what an example looks like."""
    on_cpu = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    task = build_task(on_cpu)
    client = next(i for i, shard in enumerate(task.shards) if len(shard))

    def build(classes: int) -> tuple[nn.Module, bool]:
        """A network of its own each time, for it is changed."""
        return build_task(on_cpu).model.module, True

    sample, blocks = task.batch(client, 0, 1).inputs, task.model.elements
    lists = (
        (n, m) for n, m in task.model.module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)
    )
    path = next((name for name, found in lists if list(found) == blocks), "")
    name = config.model.source or config.task.name
    return Subject(name, build, torch.float32, replace(adapters, train="full", blocks=path), sample)


def fleet(path: Path) -> dict[str, str]:
    """Device name -> the size that its line states, of a file such as ``[devices]`` ``phone = "4GiB"``.

    A device may also be a table with ``memory``, as ``laptop = { memory = "12GiB" }``.

    Raises:
        ConfigError: it cannot be read, or a device has no size above 0.
    """
    try:
        given = tomllib.loads(read(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    devices = given.get("devices")
    if not isinstance(devices, dict) or not devices:
        raise ConfigError(f'{path}: [devices] is missing; write lines such as phone = "4GiB" under it')
    return {name: _memory(path, name, value) for name, value in devices.items()}


def _memory(path: Path, name: str, value: Any) -> str:
    text = value.get("memory") if isinstance(value, dict) else value
    try:
        positive_bytes_of(text if isinstance(text, str) else "")
    except ValueError as error:
        raise ConfigError(f"{path}: devices.{name} = {text!r}: {error}") from None
    return str(text)
