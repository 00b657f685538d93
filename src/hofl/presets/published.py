# SPDX-License-Identifier: Apache-2.0
"""The numbers that the papers report, as they print them: percent, with the sample SD over their seeds.

HO-FL (arXiv 2609.39074), Tables 2, 3, 4, 7, 8 and 9; HO-SFL (arXiv 2603.14773), its language models.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

EXAMPLES = {
    "sst2": (67349, 872),
    "boolq": (9427, 3270),
    "sciq": (11679, 1000),
    "ag_news": (120000, 7600),
    "squad": (87599, 10570),
    "rte": (2490, 277),
    "cifar10": (50000, 10000),
}
"""Training and evaluation examples of each data set: HO-FL Table 6, and what RTE and CIFAR-10 have."""


class Published(NamedTuple):
    """One number of a paper.

    Attributes:
        paper: ``HO-FL`` or ``HO-SFL``.
        table: where it is printed.
        cell: what was run, ``model/data/method`` in the words of a preset's name.
        metric: as a run's rows name it.
        value: in percent; a loss as it is. None where there are only words.
        sd: sample standard deviation over the seeds, None where it is not given.
        seeds: how many; 0 where it is not given.
        examples: n, evaluation examples.
        said: the paper's words where it has no exact number.
    """

    paper: str
    table: str
    cell: str
    metric: str
    value: float | None
    sd: float | None
    seeds: int
    examples: int
    said: str = ""

    @property
    def factor(self) -> float:
        """What turns a run's value into the unit of this one."""
        return 1.0 if self.metric == "loss" else 100.0

    @property
    def shown(self) -> str:
        """As the paper prints it."""
        digits = 4 if self.metric == "loss" else 2 if self.sd is not None or self.seeds else 1
        value = self.said if self.value is None or self.said else f"{self.value:.{digits}f}"
        return value if self.sd is None else f"{value} (SD {self.sd:.{digits}f})"


_FIVE = ("fedavg", "fedprox", "decomfl", "ho_fl-beta0", "ho_fl-beta0.75")
_FOUR = ("ho_fl-beta0", "ho_fl-beta0.25", "ho_fl-beta0.5", "ho_fl-beta0.75")
_THREE = ("ho_fl-beta0", "ho_fl-beta0.5", "ho_fl-beta0.75")

