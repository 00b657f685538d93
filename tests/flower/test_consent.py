# SPDX-License-Identifier: Apache-2.0
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hofl.algorithms import ALGORITHMS
from hofl.build import probes_of, steps_of
from hofl.config import Config, parse
from hofl.core.layout import Layout
from hofl.core.optimizers import Optimizer
from hofl.core.record import Record
from hofl.errors import ClientError
from hofl.protocol.aggregate import Training, plan_values
from hofl.protocol.base import Replies
from hofl.protocol.probing import Probing
from hofl.runtime.flower.consent import Consent
from hofl.runtime.flower.node_config import NodeConfig
from hofl.runtime.local import local_call
from hofl.session import prepare

A, B = "a" * 64, "b" * 64
LAYOUT = Layout.build([(f"w{b}", (10,), b) for b in range(5)], blocks=5)
"""Ten parameters a block."""


def config(algorithm: str = "ho_fl", **settings: Any) -> Config:
    lines = {"local.batch": 4, "local.steps": 3, "rounds": 20, "zo.probes": 2, **settings}
    if ALGORITHMS[algorithm].hybrid:
        lines["cohort.boundaries"] = [2]
    if algorithm in ("hiso", "mu_splitfed", "decomfl"):
        lines["optimizer.name"] = "sgd"
    data = 'name = "synthetic"'
    if algorithm == "splitlora":  # it trains the adapters of a text model
        data = 'train = "a.csv"\nevaluation = "b.csv"'
        lines["model.source"] = "tiny:gpt2"
    text = f'algorithm = "{algorithm}"\n[task]\n{data}\n'
    return parse(text, "x.toml", [f"{key}={value}" for key, value in lines.items()])


def plan(boundary: int | None = 2, **changed: Any) -> dict[str, Any]:
    """The values that a real request has."""
    optimizer = Optimizer("sgd", 0.1)
    training = Training(seed=1, steps=3, batch=4, optimizer=optimizer, sizes=(9,))
    state = Record({"cursors/next": np.zeros(1, dtype=np.int64)}, {"round": 0})
    values = plan_values(state, 0, training)
    values |= Probing("forward", 2, 1e-3, "gaussian", optimizer).to_values()
    return values | ({} if boundary is None else {"boundary": boundary}) | changed


