# SPDX-License-Identifier: Apache-2.0
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hofl.errors import DataError
from hofl.tasks.images import decoded
from pictures import encoded, picture


@pytest.mark.parametrize("mode", ["L", "RGB", "1", "P", "RGBA", "CMYK"])
def test_every_eight_bit_mode_has_one_or_three_channels(mode: str) -> None:
    image = Image.fromarray(picture(1)).convert(mode)
    assert decoded([image])[0].shape == (1 if mode in ("L", "1") else 3, 6, 6)


def _cut_off(cells: list[Any]) -> None:
    cells[7] = encoded(7, "JPEG", side=60)[:300]


def _other_size(cells: list[Any]) -> None:
    cells[7] = encoded(7, side=5)


def _grey(cells: list[Any]) -> None:
    cells[7] = encoded(7, mode="L")


def _text(cells: list[Any]) -> None:
    cells[7] = b"%!PS-Adobe-3.0 EPSF-3.0\n"


def _none(cells: list[Any]) -> None:
    cells[7] = None


def _deep(cells: list[Any]) -> None:
    into = io.BytesIO()
    Image.fromarray(np.zeros((6, 6), np.uint16)).save(into, "PNG")
    cells[7] = into.getvalue()


def _huge(cells: list[Any]) -> None:
    into = io.BytesIO()
    Image.new("1", (4096, 2048)).save(into, "PNG")
    cells[7] = into.getvalue()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut_off, "row 7 is no image that can be decoded"),
        (_other_size, "row 7 is 5x5 in 3 channels and the first image is 6x6 in 3 channels"),
        (_grey, "row 7 is 6x6 in 1 channel and the first image is 6x6 in 3 channels"),
        (_text, "row 7 is no image that can be decoded (cannot identify image file): JPEG, PNG"),
        (_none, "row 7 has no image"),
        (_deep, "mode I;16 is not of 8 bits a channel"),
        (_huge, "4096x2048 is over 4,194,304 pixels"),
    ],
)
def test_a_bad_image_is_one_line_with_its_row(spoil: Any, said: str) -> None:
    cells: list[Any] = [encoded(i) for i in range(10)]
    spoil(cells)
    with pytest.raises(DataError) as caught:
        decoded(cells)
    line = str(caught.value)
    assert line.startswith("row 7") and said in line and "\n" not in line


def test_only_the_rows_asked_for_are_decoded() -> None:
    cells = [encoded(0), b"no image", {"bytes": encoded(2), "path": "2.png"}]
    assert np.array_equal(decoded(cells, [2, 0]), np.stack([picture(i).transpose(2, 0, 1) for i in (2, 0)]))
    with pytest.raises(DataError, match="row 0 is 6x6 in 3 channels and the first image is 6x6 in 1 channel"):
        decoded(cells, [0], (1, 6, 6))
