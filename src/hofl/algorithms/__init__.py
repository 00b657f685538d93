# SPDX-License-Identifier: Apache-2.0
"""The methods, by name: a literal table, so that adding one is one file and one line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hofl.algorithms.base import Algorithm


class Method(NamedTuple):
    """One row of ``hofl list algorithms``; the method is the function ``name`` of the module ``name``.

    Attributes:
        name: what a config says.
        title: what it is.
        paper: where it is from.
        backpropagates: who runs a backward pass through what.
        uplink: numbers a client sends in one round, in the symbols of the paper.
    """

    name: str
    title: str
    paper: str
    backpropagates: str
    uplink: str

    def build(self, *arguments: Any) -> "Algorithm":
        """The Algorithm from plain arguments; imported here, since a list of names needs no PyTorch."""
        made: Algorithm = getattr(import_module(f"hofl.algorithms.{self.name}"), self.name)(*arguments)
        return made


ALGORITHMS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ho_fl", "HO-FL", "Chen et al., arXiv 2609.39074", "client, top only", "E q + d_fo[i]"),
        Method("fedavg", "FedAvg", "McMahan et al., AISTATS 2017", "client, all", "d"),
    )
}
