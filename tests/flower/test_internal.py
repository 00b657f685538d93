# SPDX-License-Identifier: Apache-2.0
"""The contract with the parts of Flower that are not its public API, held to the installed version."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import http_grid

from hofl.runtime.flower import internal, superlink
from hofl.runtime.flower.internal import inbox, server
from hofl.runtime.flower.internal import node as link
from hofl.runtime.flower.processes import stop
from hofl.runtime.flower.wire import INLINE, MESSAGE_TYPE, seal, unseal

SIZES = (0, 1 << 10, INLINE, 6_000_000)
"""Bytes of the blobs: nothing, a message of scalars, the most that travels inline, more than one chunk."""

PUBLIC = ("flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.simulation")

_STATE = "flwr.server.superlink.linkstate.sql_linkstate"
_FLATTENED = "flwr.supercore.inflatable"
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address": (3, ("interceptors",)),
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": (2, ()),
    "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor": (
        0,
        ("component_name",),
    ),
    f"{_FLATTENED}.inflatable_utils:pull_and_inflate_object_from_tree": (
        3,
        ("return_type", "initial_backoff"),
    ),
    f"{_FLATTENED}.inflatable_utils:inflate_object_from_contents": (2, ()),
    f"{_FLATTENED}.inflatable_object:iterate_object_tree": (1, ()),
    "flwr.common.serde:message_from_proto": (1, ()),
    "flwr.app.message:make_message": (1, ("error",)),
    f"{_FLATTENED}.inflatable_utils:push_objects": (2, ("object_ids_to_push",)),
    f"{_FLATTENED}.inflatable_protobuf_utils:make_pull_object_fn_protobuf": (3, ()),
    f"{_FLATTENED}.inflatable_protobuf_utils:make_push_object_fn_protobuf": (4, ()),
    f"{_FLATTENED}.inflatable_protobuf_utils:make_confirm_message_received_fn_protobuf": (3, ()),
    f"{_FLATTENED}.inflatable_object:get_all_nested_objects": (1, ()),
    f"{_FLATTENED}.inflatable_object:get_object_tree": (1, ()),
    f"{_FLATTENED}.inflatable_object:no_object_id_recompute": (0, ()),
    "flwr.common.serde:message_to_proto": (1, ()),
    "flwr.app.message:remove_content_from_message": (1, ()),
    "flwr.supercore.error:FlowerError.from_json": (1, ()),
    "flwr.supercore.primitives.asymmetric:generate_key_pairs": (0, ()),
    "flwr.supercore.primitives.asymmetric:public_key_to_bytes": (1, ()),
    "flwr.superlink.extensions:get_middleware": (0, ()),
    f"{_STATE}:SqlLinkState.store_message_and_object_tree": (4, ()),
    f"{_STATE}:SqlLinkState.store_message_ins": (2, ()),
    f"{_STATE}:SqlLinkState.store_message_res": (2, ()),
    f"{_STATE}:SqlLinkState.store_object": (5, ()),
    f"{_STATE}:SqlLinkState._cleanup_push_session": (2, ("cleanup_messages",)),
    f"{_STATE}:SqlLinkState._cleanup_expired_task_tokens": (1, ()),
    f"{_STATE}:SqlLinkState.session": (1, ()),
    "flwr.supercore.object_store.sql_object_store:SqlObjectStore.get_object_tree": (2, ()),
    "flwr.superlink.cli.flower_superlink:flower_superlink": (0, ()),
    "flwr.simulation:run_simulation": (3, ("backend_config",)),
}
"""How we call what we import: arguments by place, and by name."""

ECHO = """
import json, time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from hofl.runtime.flower import internal
from hofl.runtime.flower.internal import Inbox
from hofl.runtime.flower.wire import MESSAGE_TYPE, seal, unseal

app = ServerApp()


