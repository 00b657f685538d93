# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hofl.errors import ConfigError
from hofl.tasks import partition
from hofl.tasks.partition import Partition, Shards

TWO = np.arange(2000, dtype=np.int64) % 2


def _once(shards: Shards, n: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(shards)), np.arange(n))


@pytest.mark.parametrize("clients", [1, 3, 30, 2000])
def test_iid_shards_hold_every_example_once_and_differ_by_one_at_most(clients: int) -> None:
    shards = partition.iid(TWO, clients, seed=42)
    sizes = [len(shard) for shard in shards]
    assert _once(shards, 2000) and len(shards) == clients and max(sizes) - min(sizes) <= 1


def test_the_papers_iid_shards_have_the_papers_sizes() -> None:
    sizes = {len(shard) for shard in partition.iid(np.zeros(67349, dtype=np.int64), 30, seed=42)}
    assert sizes == {2244, 2245}


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "by_label", "fixed_dirichlet"])
def test_the_seed_decides_and_nothing_else_does(kind: str) -> None:
    labels = np.arange(600, dtype=np.int64) % 4
    made = Partition(kind, clients=5, size=100)
    one, same, other = (made.divide(labels, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) and a.dtype == np.int64 for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_minimum_that_cannot_be_met_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"minimum = 250 .* 2500 .* 2000: lower minimum to 200"):
        partition.dirichlet(TWO, 10, 0.1, 250, seed=0)


def test_more_clients_than_examples_are_told_to_be_fewer() -> None:
    with pytest.raises(ConfigError, match=r"2001 clients needs 2001 .* there are 2000: use fewer clients$"):
        partition.dirichlet(TWO, 2001, 0.1, seed=0)


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("minimum", [10, 200])
def test_dirichlet_is_quick_and_meets_the_minimum_at_any_alpha(alpha: float, minimum: int) -> None:
    start = time.perf_counter()
    shards = partition.dirichlet(TWO, 10, alpha, minimum, seed=0)
    assert time.perf_counter() - start < 1.0
    assert _once(shards, 2000) and min(map(len, shards)) >= minimum


def test_two_large_dirichlet_clients_use_every_sample_exactly_once() -> None:
    shards = partition.dirichlet(TWO, 2, 100.0, seed=3)
    assert _once(shards, 2000)
    assert all(400 < np.bincount(TWO[shard])[0] < 600 for shard in shards[:1])


def test_a_small_alpha_makes_clients_less_alike_than_a_large_one() -> None:
    def spread(alpha: float) -> float:
        shards = partition.dirichlet(TWO, 10, alpha, seed=5)
        return float(np.std([TWO[shard].mean() for shard in shards]))

    assert spread(0.1) > 3 * spread(100.0)


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 5), st.floats(1e-3, 50.0), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_dirichlet_always_covers(seed: int, clients: int, classes: int, alpha: float, minimum: int) -> None:
    labels = np.arange(clients * minimum + classes, dtype=np.int64) % classes
    shards = partition.dirichlet(labels, clients, alpha, minimum, seed=seed)
    assert _once(shards, len(labels)) and min(map(len, shards)) >= minimum


@pytest.mark.parametrize(("clients", "each", "classes"), [(10, 2, 10), (5, 2, 4), (3, 4, 4), (7, 1, 3)])
def test_by_label_gives_each_client_exactly_so_many_labels(clients: int, each: int, classes: int) -> None:
    labels = np.arange(1000, dtype=np.int64) % classes
    shards = partition.by_label(labels, clients, each, seed=1)
    assert _once(shards, 1000)
    assert {len(np.unique(labels[shard])) for shard in shards} == {each}


