# SPDX-License-Identifier: Apache-2.0
"""The methods, by name: a literal table, so that adding one is one file and one line."""

from collections.abc import Callable
from typing import NamedTuple

from hofl.algorithms.base import Algorithm
from hofl.algorithms.fedavg import fedavg
from hofl.algorithms.ho_fl import ho_fl


class Method(NamedTuple):
    """One row of ``hofl list algorithms``.

    Attributes:
        build: makes the Algorithm from plain arguments.
        title: what it is.
        paper: where it is from.
        backpropagates: who runs a backward pass through what.
        uplink: numbers a client sends in one round, in the symbols of the paper.
    """

    build: Callable[..., Algorithm]
    title: str
    paper: str
    backpropagates: str
    uplink: str


ALGORITHMS: dict[str, Method] = {
    "ho_fl": Method(ho_fl, "HO-FL", "Chen et al., arXiv 2609.39074", "client, top only", "E q + d_fo[i]"),
    "fedavg": Method(fedavg, "FedAvg", "McMahan et al., AISTATS 2017", "client, all", "d"),
}
