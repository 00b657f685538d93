# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the task: the data, who holds it, and the one model, cut."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hofl.config import Config, about
from hofl.core.keys import Key
from hofl.errors import ConfigError
from hofl.models.boundary import CutModel, cut
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition

if TYPE_CHECKING:
    from hofl.models.load import Loaded

_MODEL, _ADAPTERS = (int.from_bytes(name, "big") for name in (b"model", b"adapter"))
"""Coordinates of the streams that draw a head and adapters; no counter is as large."""


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


def _vision(config: Config, device: str) -> Task:
    from hofl.models.resnet import resnet
    from hofl.tasks.vision import read_images, vision_task

    task, model = config.task, config.model
    divided = Partition(**config.partition.model_dump())
    settings = task.model_dump(include={"image", "label", "train_rows", "evaluation_rows"})
    data = read_images(task.train, task.evaluation, divided, seed=config.seed, **settings)
    sizes = {"classes": len(data.names), "channels": data.channels, "width": model.width}
    network = resnet(model.source, key=Key.of(config.seed, "init", _MODEL), norm=model.norm, **sizes)
    cut_network = cut(network.to(device), checkpointing=model.checkpointing)
    return vision_task(data, cut_network, batch=config.evaluation.batch)


_TASKS: dict[str, Callable[[Config, str], Task]] = {"synthetic": _synthetic, "text": _text, "vision": _vision}
