# SPDX-License-Identifier: Apache-2.0
"""``hofl evaluate``: a finished run's final model, scored again, and what it says of each example."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hofl.commands.output import print_json, print_table, quiet_libraries, say
from hofl.errors import ConfigError, RecordError
from hofl.report.tables import Table, number

if TYPE_CHECKING:
    from hofl.protocol.base import Vector
    from hofl.tasks.base import Task

Row = dict[str, Any]


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="New file: one JSON object an example.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Score a finished run's final model again and hold the metrics to those that the run recorded."""
    quiet_libraries()
    found = evaluate_run(run, predictions)
    if json:
        return print_json(found)
    print_table(_table(run, found))
    if found["equal"]:
        say("equal to what the run recorded, to the last bit")
    else:
        say(
            f"not equal to what the run recorded: {', '.join(found['differ'])}; weights and evaluation data "
            "are the same, so threads, device or versions of packages are others"
        )
    if predictions:
        say(f"predictions: {predictions}, {found['metrics']['n']} lines")


def evaluate_run(where: Path, predictions: Path | None = None) -> Row:
    """Score a run's final model on the evaluation data of its configuration.

    Args:
        where: the run folder.
        predictions: a file to write, one JSON object a line for each held-out example in order.

    Returns:
        round, metrics, those recorded, whether they are equal and the names of those that differ.

    Raises:
        ConfigError: no run folder, a run that is not finished, or a file that is there already.
        RecordError: the final model is damaged, or model or evaluation data are not those of the run.
        HoflError: the data or the model cannot be loaded, or the file cannot be written.
    """
    import torch

    from hofl.build_task import build_task
    from hofl.config import load, placed
    from hofl.rebuilding import run_config

    file = run_config(where)
    ended = _ended(where)
    if predictions is not None and (predictions.exists() or not predictions.parent.is_dir()):
        why = "exists already; name another file" if predictions.exists() else "its folder does not exist"
        raise ConfigError(f"--predictions {predictions}: {why}")
    config = load(file)
    vector = _final(where, ended)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with placed(file):
        task = build_task(config)
    _require_same(where, task)
    task.model.write(vector)
    told: list[Row] = []
    now = task.evaluate(told.append if predictions else None).to_row()
    if predictions is not None:
        _write(predictions, told)
    then = _recorded(where, ended)
    differ = [name for name in now if name in then and now[name] != then[name]]
    return {
        "round": ended["rounds"],
        "metrics": now,
        "recorded": then,
        "equal": not differ,
        "differ": differ,
        "predictions": str(predictions) if predictions else None,
    }


def _ended(where: Path) -> Row:
    """The summary of a run that is done."""
    import json as decoder

    from hofl.runtime import folder

    path = where / folder.SUMMARY
    if not path.is_file() or not (where / folder.FINAL).is_file():
        raise ConfigError(f"{where}: the run is not finished: hofl run --resume {where}")
    try:
        ended: Row = decoder.loads(path.read_bytes())
        status, why = ended["status"], ended.get("error", "")
        metric = ended["metric"]
        sound = {"name", "value", "n"} <= set(metric) and isinstance(ended["rounds"], int)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: damaged: {type(error).__name__}") from error
    if status != "done":
        raise ConfigError(
            f"{where}: the run {status} ({why}): only a finished run has a final model to score"
        )
    if not sound:
        raise RecordError(f"{path}: damaged: it has no metric or no rounds")
    return ended


def _final(where: Path, ended: Mapping[str, Any]) -> "Vector":
    """The final trainables, those that the summary names."""
    from hofl.core.replay import hex_digest
    from hofl.runtime import checkpoint, folder

    vector, _ = checkpoint.load_final(where / folder.FINAL)
    if hex_digest(vector) != ended.get("final_sha256"):
        raise RecordError(f"{where / folder.FINAL}: not the final model that {folder.SUMMARY} names")
    return vector


def _require_same(where: Path, task: "Task") -> None:
    """Hold layout, frozen weights and evaluation data to the run's; its training data has no say here."""
    from hofl.runtime import folder, prints

    manifest, found = folder.read_manifest(where), prints.fingerprints(task)
    same = {name: found[name] for name in ("layout", "model")}
    prints.require_same(where, manifest["fingerprints"], same, "give it back to score the run's final model")
    facts = manifest.get("facts")
    then = _evaluation(facts.get("data_sha256") if isinstance(facts, Mapping) else None)
    if _evaluation(task.facts.get("data_sha256")) != then:
        raise RecordError(f"{where}: the evaluation data is not what this run was scored on; give it back")


def _evaluation(hashes: Any) -> Any:
    """The hash of the evaluation data, or that of all data where there is but one."""
    return hashes.get("evaluation") if isinstance(hashes, Mapping) else hashes


def _recorded(where: Path, ended: Mapping[str, Any]) -> Row:
    """The metrics in the row of the last round, or what the summary keeps of them where it was not due."""
    from hofl.runtime import folder
    from hofl.runtime.rows import read_rows

    last = [row for row in read_rows(where / folder.ROWS) if row["round"] == ended["rounds"]]
    if last and isinstance(last[0].get("metrics"), dict):
        return dict(last[0]["metrics"])
    metric = ended["metric"]
    kept = {name: ended[name] for name in ("loss", "balanced_accuracy") if name in ended}
    return {"n": metric["n"], metric["name"]: metric["value"], **kept}


def _write(path: Path, told: list[Row]) -> None:
    """One strict JSON object a line; a number that is not finite becomes null."""
    import json as encoder

    from hofl.runtime import files
    from hofl.runtime.rows import finite

    lines = [encoder.dumps(finite(row), allow_nan=False) + "\n" for row in told]
    with files.storage(path, "nothing was written: mend this, or name another file"):
        files.replace(path, "".join(lines).encode())


def _table(run: Path, found: Row) -> Table:
    """Metrics now and then; counts by class are compared but not shown."""
    now, then = found["metrics"], found["recorded"]
    rows = tuple((name, _cell(value), _cell(then.get(name))) for name, value in now.items() if _one(value))
    return Table(f"final model of {run}, round {found['round']}", ("", "now", "recorded"), rows)


def _one(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    return number(value, 6) if value is None or isinstance(value, float) else str(value)
