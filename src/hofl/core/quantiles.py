# SPDX-License-Identifier: Apache-2.0
"""The table that turns 16 random bits into a standard-normal number, bit-equal everywhere.

Entry ``i`` is the normal quantile at ``(i + 1/2) / 65536``, scaled so that the table's variance is
exactly one, stored as float32. It is computed with ``+ - * /`` and ``sqrt`` only, which IEEE 754
rounds identically on every machine, and no library ``log`` or ``erf``; its SHA-256 is checked.
"""

import hashlib
import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIZE = 65_536
SHA256 = "8babbcaf96568f10165a1eab530c0e5c92d04de96761b6dbb3dadfa94baba37f"

# Wichura (1988), algorithm AS 241, PPND16: rational approximations, relative error about 1e-16.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip


def _ratio(x: NDArray[np.float64], polynomials: tuple[tuple[float, ...], ...]) -> NDArray[np.float64]:
    values = []
    for coefficients in polynomials:
        y = np.full_like(x, coefficients[0])
        for c in coefficients[1:]:
            y = y * x + c
        values.append(y)
    return values[0] / values[1]


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of x > 0 by ``2 atanh((m-1)/(m+1)) + e ln 2``, m in [0.5, 1)."""
    m, e = np.frexp(x)
    t = (m - 1.0) / (m + 1.0)  # in [-1/3, 0]: 20 terms leave less than 1e-20
    t2 = t * t
    series = np.zeros_like(t)
    for k in range(39, 0, -2):
        series = series * t2 + 1.0 / k
    return 2.0 * t * series + e * 0.6931471805599453


@cache
def normal_quantiles() -> NDArray[np.float32]:
    """The table: float32 [65536], ascending, antisymmetric, of variance exactly one before rounding.

    Raises:
        RuntimeError: this machine's floating point does not give the table's bits.
    """
    p = (np.arange(SIZE // 2) + 0.5) / SIZE  # lower half, (0, 1/2)
    q = p - 0.5
    centre = q * _ratio(0.180625 - q * q, _CENTRE)
    tail = -_ratio(np.sqrt(-_log(p)) - 1.6, _TAIL)  # sqrt(-log p) < 5 for p > 1e-11
    lower = np.where(np.abs(q) <= 0.425, centre, tail)
    variance = math.fsum((lower * lower).tolist()) / (SIZE // 2)
    half = (lower / math.sqrt(variance)).astype(np.float32)
    table = np.concatenate([half, -half[::-1]])
    table.setflags(write=False)
    if hashlib.sha256(table.astype("<f4").tobytes()).hexdigest() != SHA256:
        raise RuntimeError("the normal table differs on this machine: its floating point is not IEEE 754")
    return table
