# SPDX-License-Identifier: Apache-2.0
"""One finding of a check, and where in the fleet it holds."""

from collections.abc import Mapping
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.session import Session

Row = Mapping[str, Any]
Finding = dict[str, Any]


def finding(id: str, text: str, warning: bool = True, **numbers: Any) -> Finding:
    """A warning or a note, with the numbers that its text has."""
    return {"id": id, "level": "warning" if warning else "note", "text": text, "numbers": numbers}


def probed(found: Row) -> list[Row]:
    """The tiers that probe."""
    return [tier for tier in found["tiers"] if tier["probes"]]


def where(session: Session, tier: Row) -> str:
    """A tier in words."""
    return f"boundary {tier['boundary']}" if ALGORITHMS[session.config.algorithm].hybrid else "a client"
