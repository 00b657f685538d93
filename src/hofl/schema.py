# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, section by section: what each may be, and which contradict each other."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hofl.algorithms import ALGORITHMS
from hofl.errors import ConfigError
from hofl.tasks.partition import KINDS


def _check(test: Callable[[Any], bool], allowed: str) -> AfterValidator:
    def _validate(value: Any) -> Any:
        if not test(value):
            raise ValueError(f"must be {allowed}")
        return value

    return AfterValidator(_validate)


def _one_of(names: Iterable[str]) -> AfterValidator:
    quoted = [f"'{name}'" for name in names]
    allowed = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
    return _check(lambda v: f"'{v}'" in quoted, allowed)


Positive = Annotated[float, Field(allow_inf_nan=False), _check(lambda v: v > 0, "> 0")]
NotNegative = Annotated[float, Field(allow_inf_nan=False), _check(lambda v: v >= 0, ">= 0")]
Share = Annotated[float, Field(allow_inf_nan=False), _check(lambda v: 0 <= v < 1, "in [0, 1)")]
Count = Annotated[int, _check(lambda v: v >= 1, ">= 1")]
Natural = Annotated[int, _check(lambda v: v >= 0, ">= 0")]
Seed = Annotated[int, _check(lambda v: -(2**63) <= v < 2**63, "a 64-bit signed integer")]


def _part(size: int | str) -> int | str:
    """Part of the clients: a count, a percentage, or all."""
    good = size >= 1 if isinstance(size, int) else size == "all" or _percent(size) is not None
    if not good:
        raise ValueError('must be a count >= 1, a percentage such as "50%", or "all"')
    return size