def refused(check: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ClientError) as caught:
        check(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


RUNS = [
    (
        Consent(models=(A,)), config(), B, A,
        "refused by consent.models: the run's model has SHA-256 bbbbbbbbbbbb, allowed is aaaaaaaaaaaa",
    ),
    (
        Consent(max_rounds=19), config(), A, config(rounds=19),
        "refused by consent.max_rounds: asked for 20 rounds, allowed are 19",
    ),
    (
        Consent(minimum_batch=4), config(**{"local.batch": 3}), A, config(),
        "refused by consent.minimum_batch: asked for batches of 3 examples, a step must see at least 4",
    ),
    (
        Consent(), config("ho_sfl"), A, config(),
        "refused by consent.split: ho_sfl is a split method: "
        "boundary activations and labels would leave this node",
    ),
    (
        Consent(boundary=1), config("fedavg"), A, config("decomfl"),
        "refused by device.boundary: fedavg backpropagates through every block of a client, "
        "this node declared 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("consent", "asked", "model", "inside", "message"), RUNS)
def test_each_line_of_a_run(consent: Consent, asked: Config, model: str, inside: Any, message: str) -> None:
    assert refused(consent.check_run, asked, model) == message
    if isinstance(inside, str):
        consent.check_run(asked, inside)
    else:
        consent.check_run(inside, model)


def test_split_methods_are_joined_only_where_split_is_allowed() -> None:
    for name, method in ALGORITHMS.items():
        Consent(split=True).check_run(config(name), A)
        if method.split:
            assert refused(Consent().check_run, config(name), A).startswith("refused by consent.split: ")
        else:
            Consent().check_run(config(name), A)


def test_methods_that_backpropagate_below_a_declared_boundary() -> None:
    """By what the table of methods says that a client backpropagates through."""
    for name, method in ALGORITHMS.items():
        whole = method.backpropagates in ("client, all", "client and server")
        if whole:
            told = refused(Consent(split=True, boundary=1).check_run, config(name), A)
            assert told.startswith(f"refused by device.boundary: {name} ")
            Consent(split=True, boundary=0).check_run(config(name), A)
        else:
            Consent(split=True, boundary=1).check_run(config(name), A)


def test_a_node_that_wants_differential_privacy_joins_nothing() -> None:
    for name in ALGORITHMS:
        told = refused(Consent(split=True, differential_privacy=True).check_run, config(name), A)
        assert told.startswith("refused by consent.differential_privacy: ")


def test_a_batch_is_no_larger_than_what_the_client_holds() -> None:
    consent = Consent(minimum_batch=4)
    consent.check_run(config(), A, examples=4)
    assert refused(consent.check_run, config(), A, examples=3) == (
        "refused by consent.minimum_batch: this client holds only 3 examples, a step must see at least 4"
    )


def test_a_model_is_known_in_either_case() -> None:
    node = NodeConfig.model_validate(
        {"client": "a", "server": "127.0.0.1:1", "consent": {"models": ("A" * 64,)}}
    )
    Consent.of(node).check_run(config(), A)
    Consent.of(node).check_run(config(), A.upper())
    assert "consent.models" in refused(Consent.of(node).check_run, config(), B)


PLANS = [
    # 2 probes x 20 parameters below block 2 x 3 steps
    (
        {"max_probe_cost": 119}, {"max_probe_cost": 120}, plan(),
        "refused by consent.max_probe_cost: "
        "asked for 2 probes x 20 parameters x 3 steps = 120, allowed are 119",
    ),
    # no boundary: all 50 parameters are probed
    (
        {"max_probe_cost": 299}, {"max_probe_cost": 300}, plan(None),
        "refused by consent.max_probe_cost: "
        "asked for 2 probes x 50 parameters x 3 steps = 300, allowed are 299",
    ),
    (
        {"minimum_batch": 5}, {"minimum_batch": 4}, plan(),
        "refused by consent.minimum_batch: asked for batches of 4 examples, a step must see at least 5",
    ),
    (
        {"max_rounds": 7}, {"max_rounds": 8}, plan(round=7),
        "refused by consent.max_rounds: asked for 8 rounds, allowed are 7",
    ),
    (
        {"boundary": 3}, {"boundary": 1}, plan(1),
        "refused by device.boundary: asked for boundary 1, this node declared 3",
    ),
    (
        {"memory": 103}, {"memory": 104}, plan(),
        "refused by device.memory: needs at least 104 bytes, this node has 103",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("outside", "inside", "values", "message"), PLANS)
def test_each_line_of_a_plan(
    outside: dict[str, int], inside: dict[str, int], values: dict[str, Any], message: str
) -> None:
    assert refused(replace(Consent(), **outside).check_plan, values, LAYOUT) == message
    replace(Consent(), **inside).check_plan(values, LAYOUT)
    Consent().check_plan(values, LAYOUT)


def test_memory_in_use_counts() -> None:
    consent = Consent(memory=1104)
    consent.check_plan(plan(), LAYOUT, held=1000)
    assert "needs at least 1,105 bytes" in refused(consent.check_plan, plan(), LAYOUT, held=1001)


def test_a_huge_plan_is_refused_at_once_and_without_allocation() -> None:
    consent = Consent(max_probe_cost=10**9)
    tracemalloc.start()
    begun = time.perf_counter()
    told = refused(consent.check_plan, plan(steps=10**9), LAYOUT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.perf_counter() - begun < 1 and peak < 2**20
    assert told.startswith("refused by consent.max_probe_cost: ") and "1,000,000,000 steps" in told
    for name in ("steps", "batch", "probes", "round"):  # and what a run has agreed to holds without limits
        told = refused(Consent().check_plan, plan(**{name: 10**9}), LAYOUT, config())
        assert told.startswith(f"refused: the plan has {name} = 1,000,000,000, at most ")


def test_a_plan_keeps_to_the_runs_configuration() -> None:
    Consent().check_plan(plan(round=19), LAYOUT, config())
    told = refused(Consent().check_plan, plan(steps=4), LAYOUT, config())
    assert told == "refused: the plan has steps = 4, at most 3 by this run's local.steps"
    told = refused(Consent().check_plan, plan(round=20), LAYOUT, config())
    assert told == "refused: the plan has round = 20, at most 19 by this run's rounds"


@pytest.mark.parametrize("name", ["round", "steps", "batch", "probes", "boundary"])
@pytest.mark.parametrize(
    "value", [-1, 2**63, pytest.param(10**5000, id="5000 digits"), 1.0, float("nan"), True, "1", None, [1]]
)
def test_what_is_no_count_is_refused(name: str, value: Any) -> None:
    told = refused(Consent().check_plan, plan() | {name: value}, LAYOUT)
    assert told == f"refused: the plan's {name} is no whole number of 0 or more"


def test_a_boundary_beyond_the_model_is_refused() -> None:
    Consent().check_plan(plan(5), LAYOUT)
    assert "asked for boundary 6, this model has 5 blocks" in refused(Consent().check_plan, plan(6), LAYOUT)


def test_probes_without_steps_are_a_plan_too() -> None:
    values = {"run": "x", "round": 0, "client": 0, "probes": 10**9, "boundary": 2}
    assert "consent.max_probe_cost" in refused(Consent(max_probe_cost=1000).check_plan, values, LAYOUT)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((20, 3, 2), ""),
        ((21, 3, 2), "refused: a history of shape (21, 3, 2), at most 20 rounds by split.history"),
        ((20, 6), "refused: a history of shape (20, 6), at most 20 rounds by split.history"),
        ((1, 4, 2), "refused: the plan has steps = 4, at most 3 by this run's local.steps"),
        ((1, 3, 3), "refused: the plan has probes = 3, at most 2 by this run's zo.probes"),
    ],
)
def test_the_replay_of_past_rounds_is_limited(shape: tuple[int, ...], expected: str) -> None:
    request = Record({"scalars/history": np.zeros(shape, dtype=np.float32)}, plan(None))
    arguments = request, LAYOUT, config("decomfl", **{"split.history": 20})
    if expected:
        assert refused(Consent().check_request, *arguments) == expected
    else:
        Consent().check_request(*arguments)


def test_later_messages_say_less_and_have_nothing_to_check() -> None:
    strict = Consent((A,), 1, False, 99, 3, False, 4, 10**6)
    strict.check_plan({"run": "x", "round": 2, "client": 0}, LAYOUT, config())
    strict.check_plan({}, LAYOUT)


def test_consent_is_what_the_file_says() -> None:
    data: dict[str, Any] = {
        "client": "a",
        "server": "127.0.0.1:1",
        "device": {"boundary": 3, "memory": "2 GiB"},
        "consent": {
            "models": (A,), "max_probe_cost": 5, "split": True, "minimum_batch": 8, "max_rounds": 7,
            "differential_privacy": True,
        },
    }  # fmt: skip
    assert Consent.of(NodeConfig.model_validate(data)) == Consent((A,), 5, True, 8, 7, True, 3, 2**31)
    bare = NodeConfig.model_validate({"client": "a", "server": "127.0.0.1:1"})
    assert Consent.of(bare) == Consent()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "splitlora"])
def test_what_methods_really_ask_passes_and_is_refused_one_below(name: str) -> None:
    """Three rounds of each method, every message checked against limits that are just enough for it."""
    session = prepare(config(name, **{"partition.clients": 2, "cohort.size": "all", "cohort.preference": 0}))
    layout, clients = session.task.model.layout, [0] if ALGORITHMS[name].centralised else [0, 1]
    inner, asked = local_call(session.seen, session.algorithm.actions), list[Record]()

    def call(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
        asked.extend(requests.values())
        return inner(action, requests, deadline)

    state = session.algorithm.init(session.task.model.read())
    for cohort in (clients, clients[:1], clients):  # the second client misses a round
        state = session.algorithm.round(state, cohort, call).state
    steps, probes = steps_of(session.config), probes_of(session.config)
    bottom = layout.bottom_size(2) if ALGORITHMS[name].hybrid else layout.size
    exact = Consent(
        max_probe_cost=probes * bottom * steps, split=True, minimum_batch=4, max_rounds=3,
        boundary=2 if ALGORITHMS[name].hybrid else -1, memory=4 * (bottom + steps * probes),
    )  # fmt: skip
    for request in asked:
        exact.check_request(request, layout, session.config)
    replayed = any("scalars/history" in request.arrays for request in asked)
    assert replayed == (name in ("ho_sfl", "decomfl", "hiso"))
    limits = {"minimum_batch": 5, "max_rounds": 2, "memory": exact.memory - 1}
    limits |= {"max_probe_cost": exact.max_probe_cost - 1} if probes else {}
    limits |= {"boundary": 3} if ALGORITHMS[name].hybrid else {}
    for line, value in limits.items():
        place = "device" if line in ("memory", "boundary") else "consent"
        tighter, refusals = replace(exact, **{line: value}), set[str]()
        for request in asked:
            try:
                tighter.check_request(request, layout, session.config)
            except ClientError as error:
                refusals.add(str(error).partition(": ")[0])
        assert refusals == {f"refused by {place}.{line}"}
