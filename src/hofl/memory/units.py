# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them."""

import re

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{name}i": 2 ** (10 * place) for place, name in enumerate("kmgt", 1)}
"""Bytes of a unit, by what stands before the B."""

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([kmgt]?i?)b", re.IGNORECASE | re.ASCII)


def bytes_of(text: str) -> int:
    """The bytes of a size such as ``2 GiB`` or ``512MB``; 0 for an empty text.

    Raises:
        ValueError: what is allowed.

    >>> bytes_of("2 GiB"), bytes_of("1.5kB"), bytes_of("")
    (2147483648, 1500, 0)
    """
    found = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if text and not size:
        raise ValueError('must be a size such as "2 GiB" or "512 MB", or "" for no limit')
    return size


def positive_bytes_of(text: str) -> int:
    """The bytes of a size that must be there.

    Raises:
        ValueError: what is allowed.
    """
    try:
        size = bytes_of(text)
    except ValueError:
        size = 0
    if not size:
        raise ValueError("must be a size above 0 such as 12GiB or 512MB")
    return size
