# SPDX-License-Identifier: Apache-2.0
"""Directions and keys: golden bits, random access, moments, and no dependence on sizes (C01-C05, C03)."""

import hashlib
import math

import numpy as np
import pytest
from scipy.linalg import hadamard

from hofl.core.directions import Directions, blocks, gaussian, signs, squared_norm, walsh_hadamard_
from hofl.core.keys import Key
from hofl.core.quantiles import normal_quantiles
from hofl.errors import ConfigError
from hofl.theory.estimator_variance import relative_variance

FAMILIES = ("gaussian", "rademacher", "hadamard", "sphere")
KEY = Key.of(42, "directions", 3, 7)

# Pinned: a change of any of these breaks every ledger ever written (and RNG_ID must change with it).
GOLDEN = {
    "gaussian": "b54bb0c1d307155ac63798f0807d85cc6205f24ce1e803d07dbbc623cb4b4bc3",
    "rademacher": "8c99f71f01da48cbab67bf0b038bd6522021e0deb6102d36d467a674046f2df5",
    "hadamard": "3f8881d12ab1abe51f673c3a35d1bd71cadeac33218de3e631644e81626b8ac0",
    "sphere": "f982721e5a1535a318a55817b65703db7079f3c70f92b2c850a9664e1bf1ec36",
}


def test_key_is_pinned() -> None:
    assert (KEY.high, KEY.low) == (3375809863272313628, 10407466874370601297)
    assert KEY.words(0, 4).tolist() == [
        4288702498207008035,
        3430832029379271742,
        16777128926517684821,
        8037416390824728413,
    ]


def test_first_values_are_pinned() -> None:
    assert gaussian(KEY, 0, 4).tolist() == [
        0.05033715069293976,
        -1.2959650754928589,
        0.08038922399282455,
        -0.7306768894195557,
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_sha256(family: str) -> None:
    """C02, the half of a machine without an accelerator; ``test_gpu.py`` has the other."""
    u = Directions(KEY, family, 2, 2**20).block(1, 0, 10**6)
    assert hashlib.sha256(u.astype("<f4").tobytes()).hexdigest() == GOLDEN[family]


def test_table_moments() -> None:
    t = normal_quantiles().astype(np.float64)
    assert np.all(np.diff(t) > 0) and np.array_equal(t, -t[::-1])
    assert abs((t**2).mean() - 1) < 1e-8
    assert abs((t**4).mean() - 2.9992) < 1e-4
    assert abs((t**6).mean() - 14.97) < 1e-2


def test_table_is_the_normal_law() -> None:
    from statistics import NormalDist

    places = range(0, 65_536, 97)
    exact = np.array([NormalDist().inv_cdf((i + 0.5) / 65_536) for i in places])
    np.testing.assert_allclose(normal_quantiles()[list(places)], exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [1, 7, 20, 4096, 5000])
def test_slices_agree_whatever_the_block_size(family: str, block: int) -> None:
    directions = Directions(KEY, family, 3, 5000)
    whole = directions.block(2, 0, 5000)
    spans = blocks(5000, block) if block > 1 else [(i, i + 1) for i in (0, 1, 63, 64, 65, 4999)]
    for start, stop in spans:
        assert np.array_equal(directions.block(2, start, stop), whole[start:stop])


@pytest.mark.parametrize("draw", [gaussian, signs])
def test_coordinate_does_not_depend_on_length(draw) -> None:
    long = draw(KEY, 0, 1000)
    for n in (15, 16, 17, 31, 64, 65):
        assert np.array_equal(draw(KEY, 0, n), long[:n])


def test_streams_differ_by_every_coordinate() -> None:
    keys = {Key.of(seed, domain, c, r) for seed in (1, 2) for domain in ("directions", "batches")
            for c in range(20) for r in range(20)}  # fmt: skip
    keys |= {KEY.fold(e).fold(j) for e in range(50) for j in range(50)}
    assert len(keys) == 2 * 2 * 400 + 2500
    # the collision of earlier code: seed 17, probe 0 against seed 16, probe 1
    assert Key.of(17, "directions").fold(0) != Key.of(16, "directions").fold(1)
    assert KEY.fold(1, 2) != KEY.fold(1).fold(2)


def test_permutation_and_uniforms() -> None:
    order = KEY.permutation(1000)
    assert sorted(order.tolist()) == list(range(1000)) and not np.array_equal(order, np.arange(1000))
    u = KEY.uniforms(100_000)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005


@pytest.mark.parametrize("n", [1, 2, 8, 64, 512])
def test_walsh_hadamard_equals_the_matrix(n: int) -> None:
    x = gaussian(KEY, 0, n).astype(np.float64)
    np.testing.assert_allclose(walsh_hadamard_(x.copy()), hadamard(n) @ x, atol=1e-12 * n)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_project_and_combination_equal_the_blocks(family: str, size: int) -> None:
    directions = Directions(KEY, family, 4, size)
    u = np.stack([directions.block(j, 0, size) for j in range(4)]).astype(np.float64)
    g = gaussian(KEY.fold(9), 0, size)
    s = np.float32([1.5, -2.0, 0.25, 3.0])
    np.testing.assert_allclose(directions.project(g), u @ g, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(directions.combination(s)(1, size), (s @ u / 4)[1:], rtol=1e-5, atol=1e-5)


def test_hadamard_is_orthogonal_and_exact_at_full_count() -> None:
    directions = Directions(KEY, "hadamard", 64, 64)
    u = np.stack([directions.block(j, 0, 64) for j in range(64)])
    assert np.array_equal(u @ u.T, 64 * np.eye(64))
    g = gaussian(KEY.fold(9), 0, 64)
    s = directions.project(g).astype(np.float32)
    np.testing.assert_allclose(directions.combination(s)(0, 64), g, rtol=1e-5, atol=1e-5)


def test_hadamard_refuses_more_probes_than_rows() -> None:
    with pytest.raises(ConfigError, match="hadamard has 64 directions"):
        Directions(KEY, "hadamard", 65, 60)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("d", "q"), [(7, 3), (8, 2), (24, 8)])
def test_estimate_is_unbiased_with_the_stated_variance(family: str, d: int, q: int) -> None:
    """E[(1/q) sum <g,u> u] = g and its relative variance is theory's (SYSTEMS 4.3)."""
    g, draws = gaussian(KEY.fold(9), 0, d).astype(np.float64), 1500
    total, square = np.zeros(d), 0.0
    for i in range(draws):
        directions = Directions(KEY.fold(1000 + i), family, q, d)
        u = np.stack([directions.block(j, 0, d) for j in range(q)])
        estimate = (u @ g) @ u / q
        total += estimate
        square += ((estimate - g) ** 2).sum()
    variance = relative_variance(family, d, q)
    spread = math.sqrt(variance / draws) * np.linalg.norm(g)
    assert np.linalg.norm(total / draws - g) < 3 * spread
    assert square / draws / (g @ g) == pytest.approx(variance, rel=0.15)


def test_sixth_moment() -> None:
    """E ||u||^6 = d (d+2) (d+4) for Gaussian u, here d = 7: 693."""
    u = gaussian(KEY, 0, 7 * 200_000).reshape(-1, 7).astype(np.float64)
    assert ((u**2).sum(1) ** 3).mean() == pytest.approx(693, rel=0.02)


def test_sphere_is_pinned_at_another_size() -> None:
    """The factor depends on d, so a second d has bits of its own."""
    u = Directions(KEY, "sphere", 2, 10**5).block(1, 0, 10**5)
    expected = "7c065bb21e7af5bfce65400a64c16c4f4d0f10de8f97328c1d7d35c97abe9ead"
    assert hashlib.sha256(u.astype("<f4").tobytes()).hexdigest() == expected


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 70_000])
def test_sphere_is_the_gaussian_at_length_sqrt_d(size: int) -> None:
    directions = Directions(KEY, "sphere", 3, size)
    for j in range(3):
        u, normal = directions.block(j, 0, size), gaussian(KEY.fold(j), 0, size)
        exact = normal.astype(np.float64) * math.sqrt(size / math.fsum(normal.astype(np.float64) ** 2))
        np.testing.assert_allclose(u, exact, rtol=2e-7)
        assert np.linalg.norm(u.astype(np.float64)) == pytest.approx(math.sqrt(size), rel=1e-7)


