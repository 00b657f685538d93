# SPDX-License-Identifier: Apache-2.0
"""The methods, by name: a literal table, so that adding one is one file and one line.

Uplink and downlink are numbers of one client in one round, in these symbols: d trainables, d_c of them
below the boundary, d_fo above it, d_a of an auxiliary head, q ``zo.probes``, E ``local.steps``, k
``split.upload_every``, A numbers of one boundary activation, y labels and lengths of one batch, lag the
rounds since a client was last in step. The law suite evaluates every uplink against bytes that were metered.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from hofl.protocol.base import Algorithm

_ALL = ("forward", "central", "tangent", "sketch", "none")
_LABELS = ("boundary activations", "labels", "lengths of texts")
_SCALARS = "E x q scalars"
_IN_TURN = "one for all clients, trained by one after another"
_REPLICAS = "a replica for each client of a round, then averaged"


class Method(NamedTuple):
    """One row of ``hofl list algorithms``; the method is the function ``name`` of its module.

    Attributes:
        name: what a config says.
        title: what it is.
        paper: where it is from.
        paradigm: federated, split (the server holds the top), or both halves in one place.
        boundary: ``none``, ``one`` for all clients, or ``each`` client its own.
        uploads: boundary activations a client sends in a local step.
        local_steps: between two aggregations.
        backpropagates: who runs a backward pass through what.
        memory: the class of a client's memory.
        uplink: numbers a client sends in one round.
        downlink: numbers a client receives in one round, keys apart.
        rate: of convergence, as the paper states it for non-convex losses.
        leaves_device: what a client sends, in words; of a bottom without probes, the last one only.
        needs: arguments of its function, by name.
        estimators: what ``zo.estimator`` may be, the paper's first; none where nothing is probed.
        top: of split methods, how many tops the server has and how they are trained.
        module: where its function is, if not in the module of its name.
        centralised: one client holds all the data.
    """

    name: str
    title: str
    paper: str
    paradigm: Literal["federated", "split", "centralised"]
    boundary: Literal["none", "one", "each"]
    uploads: str
    local_steps: str
    backpropagates: str
    memory: str
    uplink: str
    downlink: str
    rate: str
    leaves_device: tuple[str, ...]
    needs: tuple[str, ...]
    estimators: tuple[str, ...] = ()
    top: str = ""
    module: str = ""
    centralised: bool = False

    @property
    def hybrid(self) -> bool:
        """Whether clients have a boundary."""
        return self.boundary != "none"

    @property
    def split(self) -> bool:
        """Whether the server holds the top, and activations and labels travel."""
        return self.boundary == "one"

    def build(self, **given: Any) -> "Algorithm":
        """The Algorithm; imported here, since a list of names needs no PyTorch.

        Args:
            given: at least what the row ``needs``: layout, boundaries, training, probing, preferred, split,
                shared, proximal.
        """
        function = getattr(import_module(f"hofl.algorithms.{self.module or self.name}"), self.name)
        made: Algorithm = function(*(given[name] for name in self.needs))
        return made


_PROBED = ("layout", "boundaries", "training", "probing", "split")
_TRAINED = ("layout", "boundaries", "training", "split")

ALGORITHMS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "ho_fl", "HO-FL", "Chen et al., arXiv 2609.39074",
            "federated", "each", "0", "E", "client, top only", "training for the top, inference below",
            "E q + d_fo", "d", "O(sqrt((1 + sum_i p_i d_zo[i]/q) / T)) + bias of the sampling",
            ("E x q scalars of the bottom", "a digest of the bottom", "the update of the top"),
            ("layout", "boundaries", "training", "probing", "preferred"), _ALL,
        ),
        Method(
            "ho_sfl", "HO-SFL", "arXiv 2603.14773",
            "split", "one", "1", "1", "server", "inference",
            "A + y + q", "A + q + lag q", "O(sqrt(d_c / (q T)))",
            ("q scalars and a digest of the bottom", *_LABELS), _PROBED, _ALL,
            top="one for all clients, their gradients averaged",
        ),
        Method(
            "hosl", "HOSL", "hybrid-order split learning, as HO-FL App. A describes it",
            "split", "one", "2 q + 1", "–", "server", "inference",
            "E ((2 q + 1) A + y)", "E 2 q", "O(sqrt(d_c / (q T)))",
            ("a digest of the bottom", *_LABELS), _PROBED, ("central", "none"),
            centralised=True,
            top="one",
        ),
        Method(
            "heron_sfl", "HERON-SFL", "arXiv 2601.09076",
            "split", "one", "1 every k steps", "E", "server", "inference, with an auxiliary head",
            "ceil(E / k) (A + y) + d_c + d_a", "d_c + d_a", "O(sqrt(d / (E N B T)))",
            ("the update of the bottom and the auxiliary head", *_LABELS), _PROBED,
            ("forward", "central", "none"),
            top=_IN_TURN,
        ),
        Method(
            "splitfed_v1", "SplitFed V1", "Thapa et al., AAAI 2022",
            "split", "one", "1", "E", "client and server", "training for the bottom",
            "E (A + y) + d_c", "E A + d_c", "as FedAvg",
            ("the update of the bottom", *_LABELS), _TRAINED, module="splitfed",
            top=_REPLICAS,
        ),
        Method(
            "splitfed_v2", "SplitFed V2", "Thapa et al., AAAI 2022",
            "split", "one", "1", "E", "client and server", "training for the bottom",
            "E (A + y) + d_c", "E A + d_c", "first order",
            ("the update of the bottom", *_LABELS), _TRAINED, module="splitfed",
            top=_IN_TURN,
        ),
        Method(
            "splitlora", "SplitLoRA", "Lin et al., arXiv 2407.00952",
            "split", "one", "1", "E", "client and server", "training for the bottom's adapters",
            "E (A + y) + d_c", "E A + d_c", "first order",
            ("the update of the bottom's adapters", *_LABELS), _TRAINED,
            top=_IN_TURN,
        ),
        Method(
            "zo_sfl", "ZO-SFL", "the pure zeroth-order baseline of arXiv 2603.14773",
            "split", "one", "2 q", "E", "nobody", "inference",
            "E (2 q A + y) + d_c", "E q + d_c", "O(sqrt(d / T))",
            ("the update of the bottom", *_LABELS), _PROBED, ("central",),
            top=_REPLICAS,
        ),
        Method(
            "mu_splitfed", "MU-SplitFed", "arXiv 2510.21155",
            "split", "one", "2 q + 1", "1 client, tau server", "nobody", "inference",
            "(2 q + 1) A + y + d_c", "q + d_c", "O(sqrt(d / (tau T)))",
            ("the update of the bottom", *_LABELS), _PROBED, ("central",),
            top=_REPLICAS,
        ),
        Method(
            "fedavg", "FedAvg", "McMahan et al., AISTATS 2017",
            "federated", "none", "0", "E", "client, all", "training",
            "d", "d", "O(1 / sqrt(T))",
            ("the update of all trainables",), ("layout", "training"),
        ),
        Method(
            "fedprox", "FedProx", "Li et al., MLSys 2020",
            "federated", "none", "0", "E", "client, all", "training, and a copy of the trainables",
            "d", "d", "as FedAvg",
            ("the update of all trainables",), ("layout", "training", "proximal"),
        ),
        Method(
            "decomfl", "DeComFL", "Li et al., ICLR 2025",
            "federated", "none", "0", "E", "nobody", "inference, and a copy of the trainables",
            "E q", "lag E q", "O(sqrt((1 + d/q) / T))",
            (_SCALARS,), ("layout", "training", "probing", "shared"), ("central", "forward", "tangent"),
        ),
        Method(
            "hiso", "HiSo", "ICLR 2026, Hessian-informed DeComFL",
            "federated", "none", "0", "E", "nobody", "inference, and a diagonal of d",
            "E q", "lag E q", "O(sqrt(zeta / (m T)))",
            (_SCALARS,), ("layout", "training", "probing", "shared"), ("forward", "central"),
        ),
        Method(
            "fedzo", "FedZO", "Fang et al., IEEE TSP 2022",
            "federated", "none", "0", "E", "nobody", "inference, and a copy of the trainables",
            "d", "d", "pure zeroth order",
            ("the update of all trainables",), ("layout", "training", "probing"), ("forward", "central"),
        ),
        Method(
            "mezo", "MeZO", "Malladi et al., NeurIPS 2023",
            "centralised", "none", "0", "–", "nobody", "inference, and a copy of the trainables",
            "E q", "0", "effective rank, not d",
            (_SCALARS, "a digest of the trainables"),
            ("layout", "training", "probing"), ("central", "tangent"),
            centralised=True,
        ),
    )
}  # fmt: skip
