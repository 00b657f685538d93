# SPDX-License-Identifier: Apache-2.0
"""What a plan is about: a model without weights, and the minibatches that it is trained on."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hofl.core.keys import Key
from hofl.errors import ConfigError, ModelError
from hofl.memory.fake import Inputs, Loss, pretending
from hofl.memory.named import NAMED, find
from hofl.models.boundary import CutModel, cut
from hofl.models.load import refuse_code, resolve, restrict_head
from hofl.models.lora import Train, add_lora, select
from hofl.models.tiny import tiny_config
from hofl.tasks.base import Batch, token_cross_entropy

Attention = Literal["causal", "mask"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """One participation, as far as memory, compute and traffic go.

    Attributes:
        batch: examples of a local step.
        length: tokens of an example; networks for other data take the length of their data.
        attention: "causal" where no row is padded, so that fused attention runs without a mask tensor;
            "mask" where rows are padded to a common length.
        steps: E, local steps.
        probes: q.
        moments: vectors of optimizer state of the top and of the bottom.
        checkpointing: of the run; a plan has rows with and without.
        classes: outputs of a trained head, or label words.
        scored: positions at the end of a text whose next tokens the loss is of, each over the whole
            vocabulary; 0 for label words or a head at the last one.
    """

    batch: int = 16
    length: int = 1024
    attention: Attention = "causal"
    steps: int = 5
    probes: int = 2
    moments: tuple[int, int] = (2, 2)
    checkpointing: bool = False
    classes: int = 2
    scored: int = 0


@dataclass(frozen=True)
class Adapters:
    """What of a model is trained, as in ``[model]``."""

    train: Train = "lora"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    blocks: str = ""


@dataclass(frozen=True)
class Subject:
    """A model that can be made without weights.

    Attributes:
        name: what a user calls it.
        build: classes -> a module on the meta device (or, small, with real tensors), without adapters, and
            whether a trained head answers.
        dtype: of the backbone.
        adapters: what is trained.
        sample: inputs of one example where it is no text: name -> tensor [1, ...]; None for tokens.
    """

    name: str
    build: Callable[[int], tuple[nn.Module, bool]]
    dtype: torch.dtype = torch.bfloat16
    adapters: Adapters = Adapters()
    sample: dict[str, Tensor] | None = None

    def with_rank(self, rank: int) -> "Subject":
        """The same with adapters of another rank."""
        return replace(self, adapters=replace(self.adapters, rank=rank))


@dataclass(frozen=True)
class Stage:
    """A cut model of fake tensors with one batch of them; good inside :func:`staged` alone.

    Attributes:
        model: the model.
        inputs: the batch.
        loss: of the model's output.
        alike: whether the activation is of one shape at every boundary.
    """

    model: CutModel
    inputs: Inputs
    loss: Loss
    alike: bool


@contextmanager
def staged(subject: Subject, work: Workload) -> Iterator[Stage]:
    """Build the model without weights and cut it.

    Raises:
        ModelError, ConfigError: it cannot be trained as asked.
    """
    module, headed = subject.build(work.classes)
    module = module.to(dtype=subject.dtype).eval()
    own = subject.adapters
    if subject.sample is None:
        _check_length(module, work.length)
        if own.train == "lora":
            given = {"rank": own.rank, "alpha": own.alpha, "targets": own.targets}
            module = add_lora(module, key=Key.of(0, "init"), **given)  # type: ignore[arg-type]
        select(module, own.train)
    with pretending(module, work.attention == "causal"):
        if subject.sample is None and not headed and not work.scored:
            restrict_head(module, list(range(work.classes)))
        model = cut(module, blocks=own.blocks or None, checkpointing=work.checkpointing)
        shape = (work.batch, work.scored) if work.scored else (work.batch,)
        targets = torch.zeros(shape, dtype=torch.int64)

        def loss(output: Tensor) -> Tensor:
            """Cross-entropy at the last position, or at the last ones."""
            if work.scored:
                return token_cross_entropy(output, Batch({}, targets))
            last = output[:, -1] if output.ndim == 3 else output
            return torch.nn.functional.cross_entropy(last.float(), targets)

        yield Stage(model, _inputs(model, subject, work, headed), loss, subject.sample is None)


def _inputs(model: CutModel, subject: Subject, work: Workload, headed: bool) -> Inputs:
    """One batch, with the arguments that :mod:`hofl.tasks.fill` gives."""
    if subject.sample is not None:
        return {n: torch.zeros((work.batch, *t.shape[1:]), dtype=t.dtype) for n, t in subject.sample.items()}
    unwrap = getattr(model.module, "get_base_model", None)
    accepted = inspect.signature((unwrap() if unwrap else model.module).forward).parameters
    inputs = {
        name: torch.zeros(work.batch, work.length, dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "position_ids")
        if name in accepted
    }
    if not headed and "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = torch.arange(work.length - max(1, work.scored), work.length)
    return inputs


def _check_length(module: nn.Module, length: int) -> None:
    longest = getattr(module.config, "max_position_embeddings", None)
    if length < 1 or (isinstance(longest, int) and length > longest):
        raise ConfigError(f"--length {length}: allowed is 1 to {longest or 'any'} tokens for this model")


def subject_of(
    name: str, dtype: str = "bfloat16", adapters: Adapters | None = None, head: bool = False
) -> Subject:
    """A model by name: one of :data:`NAMED`, a folder with ``config.json``, or what a run's source may be.

    Args:
        name: as said.
        dtype: of the backbone.
        adapters: what is trained; None for LoRA of rank 8.
        head: whether a trained head answers, and not label words.

    Raises:
        ModelError: there is none of that name, or it is no transformer.
    """
    config = _config(name)

    def build(classes: int) -> tuple[nn.Module, bool]:
        """The module, and whether it has a head."""
        return _transformer(config, name, classes, head)

    return Subject(name, build, DTYPES[dtype], adapters or Adapters())


def _config(name: str) -> Any:
    """The Hugging Face configuration of a name."""
    from transformers import AutoConfig

    known = find(name)
    if known and not Path(name).exists():
        return AutoConfig.for_model(known[0], **known[1])
    if name.startswith("tiny:"):
        return tiny_config(name.removeprefix("tiny:"))
    if name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~")):
        return _read(name, AutoConfig)
    if "/" not in name and ":" not in name and not Path(name).exists():
        raise ModelError(
            f'MODEL = "{name}": no such file or folder, and none of the known shapes: {", ".join(NAMED)}'
        )
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / "config.json").is_file():
        refuse_code(folder)
        return _read(str(folder), AutoConfig)
    base, _ = resolve(name)
    return _read(base, AutoConfig)


def _read(place: str, library: Any) -> Any:
    """A ``config.json`` in a folder or in the hub's cache."""
    path = Path(place) / "config.json"
    try:
        if path.is_file() and "model_type" not in json.loads(path.read_text(encoding="utf-8")):
            raise ValueError("it names no model_type")
        return library.from_pretrained(place, trust_remote_code=False, local_files_only=path.is_file())
    except Exception as error:  # the library raises of every kind at a damaged file
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f'MODEL = "{place}": its config.json is not that of a transformer: {reason}'
        ) from None


def _transformer(config: Any, name: str, classes: int, head: bool) -> tuple[nn.Module, bool]:
    """The module on the meta device, with next-token logits, or with a head where asked or an encoder."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    headed = head or (config.model_type in ENCODERS and not getattr(config, "is_decoder", False))
    if headed:
        config.num_labels = classes
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    kind = AutoModelForSequenceClassification if headed else AutoModelForCausalLM
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return kind.from_config(config), headed
    except Exception as error:  # the library raises of every kind at a shape it cannot build
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f'MODEL = "{name}" is not a transformer that can be trained: {reason}') from None
