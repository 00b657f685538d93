# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a task of a language model: classification, answers to questions, or plain text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hofl.config import Config, about
from hofl.core.keys import Key
from hofl.models.boundary import CutModel, cut
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition

if TYPE_CHECKING:
    from hofl.models.load import Loaded
    from hofl.tasks.generation_data import Columns, QuestionData
    from hofl.tasks.language_data import LanguageData
    from hofl.tasks.text_data import TextData

MODEL, _ADAPTERS = (int.from_bytes(name, "big") for name in (b"model", b"adapter"))
"""Coordinates of the streams that draw a head and adapters; no counter is as large."""

NEW_TOKENS = 64
"""Tokens of the longest answer where ``task.new_tokens`` does not say."""

Built = tuple[Task, "Loaded"]


def load_text(config: Config, device: str) -> Built:
    """The task of a language model and the model; data is read first, so bad data is said at once.

    Raises:
        ConfigError, DataError, ModelError: one line that says what to mend.
    """
    return _LOADERS[config.task.name](config, device)


def divided_of(config: Config) -> Partition:
    """The ``[partition]`` of a configuration."""
    return Partition(**config.partition.model_dump())


def _classified(config: Config, device: str) -> Built:
    from hofl.tasks.text_data import read_held_out, read_text

    task, divided = config.task, divided_of(config)
    settings = task.model_dump(include={"text", "label", "evaluation_rows"})
    settings |= {"template_id": task.template, "seed": config.seed}
    if divided.kind == "nodes":
        data = read_held_out(task.evaluation, divided, **settings)
    else:
        data = read_text(task.train, task.evaluation, divided, train_rows=task.train_rows, **settings)
    return _with_words(config, device, data)


def _with_words(config: Config, device: str, data: "TextData") -> Built:
    """The classification task on data that has been read, and the model."""
    from hofl.models.load import restrict_head
    from hofl.tasks.text import text_task
    from hofl.tasks.tokens import word_tokens

    head = len(data.names) if data.template.head else None
    length, batch = config.task.length, config.evaluation.batch
    with about("model.source"):
        loaded = _loaded(config, device, head)
        if head is None:
            restrict_head(loaded.module, word_tokens(loaded.tokenizer, data.template))
        built = text_task(data, cut_of(config, loaded), loaded.tokenizer, length=length, batch=batch)
    return _with_facts(built, loaded)


def _loaded(config: Config, device: str, head: int | None = None) -> "Loaded":
    from hofl.models.load import load

    # A tiny model stands for a pretrained one: the same for every seed, so that an export finds it again.
    key = None if config.model.source.startswith("tiny:") else Key.of(config.seed, "init", MODEL)
    return load(config.model.source, dtype=config.model.dtype, device=device, head=head, key=key)


def _with_facts(built: Task, loaded: "Loaded") -> Built:
    return replace(built, facts={**built.facts, "model": loaded.facts}), loaded


def cut_of(config: Config, loaded: "Loaded") -> CutModel:
    """The loaded model with what is to be trained chosen, cut into blocks."""
    from hofl.models.lora import add_lora, select

    module, lora = loaded.module, config.model.lora
    if config.model.train == "lora":
        key = Key.of(config.seed, "init", _ADAPTERS)
        module = add_lora(module, key=key, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    select(module, config.model.train)
    return cut(module, blocks=config.model.blocks or None, checkpointing=config.model.checkpointing)


def _columns(config: Config) -> "Columns":
    from hofl.tasks.generation_data import Columns

    return Columns(config.task.template, config.task.text, config.task.label)


def _generation(config: Config, device: str) -> Built:
    from hofl.tasks.generation_data import read_held_out, read_questions

    task, divided, columns = config.task, divided_of(config), _columns(config)
    sizes = {"seed": config.seed, "evaluation_rows": task.evaluation_rows}
    if divided.kind == "nodes":
        data = read_held_out(task.evaluation, divided, columns, **sizes)
    else:
        rows = task.train_rows
        data = read_questions(task.train, task.evaluation, divided, columns, train_rows=rows, **sizes)
    return _with_answers(config, device, data)


def _with_answers(config: Config, device: str, data: "QuestionData") -> Built:
    """The generation task on data that has been read, and the model."""
    from hofl.tasks.generation import generation_task

    task = config.task
    sizes = {"length": task.length, "new_tokens": task.new_tokens or NEW_TOKENS}
    with about("model.source"):
        loaded = _loaded(config, device)
        model = cut_of(config, loaded)
        built = generation_task(data, model, loaded.tokenizer, batch=config.evaluation.batch, **sizes)
    return _with_facts(built, loaded)


def _language(config: Config, device: str) -> Built:
    from hofl.tasks.language_data import read_files, read_held_out

    task, divided = config.task, divided_of(config)
    if divided.kind == "nodes":
        data = read_held_out(task.evaluation, divided, seed=config.seed)
    else:
        data = read_files(task.train, task.evaluation, divided, seed=config.seed)
    rows = task.model_dump(include={"train_rows", "evaluation_rows"})
    return _with_pieces(config, device, data, **rows)


def _with_pieces(config: Config, device: str, data: "LanguageData", **rows: int) -> Built:
    """The language task on files that have been read, and the model."""
    from hofl.tasks.language import language_task

    sizes = {"length": config.task.length, "batch": config.evaluation.batch, **rows}
    with about("model.source"):
        loaded = _loaded(config, device)
        built = language_task(data, cut_of(config, loaded), loaded.tokenizer, **sizes)
    return _with_facts(built, loaded)


def _own_text(
    config: Config, device: str, client: str, names: Sequence[str], images: Mapping[str, Any]
) -> Task:
    from hofl.tasks.text_data import read_own

    task = config.task
    columns = {"template_id": task.template, "text": task.text, "label": task.label}
    data = read_own(task.train, divided_of(config), client, seed=config.seed, names=names, **columns)
    return _with_words(config, device, data)[0]


def _own_questions(
    config: Config, device: str, client: str, names: Sequence[str], images: Mapping[str, Any]
) -> Task:
    from hofl.tasks.generation_data import read_own

    data = read_own(config.task.train, divided_of(config), _columns(config), client, seed=config.seed)
    return _with_answers(config, device, data)[0]


def _own_files(
    config: Config, device: str, client: str, names: Sequence[str], images: Mapping[str, Any]
) -> Task:
    from hofl.tasks.language_data import read_own

    data = read_own(config.task.train, divided_of(config), client, seed=config.seed)
    return _with_pieces(config, device, data)[0]


_LOADERS: dict[str, Callable[[Config, str], Built]] = {
    "text": _classified,
    "generation": _generation,
    "language": _language,
}
TASKS: dict[str, Callable[[Config, str], Task]] = {
    name: lambda config, device: load_text(config, device)[0] for name in _LOADERS
}
"""Tasks by name: (configuration, device) -> task."""
NODES: dict[str, Callable[[Config, str, str, Sequence[str], Mapping[str, Any]], Task]] = {
    "text": _own_text,
    "generation": _own_questions,
    "language": _own_files,
}
"""The same where the data is at the nodes: (configuration, device, client, classes, images) -> a node's."""
