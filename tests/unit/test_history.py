# SPDX-License-Identifier: Apache-2.0
"""Catch-up: whoever missed rounds, lost or garbled its copy, or hears twice, ends with the same bits."""

from functools import cache

import numpy as np
import pytest

from clients import Clients, last
from hofl.algorithms.decomfl import decomfl
from hofl.algorithms.hiso import hiso
from hofl.algorithms.ho_sfl import ho_sfl
from hofl.core.directions import Directions, gaussian
from hofl.core.keys import Key
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.core.replay import Step, hex_digest, replay_
from hofl.errors import RecordError
from hofl.protocol import history
from hofl.protocol.aggregate import Training
from hofl.protocol.base import Algorithm, Memory
from hofl.protocol.probing import SHARED, Probing, Shared, root_key
from hofl.protocol.split import Split
from hofl.tasks.base import Task
from hofl.tasks.partition import Partition
from hofl.tasks.synthetic import synthetic_task

SEED, SIZE, WINDOW, Q = 7, 96, 6, 2
SGD, MOMENTUM = Optimizer("sgd", 0.05, weight_decay=1e-3), Optimizer("sgd", 0.02, momentum=0.9)
ADAMW = Optimizer("adamw", 3e-3, weight_decay=5e-4)
KEY = Key.of(SEED, "evaluation")


def probing(optimizer: Optimizer, family: str = "gaussian") -> Probing:
    return Probing("forward", Q, 1e-3, family, optimizer)


def begun(optimizer: Optimizer, steps: int = 1, size: int = SIZE) -> Record:
    """A server's state with one client that holds nothing."""
    arrays = history.begin(1, WINDOW, size, steps, Q, optimizer)
    return Record({**arrays, "weights/vector": gaussian(KEY, 0, size)}, {"round": 0})


def after(state: Record, optimizer: Optimizer, rounds: int = 1, steps: int = 1) -> Record:
    """The state some rounds later, their scalars and keys made up."""
    for _ in range(rounds):
        t, vector = state.values["round"], state.arrays["weights/vector"].copy()
        scalars = gaussian(KEY.fold(t), 0, steps * Q).reshape(steps, Q)
        recipe = history.recipe_of(probing(optimizer), optimizer)
        key = root_key(SEED, SHARED, t).array()
        arrays, values = history.advance(state, vector, key, scalars, recipe)
        arrays |= {"weights/vector": vector}
        state = Record({**state.arrays, **arrays}, {**state.values, **values, "round": t + 1})
        state = Record.from_bytes(state.to_bytes())
    return state


def told(state: Record, mark: int = -1) -> Record:
    """What the client with this mark is sent."""
    news = history.news(history.marked(state, {0: mark}), 0, state.arrays["weights/vector"])
    request = Record(news.arrays, {"run": "", "round": state.values["round"], "client": 0, **news.values})
    return Record.from_bytes(request.to_bytes())


def in_step(state: Record) -> Memory:
    """A client that holds the state's shared part."""
    return Memory(history.catch_up(Memory(), told(state), SIZE))