def test_squared_norm_is_a_running_sum_in_the_order_of_coordinates() -> None:
    """Not pairwise, whose bits depend on vector widths: the plain loop's, whatever the block size."""
    total = 0.0
    for value in gaussian(KEY, 0, 70_001).tolist():
        total += value * value
    assert {squared_norm(KEY, 70_001, block) for block in (1000, 4097, 1 << 16, 1 << 20)} == {total}


def test_sphere_of_no_coordinates_is_empty() -> None:
    assert Directions(KEY, "sphere", 2, 0).block(1, 0, 0).shape == (0,)


@pytest.mark.parametrize(("family", "each"), [("gaussian", 4), ("rademacher", 4), ("hadamard", 64)])
@pytest.mark.parametrize("steps", [8, 64])
def test_a_sum_of_estimates_has_the_cosine_of_its_probes_a_number(family: str, each: int, steps: int) -> None:
    """N = n q exact probes of one gradient in d dimensions: cos^2 = N / (N + d) = c / (1 + c), c = N / d.

    E ||sum||^2 = N^2 + N (d + 1) for gaussian directions and a unit gradient, and E <sum, g> = N.
    """
    d = 1000
    gradient = np.random.default_rng(3).normal(size=d).astype(np.float32)
    total = np.zeros(d)
    for step in range(steps):
        own = Directions(KEY.fold(step), family, each, d)  # type: ignore[arg-type]
        total += own.combination(own.project(gradient).astype(np.float32))(0, d)
    squared = (total @ gradient) ** 2 / (total @ total) / float(gradient @ gradient)
    c = steps * each / d
    assert squared == pytest.approx(c / (1 + c), rel=0.25, abs=0.02)
