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
    """C37: 10 clients of 250 from 2,000."""
    with pytest.raises(ConfigError, match=r"minimum = 250 .* 2500 .* 2000: lower minimum to 200"):
        partition.dirichlet(TWO, 10, 0.1, 250, seed=0)


def test_more_clients_than_examples_are_told_to_be_fewer() -> None:
    with pytest.raises(ConfigError, match=r"2001 clients needs 2001 .* there are 2000: use fewer clients$"):
        partition.dirichlet(TWO, 2001, 0.1, seed=0)


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("minimum", [10, 200])
def test_dirichlet_is_quick_and_meets_the_minimum_at_any_alpha(alpha: float, minimum: int) -> None:
    """C37: plain rejection needs over 600 tries at alpha 0.1."""
    start = time.perf_counter()
    shards = partition.dirichlet(TWO, 10, alpha, minimum, seed=0)
    assert time.perf_counter() - start < 1.0
    assert _once(shards, 2000) and min(map(len, shards)) >= minimum


def test_two_large_dirichlet_clients_use_every_sample_exactly_once() -> None:
    """C37."""
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


@pytest.mark.parametrize(
    ("shares", "total", "counts"),
    [
        ([0.475, 0.325, 0.2], 10, [5, 3, 2]),  # 4.75, 3.25, 2: one left, to the largest remainder
        ([1.0, 0.0, 0.0], 7, [7, 0, 0]),
        ([0.5, 0.5], 3, [2, 1]),  # a tie goes to the lowest class
        ([0.12, 0.29, 0.29, 0.30], 10, [1, 3, 3, 3]),  # 1.2, 2.9, 2.9, 3.0: two left
        ([0.25, 0.25, 0.25, 0.25], 4000, [1000] * 4),
    ],
)
def test_proportions_are_rounded_by_largest_remainder(
    shares: list[float], total: int, counts: list[int]
) -> None:
    assert partition._round(np.array(shares), total).tolist() == counts


def test_the_papers_ag_news_iid_is_4000_a_client_and_no_repetition() -> None:
    shards = partition.iid(np.arange(120_000, dtype=np.int64) % 4, 30, seed=42)
    assert [len(shard) for shard in shards] == [4000] * 30 and _once(shards, 120_000)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_the_papers_ag_news_dirichlet_uses_a_class_up_before_it_is_drawn_again(alpha: float) -> None:
    """30 clients of 4,000; a pool of 30,000 a class, refilled with repetition once it is empty."""
    labels = np.arange(120_000, dtype=np.int64) % 4
    shards = partition.fixed_dirichlet(labels, 30, 4000, alpha, seed=42)
    assert [len(shard) for shard in shards] == [4000] * 30
    times = np.bincount(np.concatenate(shards), minlength=120_000)
    refilled = 0
    for label in range(4):
        held = times[labels == label]
        if held.sum() <= 30_000:
            assert held.max() == 1
        else:
            assert held.min() == 1
            extra = held - 1  # of a refill drawn with replacement: some repeat, some do not come
            refilled += extra.max() > 1 and extra.min() == 0
    assert refilled
    shares = np.stack([np.bincount(labels[shard], minlength=4) for shard in shards]) / 4000
    assert abs(shares.mean() - 0.25) < 1e-12
    # Var of one Dir(alpha 1_4) share is 3/16 / (4 alpha + 1); 120 of them, correlated: within half of it
    assert shares.var() == pytest.approx(3 / 16 / (4 * alpha + 1), rel=0.5)


def test_a_pool_is_refilled_by_hand() -> None:
    """Two classes of 4, three clients of 2 + 2 (alpha 1e6: shares within 1e-3 of a half).

    Whoever draws first and second, in a seeded order, empties both pools; the third gets the refill.
    """
    labels = np.array([0, 1] * 4, dtype=np.int64)
    lasts = set()
    for seed in range(12):
        shards = partition.fixed_dirichlet(labels, 3, 4, 1e6, seed=seed)
        assert all(np.bincount(labels[shard]).tolist() == [2, 2] for shard in shards)
        pairs = [(a, b) for a in range(3) for b in range(a) if _once([shards[a], shards[b]], 8)]
        assert pairs
        lasts |= {3 - a - b for a, b in pairs if len(pairs) == 1}
    assert lasts == {0, 1, 2}


def test_a_client_that_wants_more_than_is_left_takes_the_rest_first() -> None:
    """One class of 5, two clients of 4: the second gets the one that is left and three of a refill."""
    for seed in range(12):
        shards = partition.fixed_dirichlet(np.zeros(5, dtype=np.int64), 2, 4, 1.0, seed=seed)
        assert set(np.concatenate(shards).tolist()) == set(range(5))
        assert any(len(set(shard.tolist())) == 4 for shard in shards)


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
