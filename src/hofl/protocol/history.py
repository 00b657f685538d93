# SPDX-License-Identifier: Apache-2.0
"""Shared steps and how a client that missed some catches up (HO-SFL; DeComFL's ledger; HiSo).

Where all clients share directions, a round moves every copy of the shared part by the same keys and averaged
scalars. The server keeps those of the last W rounds; a client that was away replays them in order, and one
that was away longer, or is new, or differs, gets a snapshot. Each round is recorded with its recipe
(optimizer with its learning rate, law of directions, q, generator), never looked up in today's configuration.

State: ``cursors/synced`` int64 [clients], rounds a client has applied (-1: it holds nothing);
``scalars/history`` float32 [W, E, q] and ``seeds/history`` uint64 [W, 2] with round t in row t mod W;
``weights/moments`` float32 [k, n], the optimizer's persistent state; the value ``recipes``.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hofl.core.directions import RNG_ID, Directions
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer, Update
from hofl.core.record import Record
from hofl.core.replay import Step, digest, replay_
from hofl.errors import ClientError, RecordError
from hofl.protocol import aggregate, split
from hofl.protocol.aggregate import require_usable
from hofl.protocol.base import SERVER, Call, Entry, Memory, Vector
from hofl.protocol.probing import Probing, agreement_of

Floats = NDArray[np.float32]
Recipes = Sequence[tuple[int, dict[str, Any]]]
"""(first round, recipe) in order; the last one goes on."""

PASS = 64
"""Rounds a pass over the weights: ``hadamard`` keeps a vector for each step of a pass."""

UpdateOf = Callable[[dict[str, Any]], Update]


def begin(
    clients: int, limit: int, size: int, steps: int, probes: int, update: Update
) -> dict[str, NDArray[Any]]:
    """The arrays of a state in which nobody holds anything.

    W is at most the lag from which a snapshot of n numbers is smaller than 2 q E numbers a round.

    Args:
        clients: N.
        limit: of W.
        size: n, coordinates of the shared part.
        steps: E.
        probes: q.
        update: makes the first moments.
    """
    window = max(1, min(limit, size // max(1, 2 * steps * probes)))
    moments = [np.asarray(m) for m in update.init(size)]
    return {
        "cursors/synced": np.full(clients, -1, dtype=np.int64),
        "scalars/history": np.zeros((window, steps, probes), dtype=np.float32),
        "seeds/history": np.zeros((window, 2), dtype=np.uint64),
        "weights/moments": np.stack(moments) if moments else np.zeros((0, size), dtype=np.float32),
    }


def recipe_of(probing: Probing, update: Update) -> dict[str, Any]:
    """What a replay of a round needs beside its key and scalars; as it reads back from a checkpoint."""
    values = probing.to_values()
    recipe = {n: values[n] for n in ("directions", "probes", "rng")} | {"optimizer": update.to_values()}
    plain: dict[str, Any] = json.loads(json.dumps(recipe))
    return plain


def replay_rounds_(
    weights: Floats,
    moments: Iterable[Floats],
    first: int,
    keys: NDArray[np.uint64],
    scalars: Floats,
    recipes: Recipes,
    update_of: UpdateOf = Optimizer.from_values,
) -> None:
    """Apply rounds ``first ..`` to the shared part in place, block by block, PASS rounds at a time.

    Args:
        weights: float32 [n], overwritten.
        moments: k arrays float32 [n], overwritten.
        first: number of the first round, from 0.
        keys: uint64 [rounds, 2], each round's root key.
        scalars: float32 [rounds, E, q], averaged over its clients.
        recipes: from round 0 or before ``first`` on.
        update_of: a recipe's ``optimizer`` -> what moves the weights.

    Raises:
        RecordError: a round has no recipe, or one of another generator.
    """
    for start, stop, recipe in _stretches(first, first + len(keys), recipes):
        if recipe["rng"] != RNG_ID:
            raise RecordError(f"round {start}: its directions are '{recipe['rng']}', not '{RNG_ID}'")
        if not recipe["probes"]:
            continue
        law, q, count = recipe["directions"], recipe["probes"], scalars.shape[1]
        update, state = update_of(recipe["optimizer"]), list(moments)
        for begins in range(start, stop, PASS):
            steps = [
                Step(Directions(Key.from_array(keys[t - first]).fold(e), law, q, len(weights)), s)
                for t in range(begins, min(begins + PASS, stop))
                for e, s in enumerate(scalars[t - first])
            ]
            with np.errstate(all="ignore"):
                replay_(weights, steps, update, state, first=begins * count + 1)


def _stretches(first: int, last: int, recipes: Recipes) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Rounds ``first .. last-1`` as (start, stop, recipe)."""
    if first < last and (not recipes or recipes[0][0] > first):
        raise RecordError(f"round {first} has no recipe")
    ends = [*(begins for begins, _ in recipes[1:]), last]
    for (begins, recipe), ends_at in zip(recipes, ends, strict=True):
        start, stop = max(first, begins), min(last, ends_at)
        if start < stop:
            yield start, stop, recipe


