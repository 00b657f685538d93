# SPDX-License-Identifier: Apache-2.0
"""A Flower app that stands for ours: a round is a question to the SuperLink, a row and a pause."""

from pathlib import Path

PYPROJECT = """
[project]
name = "scratch"
version = "0.1.0"
dependencies = []
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "scratch.server_app:app"
clientapp = "scratch.client_app:app"
[tool.flwr.app.config]
config = ""
out = ""
resume = false
keys = ""
log = ""
pid = ""
ended = ""
"""

SERVER = """
import json, os, sys, time
from pathlib import Path

from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    given = context.run_config
    Path(given["pid"]).write_text(str(os.getpid()))
    settings = json.loads(Path(given["config"]).read_text())
    log = open(given["log"], "a", buffering=1)
    out = Path(given["out"])
    out.mkdir(parents=True, exist_ok=True)
    if not given["resume"] and (out / "config.toml").exists():
        return end(given, 2, "not empty")
    log.write(f"started in {os.getpid()}, resume {given['resume']}, keys {Path(given['keys']).name}\\n")
    (out / "config.toml").touch()
    rows = out / "rounds.jsonl"
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    gate = settings.get("until")
    while done < settings["rounds"] or (gate and not Path(gate).exists()):
        if settings.get("die"):
            os.kill(os.getpid(), 9)
        nodes = list(grid.get_node_ids())
        with rows.open("a") as file:
            file.write(json.dumps({"round": done, "nodes": len(nodes), "pid": os.getpid()}) + "\\n")
        log.write(f"round {done}\\n")
        done += 1
        time.sleep(settings["pause"])
    end(given, settings.get("exit", 0), settings.get("message", ""))


def end(given, code, message):
    partial = Path(given["ended"] + ".partial")
    partial.write_text(json.dumps({"exit": code, "message": message}))
    partial.replace(given["ended"])
"""

CLIENT = "from flwr.clientapp import ClientApp\n\napp = ClientApp()\n"


def write(folder: Path) -> Path:
    """The app in a new folder."""
    (folder / "scratch").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "scratch" / "__init__.py").touch()
    (folder / "scratch" / "server_app.py").write_text(SERVER)
    (folder / "scratch" / "client_app.py").write_text(CLIENT)
    return folder
