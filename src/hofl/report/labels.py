# SPDX-License-Identifier: Apache-2.0
"""What a group of runs is called: short names, and the settings that tell two of one name apart."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hofl.theory.computation import HYBRID

_NO_PART = {"seed", "run", "fleet"}
_OWN = "zo.optimizer."


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by dotted key, without what is no part of a group's identity.

    What ``[zo.optimizer]`` has in common with ``[optimizer]`` is left out: it says nothing new.
    """
    flat: dict[str, Any] = {}

    def _walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                _walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    _walk("", {k: v for k, v in config.items() if k not in _NO_PART})
    return {k: v for k, v in flat.items() if not k.startswith(_OWN) or flat.get(k[3:]) != v}


def labels(flats: Sequence[Mapping[str, Any]], boundaries: Sequence[Collection[int]]) -> list[str]:
    """One name a configuration; where two agree, also every key that tells them apart.

    Args:
        flats: see :func:`flatten`.
        boundaries: that each ran at, whoever chose them.
    """
    return told_apart([name(flat, own) for flat, own in zip(flats, boundaries, strict=True)], flats)


def told_apart(names: Sequence[str], flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names; where two agree, each with every key that tells them apart."""
    keys = sorted({key for flat in flats for key in flat})
    found = []
    for own, flat in zip(names, flats, strict=True):
        twins = [f for n, f in zip(names, flats, strict=True) if n == own]
        telling = [k for k in keys if any(f.get(k) != flat.get(k) for f in twins)]
        found.append(" ".join([own, *(f"{k}={_short(flat, k)}" for k in telling)]))
    return found


def name(flat: Mapping[str, Any], boundaries: Collection[int]) -> str:
    """The algorithm; its estimator where bottoms are probed, its boundaries where it has some.

    >>> name({"algorithm": "ho_fl", "zo.estimator": "forward"}, [2, 1, 2])
    'ho_fl forward b=1,2'
    >>> name({"algorithm": "splitlora", "zo.estimator": "forward"}, [1])
    'splitlora b=1'
    >>> name({"algorithm": "decomfl", "zo.estimator": "central"}, [0])
    'decomfl'
    """
    algorithm = str(flat.get("algorithm", "?"))
    if not any(boundaries):
        return algorithm
    probed = [str(flat.get("zo.estimator", "?"))] if algorithm in HYBRID else []
    return " ".join([algorithm, *probed, f"b={','.join(map(str, sorted(set(boundaries))))}"])


def _short(flat: Mapping[str, Any], key: str) -> str:
    inherited = flat.get(key[3:]) if key.startswith(_OWN) else None
    value = flat.get(key, inherited)
    return "unset" if value is None else str(value).replace(" ", "")