# Each line: model, data, then mean (SD) in the order of the columns.
_TABLE_2 = """
opt-125m     sst2           87.04 (0.11)  87.12 (0.13)  51.95 (0.00)  86.01 (0.11)  86.54 (0.24)
opt-125m     boolq          59.84 (0.37)  59.85 (0.46)  55.87 (0.05)  57.91 (0.18)  59.44 (0.96)
opt-125m     sciq           25.50 (1.30)  25.43 (1.04)  25.53 (0.85)  24.97 (0.80)  26.10 (1.64)
opt-125m     ag_news-dir0.5 78.24 (2.97)  78.29 (2.99)  23.38 (0.08)  59.58 (2.24)  62.85 (6.52)
qwen2.5-1.5b sst2           93.27 (0.26)  93.43 (0.26)  71.25 (0.18)  91.09 (0.18)  92.81 (0.07)
qwen2.5-1.5b boolq          79.06 (0.19)  79.11 (0.08)  72.44 (0.12)  77.00 (0.40)  78.72 (0.24)
qwen2.5-1.5b sciq           90.83 (0.32)  90.87 (0.31)  88.87 (0.46)  90.17 (0.25)  90.47 (0.29)
qwen2.5-1.5b ag_news-dir0.5 88.15 (0.21)  88.23 (0.17)  55.83 (0.08)  85.51 (0.43)  86.69 (0.56)
smollm3-3b   sst2           94.04 (0.11)  94.07 (0.07)  63.38 (0.18)  93.16 (0.07)  94.04 (0.30)
smollm3-3b   boolq          86.15 (0.05)  86.01 (0.14)  82.59 (0.07)  84.32 (0.12)  85.37 (0.43)
smollm3-3b   sciq           90.50 (0.17)  90.57 (0.35)  89.13 (0.38)  89.57 (0.35)  89.77 (0.21)
smollm3-3b   ag_news-dir0.5 89.38 (0.14)  89.37 (0.18)  74.70 (0.05)  87.11 (0.22)  87.52 (0.55)
"""
_TABLE_3_EM = """
opt-125m     squad          43.95 (0.04)  43.92 (0.10)  1.29 (0.05)   37.16 (0.26)  41.87 (0.32)
qwen2.5-1.5b squad          79.65 (0.14)  79.70 (0.08)  61.70 (0.11)  76.67 (0.05)  78.71 (0.19)
smollm3-3b   squad          81.52 (0.10)  81.47 (0.20)  47.98 (0.09)  77.80 (0.11)  79.54 (0.20)
"""
_TABLE_3_F1 = """
opt-125m     squad          54.68 (0.02)  54.65 (0.08)  8.54 (0.09)   47.24 (0.21)  52.43 (0.20)
qwen2.5-1.5b squad          87.59 (0.07)  87.61 (0.04)  73.14 (0.16)  85.34 (0.03)  86.92 (0.10)
smollm3-3b   squad          89.93 (0.10)  89.90 (0.16)  68.43 (0.04)  87.25 (0.04)  88.57 (0.13)
"""
_TABLE_4 = """
qwen2.5-1.5b ag_news-iid    86.75 (0.13)  87.33 (0.03)  87.58 (0.08)  87.91 (0.03)
qwen2.5-1.5b ag_news-dir1   86.22 (0.47)  86.64 (0.23)  87.11 (0.15)  87.26 (0.29)
qwen2.5-1.5b ag_news-dir0.5 85.51 (0.43)  86.31 (0.48)  86.58 (0.44)  86.69 (0.56)
qwen2.5-1.5b ag_news-dir0.1 83.39 (1.46)  83.83 (0.92)  82.53 (1.81)  82.66 (3.07)
"""
_TABLE_7 = """
opt-125m     sst2           86.01  86.47  86.47  86.47
opt-125m     boolq          57.98  57.92  58.84  58.84
opt-125m     sciq           24.20  23.90  24.50  24.30
qwen2.5-1.5b sst2           91.28  91.86  92.78  92.78
qwen2.5-1.5b boolq          76.54  77.74  78.29  78.84
qwen2.5-1.5b sciq           89.90  89.80  90.00  90.30
"""
_TABLE_8_EM = """
opt-125m     squad          37.16 (0.26)  40.68 (0.23)  41.87 (0.32)
qwen2.5-1.5b squad          76.67 (0.05)  78.32 (0.18)  78.71 (0.19)
smollm3-3b   squad          77.80 (0.11)  79.23 (0.06)  79.54 (0.20)
"""
_TABLE_8_F1 = """
opt-125m     squad          47.24 (0.21)  51.16 (0.19)  52.43 (0.20)
qwen2.5-1.5b squad          85.34 (0.03)  86.61 (0.11)  86.92 (0.10)
smollm3-3b   squad          87.25 (0.04)  88.30 (0.06)  88.57 (0.13)
"""
_ABLATIONS = ("", "-steps1", "-steps10", "-probes1", "-probes4", "-probes8", "-radius1e-4", "-radius1e-2")
_TABLE_9_ACCURACY = """
opt-125m sst2 86.39 (0.07) 86.47 (0.41) 86.58 (0.30) 86.51 (0.18) 86.47 (0.00)
              86.47 (0.11) 86.31 (0.07) 86.35 (0.00)
"""
_TABLE_9_LOSS = """
opt-125m sst2 0.3498 (0.0038) 0.3489 (0.0033) 0.3406 (0.0008) 0.3498 (0.0036) 0.3498 (0.0038) 0.3496 (0.0041)
              0.3496 (0.0036) 0.3493 (0.0040)
"""
_HO_SFL = """
opt-125m     sst2  87.5 52.8 87.6
opt-125m     rte   57.8 52.0 59.2
gemma-3-270m sst2  90.3 51.8 90.8
gemma-3-270m rte   59.6 54.2 65.0
llama-3.2-1b sst2  94.4 61.5 93.9
llama-3.2-1b rte   70.0 49.1 73.3
"""
_HO_SFL_SAID: Mapping[str, tuple[float | None, str]] = {
    "llama-3.2-1b/squad/splitlora": (60.0, "about 60"),
    "llama-3.2-1b/squad/zo_sfl": (None, "does not converge"),
    "llama-3.2-1b/squad/ho_sfl": (None, "about equal to SplitLoRA"),
    "llama-3.1-8b/squad/splitlora": (None, "no number; HO-SFL is level with it"),
    "llama-3.1-8b/squad/ho_sfl": (None, "level with SplitLoRA"),
    "resnet-18/cifar10-iid/splitfed_v1": (None, "no number; HO-SFL is nearly equal to it"),
    "resnet-18/cifar10-iid/ho_sfl": (None, "nearly equal to SFL"),
    "resnet-18/cifar10-dir0.1/splitfed_v1": (None, "no number; HO-SFL is above it"),
    "resnet-18/cifar10-dir0.1/ho_sfl": (None, "above SFL"),
}
_TABLES: Sequence[tuple[str, str, str, tuple[str, ...], str, int]] = (
    ("HO-FL", "Table 2", "accuracy", _FIVE, _TABLE_2, 3),
    ("HO-FL", "Table 3", "exact_match", _FIVE, _TABLE_3_EM, 3),
    ("HO-FL", "Table 3", "f1", _FIVE, _TABLE_3_F1, 3),
    ("HO-FL", "Table 4", "accuracy", _FOUR, _TABLE_4, 3),
    ("HO-FL", "Table 7, seed 42", "accuracy", _FOUR, _TABLE_7, 1),
    ("HO-FL", "Table 8", "exact_match", _THREE, _TABLE_8_EM, 3),
    ("HO-FL", "Table 8", "f1", _THREE, _TABLE_8_F1, 3),
    ("HO-FL", "Table 9", "accuracy", tuple(f"ho_fl-beta0.5{a}" for a in _ABLATIONS), _TABLE_9_ACCURACY, 3),
    ("HO-FL", "Table 9", "loss", tuple(f"ho_fl-beta0.5{a}" for a in _ABLATIONS), _TABLE_9_LOSS, 3),
    ("HO-SFL", "language models", "accuracy", ("splitlora", "zo_sfl", "ho_sfl"), _HO_SFL, 0),
)


def _read(lines: str) -> Iterator[tuple[str, list[tuple[float, float | None]]]]:
    """``model/data`` and its values with their SD, of each row."""
    for row in re.split(r"\n(?=\S)", lines.strip()):
        model, data, values = row.split(maxsplit=2)
        found = re.findall(r"([\d.]+)(?: \(([\d.]+)\))?", values)
        yield f"{model}/{data}", [(float(value), float(sd) if sd else None) for value, sd in found]


def _examples(cell: str) -> int:
    return EXAMPLES[cell.split("/")[1].partition("-")[0]][1]


def _all() -> Iterator[Published]:
    for paper, table, metric, methods, lines, seeds in _TABLES:
        for place, values in _read(lines):
            for method, (value, sd) in zip(methods, values, strict=True):
                cell = f"{place}/{method}"
                yield Published(paper, table, cell, metric, value, sd, seeds, _examples(cell))
    for cell, (number, said) in _HO_SFL_SAID.items():
        metric, where = ("f1", "SQuAD") if "squad" in cell else ("accuracy", "CIFAR-10")
        yield Published("HO-SFL", where, cell, metric, number, None, 0, _examples(cell), said)


PUBLISHED: tuple[Published, ...] = tuple(_all())
"""Every number, in the order of the tables."""
