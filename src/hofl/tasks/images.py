# SPDX-License-Identifier: Apache-2.0
"""Images as bytes -> uint8 arrays, by Pillow; every refusal is one line that names the row."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.errors import DataError

Pixels = NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""What is decoded; formats whose decoders run other programs or scripts are not among them."""
PIXEL_LIMIT = 2**22
"""Pixels of the largest image, before it is decoded."""


def decoded(cells: Sequence[Any], rows: Sequence[int] | None = None, shape: Any = None) -> Pixels:
    """The images of some rows (all without ``rows``): uint8 [rows, channels, height, width].

    Args:
        cells: uint8 arrays [channels, height, width], or for Pillow: bytes, ``{"bytes": bytes}``, its images.
            A grey image has one channel; any other mode becomes red, green and blue.
        rows: which, in order.
        shape: what each must be; that of the first image unless given.

    Raises:
        DataError: an image that cannot be decoded or has another shape.
    """
    rows = range(len(cells)) if rows is None else rows
    if isinstance(cells, np.ndarray) and cells.dtype == np.uint8 and cells.ndim == 4:
        images: list[Pixels] = [cells[row] for row in rows]
    else:
        reader = _reader()
        images = [_image(cells[row], row, reader) for row in rows]
    wanted = tuple(shape or images[0].shape)
    for row, image in zip(rows, images, strict=True):
        if image.shape != wanted:
            raise DataError(
                f"row {row} is {_size(image.shape)} and the first image is {_size(wanted)}: "
                "make all images, in both sources, one size and one kind of colour"
            )
    return np.stack(images)


def _size(shape: Sequence[int]) -> str:
    channels, height, width = shape
    return f"{width}x{height} in {channels} channel{'s' if channels > 1 else ''}"


def _reader() -> Callable[[bytes], Any]:
    """Encoded bytes -> a Pillow image that is not decoded yet."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need one more package: pip install 'hofl[vision]'") from None
    return lambda raw: Image.open(io.BytesIO(raw), formats=FORMATS)


def _image(cell: Any, row: int, reader: Callable[[bytes], Any]) -> Pixels:
    """One cell as uint8 [channels, height, width]."""
    raw: Any = cell.get("bytes") if isinstance(cell, Mapping) else cell
    if isinstance(raw, np.ndarray) and raw.dtype == np.uint8 and raw.ndim == 3:
        return raw
    if not isinstance(raw, bytes | bytearray) and not hasattr(raw, "getbands"):
        there = "no image" if raw is None else type(raw).__name__
        raise DataError(
            f"row {row} has {there}, where the bytes of an encoded image must be: name the "
            "column of images by task.image, or drop the row"
        )
    try:
        image = raw if hasattr(raw, "getbands") else reader(bytes(raw))
        if image.width * image.height > PIXEL_LIMIT:
            raise ValueError(f"{image.width}x{image.height} is over {PIXEL_LIMIT:,} pixels")
        if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"):
            raise ValueError(f"mode {image.mode} is not of 8 bits a channel")
        pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except Exception as error:  # each of Pillow's decoders raises its own kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(" <_io")[0][:120]
        raise DataError(
            f"row {row} is no image that can be decoded ({reason}): {', '.join(FORMATS)} can; mend or drop it"
        ) from None
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