@app.main()
def main(grid, context):
    out, found, looks = Path(context.run_config["out"]), [], []
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    inbox = Inbox(grid, limit=8_000_000)

    def ask(**header):
        size = header["size"]
        content = seal(header, np.random.default_rng(size).bytes(size))
        message = Message(content, nodes[0], MESSAGE_TYPE, ttl=60.0)
        whole = header.get("whole")
        [name] = internal.push_whole(grid, [message]) if whole else grid.push_messages([message])
        return name

    def look(names):
        begun = time.monotonic()
        answers = dict(inbox.look(names))
        looks.append(time.monotonic() - begun)
        time.sleep(0.03)
        return answers

    halves = [ask(size=7, half=1)]
    sizes = json.loads(context.run_config["config"])
    for size, whole in [(size, 0) for size in sizes] + [(size, 1) for size in sizes[:-1]]:
        name = ask(size=size, half=0, whole=whole)
        while name not in (answers := look([*halves, name])):
            pass
        answer = unseal(answers[name].content)
        found.append({"size": answer.header["size"],
                      "equal": answer.blob == np.random.default_rng(size).bytes(size),
                      "key": internal.public_keys(grid)[nodes[0]].hex()})
    waits = look(halves) == {}
    large = ask(size=1, half=0, large=1)
    while large not in (answers := look([large])):
        pass
    told = {"found": found, "waits": waits, "slowest": max(looks), "large": answers[large].error.reason}
    out.with_suffix(".partial").write_text(json.dumps(told))
    out.with_suffix(".partial").rename(out)
"""
"""A ServerApp that sends blobs and compares what comes back."""


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of every import from Flower in the package."""
    for file in sorted(Path(internal.__file__).parents[3].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                yield from ((file.name, str(node.module), alias.name) for alias in node.names)


def test_the_installed_flower_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("flwr").split(".")[:2] == ["1", "42"]


def test_every_name_that_is_imported_from_flower_is_there() -> None:
    found = list(imports())
    missing = [
        (module, name)
        for _, module, name in found
        if not hasattr(importlib.import_module(module), name)
        and importlib.util.find_spec(f"{module}.{name}") is None
    ]
    assert not missing and len(found) > 30


def test_few_files_touch_what_is_not_public() -> None:
    private = {file for file, module, _ in imports() if module not in PUBLIC}
    assert private == {"inbox.py", "link.py", "node.py", "server.py"}


@pytest.mark.parametrize("called", CALLS)
def test_what_is_called_takes_what_we_give(called: str) -> None:
    module, _, path = called.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    places, names = CALLS[called]
    bound = inspect.signature(found).bind(*range(places), **dict.fromkeys(names))
    required = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    assert set(required) <= set(bound.arguments)


def test_the_fleet_protocol_has_the_calls_and_messages_we_make() -> None:
    client = link.FleetHttpClient
    for name in (*link._CALLS, "RegisterNode", "ActivateNode", "DeactivateNode", "UnregisterNode"):
        assert list(inspect.signature(getattr(client, name)).parameters) == ["self", "request"]
    assert list(inspect.signature(client.SendNodeHeartbeat).parameters) == ["self", "request"]
    link.ActivateNodeRequest(public_key=b"k", heartbeat_interval=link.HEARTBEAT)
    node = link.Node(node_id=1)
    link.SendNodeHeartbeatRequest(node=node, heartbeat_interval=link.HEARTBEAT)
    link.PushMessagesRequest(
        node=node, messages_list=[], message_object_trees=[], clientapp_runtime_list=[0.5]
    )
    internal.enter(3, 4)
    assert (server.TaskIdentity.run_id, server.TaskIdentity.node_id) == (3, 4)


def test_a_servers_grid_has_the_calls_that_our_inbox_makes() -> None:
    assert isinstance(inspect.getattr_static(http_grid.HttpGrid, "_runtime_client"), property)
    assert {"node", "_token"} <= set(http_grid.HttpGrid.__init__.__code__.co_names)
    for name in ("PullMessages", "PullObject", "ConfirmMessageReceived"):
        assert list(inspect.signature(getattr(RuntimeHttpClient, name)).parameters) == ["self", "request"]
    inbox.PullAppMessagesRequest(message_ids=["a"])
    where = {"node": link.Node(node_id=1), "run_id": 2}
    inbox.PullObjectRequest(object_id="a", **where)
    inbox.ConfirmMessageReceivedRequest(message_object_id="a", **where)
    failed = inbox._failed("question", "why")
    assert failed.has_error() and failed.metadata.reply_to_message_id == "question"
    assert failed.error.code not in {value for name, value in vars(ErrorCode).items() if name.isupper()}


def test_an_answer_that_comes_whole_is_checked_as_one_in_parts() -> None:
    internal.enter(3, 4)
    content = RecordDict({"hofl": ConfigRecord({"blob": bytes(2 << 20)})})
    proto = message_to_proto(Message(content, 4, MESSAGE_TYPE, ttl=60.0))
    unused: Any = None
    large = inbox.Inbox(unused, limit=10)._whole("question", proto)
    assert large.error.code == inbox.BROKEN and "at most 10 are due" in large.error.reason
    fits = inbox.Inbox(unused, limit=3 << 20)._whole("question", proto)
    assert fits.content.config_records["hofl"]["blob"] == bytes(2 << 20)
    proto.content.items[0].ClearField("config_record")
    broken = inbox.Inbox(unused, limit=3 << 20)._whole("question", proto)
    assert broken.error.code == inbox.BROKEN and broken.metadata.reply_to_message_id == "question"


def write_app(folder: Path) -> Path:
    (folder / "echo").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "echo"\nversion = "0.1.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "tests"\n'
        '[tool.flwr.app.components]\nserverapp = "echo.server:app"\nclientapp = "echo.client:app"\n'
        '[tool.flwr.app.config]\nconfig = ""\nout = ""\n'
    )
    (folder / "echo" / "__init__.py").touch()
    (folder / "echo" / "server.py").write_text(ECHO)
    (folder / "echo" / "client.py").write_text("from flwr.clientapp import ClientApp\n\napp = ClientApp()\n")
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Iterator[superlink.Site]:
    """A SuperLink and its SuperExec without TLS; afterwards both are gone."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        made = superlink.Site(tmp_path / "state", "127.0.0.1", probe.getsockname()[1], None)
    made.state.mkdir()
    superlink.connect(made)
    parts = [superlink.start_link(made), superlink.start_executor(made)]
    try:
        superlink.wait_healthy(made, parts[0])
        yield made
    finally:
        for part in reversed(parts):
            stop(part)


def half(connection: internal.Connection, reply: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce an answer whose parts never come, as of a node that died while it sent."""
    with monkeypatch.context() as patched:
        patched.setattr(link, "push_objects", lambda *_, **__: None)
        connection.send(reply)


