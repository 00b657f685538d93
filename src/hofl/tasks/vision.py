# SPDX-License-Identifier: Apache-2.0
"""Image classification: small images, all of one size, kept as bytes and made float32 a batch at a time.

Two steps, so that bad data fails before a network is built: :func:`read_images` needs files only,
:func:`vision_task` adds the cut model. A source is one line of :mod:`hofl.tasks.files`, with a column of
encoded images (bytes, or the hub's ``{bytes, path}``), or ``sklearn:digits``, the 1797 grey 8x8 images
that come with scikit-learn. ``split=train:0.8`` and ``split=rest:0.8`` go by the SHA-256 of the pixels, so
that an image that occurs twice lands on one side, however it is encoded.

There is no augmentation: a batch is a pure function of its example numbers, so that anyone can make it again.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.models.boundary import CutModel
from hofl.tasks import files, partition
from hofl.tasks.base import Batch, Task, cross_entropy
from hofl.tasks.files import Source
from hofl.tasks.images import Pixels, decoded
from hofl.tasks.metrics import Sums, majority_class

DIGITS = "sklearn:digits"
_SPLIT = re.compile(r"([?&])split=(train|rest):(0\.\d{1,9})(?=&|$)")


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
        train, evaluation: the examples.
        shards: who holds which training examples.
        seed: of the run.
        facts: for the manifest; ``mean`` and ``std`` are those of the training images, a channel each.
    """

    names: tuple[str, ...]
    train: Images
    evaluation: Images
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
        train, evaluation: see the module.
        divided: how the training images are divided among how many clients; not ``files``.
        seed: of the partition and of the rows drawn.
        image, label: the columns; ``sklearn:digits`` has its own.
        train_rows, evaluation_rows: draw that many rows; 0 takes all.

    Raises:
        DataError, ConfigError: one line; it starts with the setting at fault and names the row.
    """
    with _about("task.train", image, label):
        cells, labels = _read(train, image, label)
        names = _names(labels)
        classes = _classes(labels, names)
        rows = files.drawn(len(cells), train_rows, Key.of(seed, "partition", 10), "task.train_rows")
        learned = Images(decoded(cells, rows), classes[rows])
    with _about("task.evaluation", image, label):
        cells, labels = _read(evaluation, image, label)
        key = Key.of(seed, "evaluation", 0)
        rows = files.drawn(len(cells), evaluation_rows, key, "task.evaluation_rows")
        tested = Images(decoded(cells, rows, learned.pixels.shape[1:]), _classes(labels, names)[rows])
    shards = divided.divide(learned.labels, seed=seed)
    facts = _facts(names, learned, tested)
    facts["partition"] = partition.table(shards, learned.labels, names, _clients(shards))
    return ImageData(names, learned, tested, shards, seed, facts)


def vision_task(data: ImageData, model: CutModel, *, batch: int = 32) -> Task:
    """The task of a cut model, images float32 [batch, channels, height, width] to logits, on the data.

    Args:
        data: from :func:`read_images`.
        model: takes the images, normalised by the mean and the deviation of the training images.
        batch: images an evaluation batch.
    """
    mean, std = (
        torch.tensor(data.facts[name], dtype=torch.float32, device=model.device)[:, None, None]
        for name in ("mean", "std")
    )

    def collate(numbers: NDArray[np.int64], of: Images = data.train) -> Batch:
        """Examples by number, of the training set unless another is named."""
        pixels = torch.from_numpy(of.pixels[numbers]).to(model.device)
        targets = torch.from_numpy(of.labels[numbers]).to(model.device)
        return Batch({"input": (pixels.float() - mean) / std}, targets)

    @torch.no_grad()
    def evaluate() -> Sums:
        """All held-out images, in their order."""
        sums = Sums.zero(len(data.names))
        for start in range(0, len(data.evaluation.labels), batch):
            stop = min(start + batch, len(data.evaluation.labels))
            scored = collate(np.arange(start, stop), data.evaluation)
            sums += Sums.from_logits(model.full(scored.inputs), scored.targets)
        return sums

    clients = _clients(data.shards)
    return Task(
        "vision", model, clients, data.shards, collate, cross_entropy, evaluate, data.seed, dict(data.facts)
    )


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


def _clients(shards: partition.Shards) -> tuple[str, ...]:
    return tuple(f"client-{client}" for client in range(len(shards)))


def _read(source: Source, image: str, label: str) -> tuple[Any, list[Any]]:
    """A cell for each image, encoded or decoded, and the labels; a split is already made."""
    place = str(source) if isinstance(source, str) or hasattr(source, "__fspath__") else ""
    share = _SPLIT.search(place)
    if share:
        kept = place[: share.start()] + place[share.end() :].replace("&", share[1], 1)
        if _SPLIT.search(kept):
            raise ConfigError(f"{place!a}: allowed is one split")
        source = place = kept
    if place.startswith("sklearn:"):
        cells, labels = _digits(place)
    else:
        table = files.read_table(source, [image, label])
        cells, labels = table[image], table[label]
    if not share:
        return cells, labels
    pixels, below = decoded(cells), int(float(share[3]) * 2**64)
    keep = [i for i, each in enumerate(pixels) if (_position(each) < below) == (share[2] == "train")]
    if not keep:
        raise DataError(f"{share[0][1:]} keeps none of the {len(pixels)} images: give another share")
    return pixels[keep], [labels[i] for i in keep]


def _digits(place: str) -> tuple[Any, list[Any]]:
    """scikit-learn's digits: uint8 [1797, 1, 8, 8] of 0 to 16, and their labels."""
    if place != DIGITS:
        raise ConfigError(
            f"{place!a}: allowed is {DIGITS}, with ?split=train:0.8 or ?split=rest:0.8 for a part of it"
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"{place}: needs one more package: pip install 'hofl[vision]'") from None
    pixels, labels = load_digits(return_X_y=True)
    return pixels.astype(np.uint8).reshape(-1, 1, 8, 8), labels.tolist()


