# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the task: the data, who holds it, and the one model, cut."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hofl import build_texts
from hofl.build_texts import MODEL, divided_of
from hofl.build_texts import load_text as load_text
from hofl.config import Config
from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.models.boundary import cut
from hofl.tasks import files, nodes
from hofl.tasks.base import Task
from hofl.tasks.nodes import with_sizes as with_sizes

if TYPE_CHECKING:
    from hofl.tasks.vision_data import ImageData


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
    ``train`` is opened. Where each client is a file of texts, no other client's is. Otherwise the data is
    public, and the task that of a run in one process.

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
    listed = config.partition.kind == "files" and config.task.name == "text" and not config.task.train_rows
    if listed:
        own = _own_file(own, client)
    elif config.partition.kind != "nodes":
        task = build_task(own)
        nodes.number_of(task.clients, client)
        return task
    nodes.number_of(own.partition.names, client)
    if not train and not listed:
        raise ConfigError("data.train is missing; name the file with this node's training data")
    with _in_words_of_a_node():
        built = _NODES[own.task.name](own, device_of(own.model.device), client, names, images or {})
    return nodes.node_half(built)


def _own_file(config: Config, client: str) -> Config:
    """Of a run with one client a file, the configuration with this client's file: no other is opened."""
    lines = files.client_sources(config.task.train)
    nodes.number_of(tuple(lines), client)
    parts = {
        "task": config.task.model_copy(update={"train": lines[client]}),
        "partition": config.partition.model_copy(update={"names": tuple(lines)}),
    }
    return config.model_copy(update=parts)


def _placed_here(config: Config, data: dict[str, str], source: str, device: str) -> Config:
    """The configuration with what a node has elsewhere, or under another name."""
    vision = config.task.name == "vision"
    data = {"image" if vision and name == "text" else name: value for name, value in data.items() if value}
    model = {name: value for name, value in (("source", source), ("device", device)) if value}
    if config.task.name not in build_texts.TASKS:  # the others bring a network of their own
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


def _synthetic(config: Config, device: str) -> Task:
    from hofl.tasks.synthetic import synthetic_task

    sizes = {"rows": config.task.train_rows, "evaluation_rows": config.task.evaluation_rows}
    return synthetic_task(
        divided_of(config),
        seed=config.seed,
        **{name: size for name, size in sizes.items() if size},
        checkpointing=config.model.checkpointing,
        device=device,
    )


def _vision(config: Config, device: str) -> Task:
    from hofl.tasks.vision_data import read_held_out, read_images

    task, divided = config.task, divided_of(config)
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
    data = read_own(task.train, divided_of(config), client, seed=config.seed, **columns)
    return _with_network(config, device, data)


def _with_network(config: Config, device: str, data: "ImageData") -> Task:
    """The task on images that have been read."""
    from hofl.models.resnet import resnet
    from hofl.tasks.vision import vision_task

    model = config.model
    sizes = {"classes": len(data.names), "channels": data.channels, "width": model.width}
    network = resnet(model.source, key=Key.of(config.seed, "init", MODEL), norm=model.norm, **sizes)
    cut_network = cut(network.to(device), checkpointing=model.checkpointing)
    return vision_task(data, cut_network, batch=config.evaluation.batch)


_TASKS: dict[str, Callable[[Config, str], Task]] = {
    **build_texts.TASKS,
    "synthetic": _synthetic,
    "vision": _vision,
}
_NODES: dict[str, Callable[[Config, str, str, Sequence[str], Mapping[str, Any]], Task]] = {
    **build_texts.NODES,
    "vision": _own_images,
}
"""The tasks whose data can be at the nodes."""
