# SPDX-License-Identifier: Apache-2.0
"""What a method computes: forward-equivalents of one client's local step, on the client and on the server.

The unit is one forward pass of the whole model on the step's minibatch, F = F_b + F_t with F_b / F the
share of the blocks below the boundary. A backward pass is two forwards (HO-FL App. E), recomputing a
block one more. A bottom that waits for feedback is run again and not kept, so a client that backpropagates
in split training pays F_b for z, F_b again and 2 F_b. Not counted: replay (it runs no model), an auxiliary
head, and passes that only diagnose: mirrored probes for ``zo_signal``, evaluation, and the pass at the
anchor that gives the training loss where central differences of a loss would not need it.
"""

from collections.abc import Callable
from dataclasses import dataclass

HYBRID = frozenset({"ho_fl", "ho_sfl", "hosl", "heron_sfl"})
"""Methods that probe the bottom and backpropagate the top, so that a frozen bottom is their control."""


@dataclass(frozen=True)
class Step:
    """One local step.

    Attributes:
        share: F_b / F, by default of the planner b / L; in 0 .. 1.
        estimator: of what is probed, see :mod:`hofl.core.estimators`.
        probes: q.
        checkpointing: whether what is backpropagated with a recorded graph is recomputed block by block.
        server_steps: tau of MU-SplitFed.
        upload_every: k of HERON-SFL.
    """

    share: float = 0.0
    estimator: str = "forward"
    probes: int = 1
    checkpointing: bool = False
    server_steps: int = 1
    upload_every: int = 1

    @property
    def top(self) -> float:
        """F_t / F."""
        return 1.0 - self.share

    @property
    def trained(self) -> int:
        """A forward and a backward pass, in forwards: 3, or 4 with checkpointing."""
        return 4 if self.checkpointing else 3

    @property
    def probed(self) -> int:
        """Passes of an estimator that needs z at the anchor too: the table of :mod:`hofl.core.estimators`."""
        q = self.probes
        return {"none": 1, "forward": 1 + q, "tangent": 1 + q, "central": 1 + 2 * q, "sketch": 4}[
            self.estimator
        ]

    @property
    def differenced(self) -> int:
        """Passes where the outputs are losses, so that central differences need none at the anchor."""
        return 2 * self.probes if self.estimator == "central" else self.probed


Cost = Callable[[Step], float]


def _nothing(step: Step) -> float:
    return 0.0


def _whole(step: Step) -> float:
    return float(step.trained)


def _differenced(step: Step) -> float:
    return float(step.differenced)


def _bottom(step: Step) -> float:
    return step.probed * step.share


def _top(step: Step) -> float:
    return step.trained * step.top


def _bottom_twice(step: Step) -> float:
    return (1 + step.trained) * step.share


_FIRST_ORDER_SPLIT: tuple[Cost, Cost] = (_bottom_twice, _top)
_ZEROTH_ORDER: tuple[Cost, Cost] = (_differenced, _nothing)

COSTS: dict[str, tuple[Cost, Cost]] = {
    "ho_fl": (lambda s: _bottom(s) + _top(s), _nothing),
    "ho_sfl": (lambda s: _bottom(s) + (s.share if s.estimator == "sketch" else 0.0), _top),
    "hosl": (_bottom, lambda s: _top(s) + (s.probed - 1) * s.top),
    "heron_sfl": (_bottom, lambda s: _top(s) / s.upload_every),
    "splitfed_v1": _FIRST_ORDER_SPLIT,
    "splitfed_v2": _FIRST_ORDER_SPLIT,
    "splitlora": _FIRST_ORDER_SPLIT,
    "zo_sfl": (lambda s: s.differenced * s.share, lambda s: s.differenced * s.top),
    # z, z+ and z- of the client; tau steps and the two losses of its scalar at the server
    "mu_splitfed": (_bottom, lambda s: 2 * s.probes * (s.server_steps + 1) * s.top),
    "fedavg": (_whole, _nothing),
    "fedprox": (_whole, _nothing),
    "decomfl": _ZEROTH_ORDER,
    "hiso": _ZEROTH_ORDER,
    "fedzo": _ZEROTH_ORDER,
    "mezo": _ZEROTH_ORDER,
}
"""(client, server) of every method."""


def client(name: str, step: Step) -> float:
    """Forward-equivalents of one local step on a client.

    Raises:
        KeyError: there is no such method or estimator.

    >>> half = Step(share=0.5, estimator="forward", probes=2)
    >>> client("ho_fl", half), client("ho_sfl", half), client("fedavg", half)
    (3.0, 1.5, 3.0)
    >>> client("splitfed_v1", half), client("decomfl", half)
    (2.0, 3.0)
    """
    return COSTS[name][0](step)


def server(name: str, step: Step) -> float:
    """Forward-equivalents of one client's local step on the server.

    Raises:
        KeyError: there is no such method or estimator.

    >>> half = Step(share=0.5, estimator="central", probes=2, server_steps=2)
    >>> server("hosl", half), server("mu_splitfed", half), server("zo_sfl", half), server("fedavg", half)
    (3.5, 6.0, 2.0, 0.0)
    """
    return COSTS[name][1](step)