def _position(pixels: Pixels) -> int:
    """Where an image falls among all hashes, 0 .. 2**64 - 1."""
    return int.from_bytes(_hash(pixels)[:8], "big")


def _hash(pixels: Pixels) -> bytes:
    return hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).digest()


def _names(labels: Sequence[Any]) -> tuple[str, ...]:
    """The classes of training labels: "0" .. "m" for whole numbers, else one a distinct text, sorted."""
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
            f"row {row} has {has} ({bad} of {len(labels)} rows have none that is a class): the training "
            f"labels allow {few}; mend the rows or leave them out"
        )
    return np.array(classes, dtype=np.int64)


def _spelled(label: Any) -> str:
    """One spelling a label: a whole number however it is stored; nothing for a missing one."""
    if label is None or label != label:
        return ""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def _facts(names: Sequence[str], train: Images, evaluation: Images) -> dict[str, Any]:
    """What the manifest says of the data: counts, hashes and the normalisation, never an image."""
    seen = set(map(_hash, train.pixels))
    shared = sum(_hash(each) in seen for each in evaluation.pixels)
    warning = (
        f"{shared} of {len(evaluation.labels)} evaluation images are also in the training data: the metric "
        "flatters; evaluate on other rows, or on split=rest of the same source"
    )
    mean, std = _moments(train.pixels)
    return {
        "labels": list(names),
        "majority_class": majority_class(evaluation.labels, names),
        "n_train": len(train.labels),
        "n_evaluation": len(evaluation.labels),
        "shape": list(train.pixels.shape[1:]),
        "mean": mean,
        "std": std,
        "shared_images": shared,
        "data_sha256": {"train": _sha256(train), "evaluation": _sha256(evaluation)},
        "warnings": [warning] if shared else [],
    }


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
