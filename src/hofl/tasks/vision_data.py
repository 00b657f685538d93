# SPDX-License-Identifier: Apache-2.0
"""The images of a run, read, decoded, checked and divided, before there is a network.

:func:`read_images` has all data at hand. Where it is at the nodes, :func:`read_held_out` is the server's part
and :func:`read_own` a node's: what the other side has, each lacks.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks import files, nodes, partition
from hofl.tasks.facts import data_facts
from hofl.tasks.files import Source
from hofl.tasks.images import Pixels, decoded
from hofl.tasks.vision_cells import pixel_hash, read_cells


@dataclass(frozen=True)
class Images:
    """Pixels uint8 [rows, channels, height, width] and classes int64 [rows]."""

    pixels: Pixels
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ImageData:
    """Everything about the data that needs no model.

    Attributes:
        names: the classes.
        train, evaluation: the examples; where one of them is elsewhere, both are those that are here.
        clients, shards: who holds which training examples.
        seed: of the run.
        facts: for the manifest; ``mean`` and ``std`` are those of the training images, a channel each, or of
            the evaluation images where the training images are at the nodes.
    """

    names: tuple[str, ...]
    train: Images
    evaluation: Images
    clients: tuple[str, ...]
    shards: partition.Shards
    seed: int
    facts: dict[str, Any]

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for coloured ones."""
        return int(self.train.pixels.shape[1])


def read_images(
    train: Source,
    evaluation: Source,
    divided: partition.Partition,
    *,
    seed: int,
    image: str = "img",
    label: str = "label",
    train_rows: int = 0,
    evaluation_rows: int = 0,
) -> ImageData:
    """Read, decode, check and divide the data.

    Args:
        train, evaluation: see :mod:`hofl.tasks.vision_cells`.
        divided: how the training images are divided among how many clients; not ``files``.
        seed: of the partition and of the rows drawn.
        image, label: the columns; ``sklearn:digits`` has its own.
        train_rows, evaluation_rows: draw that many rows; 0 takes all.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault and names the row.
    """
    with _about("task.train", image, label):
        cells, labels = read_cells(train, image, label)
        names = _names(labels)
        classes = _classes(labels, names)
        rows = files.drawn(len(cells), train_rows, Key.of(seed, "partition", 10), "task.train_rows")
        learned = Images(decoded(cells, rows), classes[rows])
    with _about("task.evaluation", image, label):
        cells, labels = read_cells(evaluation, image, label)
        rows = _scored(len(cells), evaluation_rows, seed)
        tested = Images(decoded(cells, rows, learned.pixels.shape[1:]), _classes(labels, names)[rows])
    shards = divided.divide(learned.labels, seed=seed)
    clients = tuple(f"client-{client}" for client in range(len(shards)))
    facts = _facts(names, learned, tested) | _shape_and_moments(learned)
    facts["partition"] = partition.table(shards, learned.labels, names, clients)
    return ImageData(names, learned, tested, clients, shards, seed, facts)


def read_held_out(
    evaluation: Source,
    divided: partition.Partition,
    *,
    seed: int,
    image: str = "img",
    label: str = "label",
    evaluation_rows: int = 0,
) -> ImageData:
    """Like :func:`read_images` on the server, where the training images are at the nodes ``divided.names``.

    The classes are those of the evaluation labels, and mean and deviation those of the evaluation images.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault and names the row.
    """
    with _about("task.evaluation", image, label):
        cells, labels = read_cells(evaluation, image, label)
        names = _names(labels)
        rows = _scored(len(cells), evaluation_rows, seed)
        tested = Images(decoded(cells, rows), _classes(labels, names)[rows])
    facts = _facts(names, None, tested) | _shape_and_moments(tested)
    facts |= {"data_sha256": {**facts["data_sha256"], "nodes": {}}, "partition": []}
    return ImageData(names, tested, tested, divided.names, nodes.unknown(divided.names), seed, facts)


