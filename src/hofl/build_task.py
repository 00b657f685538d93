# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the task: the data, who holds it, and the one model, cut."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hofl.config import Config, about
from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.models.boundary import CutModel, cut
from hofl.tasks import nodes
from hofl.tasks.base import Task
from hofl.tasks.nodes import with_sizes as with_sizes
from hofl.tasks.partition import Partition

if TYPE_CHECKING:
    from hofl.models.load import Loaded
    from hofl.tasks.text_data import TextData
    from hofl.tasks.vision_data import ImageData

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

    Where the data is at the nodes it is the server's half, see :mod:`hofl.tasks.nodes`: a shard has one
    example until ``with_sizes`` is told how many there are.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    task = _TASKS[config.task.name](config, device_of(config.model.device))
    return nodes.server_half(task) if config.partition.kind == "nodes" else task


def node_task(
    config: Config,
    client: str,
    train: str = "",
    text: str = "",
    label: str = "",
    source: str = "",
    device: str = "",
    names: Sequence[str] = (),
    images: Mapping[str, Any] | None = None,
) -> Task:
    """The task as a node has it.

    Where the data is at the nodes it is the node's half, see :mod:`hofl.tasks.nodes`: no file of data but
    ``train`` is opened. Otherwise the data is public, and the task that of a run in one process.

    Args:
        config: of the run, as the server sent it; what follows replaces its settings where it is not empty.
        client: the node's client id.
        train: where the data is here, a line of :mod:`hofl.tasks.files`.
        text: the columns of the texts, or of the images.
        label: the column of the labels.
        source: where the text model is here.
        device: ``auto``, ``cpu`` or ``cuda``.
        names: of the classes, and
        images: shape, mean and deviation of the images, both as ``nodes.told`` has them on the server.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend, by the names of a node's file
            where it has the setting.
    """
    own = _placed_here(config, {"train": train, "text": text, "label": label}, source, device)
    if config.partition.kind != "nodes":
        task = build_task(own)
        nodes.number_of(task.clients, client)
        return task
    nodes.number_of(own.partition.names, client)
    if not train:
        raise ConfigError("data.train is missing; name the file with this node's training data")
    with _in_words_of_a_node():
        built = _NODES[own.task.name](own, device_of(own.model.device), client, names, images or {})
    return nodes.node_half(built)


def _placed_here(config: Config, data: dict[str, str], source: str, device: str) -> Config:
    """The configuration with what a node has elsewhere, or under another name."""
    vision = config.task.name == "vision"
    data = {"image" if vision and name == "text" else name: value for name, value in data.items() if value}
    model = {name: value for name, value in (("source", source), ("device", device)) if value}
    if config.task.name != "text":  # the others bring a network of their own
        model.pop("source", None)
    parts = {
        "task": config.task.model_copy(update=data),
        "model": config.model.model_copy(update=model),
    }
    return config.model_copy(update=parts)


@contextmanager
def _in_words_of_a_node() -> Iterator[None]:
    """Say ``data.train`` where a message begins with ``task.train``: that is its name in a node's file."""
    try:
        yield
    except (ConfigError, DataError) as error:
        said = re.sub(r"^task\.(train|label)\b", r"data.\1", str(error))
        raise type(error)(re.sub(r"^task\.(text|image)\b", "data.text", said)) from None


def _divided(config: Config) -> Partition:
    return Partition(**config.partition.model_dump())


def _synthetic(config: Config, device: str) -> Task:
    from hofl.tasks.synthetic import synthetic_task

    sizes = {"rows": config.task.train_rows, "evaluation_rows": config.task.evaluation_rows}
    return synthetic_task(
        _divided(config),
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
    from hofl.tasks.text_data import read_held_out, read_text

    task, divided = config.task, _divided(config)
    settings = task.model_dump(include={"text", "label", "evaluation_rows"})
    settings |= {"template_id": task.template, "seed": config.seed}
    if divided.kind == "nodes":
        data = read_held_out(task.evaluation, divided, **settings)
    else:
        data = read_text(task.train, task.evaluation, divided, train_rows=task.train_rows, **settings)
    return _with_model(config, device, data)


def _with_model(config: Config, device: str, data: "TextData") -> "tuple[Task, Loaded]":
    """The task on data that has been read, and the model."""
    from hofl.models.load import load, restrict_head
    from hofl.tasks.text import text_task
    from hofl.tasks.tokens import word_tokens

    head = len(data.names) if data.template.head else None
    # A tiny model stands for a pretrained one: the same for every seed, so that an export finds it again.
    key = None if config.model.source.startswith("tiny:") else Key.of(config.seed, "init", _MODEL)
    with about("model.source"):
        loaded = load(config.model.source, dtype=config.model.dtype, device=device, head=head, key=key)
        if head is None:
            restrict_head(loaded.module, word_tokens(loaded.tokenizer, data.template))
        model, length = cut_of(config, loaded), config.task.length
        built = text_task(data, model, loaded.tokenizer, length=length, batch=config.evaluation.batch)
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


def _own_text(
    config: Config, device: str, client: str, names: Sequence[str], images: Mapping[str, Any]
) -> Task:
    from hofl.tasks.text_data import read_own

    task = config.task
    columns = {"template_id": task.template, "text": task.text, "label": task.label}
    data = read_own(task.train, _divided(config), client, seed=config.seed, names=names, **columns)
    return _with_model(config, device, data)[0]


def _vision(config: Config, device: str) -> Task:
    from hofl.tasks.vision_data import read_held_out, read_images

    task, divided = config.task, _divided(config)
    settings = task.model_dump(include={"image", "label", "evaluation_rows"}) | {"seed": config.seed}
    if divided.kind == "nodes":
        data = read_held_out(task.evaluation, divided, **settings)
    else:
        data = read_images(task.train, task.evaluation, divided, train_rows=task.train_rows, **settings)
    return _with_network(config, device, data)


def _own_images(
    config: Config, device: str, client: str, names: Sequence[str], images: Mapping[str, Any]
) -> Task:
    from hofl.tasks.vision_data import read_own

    task, told = config.task, {"names": names, "images": images}
    columns: dict[str, Any] = {"image": task.image, "label": task.label, **told}
    data = read_own(task.train, _divided(config), client, seed=config.seed, **columns)
    return _with_network(config, device, data)


def _with_network(config: Config, device: str, data: "ImageData") -> Task:
    """The task on images that have been read."""
    from hofl.models.resnet import resnet
    from hofl.tasks.vision import vision_task

    model = config.model
    sizes = {"classes": len(data.names), "channels": data.channels, "width": model.width}
    network = resnet(model.source, key=Key.of(config.seed, "init", _MODEL), norm=model.norm, **sizes)
    cut_network = cut(network.to(device), checkpointing=model.checkpointing)
    return vision_task(data, cut_network, batch=config.evaluation.batch)


_TASKS: dict[str, Callable[[Config, str], Task]] = {"synthetic": _synthetic, "text": _text, "vision": _vision}
_NODES: dict[str, Callable[[Config, str, str, Sequence[str], Mapping[str, Any]], Task]] = {
    "text": _own_text,
    "vision": _own_images,
}
"""The tasks whose data can be at the nodes."""
