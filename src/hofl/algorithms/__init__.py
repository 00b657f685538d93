# SPDX-License-Identifier: Apache-2.0
"""The methods, by name: a literal table, so that adding one is one file and one line."""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hofl.algorithms.aggregate import Training
    from hofl.algorithms.base import Algorithm
    from hofl.algorithms.ho_fl import Probing
    from hofl.core.layout import Layout


class Method(NamedTuple):
    """One row of ``hofl list algorithms``; the method is the function ``name`` of the module ``name``.

    Attributes:
        name: what a config says.
        title: what it is.
        paper: where it is from.
        backpropagates: who runs a backward pass through what.
        uplink: numbers a client sends in one round, in the symbols of the paper.
        hybrid: whether clients have a boundary, with a bottom that is trained by probes.
        leaves_device: what a client sends, in words; of a hybrid method without probes, the last one only.
    """

    name: str
    title: str
    paper: str
    backpropagates: str
    uplink: str
    hybrid: bool
    leaves_device: tuple[str, ...]

    def build(
        self, layout: "Layout", boundaries: "Sequence[int]", training: "Training", probing: "Probing"
    ) -> "Algorithm":
        """The Algorithm; imported here, since a list of names needs no PyTorch.

        Args:
            layout: of the trainables.
            boundaries: one a client; only a hybrid method has a use for them.
            training: what every method is told.
            probing: how bottoms are trained; only a hybrid method has a use for it.
        """
        function = getattr(import_module(f"hofl.algorithms.{self.name}"), self.name)
        own = (layout, boundaries, training, probing) if self.hybrid else (layout, training)
        made: Algorithm = function(*own)
        return made


ALGORITHMS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "ho_fl",
            "HO-FL",
            "Chen et al., arXiv 2609.39074",
            "client, top only",
            "E q + d_fo[i]",
            True,
            ("E x q scalars of the bottom", "a digest of the bottom", "the update of the top"),
        ),
        Method(
            "fedavg",
            "FedAvg",
            "McMahan et al., AISTATS 2017",
            "client, all",
            "d",
            False,
            ("the update of all trainables",),
        ),
    )
}
