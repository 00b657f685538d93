# SPDX-License-Identifier: Apache-2.0
"""What a client does in a round, and what it receives where that depends on what it has missed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hofl.report.tables import size

if TYPE_CHECKING:
    from hofl.session import Session


def effort(session: "Session") -> str:
    """What a client does in a round; where that follows its examples, the least, the median and the most."""
    from hofl.build import probes_of
    from hofl.local_work import steps_taken

    config, batch = session.config, session.config.local.batch
    taken, q = sorted(steps_taken(session)), probes_of(config)
    shown = [taken[0], taken[len(taken) // 2], taken[-1]] if taken[0] < taken[-1] else taken[:1]
    steps, probes, visits = (" / ".join(str(n * each) for n in shown) for each in (1, q, batch))
    own = f"local.epochs = {config.local.epochs}: least / median / most of the clients; "
    follows = own if len(shown) > 1 else ""
    return (
        f"each participation: {steps} optimizer step{'s' * (taken[-1] > 1)}, {probes} probes, "
        f"up to {visits} example visits ({follows}batches of {batch}; a smaller client gives what it has)"
    )


def contact(session: "Session") -> Iterator[str]:
    """A line where what a client receives depends on what it has missed."""
    from hofl.algorithms import ALGORITHMS
    from hofl.theory import traffic

    name, sizes = session.config.algorithm, session.sizes[session.cuts[-1]]
    ready, missed, first = (
        sum(traffic.of(name, replace(sizes, lag=lag))["down"].values()) for lag in (0, 1, None)
    )
    if first > ready:
        own = "" if ALGORITHMS[name].split else ", its own last one among them"
        more = f"; {size(missed - ready)} more for each round it lacks{own}" if missed > ready else ""
        first_more = f"{size(first - ready)} or more at first contact"
        yield f"payload down: of a client in step{more}; {first_more}"
