# SPDX-License-Identifier: Apache-2.0
"""Second moments of the estimate ``(1/q) sum_j <g, u_j> u_j`` by the law of its directions."""

from hofl.core.directions import Family


def relative_variance(family: Family, d: int, q: int) -> float:
    """``E ||estimate - g||^2 / ||g||^2`` for exact scalars and q directions in d dimensions.

    Gaussian ``(d+1)/q``; Rademacher and the sphere of radius sqrt(d) ``(d-1)/q``; Hadamard, rows
    without replacement of a matrix of size n (the power of two at or above d), ``(d-1)/(n-1) (n/q - 1)``:
    d/q - 1 at d = n, and 0 at q = n.

    Raises:
        ValueError: q is not in its range.

    >>> relative_variance("gaussian", 7, 4), relative_variance("hadamard", 8, 8)
    (2.0, 0.0)
    >>> relative_variance("hadamard", 8, 2)
    3.0
    """
    n = 1 << max(0, d - 1).bit_length()
    if q < 1 or (family == "hadamard" and q > n):
        raise ValueError(f"q = {q} is not between 1 and {n if family == 'hadamard' else 'infinity'}")
    if family == "gaussian":
        return (d + 1) / q
    if family in ("rademacher", "sphere"):
        return (d - 1) / q
    return (d - 1) / (n - 1) * (n / q - 1) if n > 1 else 0.0
