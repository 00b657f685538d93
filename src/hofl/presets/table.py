# SPDX-License-Identifier: Apache-2.0
"""The one table of differences: what each paper, data set and method sets that hofl's defaults do not.

The defaults are HO-FL's own settings: N = 30, K = 6, T = 160, E = 5, q = 2, mu = 1e-3, batch 16, AdamW 1e-5
with its state new in each participation, LoRA r = 8 and alpha = 16 (arXiv 2609.39074, Appendix E).
"""

from typing import Any, NamedTuple

Settings = dict[str, Any]
"""Values by dotted key."""

RECOMMENDED: Settings = {"zo.estimator": "sketch", "zo.directions": "hadamard", "zo.probes": 256}
"""What the recommended variant of a preset sets beside the paper's, where the method is the paper's own."""


class Paper(NamedTuple):
    """What all runs of a paper have in common.

    Attributes:
        folder: its presets' second name.
        own: the method that the paper introduces, of which there are recommended variants.
        settings: of its language models.
        silent: what it does not say, so that the value is ours.
    """

    folder: str
    own: str
    settings: Settings
    silent: str


PAPERS = {
    "HO-FL": Paper(
        "ho_fl",
        "ho_fl",
        {"model.dtype": "bfloat16", "run.ledger": "scalars"},
        "prompts, lengths and the seeds beside 42",
    ),
    "HO-SFL": Paper(
        "ho_sfl",
        "ho_sfl",
        {
            "model.dtype": "bfloat16",
            "rounds": 800,
            "partition.clients": 3,
            "cohort.size": 3,
            "cohort.boundaries": [6],
            "local.steps": 1,
            "run.ledger": "scalars",
        },
        "clients, rounds, cut, rates, prompts and precision: as in its authors' scripts where known",
    ),
}
"""By the name that published numbers have."""

VISION: Settings = {
    "model.dtype": "float32",
    "model.train": "full",
    "rounds": 2000,
    "partition.clients": 100,
    "cohort.size": 10,
    "cohort.boundaries": [3],
    "local.batch": 32,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.01,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 1e-4,
    "zo.probes": 5,
}
"""HO-SFL's images: the clients hold the stem and two residual blocks; P = 5."""


class Data(NamedTuple):
    """A data set: its name in words and what reads it."""

    title: str
    settings: Settings


def _hub(name: str, evaluation: str, template: str, text: str, label: str, length: int) -> Settings:
    place = {"task.train": f"hub:{name}:train", "task.evaluation": f"hub:{name}:{evaluation}"}
    columns = {"task.template": template, "task.text": text, "task.label": label}
    return place | columns | {"task.length": length}


_SCIQ = "support,question,distractor1,distractor2,distractor3"
DATA = {
    "sst2": Data("SST-2", _hub("glue/sst2", "validation", "sst2-v1", "sentence", "label", 128)),
    "rte": Data("RTE", _hub("glue/rte", "validation", "rte-v1", "sentence1,sentence2", "label", 256)),
    "boolq": Data("BoolQ", _hub("google/boolq", "validation", "boolq-v1", "passage,question", "answer", 512)),
    "sciq": Data("SciQ", _hub("allenai/sciq", "test", "sciq-v1", _SCIQ, "correct_answer", 512)),
    "ag_news": Data("AG News", _hub("fancyzhx/ag_news", "test", "ag_news-v1", "text", "label", 256)),
    "squad": Data(
        "SQuAD 1.1",
        {"task.name": "generation", "task.new_tokens": 64}
        | _hub("rajpurkar/squad", "validation", "squad-v1", "context,question", "answers", 512),
    ),
    "cifar10": Data(
        "CIFAR-10",
        {
            "task.name": "vision",
            "task.train": "hub:uoft-cs/cifar10:train",
            "task.evaluation": "hub:uoft-cs/cifar10:test",
            "task.image": "img",
            "task.label": "label",
        },
    ),
}
"""By the name in a preset's."""

PARTITIONS: dict[str, Settings] = {
    "": {},
    "iid": {},
    "dir1": {"partition.kind": "fixed_dirichlet", "partition.alpha": 1.0},
    "dir0.5": {"partition.kind": "fixed_dirichlet", "partition.alpha": 0.5},
    "dir0.1": {"partition.kind": "fixed_dirichlet", "partition.alpha": 0.1},
}
"""By what follows the data set's name: AG News with 4,000 examples a client and refilled pools."""

VISION_PARTITIONS: dict[str, Settings] = {
    "iid": {},
    "dir0.1": {"partition.kind": "dirichlet", "partition.alpha": 0.1, "partition.minimum": 32},
}
"""Of images: each client has at least one batch."""

METHODS: dict[str, Settings] = {
    "fedavg": {"algorithm": "fedavg"},
    "fedprox": {"algorithm": "fedprox"},
    "decomfl": {"algorithm": "decomfl", "zo.average": "models"},
    "ho_fl": {"algorithm": "ho_fl"},
    "splitlora": {"algorithm": "splitlora", "rounds": 8, "local.steps": 100},
    "splitfed_v1": {"algorithm": "splitfed_v1", "rounds": 400, "local.steps": 5},
    "zo_sfl": {"algorithm": "zo_sfl"},
    "ho_sfl": {"algorithm": "ho_sfl"},
}
"""By the name in a preset's. DeComFL under AdamW averages replayed models, as HO-FL's comparison has it."""

VARIANTS: dict[str, Settings] = {
    "beta0": {"cohort.preference": 0.0},
    "beta0.25": {"cohort.preference": 0.25},
    "beta0.5": {"cohort.preference": 0.5},
    "beta0.75": {"cohort.preference": 0.75},
    "steps1": {"local.steps": 1, "rounds": 800},
    "steps10": {"local.steps": 10, "rounds": 80},
    "probes1": {"zo.probes": 1},
    "probes4": {"zo.probes": 4},
    "probes8": {"zo.probes": 8},
    "radius1e-4": {"zo.radius": 1e-4},
    "radius1e-2": {"zo.radius": 1e-2},
}
"""By what follows the method's name; ablations of HO-FL Table 9 see the same number of examples."""
