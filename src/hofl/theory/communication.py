# SPDX-License-Identifier: Apache-2.0
"""What a method sends, by formula: bytes of one client in one round, by category, headers excluded.

The formulas are those of HO-FL App. E, with what this library adds to a message: a 32-byte digest and three
float64 of diagnostics where there is a bottom, and one 16-byte root key in place of E q seeds. The law suite
holds them equal to the bytes metered from serialised records.
"""

from typing import TypedDict

WEIGHT = 4
"""Bytes of a trainable, w."""
SCALAR = 4
"""Bytes of a probe's scalar, s."""
KEY = 16
DIGEST = 32
DIAGNOSTICS = 24


class Traffic(TypedDict):
    """Bytes by category, up from and down to one client in one round."""

    up: dict[str, int]
    down: dict[str, int]


def fedavg(d: int) -> Traffic:
    """``w d`` each way.

    >>> fedavg(294_912)["up"]["weights"]
    1179648
    """
    return {"up": {"weights": WEIGHT * d}, "down": {"weights": WEIGHT * d}}


def ho_fl(d: int, d_zo: int, steps: int, probes: int) -> Traffic:
    """Up ``s E q + w d_fo``, down ``w d`` and the root key; without probes or a bottom, FedAvg's top.

    Args:
        d: trainables.
        d_zo: of them below the client's boundary.
        steps: E.
        probes: q; 0 for the frozen-bottom control.

    >>> ho_fl(294_912, 147_456, steps=5, probes=2)["up"]
    {'weights': 589824, 'scalars': 40, 'digests': 32, 'metrics': 24}
    """
    up, down = {"weights": WEIGHT * (d - d_zo)}, {"weights": WEIGHT * d}
    if d_zo and probes:
        up |= {"scalars": SCALAR * steps * probes, "digests": DIGEST, "metrics": DIAGNOSTICS}
        down |= {"seeds": KEY}
    return {"up": up, "down": down}


def catch_up(d_c: int, steps: int, probes: int, lag: int | None, moments: int = 0) -> dict[str, int]:
    """Down to one client before its round, where steps are shared: the rounds it lacks, or a snapshot.

    Args:
        d_c: trainables of the shared part.
        steps: E, shared steps a round.
        probes: q.
        lag: rounds it lacks; None for a snapshot: first contact, or a copy that differs.
        moments: vectors of optimizer state that go with a snapshot.

    >>> catch_up(147_456, steps=1, probes=2, lag=None), catch_up(147_456, steps=1, probes=2, lag=3)
    ({'digests': 32, 'weights': 589824}, {'digests': 32, 'scalars': 24, 'seeds': 48})
    """
    if lag is None:
        return {"digests": DIGEST, "weights": WEIGHT * d_c * (1 + moments)}
    return {"digests": DIGEST, "scalars": SCALAR * lag * steps * probes, "seeds": KEY * lag}


def _plus(*parts: dict[str, int]) -> dict[str, int]:
    """Bytes by category, summed."""
    return {name: sum(part.get(name, 0) for part in parts) for part in parts for name in part}


def ho_sfl(activation: int, labels: int, probes: int, news: dict[str, int]) -> Traffic:
    """Up ``a A + y + s q``, a digest and diagnostics; down ``a A + s q``, a key and the news.

    Args:
        activation: bytes of a batch's boundary activation, a A; the feedback has as many.
        labels: bytes of its labels and lengths, y.
        probes: q; 0 for the frozen-bottom control, which gets neither key nor feedback.
        news: of :func:`catch_up`.

    >>> ho_sfl(6_291_456, 64, 2, catch_up(147_456, 1, 2, lag=0))["up"]
    {'activations': 6291456, 'labels': 64, 'scalars': 8, 'digests': 32, 'metrics': 24}
    """
    up = {"activations": activation, "labels": labels}
    if not probes:
        return {"up": up, "down": news}
    up |= {"scalars": SCALAR * probes, "digests": DIGEST, "metrics": DIAGNOSTICS}
    return {"up": up, "down": _plus({"feedback": activation, "scalars": SCALAR * probes, "seeds": KEY}, news)}


def hosl(activation: int, labels: int, steps: int, probes: int, news: dict[str, int]) -> Traffic:
    """Up ``E ((2q + 1) a A + y)`` and a digest; down ``E 2q s`` of losses, a key and the news.

    >>> hosl(1000, 64, 5, 2, catch_up(10, 5, 2, lag=0))["down"]
    {'scalars': 80, 'seeds': 16, 'digests': 32}
    """
    up = {"activations": steps * (2 * probes + 1) * activation, "labels": steps * labels, "digests": DIGEST}
    own = {"scalars": SCALAR * steps * 2 * probes, "seeds": KEY} if probes else {}
    return {"up": up, "down": _plus(own, news)}