@pytest.mark.parametrize(
    ("clients", "each", "allowed"), [(3, 1, "2 to 4"), (3, 5, "2 to 4"), (9, 0, "1 to 4")]
)
def test_by_label_refuses_what_leaves_a_label_to_nobody(clients: int, each: int, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"labels_per_client = {each} .* allowed is {allowed}"):
        partition.by_label(np.arange(40, dtype=np.int64) % 4, clients, each, seed=1)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_fixed_dirichlet_is_the_papers_setting(alpha: float) -> None:
    labels = np.arange(12000, dtype=np.int64) % 4
    shards = partition.fixed_dirichlet(labels, 30, 400, alpha, seed=42)
    assert [len(shard) for shard in shards] == [400] * 30
    rows = partition.table(shards, labels, list("abcd"), [str(c) for c in range(30)])
    times = np.bincount(np.concatenate(shards), minlength=12000)
    assert sum(row["duplicates"] for row in rows) == times[times > 1].sum() > 0


def test_pools_are_used_up_before_anything_repeats() -> None:
    shards = partition.fixed_dirichlet(TWO, 1, 1000, 1e6, seed=1)
    assert len(np.unique(shards[0])) == 1000
    again = partition.fixed_dirichlet(np.zeros(10, dtype=np.int64), 1, 35, 1.0, seed=1)[0]
    assert len(again) == 35 and set(again) == set(range(10)) and np.bincount(again).max() > 3


def test_proportions_are_rounded_by_largest_remainder() -> None:
    counts = partition._round(np.array([0.475, 0.325, 0.2]), 10)
    assert counts.tolist() == [5, 3, 2]
    assert partition._round(np.array([1.0, 0.0, 0.0]), 7).tolist() == [7, 0, 0]


def test_files_keep_their_rows_and_an_empty_one_is_an_idle_client() -> None:
    assert [shard.tolist() for shard in partition.files([2, 0, 3])] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        ([[0, 1], [1, 2]], {}, "1 examples are held twice and 0 by nobody"),
        ([[0], [2]], {}, "0 examples are held twice and 1 by nobody"),
        ([[0, 1, 2], []], {}, "client 1 would hold no example"),
        ([[0, 1, 2], []], {"repeats": True}, "client 1 would hold no example"),
        ([[0, 1], [3]], {"repeats": True}, r"outside 0\.\.2"),
        ([[-1, 1], [2]], {"repeats": True}, r"outside 0\.\.2"),
    ],
)
def test_unsound_shards_are_refused(shards: list[list[int]], options: dict[str, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        partition.check([np.array(shard, dtype=np.int64) for shard in shards], 3, **options)
    assert "\n" not in str(caught.value)


def test_the_table_counts_examples_classes_and_duplicates() -> None:
    shards = [np.array([0, 0, 1]), np.array([1, 2]), np.array([], dtype=np.int64)]
    assert partition.table(shards, np.array([0, 1, 1]), ["no", "yes"], ["a", "b", "c"]) == [
        {"client": "a", "examples": 3, "classes": {"no": 2, "yes": 1}, "duplicates": 3},
        {"client": "b", "examples": 2, "classes": {"no": 0, "yes": 2}, "duplicates": 1},
        {"client": "c", "examples": 0, "classes": {"no": 0, "yes": 0}, "duplicates": 0},
    ]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kind": "striped"}, "partition.kind = 'striped'"),
        ({"kind": "files"}, "partition.kind = 'files'"),
        ({"clients": 0}, "partition.clients = 0"),
        ({"clients": 2001}, "partition.clients = 2001: client .* would hold no example"),
        ({"kind": "dirichlet", "alpha": 0.0}, "partition.alpha = 0.0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "partition.alpha = nan"),
        ({"kind": "dirichlet", "minimum": 0}, "partition.minimum = 0"),
        ({"kind": "fixed_dirichlet", "size": 0}, "partition.size = 0"),
    ],
)
def test_bad_settings_name_themselves(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Partition(**setting).divide(TWO, seed=1)  # type: ignore[arg-type]


def test_no_examples_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="no examples to divide"):
        partition.by_label(np.array([], dtype=np.int64), 1, 1, seed=1)