def same(kept: Record | None, state: Record) -> bool:
    assert kept is not None
    moments = np.array_equal(kept.arrays["weights/moments"], state.arrays["weights/moments"])
    return moments and hex_digest(kept.arrays["weights/bottom"]) == hex_digest(state.arrays["weights/vector"])


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW])
@pytest.mark.parametrize("lag", [0, 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_whatever_the_lag_the_client_ends_where_the_server_is(optimizer: Optimizer, lag: int) -> None:
    early = after(begun(optimizer), optimizer, 2)
    late, memory = after(early, optimizer, lag), in_step(early)
    request = told(late, 2)
    assert (request.values["since"] == -1) == (lag > WINDOW) == ("weights/bottom" in request.arrays)
    assert len(request.arrays.get("seeds/history", ())) == (lag if lag <= WINDOW else 0)
    kept = history.catch_up(memory, request, SIZE)
    assert kept is not None and same(kept, late) and kept.values == {"round": 2 + lag}


def test_the_window_is_a_ring_that_forgets_rounds_and_their_recipes() -> None:
    state = begun(SGD)
    for t in range(4 * WINDOW):
        state = after(state, Optimizer("sgd", 0.01 * (1 + t)))
        firsts = [first for first, _ in state.values["recipes"]]
        assert firsts == list(range(max(0, t + 1 - WINDOW), t + 1))
        assert len(state.arrays["seeds/history"]) == len(state.arrays["scalars/history"]) == WINDOW
    held = {tuple(row) for row in state.arrays["seeds/history"].tolist()}
    expected = {tuple(root_key(SEED, SHARED, t).array().tolist()) for t in range(3 * WINDOW, 4 * WINDOW)}
    assert held == expected
    assert len(after(begun(SGD), SGD, 4 * WINDOW).values["recipes"]) == 1  # one that goes on is kept


@pytest.mark.parametrize(
    ("size", "steps", "limit", "window"), [(96, 1, 99, 24), (96, 4, 99, 6), (8, 4, 9, 1)]
)
def test_no_round_is_kept_that_a_snapshot_is_smaller_than(
    size: int, steps: int, limit: int, window: int
) -> None:
    assert len(history.begin(1, limit, size, steps, Q, SGD)["seeds/history"]) == window


def test_learning_rates_are_those_of_their_rounds() -> None:
    """A client that missed three regimes replays each with its own lr (a known defect)."""
    start = after(begun(SGD), SGD)
    memory, state = in_step(start), start
    for lr in (0.05, 0.2, 0.01):
        state = after(state, Optimizer("sgd", lr, weight_decay=1e-3), 2)
    request = told(state, 1)
    assert [recipe["optimizer"]["lr"] for _, recipe in request.values["recipes"]] == [0.05, 0.2, 0.01]
    assert same(history.catch_up(memory, request, SIZE), state)
    today = [[0, request.values["recipes"][-1][1]]]
    assert (
        history.catch_up(memory, Record(request.arrays, {**request.values, "recipes": today}), SIZE) is None
    )


def test_a_resumed_server_writes_the_same_recipes() -> None:
    """What came back from a checkpoint is no other recipe than the one in memory."""
    in_memory = begun(ADAMW)
    for t in range(3):
        vector = in_memory.arrays["weights/vector"].copy()
        recipe = history.recipe_of(probing(ADAMW), ADAMW)
        key, scalars = root_key(SEED, SHARED, t).array(), np.ones((1, Q), dtype=np.float32)
        arrays, values = history.advance(in_memory, vector, key, scalars, recipe)
        stored = Record.from_bytes(in_memory.to_bytes())
        assert history.advance(stored, vector.copy(), key, scalars, recipe)[1] == values
        in_memory = Record({**in_memory.arrays, **arrays}, {**values, "round": t + 1})
    assert len(in_memory.values["recipes"]) == 1


def test_a_gap_is_never_stepped_over() -> None:
    early = after(begun(SGD), SGD, 2)
    memory, late = in_step(early), after(early, SGD, 4)
    before = memory.kept
    assert history.catch_up(memory, told(late, 3), SIZE) is None  # it holds 2, the news begin at 3
    assert history.catch_up(memory, told(late, 6), SIZE) is None  # nor where it is said to lack none
    whole = told(late, 2)
    short = {n: a[:-1] if n.endswith("/history") else a for n, a in whole.arrays.items()}
    assert history.catch_up(memory, Record(short, whole.values), SIZE) is None
    assert history.catch_up(Memory(), whole, SIZE) is None  # it lost what it held
    assert memory.kept is before and same(memory.kept, early)
    assert same(history.catch_up(memory, told(late), SIZE), late)  # a snapshot mends all three


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_twice_and_late_do_no_harm(optimizer: Optimizer) -> None:
    states = [after(begun(optimizer), optimizer, 1)]
    for _ in range(3):
        states.append(after(states[-1], optimizer))
    memory = in_step(states[0])
    news = told(states[2], 1)
    for _ in range(2):
        memory.kept = history.catch_up(memory, news, SIZE)
        assert same(memory.kept, states[2])
    assert history.catch_up(memory, told(states[1], 1), SIZE) is None  # of a round before the one it holds
    assert same(memory.kept, states[2])
    overlapping = told(states[3], 1)  # the server's mark was old: two of three rounds are known already
    assert same(history.catch_up(memory, overlapping, SIZE), states[3])


@pytest.mark.parametrize("array", ["weights/bottom", "weights/moments"])
def test_a_flipped_bit_is_found(array: str) -> None:
    early = after(begun(MOMENTUM), MOMENTUM, 2)
    for lag in (0, 3):
        memory = in_step(early)
        assert memory.kept is not None
        memory.kept.arrays[array].reshape(-1).view(np.uint32)[17] ^= 1 << 22
        assert history.catch_up(memory, told(after(early, MOMENTUM, lag), 2), SIZE) is None


def test_directions_of_another_generator_are_refused() -> None:
    early = after(begun(SGD), SGD)
    request = told(after(early, SGD, 2), 1)
    recipes = [[first, {**recipe, "rng": "mt19937"}] for first, recipe in request.values["recipes"]]
    with pytest.raises(RecordError, match="mt19937"):
        history.catch_up(in_step(early), Record(request.arrays, {**request.values, "recipes": recipes}), SIZE)
    with pytest.raises(RecordError, match="no recipe"):
        history.catch_up(in_step(early), Record(request.arrays, {**request.values, "recipes": []}), SIZE)


@pytest.mark.parametrize("family", ["gaussian", "rademacher", "hadamard"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_many_rounds_in_passes_are_one_replay(family: str, optimizer: Optimizer) -> None:
    """And AdamW's steps are counted over the whole run, not over a round or a pass."""
    rounds, steps = 2 * history.PASS + 3, 2
    keys = [root_key(SEED, SHARED, t) for t in range(rounds)]
    scalars = gaussian(KEY, 0, rounds * steps * Q).reshape(rounds, steps, Q)
    every = [
        Step(Directions(key.fold(e), family, Q, SIZE), scalars[t, e])
        for t, key in enumerate(keys)
        for e in range(steps)
    ]
    whole, parts = gaussian(KEY, 0, SIZE), gaussian(KEY, 0, SIZE)
    replay_(whole, every, optimizer)
    moments = optimizer.init(SIZE)
    recipes = [(0, history.recipe_of(probing(optimizer, family), optimizer))]
    words = np.stack([key.array() for key in keys])
    for first, stop in ((0, 70), (70, rounds)):
        history.replay_rounds_(parts, moments, first, words[first:stop], scalars[first:stop], recipes)
    assert np.array_equal(whole, parts)


def test_no_two_steps_of_a_long_run_share_a_key() -> None:
    """10^4 rounds of 5 steps and 2 probes, all 128 bits of each (the original folds 20 bits of seed)."""
    roots = [root_key(SEED, SHARED, t) for t in range(10_000)]
    steps = [(root.fold(e), t, e) for t, root in enumerate(roots) for e in range(5)]
    assert len({(key.high, key.low) for key, _, _ in steps}) == 50_000
    some = [key.fold(j) for key, t, _ in steps if t < 2000 for j in range(2)]
    assert len({(key.high, key.low) for key in some}) == 20_000


# A whole run of each method whose clients share steps.

RUNS = [("decomfl", 256), ("hiso", 256), ("ho_sfl", 256), ("decomfl-momentum", 4), ("ho_sfl-adamw", 4)]
"""Methods and their windows."""
ABSENT = {0: 0, 1: 1, 2: 10, 3: 200}
"""Rounds that each client misses before the last."""


@cache
def small_task() -> Task:
    """Four clients; 1028 trainables, 688 of them below boundary 3."""
    return synthetic_task(Partition(clients=4), seed=SEED, rows=40, evaluation_rows=4)


def method(name: str, window: int) -> tuple[Algorithm, int]:
    """A method with one probe and one step a round, and the size of its shared part."""
    task, kind = small_task(), name.partition("-")
    optimizer = {"momentum": MOMENTUM, "adamw": ADAMW, "": SGD}[kind[2]]
    training = Training(SEED, 1, 4, optimizer, (1,) * 4)
    probes, layout = Probing("forward", 1, 1e-3, "gaussian", optimizer), task.model.layout
    if kind[0] == "ho_sfl":
        made = ho_sfl(layout, (3,) * 4, training, probes, Split(task, history=window))
        return made, layout.bottom_size(3)
    build = {"decomfl": decomfl, "hiso": hiso}[kind[0]]
    return build(layout, training, probes, Shared(window)), layout.size


def start_of(task: Task) -> np.ndarray:
    return gaussian(KEY.fold(3), 0, task.model.layout.size) * np.float32(0.3)


def cohorts(rounds: int) -> list[list[int]]:
    """All in the first and the last round; between them, client i misses the last ABSENT[i]."""
    between = [[c for c, missed in ABSENT.items() if t < rounds - 1 - missed] for t in range(1, rounds - 1)]
    return [[*ABSENT], *between, [*ABSENT]]


@pytest.mark.parametrize(("name", "window"), RUNS)
def test_clients_that_missed_1_10_and_200_rounds_end_like_one_that_missed_none(
    name: str, window: int
) -> None:
    """By replay, and where the window is short by snapshot."""
    task, (algorithm, size) = small_task(), method(name, window)
    call, plan = Clients(task, algorithm.actions), cohorts(202)
    state = last(algorithm, algorithm.init(start_of(task)), call, plan[:-1])
    before, call.asked = state, []
    state = last(algorithm, state, call, plan[-1:])
    server = (
        state if name.startswith("ho_sfl") else before
    )  # DeComFL's clients apply a round with the next news
    expected = hex_digest(server.arrays["weights/vector"][:size])
    for client, missed in ABSENT.items():
        kept = call.memories[client].kept
        assert kept is not None and hex_digest(kept.arrays["weights/bottom"]) == expected
        assert np.array_equal(kept.arrays["weights/moments"], server.arrays["weights/moments"])
        news = call.requests(client)[0]
        lag = missed if name.startswith("ho_sfl") else missed + 1
        assert len(news.arrays.get("seeds/history", ())) == (lag if lag <= window else 0)
        assert ("weights/bottom" in news.arrays) == (lag > window)


def disturb(call: Clients, how: str) -> None:
    """Something happens to client 1 between two rounds."""
    memory = call.memories[1]
    assert memory.kept is not None
    if how == "lost":
        memory.kept, memory.open = None, {}
    elif how == "bit":
        garbled = {n: a.copy() for n, a in memory.kept.arrays.items()}
        garbled["weights/bottom"].view(np.uint32)[5] ^= 1 << 20
        memory.kept = Record(garbled, memory.kept.values)
    elif how == "gap":
        memory.kept = Record(memory.kept.arrays, {"round": memory.kept.values["round"] - 1})
    else:  # its latest message comes twice more, and then its first one
        mine = [(action, request) for action, client, request in call.asked if client == 1]
        for action, request in (mine[-1], mine[-1], mine[0]):
            call(action, {1: request}, None)
        assert memory.kept.values["round"] == 0


@pytest.mark.parametrize("name", ["decomfl", "hiso", "ho_sfl"])
@pytest.mark.parametrize("how", ["lost", "bit", "gap", "again"])
def test_a_client_that_is_elsewhere_is_put_right_within_the_round(name: str, how: str) -> None:
    task, (algorithm, _) = small_task(), method(name, 64)
    plan = [[0, 1], [0, 1], [0, 2], [0, 1], [1, 2]]
    quiet = last(algorithm, algorithm.init(start_of(task)), Clients(task, algorithm.actions), plan)
    call = Clients(task, algorithm.actions)
    state = last(algorithm, algorithm.init(start_of(task)), call, plan[:3])
    disturb(call, how)
    call.asked = []
    state = last(algorithm, state, call, plan[3:4])
    snapshots = [r for r in call.requests(1) if r.values.get("since") == -1]
    assert len(snapshots) == 1  # asked once more, with the whole
    assert "weights/bottom" in snapshots[0].arrays
    state = last(algorithm, state, call, plan[4:])
    assert hex_digest(state.arrays["weights/vector"]) == hex_digest(quiet.arrays["weights/vector"])
    one, two = (call.memories[c].kept for c in (1, 2))
    assert one is not None and two is not None
    assert hex_digest(one.arrays["weights/bottom"]) == hex_digest(two.arrays["weights/bottom"])


def test_a_client_that_refuses_even_the_snapshot_is_explained() -> None:
    task, (algorithm, _) = small_task(), method("decomfl", 64)
    whole = Clients(task, algorithm.actions)

    def stubborn(action, requests, deadline):
        replies = whole(action, requests, deadline)
        if 1 in requests:
            replies.records[1] = history.behind(requests[1])
        return replies

    outcome = algorithm.round(algorithm.init(start_of(task)), [0, 1], stubborn)
    assert outcome.failures == {1: "refused: it cannot take the snapshot it was sent"}
    assert [e.client for e in outcome.entries] == [0]
    assert outcome.state.arrays["cursors/synced"].tolist() == [0, -1, -1, -1]
