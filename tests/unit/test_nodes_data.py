# SPDX-License-Identifier: Apache-2.0
"""Training data that is never on the server (C46): two halves of a task, and one process with all files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hofl.build import boundaries_of, build_algorithm, build_draw, build_policy, require_local_data
from hofl.build_task import build_task, node_task, with_sizes
from hofl.config import Config, dump, parse
from hofl.core.record import Record
from hofl.errors import ClientError, ConfigError, DataError, HoflError
from hofl.protocol.base import Action, Call, Memory, Replies
from hofl.runtime.checkpoint import state_sha256
from hofl.runtime.prints import fingerprints
from hofl.session import prepare
from hofl.tasks import files
from hofl.tasks.base import Task
from hofl.tasks.nodes import told
from hofl.tasks.partition import Partition
from hofl.tasks.text_data import read_own, read_text

SIZES = {"clinic-a": 9, "clinic-b": 7, "clinic-c": 3}
"""Of clinic-b all rows are of one class."""
CLIENTS = tuple(SIZES)
WORDS = ("film", "plot", "a", "the", "and")
AT_NODES = f'[partition]\nkind = "nodes"\nnames = {list(CLIENTS)}\n'
LABELS = {"sst2-v1": ("negative", "positive"), "head-v1": ("dull", "fine")}


def _write(path: Path, client: str, rows: int, classes: Sequence[str], header: str = "said,mood") -> Path:
    """Texts of unequal lengths, whose file tells them apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header]
    for i in range(rows):
        mood = classes[1] if client == "clinic-b" else classes[i % 2]
        lines.append(f"{mood} {' '.join(WORDS[: i % 5])} of {client} {i},{mood}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(params=LABELS)
def template(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A template, with one file a client in ``clients/`` and an evaluation file beside."""
    name: str = request.param
    for client, rows in SIZES.items():
        _write(tmp_path / "clients" / f"{client}.csv", client, rows, LABELS[name])
    _write(tmp_path / "evaluation.csv", "nobody", 6, LABELS[name])
    return name


def _config(at: Path, template: str, more: str, train: str = "", algorithm: str = "ho_fl") -> Config:
    model = "tiny:llama" if template == "sst2-v1" else "tiny:bert"
    return parse(
        f'algorithm = "{algorithm}"\nseed = 3\nrounds = 3\n[model]\nsource = "{model}"\ndevice = "cpu"\n'
        f'[task]\ntemplate = "{template}"\ntrain = "{train}"\nevaluation = "{at / "evaluation.csv"}"\n'
        f'text = "said"\nlabel = "mood"\nlength = 24\n[cohort]\nsize = 2\nboundaries = [1]\n'
        f"[local]\nsteps = 2\nbatch = 4\n[optimizer]\nlr = 1e-2\n{more}",
        "x",
    )


def _in_one(at: Path, template: str, **given: str) -> Config:
    return _config(at, template, '[partition]\nkind = "files"', train=str(at / "clients" / "*.csv"), **given)


def _halves(at: Path, config: Config) -> tuple[Task, list[Task]]:
    """The server's half, and each node's from a folder that holds its one file."""
    server, nodes = build_task(config), []
    for client in CLIENTS:
        alone = at / f"at-{client}" / "data.csv"
        alone.parent.mkdir(exist_ok=True)
        alone.write_bytes((at / "clients" / f"{client}.csv").read_bytes())
        nodes.append(node_task(config, client, train=str(alone), **told(server)))
    return server, nodes


def test_batches_of_the_nodes_are_those_of_one_process_with_all_files(tmp_path: Path, template: str) -> None:
    whole = build_task(_in_one(tmp_path, template))
    server, nodes = _halves(tmp_path, _config(tmp_path, template, AT_NODES))
    start = whole.model.read()
    for number, node in enumerate(nodes):
        assert node.clients == whole.clients == CLIENTS == server.clients
        assert [len(shard) for shard in node.shards] == [
            size * (place == number) for place, size in enumerate(SIZES.values())
        ]
        assert node.model.layout.fingerprint == whole.model.layout.fingerprint
        assert fingerprints(node)["model"] == fingerprints(whole)["model"]
        assert np.array_equal(node.model.read(), start)
        for size in (1, 2, 4, 16):
            for position in range(7):
                mine, theirs = node.batch(number, position, size), whole.batch(number, position, size)
                assert mine.inputs.keys() == theirs.inputs.keys()
                assert all(torch.equal(mine.inputs[name], theirs.inputs[name]) for name in mine.inputs)
                assert torch.equal(mine.targets, theirs.targets)
                assert node.lengths and whole.lengths
                assert np.array_equal(node.lengths(mine), whole.lengths(theirs))
        with torch.no_grad():
            batch = node.batch(number, 1, 4)
            losses = [task.loss(task.model.full(batch.inputs), batch) for task in (node, whole)]
        assert torch.equal(*losses)
    classes = [set(node.batch(n, 0, 16).targets.tolist()) for n, node in enumerate(nodes)]
    assert classes == [{0, 1}, {1}, {0, 1}]
    here, there = server.evaluate(), whole.evaluate()
    assert here.loss_sum == there.loss_sum and np.array_equal(here.confusion, there.confusion)


def _play(config: Config, task: Task, call: Callable[[Mapping[str, Action]], Call]) -> list[Any]:
    """Hash of the state, loss and cohort of three rounds."""
    sizes = [len(shard) for shard in task.shards]
    boundaries = boundaries_of(config, task.model.layout, len(task.clients))
    draw = build_draw(config, build_policy(config, task.model.layout, boundaries, sizes), sizes)
    algorithm = build_algorithm(config, task, boundaries)
    state, found, ask = algorithm.init(task.model.read()), [], call(algorithm.actions)
    for round_number in range(3):
        outcome = algorithm.round(state, draw(round_number, 0), ask)
        assert not outcome.failures
        state = outcome.state
        found.append((state_sha256(state), outcome.row["loss"], draw(round_number, 0)))
    return found


def _served(tasks: Sequence[Task]) -> Callable[[Mapping[str, Action]], Call]:
    """A call in which client i works on ``tasks[i]``."""
    memories = {client: Memory() for client in range(len(tasks))}

    def of(actions: Mapping[str, Action]) -> Call:
        def call(action: str, requests: Mapping[int, Record], deadline: float | None) -> Replies:
            return Replies({c: actions[action](tasks[c], r, memories[c]) for c, r in requests.items()}, {})

        return call

    return of


@pytest.mark.parametrize("algorithm", ["ho_fl", "ho_sfl"])
def test_a_run_on_the_halves_ends_where_one_process_does(
    tmp_path: Path, template: str, algorithm: str
) -> None:
    more = '[zo.optimizer]\nname = "sgd"\n'
    one = _config(
        tmp_path,
        template,
        f'{more}[partition]\nkind = "files"',
        train=str(tmp_path / "clients" / "*.csv"),
        algorithm=algorithm,
    )
    whole = build_task(one)
    config = _config(tmp_path, template, more + AT_NODES, algorithm=algorithm)
    server, nodes = _halves(tmp_path, config)
    apart = _play(config, with_sizes(server, list(SIZES.values())), _served(nodes))
    together = _play(one, whole, _served([whole] * 3))
    assert apart == together and len({sha for sha, _, _ in apart}) == 3


def test_the_server_needs_no_training_file_and_stands_in_with_the_evaluation_set(
    tmp_path: Path, template: str
) -> None:
    for client in CLIENTS:
        (tmp_path / "clients" / f"{client}.csv").unlink()
    task = build_task(_config(tmp_path, template, AT_NODES))
    facts = task.facts
    assert [shard.tolist() for shard in task.shards] == [[0]] * 3
    assert (facts["n_train"], facts["n_evaluation"], facts["shared_texts"]) == (None, 6, None)
    assert facts["labels"] == list(LABELS[template]) and facts["warnings"] == []
    assert facts["partition"] == [] and facts["truncated"] == {"train": None, "evaluation": 0}
    assert set(facts["data_sha256"]) == {"evaluation", "nodes"} and facts["data_sha256"]["nodes"] == {}
    task.model.self_test(task.batch(0, 0, 2).inputs)
    known = with_sizes(task, [40, 0, 25], ["a", "", "c"])
    assert [len(shard) for shard in known.shards] == [40, 0, 25] and known.facts["n_train"] == 65
    assert [(row["client"], row["examples"]) for row in known.facts["partition"]] == list(
        zip(CLIENTS, (40, 0, 25), strict=True)
    )
    assert known.facts["data_sha256"]["nodes"] == {"clinic-a": "a", "clinic-b": "", "clinic-c": "c"}
    batch = known.batch(0, 3, 16)
    known.model.self_test(batch.inputs)
    texts = {tuple(row.tolist()) for row in batch.inputs["input_ids"]}
    assert batch.targets.shape == (16,) and 1 < len(texts) <= 6
    prints = [fingerprints(each)["data"] for each in (task, known, with_sizes(task, [40, 0, 25]))]
    assert len(set(prints)) == 3 and task.facts["n_train"] is None


@pytest.mark.parametrize(
    ("sizes", "digests", "message"),
    [
        ([1, 2], [], "2 sizes and 0 digests for 3 clients"),
        ([1, 2, 3], ["a"], "3 sizes and 1 digests for 3 clients"),
        ([0, 0, 0], [], "no node has an example"),
        ([1, -1, 3], [], "no node has an example"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, template: str, sizes: list[int], digests: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_sizes(build_task(_config(tmp_path, template, AT_NODES)), sizes, digests)


def test_a_node_opens_its_own_file_only_and_cannot_evaluate(tmp_path: Path) -> None:
    config = _config(tmp_path, "sst2-v1", AT_NODES)  # nothing that it names exists here
    own = _write(tmp_path / "own.csv", "clinic-a", 5, LABELS["sst2-v1"], "sentence,label")
    node = node_task(config, "clinic-a", str(own), text="sentence", label="label", device="cpu")
    assert len(node.shards[0]) == 5 and node.facts["truncated"] == {"train": 0, "evaluation": None}
    assert (node.facts["n_train"], node.facts["n_evaluation"]) == (5, None)
    assert list(node.facts["data_sha256"]) == ["train"]
    with pytest.raises(ClientError, match="only the server evaluates"):
        node.evaluate()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"client": "clinic-d"},
            ConfigError,
            "client = 'clinic-d': this run's clients are clinic-a, clinic-b",
        ),
        ({"train": ""}, ConfigError, "data.train is missing"),
        ({"train": "no.csv"}, DataError, "data.train: 'no.csv': no such file"),
        ({"text": "saidd"}, DataError, "data.text: .* no column 'saidd'; .*did you mean 'said'"),
        ({"label": "moood"}, DataError, "data.label: .* no column 'moood'"),
        ({"names": ()}, ConfigError, "task.template = 'head-v1': the server did not tell the names"),
        ({"names": ("dull", "great")}, DataError, "data.train: label 'fine' in 2 of 5 rows"),
        ({"source": "no/such/model"}, HoflError, "model.source = .no/such/model.: not found"),
    ],
)
def test_a_bad_node_is_one_line_in_the_words_of_its_file(
    tmp_path: Path, changes: dict[str, Any], error: type[HoflError], message: str
) -> None:
    own = _write(tmp_path / "own.csv", "clinic-a", 5, LABELS["head-v1"])
    given = {"client": "clinic-a", "train": str(own), "names": LABELS["head-v1"]} | changes
    with pytest.raises(error, match=f"^{message}") as caught:
        node_task(_config(tmp_path, "head-v1", AT_NODES), **given)
    assert str(caught.value).isprintable()


def test_an_empty_file_is_no_client(tmp_path: Path) -> None:
    own = _write(tmp_path / "own.csv", "clinic-a", 0, LABELS["sst2-v1"])
    with pytest.raises(DataError, match=r"^data\.train: .*no rows"):
        node_task(_config(tmp_path, "sst2-v1", AT_NODES), "clinic-a", str(own))


@pytest.mark.parametrize("kind", ["iid", "synthetic"])
def test_of_public_data_a_node_has_the_task_of_one_process(tmp_path: Path, kind: str) -> None:
    for client, rows in SIZES.items():
        _write(tmp_path / "clients" / f"{client}.csv", client, rows, LABELS["sst2-v1"])
    _write(tmp_path / "evaluation.csv", "nobody", 6, LABELS["sst2-v1"])
    path = str(tmp_path / "clients" / "*.csv")
    if kind == "synthetic":
        config, own = parse('[task]\nname = "synthetic"\n[model]\ndevice = "cpu"', "x"), {}
    else:
        more = f'[partition]\nkind = "{kind}"\nclients = 3'
        config = _config(tmp_path, "sst2-v1", more, train="elsewhere.csv")
        own = {"train": path, "source": "tiny:llama"}
    there = config.task.model_copy(update={"train": path})
    whole = build_task(config if kind == "synthetic" else config.model_copy(update={"task": there}))
    node = node_task(config, "client-1", device="cpu", **own)
    assert fingerprints(node) == fingerprints(whole) and node.fingerprint == whole.fingerprint
    assert node.clients == whole.clients and np.array_equal(node.model.read(), whole.model.read())
    with pytest.raises(ConfigError, match="client = 'clinic-x': this run's clients are"):
        node_task(config, "clinic-x", **own)


def test_of_one_file_a_client_a_node_opens_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C46, with the batches of one process that has read all."""
    for client, rows in SIZES.items():
        _write(tmp_path / "clients" / f"{client}.csv", client, rows, LABELS["sst2-v1"])
    _write(tmp_path / "evaluation.csv", "nobody", 6, LABELS["sst2-v1"])
    config, opened, read = _in_one(tmp_path, "sst2-v1"), list[str](), files._read
    whole = build_task(config)

    def _noted(path: Path, wanted: Sequence[str]) -> files.Table:
        opened.append(path.name)
        return read(path, wanted)

    monkeypatch.setattr(files, "_read", _noted)
    node = node_task(config, "clinic-b", device="cpu", **told(whole))
    assert opened == ["clinic-b.csv"] and node.clients == whole.clients
    number = whole.clients.index("clinic-b")
    for position in range(5):
        mine, theirs = node.batch(number, position, 2), whole.batch(number, position, 2)
        assert all(torch.equal(mine.inputs[name], theirs.inputs[name]) for name in theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
    with pytest.raises(ConfigError, match="client = 'clinic-x': this run's clients are"):
        node_task(config, "clinic-x")


def test_a_process_without_the_data_does_not_begin(tmp_path: Path) -> None:
    config = _config(tmp_path, "sst2-v1", AT_NODES)
    with pytest.raises(ConfigError, match=r"^partition\.kind = 'nodes': .*; run it with hofl server$"):
        require_local_data(config)
    with pytest.raises(ConfigError, match=r"^partition\.kind = 'nodes'"):
        prepare(config)
    told_later = parse(DECLARED, "x")
    with pytest.raises(ConfigError, match=r"^cohort\.assign = 'declared': .*; run it with hofl server$"):
        require_local_data(told_later)
    require_local_data(parse('[task]\nname = "synthetic"', "x"))


DECLARED = """
[task]
name = "synthetic"
[partition]
clients = 3
[cohort]
size = 2
assign = "declared"
"""


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (None, "0 of 3 clients have declared a boundary"),
        ([1, 2], "2 of 3 clients have declared a boundary"),
        ([1, 5, 2], r"client number 1 declares 5, outside 0\.\.4"),
        ([1, 2, -1], r"client number 2 declares -1, outside 0\.\.4"),
    ],
)
def test_declared_boundaries_are_one_each_and_in_the_model(declared: list[int] | None, message: str) -> None:
    config = parse(DECLARED, "x")
    layout = build_task(config).model.layout
    assert boundaries_of(config, layout, 3, [4, 0, 2]) == (4, 0, 2)
    with pytest.raises(ConfigError, match=f"^cohort.assign = 'declared': {message}"):
        boundaries_of(config, layout, 3, declared)


def test_what_nodes_declare_has_no_say_where_the_run_decides() -> None:
    config = parse(DECLARED.replace('assign = "declared"', "boundaries = [3]"), "x")
    assert boundaries_of(config, build_task(config).model.layout, 3, [1, 1, 1]) == (3, 3, 3)


def test_the_configuration_travels(tmp_path: Path) -> None:
    config = _config(tmp_path, "sst2-v1", AT_NODES)
    assert parse(dump(config), "x") == config and config.partition.names == CLIENTS


def test_a_node_of_a_run_by_files_needs_no_file_but_its_own(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C46: 3 of 100 files read for 3 clients, each by its node, and the examples of the whole run's shard."""
    for extra in range(97):
        _write(tmp_path / "clients" / f"other-{extra}.csv", f"other-{extra}", 2, LABELS[template])
    (tmp_path / "clients" / "other-7.csv").write_text("said,mood\n")  # an idle client
    glob, columns = str(tmp_path / "clients" / "*.csv"), {"text": "said", "label": "mood"}
    settings = {"template_id": template, "seed": 3, **columns}
    whole = read_text(glob, str(tmp_path / "evaluation.csv"), Partition("files"), **settings)
    opened: list[str] = []
    read = files._read

    def noted(path: Path, wanted: Sequence[str]) -> files.Table:
        opened.append(path.name)
        return read(path, wanted)

    monkeypatch.setattr(files, "_read", noted)
    lines = files.client_sources(glob)
    assert tuple(lines) == whole.clients and len(lines) == 100 and opened == []
    divided = Partition("files", names=tuple(lines))
    for client in ("clinic-b", "other-41", "other-7"):
        own = read_own(lines[client], divided, client, names=whole.names, **settings)
        shard = whole.shards[whole.clients.index(client)]
        assert own.clients == whole.clients
        assert [len(each) for each in own.shards] == [len(shard) * (name == client) for name in whole.clients]
        assert own.train.texts == [whole.train.texts[i] for i in shard]
        assert own.train.labels.tolist() == whole.train.labels[shard].tolist()
    assert opened == ["clinic-b.csv", "other-41.csv", "other-7.csv"]


def test_the_lines_of_a_globs_files_keep_its_options_and_refuse_what_the_run_would(tmp_path: Path) -> None:
    for stem in ("b", "a"):
        (tmp_path / f"{stem}.csv").write_text("said,mood,x\nhello,0,1\nbye,1,2\n")
    found = files.client_sources(f"{tmp_path}/*.csv?x=1")
    assert list(found) == ["a", "b"] and found["a"] == f"{tmp_path}/a.csv?x=1"
    assert files.read_table(found["b"], ["said"]) == {"said": ["hello"]}
    with pytest.raises(DataError, match="no such file"):
        files.client_sources(f"{tmp_path}/*.parquet")
    (tmp_path / "two words.csv").touch()
    with pytest.raises(DataError, match="file name 'two words' is no client id"):
        files.client_sources(f"{tmp_path}/*.csv")
