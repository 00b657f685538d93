# SPDX-License-Identifier: Apache-2.0
"""Where images come from.

A source is one line of :mod:`hofl.tasks.files`, with a column of encoded images (bytes, or the hub's
``{bytes, path}``), or ``sklearn:digits``, the 1797 grey 8x8 images that come with scikit-learn.
``split=train:0.8`` and ``split=rest:0.8`` go by the SHA-256 of the pixels, so that an image that occurs
twice lands on one side, however it is encoded.
"""

import hashlib
import re
from typing import Any

import numpy as np

from hofl.errors import ConfigError, DataError
from hofl.tasks import files
from hofl.tasks.files import Source
from hofl.tasks.images import Pixels, decoded

DIGITS = "sklearn:digits"
_SPLIT = re.compile(r"([?&])split=(train|rest):(0\.\d{1,9})(?=&|$)")


def read_cells(source: Source, image: str, label: str) -> tuple[Any, list[Any]]:
    """A cell for each image, encoded or decoded, and the labels; a split is already made.

    Raises:
        DataError: nothing there, unreadable, or no image left. ConfigError: the line is malformed.
    """
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
    return int.from_bytes(pixel_hash(pixels)[:8], "big")


def pixel_hash(pixels: Pixels) -> bytes:
    """SHA-256 of an image's shape and pixels."""
    return hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).digest()
