# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, section by section: what each may be, and which contradict each other."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hofl.algorithms import ALGORITHMS
from hofl.checks import contradictions, dated_budgets, memory, percent
from hofl.tasks.files import CLIENT_ID
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
Margin = Annotated[float, Field(allow_inf_nan=False), _check(lambda v: v >= 1, ">= 1")]
Count = Annotated[int, _check(lambda v: v >= 1, ">= 1")]
Natural = Annotated[int, _check(lambda v: v >= 0, ">= 0")]
Seed = Annotated[int, _check(lambda v: -(2**63) <= v < 2**63, "a 64-bit signed integer")]


def _part(size: int | str) -> int | str:
    """Part of the clients: a count, a percentage, or all."""
    good = size >= 1 if isinstance(size, int) else size == "all" or percent(size) is not None
    if not good:
        raise ValueError('must be a count >= 1, a percentage such as "50%", or "all"')
    return size


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LoraConfig(_Section):
    """LoRA adapters; ``targets`` empty: the family's query and value projections."""

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ()


class ModelConfig(_Section):
    """Where the model comes from, its precision and what of it is trained.

    ``norm`` and ``width`` (0: the usual one) are those of the networks for images.
    """

    source: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    train: Literal["lora", "full", "head"] = "lora"
    blocks: str = ""
    norm: Literal["group", "batch", "batch-frozen"] = "group"
    width: Natural = 0
    checkpointing: bool = False
    lora: LoraConfig = LoraConfig()


class TaskConfig(_Section):
    """The data, the template that turns a row into a question, and the columns it reads."""

    name: Literal["text", "generation", "language", "vision", "synthetic"] = "text"
    template: str = "sst2-v1"
    train: str = ""
    evaluation: str = ""
    text: str = "sentence"
    image: str = "img"
    label: str = "label"
    length: Count = 64
    new_tokens: Count | None = None  # of the generation task: 64
    train_rows: Natural = 0
    evaluation_rows: Natural = 0


def _ids(names: tuple[str, ...]) -> bool:
    """Whether all are client ids, each once."""
    return len(set(names)) == len(names) and all(CLIENT_ID.fullmatch(name) for name in names)


class PartitionConfig(_Section):
    """How examples are dealt to clients.

    ``files`` means one client per file of a glob; ``nodes`` that the data is at the nodes, whose client ids
    ``names`` lists (a client's number is its place), and stays there.
    """

    kind: Annotated[str, _one_of(KINDS)] = "iid"
    clients: Count = 30
    alpha: Positive = 0.5
    minimum: Count = 1
    size: Count = 4000
    labels_per_client: Count = 2
    names: Annotated[tuple[str, ...], _check(_ids, "ids of 1 to 64 of A-Z a-z 0-9 _ -, each once")] = ()


class CohortConfig(_Section):
    """Who takes part in a round, and the boundary of each client.

    Attributes:
        size: clients a round: a count, a percentage (rounded up) or "all".
        preference: beta in [0, 1): 0 samples uniformly, higher favours cheap clients.
        schedule: how the preference moves over the run's rounds: linear and cosine from ``preference`` in the
            first to ``final`` in the last; measured between the two, after what the rounds so far have shown,
            the noise that probing gave clients with a large bottom against the drift between clients.
        final: preference of the last round of a linear or cosine schedule, the least of a measured one.
        boundaries: blocks below the cut, one number per tier, or one per client when listed.
        assign: tiers are dealt equally by a seeded permutation; listed is taken as written; declared is what
            each node says of itself when it joins; budgets is the smallest boundary that fits the client's.
        budgets: memory, one size per tier, dealt as tiers are, or one per client where there are as many.
        margin: what a planned peak is multiplied by before it is held against a budget.
        budget_changes: (round, which, size): from that round on the budget at that place of ``budgets``, or
            of the client with that id, is another.
        weighting: of the mean over clients: equal (the papers'), or by the examples in the shard.
    """

    size: Annotated[int | str, AfterValidator(_part)] = 6
    preference: Share = 0.75
    schedule: Literal["constant", "linear", "cosine", "measured"] = "constant"
    final: Share = 0.0
    boundaries: tuple[Natural, ...] = ()
    assign: Literal["tiers", "listed", "declared", "budgets"] = "tiers"
    budgets: tuple[Annotated[str, AfterValidator(memory)], ...] = ()
    margin: Margin = 1.1
    budget_changes: Annotated[tuple[tuple[int, int | str, str], ...], BeforeValidator(dated_budgets)] = ()
    weighting: Literal["equal", "examples"] = "equal"