def _percent(text: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    return float(found[1]) if found and 0 < float(found[1]) <= 100 else None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LoraConfig(_Section):
    """LoRA adapters; ``targets`` empty: the family's query and value projections."""

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ()


class ModelConfig(_Section):
    """Where the model comes from, its precision and what of it is trained."""

    source: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    train: Literal["lora", "full", "head"] = "lora"
    blocks: str = ""
    checkpointing: bool = False
    lora: LoraConfig = LoraConfig()


class TaskConfig(_Section):
    """The data, the template that turns a row into a question, and the columns it reads."""

    name: Literal["text", "synthetic"] = "text"
    template: str = "sst2-v1"
    train: str = ""
    evaluation: str = ""
    text: str = "sentence"
    label: str = "label"
    length: Count = 64
    train_rows: Natural = 0
    evaluation_rows: Natural = 0


class PartitionConfig(_Section):
    """How examples are dealt to clients; ``files`` means one client per file of a glob."""

    kind: Annotated[str, _one_of(KINDS)] = "iid"
    clients: Count = 30
    alpha: Positive = 0.5
    minimum: Count = 1
    size: Count = 4000
    labels_per_client: Count = 2


class CohortConfig(_Section):
    """Who takes part in a round, and the boundary of each client.

    Attributes:
        size: clients a round: a count, a percentage (rounded up) or "all".
        preference: beta in [0, 1): 0 samples uniformly, higher favours cheap clients.
        boundaries: blocks below the cut, one number per tier, or one per client when listed.
        assign: tiers are dealt equally by a seeded permutation; listed is taken as written.
        weighting: of the mean over clients: equal (the papers'), or by the examples in the shard.
    """

    size: Annotated[int | str, AfterValidator(_part)] = 6
    preference: Share = 0.75
    boundaries: tuple[Natural, ...] = ()
    assign: Literal["tiers", "listed"] = "tiers"
    weighting: Literal["equal", "examples"] = "equal"


class LocalConfig(_Section):
    """A client's work in a round: optimizer steps, and examples in each."""

    steps: Count = 5
    batch: Count = 16


class OptimizerConfig(_Section):
    """An optimizer; settings that ``name`` does not use are ignored."""

    name: Literal["sgd", "adamw"] = "adamw"
    lr: Positive = 1e-5
    momentum: Share = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 5e-4


class ZoConfig(_Section):
    """How the bottom is trained; what ``optimizer`` leaves unset is the same as the top's."""

    estimator: Literal["forward", "central", "tangent", "sketch", "none"] = "forward"
    probes: Count = 2
    radius: Positive = 1e-3
    directions: Literal["gaussian", "rademacher", "hadamard"] = "gaussian"
    optimizer: OptimizerConfig | None = None


class EvaluationConfig(_Section):
    """Evaluate every so many rounds, before the first and after the last."""

    every: Count = 10
    batch: Count = 32


class RunConfig(_Section):
    """How the run is executed and what it keeps."""

    threads: Natural = 0
    ledger: Literal["full", "scalars"] = "full"


class Config(_Section):
    """Everything that decides a run's result, and nothing else."""

    algorithm: Annotated[str, _one_of(ALGORITHMS)] = "ho_fl"
    seed: Seed = 42
    rounds: Count = 160
    quorum: Count = 1
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    partition: PartitionConfig = PartitionConfig()
    cohort: CohortConfig = CohortConfig()
    local: LocalConfig = LocalConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    zo: ZoConfig = Field(default=ZoConfig(), validate_default=True)  # after optimizer: it inherits from it
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @property
    def bottom_optimizer(self) -> OptimizerConfig:
        """The optimizer of the bottom: ``[zo.optimizer]``, with the rest from ``[optimizer]``."""
        return self.zo.optimizer or self.optimizer

    @field_validator("zo")
    @classmethod
    def _inherit(cls, zo: ZoConfig, info: ValidationInfo) -> ZoConfig:
        """Settings that ``[zo.optimizer]`` leaves unset are those of ``[optimizer]``."""
        if "optimizer" not in info.data:  # it is not valid: that is what will be said
            return zo
        own = zo.optimizer.model_dump(exclude_unset=True) if zo.optimizer else {}
        resolved = OptimizerConfig(**{**info.data["optimizer"].model_dump(), **own})
        return zo.model_copy(update={"optimizer": resolved})

    @model_validator(mode="after")
    def _together(self) -> "Config":
        for path, wrong, allowed in _contradictions(self):
            if wrong:
                raise PydanticCustomError("together", "{allowed}", {"path": path, "allowed": allowed})
        return self


def _contradictions(c: Config) -> Iterator[tuple[str, bool, str]]:
    """Settings that are fine alone and wrong together: (key, is it wrong, what is allowed)."""
    text, fixed = c.task.name == "text", c.partition.kind != "files"
    yield "model.source", text and not c.model.source, "is missing; name a hub id, a folder or a .gguf file"
    own = not text and bool(c.model.source)
    yield "model.source", own, "must be absent: the synthetic task brings its own network"
    yield "task.train", text and not c.task.train, "is missing; name a file, a glob or hub:dataset:split"
    yield "task.evaluation", text and not c.task.evaluation, "is missing; name a file or hub:dataset:split"
    if fixed:
        size, clients = c.cohort.size, c.partition.clients
        yield (
            "cohort.size",
            isinstance(size, int) and size > clients,
            f"must be at most partition.clients = {clients}",
        )
        members = cohort_size(size, clients)
        yield "quorum", c.quorum > members, f"must be at most the cohort, {members} clients"
        listed = c.cohort.assign == "listed" and len(c.cohort.boundaries) != clients
        yield (
            "cohort.boundaries",
            listed,
            f"must list one number per client, {clients}, when assign is 'listed'",
        )
    flat = not ALGORITHMS[c.algorithm].hybrid and any(c.cohort.boundaries)
    reason = f"must be absent or 0: {c.algorithm} backpropagates through every block"
    yield "cohort.boundaries", flat, reason


def cohort_size(size: int | str, clients: int) -> int:
    """Clients a round: a count as it is, a percentage of the clients rounded up, or all of them.

    Raises:
        ConfigError: more are asked for than there are.
    """
    if isinstance(size, str):
        share = _percent(size)
        return clients if share is None else math.ceil(round(share * clients / 100, 9))
    if size > clients:
        raise ConfigError(f"cohort.size = {size}: must be at most the {clients} clients that have data")
    return size