def read_own(
    train: Source,
    divided: partition.Partition,
    client: str,
    *,
    seed: int,
    image: str = "img",
    label: str = "label",
    names: Sequence[str],
    images: Mapping[str, Any],
) -> ImageData:
    """Like :func:`read_images` on a node, which has the images of its client and no others.

    Args:
        train: see :mod:`hofl.tasks.vision_cells`.
        divided: its ``names`` number the clients.
        client: one of them.
        seed, image, label: see :func:`read_images`.
        names: of the classes, and
        images: shape, mean and deviation, which the server tells: all clients must have the same.

    Raises:
        DataError: also for a label that is no class. ConfigError: also where these are not told.
    """
    if not names:
        raise ConfigError("task.label: the server did not tell the names of the classes")
    shape, mean, std = nodes.image_facts(images)
    with _about("task.train", image, label):
        cells, labels = read_cells(train, image, label)
        learned = Images(decoded(cells, shape=shape), _classes(labels, names))
    shards = nodes.alone(divided.names, client, len(learned.labels))
    facts = _facts(names, learned, None) | {"shape": shape, "mean": mean, "std": std}
    facts["partition"] = partition.table(shards, learned.labels, names, divided.names)
    return ImageData(tuple(names), learned, learned, divided.names, shards, seed, facts)


def _scored(total: int, rows: int, seed: int) -> list[int]:
    """The numbers of the images to score on."""
    return files.drawn(total, rows, Key.of(seed, "evaluation", 0), "task.evaluation_rows")


@contextmanager
def _about(setting: str, image: str, label: str) -> Iterator[None]:
    """Begin what is said of a source, or of a column that it lacks, with the setting that names it."""
    try:
        yield
    except files.MissingColumn as error:
        named = {image: "task.image", label: "task.label"}.get(error.column, setting)
        raise DataError(f"{named}: {error}") from None
    except (DataError, ConfigError) as error:
        told = str(error)
        raise type(error)(told if told.startswith("task.") else f"{setting}: {told}") from None


def _names(labels: Sequence[Any]) -> tuple[str, ...]:
    """The classes of labels: "0" .. "m" for whole numbers, else one a distinct text, sorted."""
    found = {_spelled(label) for label in labels}
    if not all(name.lstrip("-").isdecimal() for name in found):
        names = tuple(sorted(found - {""}))
    else:
        names = tuple(map(str, range(1 + max(map(int, found)))))
    if not 2 <= len(names) <= len(labels):
        raise DataError(
            f"task.label: {len(names)} classes in {len(labels)} images: number the classes 0, 1, ... "
            "or name them, two or more"
        )
    return names


def _classes(labels: Sequence[Any], names: Sequence[str]) -> NDArray[np.int64]:
    """Labels as class numbers, int64 [rows]."""
    known = {name: number for number, name in enumerate(names)}
    classes = [known.get(_spelled(label), -1) for label in labels]
    if -1 in classes:
        row, bad = classes.index(-1), classes.count(-1)
        given = _spelled(labels[row])[:40]
        has = f"the label {given!a}" if given else "no label"
        few = ", ".join(names) if len(names) < 13 else f"{names[0]} to {names[-1]}"
        raise DataError(
            f"row {row} has {has} ({bad} of {len(labels)} rows have none that is a class): the classes "
            f"are {few}; mend the rows or leave them out"
        )
    return np.array(classes, dtype=np.int64)


def _spelled(label: Any) -> str:
    """One spelling a label: a whole number however it is stored; nothing for a missing one."""
    if label is None or label != label:
        return ""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def _facts(names: Sequence[str], train: Images | None, evaluation: Images | None) -> dict[str, Any]:
    """What the manifest says of the data: counts and hashes, never an image; None of what is elsewhere."""
    return data_facts("images", names, train, evaluation, _sha256, _shared)


def _shared(train: Images, evaluation: Images) -> int:
    """How many evaluation images are also trained on."""
    seen = set(map(pixel_hash, train.pixels))
    return sum(pixel_hash(each) in seen for each in evaluation.pixels)


def _shape_and_moments(images: Images) -> dict[str, Any]:
    mean, std = _moments(images.pixels)
    return {"shape": list(images.pixels.shape[1:]), "mean": mean, "std": std}


def _moments(pixels: Pixels) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from whole-number counts and so exact; 1 where it is 0."""
    levels = np.arange(256)
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        counts = np.bincount(pixels[:, channel].ravel(), minlength=256)
        total, first, second = (int(counts @ levels**power) for power in (0, 1, 2))
        means.append(first / total)
        deviations.append(((second * total - first**2) / total**2) ** 0.5 or 1.0)
    return means, deviations


def _sha256(images: Images) -> str:
    """Of every pixel and class, in order, with the shape."""
    h = hashlib.sha256(str(images.pixels.shape).encode())
    h.update(images.pixels.tobytes())
    h.update(images.labels.astype("<i8").tobytes())
    return h.hexdigest()