def accepted(entry: Entry, shape: tuple[int, int], failures: dict[int, str]) -> bool:
    """Whether a client's scalars are what was asked for; else it is explained."""
    try:
        if shape[1]:
            require_usable(entry.reply.array("scalars/s", "float32", shape))
            agreement_of(entry.reply)
    except RecordError as error:
        failures[entry.client] = f"refused: {error}"
        return False
    return True


def mean_scalars(entries: Sequence[Entry], shape: tuple[int, int]) -> Floats:
    """The clients' scalars float32 [E, q], averaged with the plans' weights in float64 and rounded once."""
    return aggregate.mean(
        (entry.plan.values["weight"], entry.reply.array("scalars/s", "float32", shape)) for entry in entries
    )


def advance(
    state: Record, weights: Floats, key: NDArray[np.uint64], scalars: Floats, recipe: dict[str, Any],
    update_of: UpdateOf = Optimizer.from_values,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:  # fmt: skip
    """One round of the shared part on the server: ``weights`` moves in place -> changed arrays and values."""
    t, recipes = state.values["round"], [tuple(r) for r in state.values.get("recipes", ())]
    if not recipes or recipes[-1][1] != recipe:
        recipes.append((t, recipe))
    moments = state.arrays["weights/moments"].copy()
    replay_rounds_(weights, moments, t, key[None], scalars[None], recipes, update_of)
    past, keys = state.arrays["scalars/history"].copy(), state.arrays["seeds/history"].copy()
    past[t % len(past)], keys[t % len(keys)] = scalars, key
    oldest = t + 1 - len(past)  # recipes before the window go with it
    kept = [r for r, after in zip(recipes, [*recipes[1:], (t + 2, {})], strict=True) if after[0] > oldest]
    arrays = {"weights/moments": moments, "scalars/history": past, "seeds/history": keys}
    return arrays, {"recipes": [list(r) for r in kept]}


def news(state: Record, client: int, weights: Floats, snapshot: bool = False) -> Record:
    """What brings a client to the shared part before this round, with its digest.

    Args:
        state: the server's.
        client: whose mark decides: the rounds it lacks, or a snapshot where that is smaller.
        weights: the shared part float32 [n].
        snapshot: send one whatever the mark says.
    """
    t, mark = state.values["round"], int(state.arrays["cursors/synced"][client])
    window = len(state.arrays["seeds/history"])
    moments = state.arrays["weights/moments"]
    proof = {"digests/before": _proof(weights, moments)}
    if snapshot or mark < 0 or t - mark > window:
        full = {"weights/bottom": weights, **({"weights/moments": moments} if len(moments) else {})}
        return Record({**proof, **full}, {"since": -1})
    rows = np.arange(mark, t) % window
    missed = {n: state.arrays[n][rows] for n in ("scalars/history", "seeds/history")} if len(rows) else {}
    recipes = state.values.get("recipes", ()) if len(rows) else ()
    return Record({**proof, **missed}, {"since": mark, "recipes": list(recipes)})


def catch_up(
    memory: Memory, request: Record, size: int, update_of: UpdateOf = Optimizer.from_values
) -> Record | None:
    """A client's half of :func:`news`: what it then keeps, or None where it cannot follow.

    It cannot where the rounds it was sent begin after the one it holds (it never steps over a gap), or where
    the result has another digest than the server's. Rounds it has already are left out, so a message that
    comes twice does no harm.
    """
    t, since = request.values["round"], request.values["since"]
    if since < 0:
        empty = np.zeros((0, size), dtype=np.float32)
        arrays = {"weights/bottom": request.array("weights/bottom", "float32", (size,))}
        moments = request.arrays.get("weights/moments", empty)
        kept = Record({**arrays, "weights/moments": moments}, {"round": t})
    elif memory.kept is None or not since <= memory.kept.values["round"] <= t:
        return None
    else:
        held = memory.kept.values["round"]
        kept = Record({n: a.copy() for n, a in memory.kept.arrays.items()}, {"round": t})
        if held < t:
            keys, scalars = (request.arrays[n][held - since :] for n in ("seeds/history", "scalars/history"))
            if len(keys) != t - held or len(scalars) != t - held:
                return None
            arrays, recipes = kept.arrays, request.values["recipes"]
            replay_rounds_(
                arrays["weights/bottom"], arrays["weights/moments"], held, keys, scalars, recipes, update_of
            )
    found = _proof(kept.arrays["weights/bottom"], kept.arrays["weights/moments"])
    return kept if np.array_equal(found, request.arrays["digests/before"]) else None


def _proof(weights: Floats, moments: Floats) -> NDArray[np.uint8]:
    """A digest of all that a client keeps: uint8 [32]."""
    return digest(np.concatenate([weights, moments.ravel()]))


def behind(request: Record) -> Record:
    """The reply of a client that cannot follow: it asks for a snapshot."""
    return Record({}, {**split.identity(request.values), "behind": True})


def ask(
    call: Call,
    action: str,
    state: Record,
    plans: Mapping[int, Record],
    weights: Floats,
    failures: dict[int, str],
) -> dict[int, Record]:
    """Ask each client with the news it needs, and those that cannot follow once more with a snapshot."""
    answers: dict[int, Record] = {}
    asked: Mapping[int, Record] = plans
    for snapshot in (False, True):
        requests = {}
        for client, plan in asked.items():
            told = news(state, client, weights, snapshot)
            requests[client] = Record({**plan.arrays, **told.arrays}, {**plan.values, **told.values})
        answers |= split.ask(call, action, requests, failures)
        asked = {client: plans[client] for client in answers if answers[client].values.get("behind")}
        if not asked:
            break
    for client in asked:
        del answers[client]
        failures.setdefault(client, "refused: it cannot take the snapshot it was sent")
    return dict(sorted(answers.items()))


def moved(kept: Record, request: Record, update_of: UpdateOf = Optimizer.from_values) -> Record:
    """What a client keeps after the round it took part in: one more round applied (HO-SFL stage 4b).

    Raises:
        ClientError: it is not at the round that the message is of.
    """
    t = request.values["round"]
    if kept.values["round"] != t:
        raise ClientError(f"this client holds round {kept.values['round']}, the message is of round {t}")
    arrays = {n: a.copy() for n, a in kept.arrays.items()}
    keys, scalars = request.arrays["seeds/root"][None], request.arrays["scalars/mean"][None]
    recipes = [(t, request.values["recipe"])]
    replay_rounds_(arrays["weights/bottom"], arrays["weights/moments"], t, keys, scalars, recipes, update_of)
    return Record(arrays, {"round": t + 1})


def marked(state: Record, marks: Mapping[int, int]) -> Record:
    """The state with the rounds that these clients have applied: -1 for one that must get a snapshot."""
    synced = state.arrays["cursors/synced"].copy()
    for client, mark in marks.items():
        synced[client] = mark
    return Record({**state.arrays, "cursors/synced": synced}, state.values)


def in_step(state: Record, entries: Sequence[Entry]) -> Record:
    """:func:`marked` by the entries: who has taken this round's step, and who must get a snapshot."""
    said = {e.client: e.reply.values["in_step"] for e in entries if e.client != SERVER}
    return marked(state, {client: state.values["round"] if good else -1 for client, good in said.items()})


def bottom_of(state: Record, size: int) -> Vector:
    """A copy of the shared part: the first ``size`` trainables."""
    return state.arrays["weights/vector"][:size].copy()
