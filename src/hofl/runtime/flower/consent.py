# SPDX-License-Identifier: Apache-2.0
"""What the owner of a node agrees to: checked on the node, before it loads a model or computes anything.

A server may be wrong or hostile. The checks compare numbers alone: nothing is allocated, whatever is asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hofl.algorithms import ALGORITHMS
from hofl.config import Config
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.errors import ClientError
from hofl.protocol.aggregate import steps_of_epochs
from hofl.runtime.flower.node_config import NodeConfig

Refusal = tuple[str, bool, str]
"""(line of the node's file, is it violated, how)."""

COUNTS = ("round", "steps", "batch", "probes", "boundary")
"""What a plan may say that is checked: whole numbers, none below 0."""
_FLOAT32 = 4


@dataclass(frozen=True)
class Consent:
    """The ``[consent]`` of a node, with what it declares of its device; 0 and empty allow anything.

    Attributes:
        models: allowed SHA-256 of the frozen weights, lower case.
        max_probe_cost: probes x bottom parameters x steps of one participation.
        split: whether activations and labels may leave.
        minimum_batch: examples a step.
        max_rounds: of a run.
        differential_privacy: whether only runs that have it are joined; no run has it yet.
        boundary: blocks below which this device cannot backpropagate; -1 any.
        memory: bytes.
    """

    models: tuple[str, ...] = ()
    max_probe_cost: int = 0
    split: bool = False
    minimum_batch: int = 1
    max_rounds: int = 0
    differential_privacy: bool = False
    boundary: int = -1
    memory: int = 0

    @classmethod
    def of(cls, node: NodeConfig) -> "Consent":
        """What a node's file says."""
        lines = node.consent.model_dump()
        lines["models"] = tuple(model.lower() for model in node.consent.models)
        return cls(**lines, boundary=node.device.boundary, memory=node.device.bytes)

    def check_run(self, config: Config, model_sha256: str, examples: int | None = None) -> None:
        """Whether this node takes part in a run.

        Args:
            config: the server's.
            model_sha256: of its frozen weights; what the node then loads must have it.
            examples: that this client holds, if that is known: a step has no more.

        Raises:
            ClientError: ``refused by consent.<line>: ...``.
        """
        _refuse(self._of_run(config, model_sha256, examples))

    def check_plan(
        self,
        plan: Mapping[str, Any],
        layout: Layout,
        config: Config | None = None,
        held: int = 0,
        examples: int | None = None,
    ) -> None:
        """Whether this node does what one message asks; what a message does not say is not checked.

        Args:
            plan: values of the request.
            layout: of this node's model.
            config: the run's, to which the plan must then keep.
            held: bytes this process has in use already.
            examples: that this client holds, if that is known: ``local.epochs`` allows no more steps.

        Raises:
            ClientError: ``refused by consent.<line>: ...``, or a number in the plan is none.
        """
        for name in COUNTS:
            value = plan.get(name, 0)
            if type(value) is not int or not 0 <= value < 2**63:
                raise ClientError(f"refused: the plan's {name} is no whole number of 0 or more")
        if plan.get("boundary", 0) > layout.blocks:
            raise ClientError(
                f"refused: asked for boundary {plan['boundary']}, this model has {layout.blocks} blocks"
            )
        if config is not None:
            _keep_to(plan, config, examples)
        _refuse(self._of_plan(plan, layout, held))

    def check_request(
        self, request: Record, layout: Layout, config: Config, held: int = 0, examples: int | None = None
    ) -> None:
        """:meth:`check_plan` on a whole message, and on the past rounds that it asks this node to replay.

        Raises:
            ClientError: as there.
        """
        self.check_plan(request.values, layout, config, held, examples)
        past = request.arrays.get("scalars/history")
        if past is None:
            return
        if past.ndim != 3 or len(past) > config.split.history:
            most = config.split.history
            raise ClientError(
                f"refused: a history of shape {past.shape}, at most {most:,} rounds by split.history"
            )
        steps, probes = past.shape[1:]
        self.check_plan({**request.values, "steps": steps, "probes": probes}, layout, config, held)

    def _of_run(self, c: Config, model: str, examples: int | None) -> Iterator[Refusal]:
        method = ALGORITHMS[c.algorithm]
        private = self.differential_privacy
        yield "consent.differential_privacy", private, "this run has none, this node joins only runs that do"
        yield (
            "consent.split",
            method.split and not self.split,
            f"{c.algorithm} is a split method: boundary activations and labels would leave this node",
        )
        unknown = bool(self.models) and model.lower() not in self.models
        more = f" and {len(self.models) - 3} more" if len(self.models) > 3 else ""
        allowed = ", ".join(known[:12] for known in self.models[:3]) + more
        yield "consent.models", unknown, f"the run's model has SHA-256 {model[:12]}, allowed is {allowed}"
        yield "consent.max_rounds", *_over("rounds", c.rounds, self.max_rounds)
        yield "consent.minimum_batch", *self._batch(c.local.batch, examples)
        declared = self.boundary
        whole = not method.estimators and declared > 0
        yield (
            "device.boundary",
            whole,
            f"{c.algorithm} backpropagates through every block of a client, this node declared {declared}",
        )

    def _of_plan(self, plan: Mapping[str, Any], layout: Layout, held: int) -> Iterator[Refusal]:
        cut, low = plan.get("boundary"), self.boundary
        if cut is not None:
            yield "device.boundary", cut < low, f"asked for boundary {cut}, this node declared {low}"
        if "batch" in plan:
            yield "consent.minimum_batch", *self._batch(plan["batch"], None)
        if "round" in plan:
            yield "consent.max_rounds", *_over("rounds", plan["round"] + 1, self.max_rounds)
        if "steps" not in plan and "probes" not in plan:
            return  # a later message of a participation, whose plan was checked
        steps, probes = plan.get("steps", 1), plan.get("probes", 0)
        bottom = layout.size if cut is None else layout.bottom_size(cut)
        cost, most = probes * bottom * steps, self.max_probe_cost
        yield (
            "consent.max_probe_cost",
            0 < most < cost,
            f"asked for {probes:,} probes x {bottom:,} parameters x {steps:,} steps = {cost:,}, "
            f"allowed are {most:,}",
        )
        need = held + _FLOAT32 * (bottom + steps * probes)
        over = 0 < self.memory < need
        yield "device.memory", over, f"needs at least {need:,} bytes, this node has {self.memory:,}"

    def _batch(self, asked: int, examples: int | None) -> tuple[bool, str]:
        """Whether a step sees too few examples: what is asked for, or all that this client holds."""
        low, size = self.minimum_batch, asked if examples is None else min(asked, examples)
        whose = "asked for batches of" if size == asked else "this client holds only"
        return size < low, f"{whose} {size} examples, a step must see at least {low}"


def _over(what: str, asked: int, most: int) -> tuple[bool, str]:
    return 0 < most < asked, f"asked for {asked:,} {what}, allowed are {most:,}"


def _keep_to(plan: Mapping[str, Any], config: Config, examples: int | None) -> None:
    """Refuse a plan that goes beyond the configuration this node has agreed to."""
    local, paced = config.local, config.local.epochs is not None and examples is not None
    steps = local.steps
    if examples is not None:
        steps = steps_of_epochs(local.epochs, examples, local.batch, local.steps)
    limits = {
        "round": ("rounds", config.rounds - 1),
        "steps": ("local.epochs" if paced else "local.steps", steps),
        "batch": ("local.batch", config.local.batch),
        "probes": ("zo.probes", config.zo.probes),
    }
    for name, (setting, most) in limits.items():
        if plan.get(name, 0) > most:
            raise ClientError(
                f"refused: the plan has {name} = {plan[name]:,}, at most {most:,} by this run's {setting}"
            )


def _refuse(refusals: Iterator[Refusal]) -> None:
    for line, violated, how in refusals:
        if violated:
            raise ClientError(f"refused by {line}: {how}")
