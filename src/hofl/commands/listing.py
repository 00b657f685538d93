# SPDX-License-Identifier: Apache-2.0
"""``hofl list``: what a configuration can name."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import click
import typer

from hofl.commands.output import print_json, print_table, say
from hofl.errors import ConfigError
from hofl.report.tables import Table

Entry = dict[str, Any]


class What(StrEnum):
    """The kinds of things that are listed."""

    ALGORITHMS = "algorithms"
    TASKS = "tasks"
    MODELS = "models"
    PRESETS = "presets"


def list_(
    what: Annotated[What | None, typer.Argument(help="One kind; all but presets if left out.")] = None,
    filter: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILTER ...]", help="Of presets: those that have all these words."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List algorithms, tasks, models or presets."""
    if filter and what is not What.PRESETS:
        raise click.UsageError("FILTER is for presets: hofl list presets FILTER")
    kinds = [what] if what else [kind for kind in What if kind is not What.PRESETS]
    found = {title: entries for kind in kinds for title, entries in _LISTS[kind]().items()}
    if what is What.PRESETS:
        found = {"presets": _filtered(found["presets"], filter or [])}
    if json:
        return print_json(next(iter(found.values())) if len(found) == 1 else found)
    for title, entries in found.items():
        print_table(_table(title, entries))
        for line in NOTES.get(title, ()):
            say(line)
        say("")


TAXONOMY = {
    "name": "name",
    "title": "title",
    "paradigm": "paradigm",
    "boundary": "boundary",
    "uploads": "uploads a step",
    "local_steps": "local steps",
    "backpropagates": "who backpropagates",
    "memory": "client memory",
    "uplink": "up a round",
    "downlink": "down a round",
}
"""What a terminal shows of an algorithm, with its headings; the rest is in ``--json``."""

NOTES = {
    "algorithms": (
        "Up and down are numbers of one client, keys apart; uploads are boundary activations.",
        "d trainables: d_c below the boundary, d_fo above it, d_a of an auxiliary head; q probes;",
        "E local steps, tau the server's, k between two uploads; A numbers of one boundary activation;",
        "y labels and lengths of a batch; lag rounds since the client was in step.",
        "Papers, rates and estimators: hofl list algorithms --json",
    ),
    "presets": (
        "In percent, with the sample SD over seeds. With -recommended after its name: what hofl recommends.",
        "Its configuration: hofl preset NAME. To run it: hofl sweep NAME --out runs/papers",
    ),
    "models": ("Blocks and boundaries are what hofl plan and cohort.boundaries count in.",),
}
"""Lines under a table."""


def _table(title: str, entries: list[Entry]) -> Table:
    columns = TAXONOMY if title == "algorithms" else dict(zip(entries[0], entries[0], strict=True))
    rows = tuple(tuple(str(entry[c]) for c in columns) for entry in entries)
    return Table(title, tuple(columns.values()), rows, frozenset(range(len(columns))))


def _algorithms() -> dict[str, list[Entry]]:
    from hofl.algorithms import ALGORITHMS

    return {
        "algorithms": [
            m._asdict() | {"leaves_device": ", ".join(m.leaves_device), "hybrid": m.hybrid}
            for m in ALGORITHMS.values()
        ]
    }


def _tasks() -> dict[str, list[Entry]]:
    from hofl.tasks.partition import KINDS
    from hofl.tasks.templates import TEMPLATES

    tasks = [
        {"task.name": "text", "is": "classification of texts by label words or a trained head"},
        {"task.name": "generation", "is": "answers to questions as text, scored by F1 and exact match"},
        {"task.name": "language", "is": "next tokens of plain text files, scored by perplexity"},
        {"task.name": "vision", "is": "classification of small images; sklearn:digits needs no download"},
        {"task.name": "synthetic", "is": "clouds of points and a small network: seconds, no files"},
    ]
    templates = [
        {
            "task.template": t.id,
            "columns": ", ".join(t.fields),
            "answers": ", ".join(w.strip() for w in t.words)
            or ("generated text" if t.generated else "a trained head"),
            "prompt": t.pattern.replace("\n", " / "),
        }
        for t in TEMPLATES.values()
    ]
    return {
        "tasks": tasks,
        "templates": templates,
        "partitions": [{"partition.kind": name, "is": kind.says} for name, kind in KINDS.items()],
    }


FAMILIES = ("llama", "qwen2", "smollm3", "gemma2", "gemma3", "opt", "opt-post-norm", "gpt2", "bert")
"""Those of ``models.tiny``, said here again because that module needs PyTorch; a test compares them."""


def _models() -> dict[str, list[Entry]]:
    sources = [
        {"model.source": "owner/name", "is": "a model of the hub, from the local cache or downloaded"},
        {"model.source": "path/to/folder", "is": "a folder that save_pretrained wrote"},
        {"model.source": "path/to/model.gguf", "is": "one GGUF file, dequantised"},
        {"model.source": "package:NAME", "is": "a folder or GGUF file inside an installed package"},
        {
            "model.source": "resnet18, resnet8",
            "is": "residual networks for task vision, trained from scratch",
        },
        {"model.source": "tiny:FAMILY", "is": "a random tiny model with a word-hash tokenizer, for trials"},
    ]
    from hofl.memory.named import MODELS

    models = [
        {
            "model": name,
            "model.source": model.source,
            "parameters": f"{model.parameters:,}",
            "blocks": model.blocks,
            "boundaries of three tiers": ", ".join(map(str, model.boundaries)),
        }
        for name, model in MODELS.items()
    ]
    families = [{"family": name, "trial": f"tiny:{name}"} for name in FAMILIES]
    return {"sources": sources, "models": models, "families": families}


def _presets() -> dict[str, list[Entry]]:
    from hofl.presets import presets

    return {
        "presets": [
            {
                "preset": preset.name,
                "in": preset.tables,
                "published": ", ".join(f"{p.metric} {p.shown}" for p in preset.published),
            }
            for preset in presets().values()
            if not preset.recommended
        ]
    }


def _filtered(entries: list[Entry], words: list[str]) -> list[Entry]:
    """The entries in which all of the words occur, in any case.

    Raises:
        ConfigError: there is none.
    """
    found = [entry for entry in entries if all(w.lower() in " ".join(entry.values()).lower() for w in words)]
    if not found:
        raise ConfigError(f"no preset has {' and '.join(words)}; hofl list presets shows all {len(entries)}")
    return found


_LISTS: dict[What, Callable[[], dict[str, list[Entry]]]] = {
    What.ALGORITHMS: _algorithms,
    What.TASKS: _tasks,
    What.MODELS: _models,
    What.PRESETS: _presets,
}