def test_messages_cross_a_superlink_bit_for_bit(
    site: superlink.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real SuperLink, SuperExec and ServerApp; the node is this process, and not always what it should be."""
    connection, out = internal.Connection(site.address, None, None), tmp_path / "found.json"
    node, heard, end = connection.open(), [], time.monotonic() + 60
    try:
        superlink.submit(site, write_app(tmp_path / "app"), {"config": json.dumps(SIZES), "out": str(out)})
        while not out.is_file():
            assert time.monotonic() < end, superlink.last_line(site.state / "superexec.log")
            try:
                message = connection.receive()
            except internal.Ended:
                break
            if message is None:
                time.sleep(0.05)
                continue
            internal.enter(message.metadata.run_id, node)
            envelope = unseal(message.content)
            blob = bytes(20_000_000) if "large" in envelope.header else envelope.blob
            reply = Message(seal(envelope.header, blob), reply_to=message)
            if envelope.header["half"]:
                half(connection, reply, monkeypatch)
                continue
            assert connection._whole == bool(envelope.header.get("whole", 0))
            heard.append((envelope, len(get_all_nested_objects(message)), len(get_all_nested_objects(reply))))
            connection.send(reply, 0.1)
    finally:
        connection.close()
    told, whole, heard = json.loads(out.read_bytes()), heard[len(SIZES) : -1], heard[: len(SIZES)]
    assert [len(envelope.blob) for envelope, _, _ in heard] == list(SIZES)
    assert [len(envelope.blob) for envelope, _, _ in whole] == list(SIZES[:-1])
    for envelope, _, _ in (*heard, *whole):
        assert envelope.blob == np.random.default_rng(len(envelope.blob)).bytes(len(envelope.blob))
    assert [(row["size"], row["equal"]) for row in told["found"]] == [
        (size, True) for size in (*SIZES, *SIZES[:-1])
    ]
    assert all(max(down, up) <= 3 for envelope, down, up in heard if len(envelope.blob) <= INLINE)
    assert heard[-1][1] <= 7  # two chunks of an array, its record and the three of a small one
    assert {row["key"] for row in told["found"]} == {connection._public.hex()}
    # an answer that never comes whole holds up no other, and one that is too large is never held whole
    assert told["waits"] and told["slowest"] < 10.0
    size, most = map(int, re.findall(r"\d+", told["large"]))
    assert most == 8_000_000 < size < 16_000_000