def zo_sfl(activation: int, labels: int, steps: int, probes: int, d_c: int) -> Traffic:
    """Up ``E (2q a A + y) + w d_c``, down ``E q s + w d_c`` and a key.

    >>> zo_sfl(1000, 64, 5, 2, 10)["up"]
    {'activations': 20000, 'labels': 320, 'weights': 40}
    """
    up = {"activations": steps * 2 * probes * activation, "labels": steps * labels, "weights": WEIGHT * d_c}
    return {"up": up, "down": {"scalars": SCALAR * steps * probes, "seeds": KEY, "weights": WEIGHT * d_c}}


def mu_splitfed(activation: int, labels: int, probes: int, d_c: int) -> Traffic:
    """Up ``(2q + 1) a A + y + w d_c``, down ``q s + w d_c`` and a key; whatever tau is.

    >>> mu_splitfed(1000, 64, 1, 10)["up"]
    {'activations': 3000, 'labels': 64, 'weights': 40}
    """
    up = {"activations": (2 * probes + 1) * activation, "labels": labels, "weights": WEIGHT * d_c}
    return {"up": up, "down": {"scalars": SCALAR * probes, "seeds": KEY, "weights": WEIGHT * d_c}}


def fedprox(d: int) -> Traffic:
    """As FedAvg; the proximal coefficient is a header."""
    return fedavg(d)


def fedzo(d: int) -> Traffic:
    """``w d`` each way, with a key for the private directions down and diagnostics up.

    >>> fedzo(294_912)
    {'up': {'weights': 1179648, 'metrics': 24}, 'down': {'weights': 1179648, 'seeds': 16}}
    """
    return {
        "up": {"weights": WEIGHT * d, "metrics": DIAGNOSTICS},
        "down": {"weights": WEIGHT * d, "seeds": KEY},
    }


def mezo(d: int, steps: int, probes: int, moments: int = 0, first: bool = False) -> Traffic:
    """Up ``s E q``; down a key, and at first contact ``w d`` and the optimizer's state.

    Args:
        d: trainables.
        steps: E.
        probes: q.
        moments: vectors of d numbers that the optimizer keeps: 0 to 2.
        first: the trainer holds nothing yet, or has lost it.

    >>> mezo(294_912, steps=5, probes=1)["up"]
    {'scalars': 20, 'digests': 32, 'metrics': 24}
    """
    snapshot = {"weights": WEIGHT * d * (1 + moments)} if first else {}
    return {
        "up": {"scalars": SCALAR * steps * probes, "digests": DIGEST, "metrics": DIAGNOSTICS},
        "down": {"seeds": KEY, "digests": DIGEST, **snapshot},
    }


def splitfed(activation: int, labels: int, steps: int, d_c: int) -> Traffic:
    """SplitFed V1 and V2, and SplitLoRA: up ``E (a A + y) + w d_c``, down ``E a A + w d_c``.

    >>> splitfed(1000, 64, 5, 10)["down"]
    {'feedback': 5000, 'weights': 40}
    """
    up = {"activations": steps * activation, "labels": steps * labels, "weights": WEIGHT * d_c}
    return {"up": up, "down": {"feedback": steps * activation, "weights": WEIGHT * d_c}}


def heron_sfl(
    activation: int, labels: int, steps: int, probes: int, every: int, d_c: int, d_a: int
) -> Traffic:
    """Up ``ceil(E / k) (a A + y) + w (d_c + d_a)`` and diagnostics, down ``w (d_c + d_a)`` and a key.

    Args:
        activation: bytes of a batch's boundary activation.
        labels: bytes of its labels and lengths.
        steps: E.
        probes: q; 0 for the frozen control, which gets no key and has nothing to diagnose.
        every: k, local steps between two uploads.
        d_c: trainables of the bottom.
        d_a: numbers of the auxiliary head.

    >>> heron_sfl(1000, 64, steps=5, probes=1, every=2, d_c=10, d_a=5)["up"]
    {'activations': 3000, 'labels': 192, 'weights': 60, 'metrics': 24}
    """
    uploads, weights = -(-steps // every), WEIGHT * (d_c + d_a)
    up = {"activations": uploads * activation, "labels": uploads * labels, "weights": weights}
    own = ({"metrics": DIAGNOSTICS}, {"seeds": KEY}) if probes else ({}, {})
    return {"up": up | own[0], "down": {"weights": weights} | own[1]}


def decomfl(d: int, steps: int, probes: int, news: dict[str, int]) -> Traffic:
    """DeComFL and HiSo: up ``s E q`` and diagnostics, down a key and the news.

    With averaged models it is :func:`ho_fl` with all trainables below the boundary.

    Args:
        d: trainables.
        steps: E.
        probes: q.
        news: of :func:`catch_up`; HiSo's diagonal is one vector of moments.

    >>> decomfl(294_912, 5, 2, catch_up(294_912, 5, 2, lag=1))
    {'up': {'scalars': 40, 'metrics': 24}, 'down': {'seeds': 32, 'digests': 32, 'scalars': 40}}
    """
    up = {"scalars": SCALAR * steps * probes, "metrics": DIAGNOSTICS}
    return {"up": up, "down": _plus({"seeds": KEY}, news)}
