# SPDX-License-Identifier: Apache-2.0
"""What the run needs of memory by plan, beside full first order, and what this machine has left."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hofl.algorithms import ALGORITHMS
from hofl.errors import HoflError
from hofl.memory.configured import of_config
from hofl.memory.orders import Costs, Order, first_orders, hybrids, zeroth_orders
from hofl.memory.plan import MARGIN
from hofl.memory.subject import staged
from hofl.needs import plan_needs
from hofl.session import Session

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Planned:
    """Bytes by plan.

    Attributes:
        tiers: peak of a participation by boundary.
        first_order: peak of backpropagation through everything: plain, and with checkpointing.
        resident: of the whole model, which is loaded here already.
        free: what this machine has left now; None where it is not known.
        why: there is no plan, else empty.
    """

    tiers: Mapping[int, int]
    first_order: Mapping[bool, int]
    resident: int
    free: int | None
    why: str = ""

    def lacks(self, peak: int | None) -> bool:
        """Whether a peak, less the model that is loaded, is more than what is free with a margin."""
        return lacks(peak, self.resident, self.free)

    def backpropagation(self) -> bool | None:
        """Whether full first order fits with checkpointing alone (True) or without (False); None: neither."""
        fits = [how for how in (False, True) if not self.lacks(self.first_order.get(how))]
        return fits[0] if fits else None


def lacks(peak: int | None, resident: int | None, free: int | None) -> bool:
    """Whether a planned peak, less what is loaded, does not fit what is free; False where it is unknown."""
    if peak is None or free is None:
        return False
    return max(0, peak - (resident or 0)) * MARGIN > free


def planned(session: Session) -> Planned:
    """The plan of a run's own participations at the boundaries that somebody has, and of full first order."""
    free = free_bytes(session.task.model.device)
    try:
        return _traced(session, free)
    except HoflError as error:
        return Planned({}, {}, 0, free, str(error))


def _traced(session: Session, free: int | None) -> Planned:
    config, cuts = session.config, session.cuts
    method, estimator = ALGORITHMS[config.algorithm], str(config.zo.estimator)
    subject, work = of_config(config)
    with staged(subject, work) as stage:
        costs = Costs.of(stage, work)
        whole = list(first_orders(stage, costs, (False, True), _silent))
        own = [row for row in whole if row.checkpointing == work.checkpointing]
        if method.split:
            own = []
        elif method.hybrid and any(cuts):
            own += hybrids(stage, costs, (estimator,), (work.checkpointing,), _silent)
        elif method.estimators and not method.hybrid:
            own = list(zeroth_orders(stage, costs, (estimator,), _silent))
    peaks = (
        plan_needs(config, session.seen, 1.0).planned
        if method.split
        else _by_boundary(own, cuts, method.hybrid)
    )
    first = {row.checkpointing: row.peak_bytes for row in whole}
    resident = whole[0].parts["backbone"] + whole[0].parts["trainables"]
    return Planned({b: peaks[b] for b in cuts if b in peaks}, first, resident, free)


def _by_boundary(rows: Sequence[Order], cuts: Sequence[int], hybrid: bool) -> dict[int, int]:
    """Peaks by the boundary that a tier says it has: 0 for all where the method has none."""
    found = {row.boundary if hybrid else 0: row.peak_bytes for row in rows}
    return {boundary: found[boundary] for boundary in cuts}


def _silent(what: str) -> None:
    """Say nothing of what is traced."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process could still take: of the accelerator, or of the machine or its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_available(), _group_room()) if limit is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_room() -> int | None:
    """What a container's limit leaves; None where it has none."""
    try:
        most, used = ((_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return None if most == "max" else max(0, int(most) - int(used))
    except (OSError, ValueError):
        return None