class LocalConfig(_Section):
    """A client's work in a round: optimizer steps, and examples in each; FedProx's proximal coefficient.

    With ``epochs`` a client that holds n examples takes ceil(epochs n / batch) steps, ``steps`` at most.
    """

    steps: Count = 5
    epochs: Positive | None = None
    batch: Count = 16
    proximal: NotNegative = 1e-3


class OptimizerConfig(_Section):
    """An optimizer; settings that ``name`` does not use are ignored."""

    name: Literal["sgd", "adamw"] = "adamw"
    lr: Positive = 1e-5
    momentum: Share = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 5e-4


class ZoConfig(_Section):
    """How the zeroth-order part is trained; what ``optimizer`` leaves unset is as in ``[optimizer]``.

    Attributes:
        estimator: unset, the one of the algorithm's paper.
        probes: q, directions a step.
        radius: mu of the differences.
        directions: the law they are drawn from.
        average: of DeComFL's clients: their scalars, or the models that these make.
        curvature: nu of HiSo, the share of the newest step in its diagonal.
        curvature_floor: added to the square of that step.
        curvature_every: HiSo's diagonal moves after each round or after each local step.
        optimizer: of the zeroth-order part.
    """

    estimator: Literal["forward", "central", "tangent", "sketch", "none"] | None = None
    probes: Count = 2
    radius: Positive = 1e-3
    directions: Literal["gaussian", "rademacher", "hadamard", "sphere"] = "gaussian"
    average: Literal["scalars", "models"] = "scalars"
    curvature: Share = 0.05
    curvature_floor: NotNegative = 1e-8
    curvature_every: Literal["round", "step"] = "round"
    optimizer: OptimizerConfig | None = None


class SplitConfig(_Section):
    """How the halves of a split model talk; settings of single methods are named with them.

    Attributes:
        wire: type in which activations and feedback travel.
        history: rounds a client may lag before it gets a snapshot (HO-SFL, DeComFL, HiSo).
        upload_every: local steps between two uploads (HERON-SFL).
        server_steps: steps of the server a round (MU-SplitFed).
        global_lr: rate of the aggregation (MU-SplitFed).
        delay: mean of a client's exponential delay, in server steps (MU-SplitFed).
    """

    wire: Literal["float32", "bfloat16"] = "float32"
    history: Count = 1024
    upload_every: Count = 1
    server_steps: Count = 2
    global_lr: Positive = 1.0
    delay: NotNegative = 0.0


class EvaluationConfig(_Section):
    """Evaluate every so many rounds, before the first and after the last."""

    every: Count = 10
    batch: Count = 32


class FleetConfig(_Section):
    """How a run on a network waits for its clients; a run in one process has no use for it.

    Attributes:
        deadline: seconds that a question waits for its answers.
        enough: answers after which it waits no longer; 0 waits for the whole cohort. A cohort larger than
            this is over-sampled: whoever is slow is left out.
        retries: times a question is sent again to a client that was lost on the way.
        join: seconds to wait for clients before the first round.
        minimum: clients that must be there by then; 0: all of them.
    """

    deadline: Positive = 600.0
    enough: Natural = 0
    retries: Natural = 2
    join: Positive = 300.0
    minimum: Natural = 0


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
    split: SplitConfig = SplitConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    fleet: FleetConfig = FleetConfig()
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
        method = ALGORITHMS.get(info.data.get("algorithm", ""))
        papers = method.estimators[0] if method and method.estimators else "forward"
        return zo.model_copy(update={"optimizer": resolved, "estimator": zo.estimator or papers})

    @model_validator(mode="after")
    def _together(self) -> "Config":
        for path, wrong, allowed in contradictions(self):
            if wrong:
                raise PydanticCustomError("together", "{allowed}", {"path": path, "allowed": allowed})
        return self
