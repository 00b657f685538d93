# SPDX-License-Identifier: Apache-2.0
"""Small images from numbers, and Parquet files of them, shared by the tests."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from hofl.core.keys import Key


def picture(number: int, side: int = 6, mode: str = "RGB") -> np.ndarray[Any, Any]:
    """Pixels [side, side(, 3)] that follow the number."""
    shape = (side, side, 3) if mode == "RGB" else (side, side)
    return Key.of(number, "init").generator().integers(0, 256, shape, dtype=np.uint8)


def encoded(number: int, kind: str = "PNG", side: int = 6, mode: str = "RGB") -> bytes:
    into = io.BytesIO()
    Image.fromarray(picture(number, side, mode)).save(into, kind)
    return into.getvalue()


def table(path: Path, cells: list[Any], labels: list[Any], hub: bool = True) -> str:
    """A Parquet file in the hub's schema, or with bare bytes."""
    images = [{"bytes": cell, "path": f"{i}.png"} for i, cell in enumerate(cells)] if hub else cells
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if hub else pa.binary()
    pq.write_table(pa.table({"img": pa.array(images, kind), "label": labels}), path)
    return str(path)
