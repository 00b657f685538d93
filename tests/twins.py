# SPDX-License-Identifier: Apache-2.0
"""Small random twins of the papers' models and a few rows in each data set's schema, as files.

A twin has its model's architecture, number of blocks and tied weights, and a small width; it is a folder
with ``config.json``, safetensors and a byte-level BPE tokenizer, which is loaded as any model is.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hofl.memory.named import MODELS
from hofl.presets import Preset
from pictures import encoded

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 600,
}
_SPECIAL = ("<pad>", "<s>", "</s>")
_PLACES = ("town", "river", "harbour", "mill", "school")


def _rows(data: str, count: int) -> list[dict[str, Any]]:
    """Rows as the hub has them; the classes take turns."""
    place = [_PLACES[number % 5] for number in range(count)]
    if data == "sst2":
        return [{"idx": i, "sentence": f"film {i} in the {p}", "label": i % 2} for i, p in enumerate(place)]
    if data == "rte":
        return [
            {"sentence1": f"There is a {p} {i}.", "sentence2": f"A {p} is here.", "label": i % 2, "idx": i}
            for i, p in enumerate(place)
        ]
    if data == "boolq":
        return [
            {"question": f"is there a {p}", "passage": f"Number {i} has a {p}.", "answer": i % 2 == 0}
            for i, p in enumerate(place)
        ]
    if data == "sciq":
        wrong = {f"distractor{n}": f"stone {n}" for n in (1, 2, 3)}
        return [
            {"question": f"what is at {i}", "correct_answer": p, "support": f"A {p}."} | wrong
            for i, p in enumerate(place)
        ]
    if data == "ag_news":
        return [{"text": f"The {p} opened {i} doors", "label": i % 4} for i, p in enumerate(place)]
    if data == "squad":
        return [
            {"id": str(i), "title": p, "context": f"The {p} has number {i}.", "question": f"what has {i}"}
            | {"answers": {"text": [f"The {p}"], "answer_start": [0]}}
            for i, p in enumerate(place)
        ]
    return [
        {"img": {"bytes": encoded(i, side=8), "path": None}, "label": i % 10} for i, _ in enumerate(place)
    ]


def write_rows(folder: Path, data: str, count: int, name: str) -> str:
    """A Parquet file with that many rows."""
    file = folder / f"{data}-{name}.parquet"
    if not file.exists():
        pq.write_table(pa.Table.from_pylist(_rows(data, count)), file)
    return str(file)


def write_model(folder: Path, name: str) -> str:
    """The twin of a model of ``MODELS``; a folder that ``model.source`` can name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where, entry = folder / name, MODELS[name]
    if (where / "config.json").exists():
        return str(where)
    tokenizer = _tokenizer()
    grouped = {"num_key_value_heads": min(2, entry.shape.get("num_key_value_heads", 2))}
    small = {key: value for key, value in (_SMALL | grouped).items() if key in entry.shape}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(entry.kind, **{**entry.shape, **small, **ids})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return str(where)


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer that knows the words of the templates and of the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from hofl.tasks.templates import TEMPLATES

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    words = [word for template in TEMPLATES.values() for word in (*template.words, template.pattern)]
    made.train_from_iterator([*words, *(f" {place}" for place in _PLACES)] * 4, trainer)
    pad, start, end = _SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=start, eos_token=end)


def settings(preset: Preset, folder: Path) -> list[str]:
    """What makes a preset a run of two rounds on the twin of its model and a few rows."""
    model, kind = preset.name.split("/")[2:4]
    data = kind.partition("-")[0]
    clients = preset.settings.get("partition.clients", 30)
    files = [
        f"task.train={write_rows(folder, data, 4 * clients, 'train')}",
        f"task.evaluation={write_rows(folder, data, 10, 'evaluation')}",
    ]
    small = ["rounds=2", "evaluation.every=2", "local.batch=2", "local.steps=1", "model.device=cpu"]
    small += ["cohort.size=2", "partition.size=4", "partition.minimum=2", "run.threads=1"]
    if data == "cifar10":
        return [*files, *small, "model.width=8"]
    name = next(known for known in MODELS if known.lower() == model)
    generated = ["task.new_tokens=3"] if data == "squad" else []
    return [*files, *small, *generated, f"model.source={write_model(folder, name)}"]
