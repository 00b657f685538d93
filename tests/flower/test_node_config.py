# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from hofl.cli import main
from hofl.errors import ConfigError
from hofl.runtime.flower.node_config import NodeConfig, bytes_of, is_loopback, load_node

LOCAL = 'client = "clinic-a"\nserver = "127.0.0.1:9092"\n'
FULL = """
client = "clinic-a"
server = "hofl.example.org:9092"
ca = "ca.crt"
key = "clinic-a.key"
folder = "kept"
[data]
train = "data/*.csv?split=train:0.9"
text = "note"
label = "code"
[model]
source = "model"
[device]
device = "cpu"
threads = 2
memory = "1.5 GiB"
boundary = 4
[consent]
models = ["%s"]
max_probe_cost = 1_000_000
split = true
minimum_batch = 8
max_rounds = 100
differential_privacy = false
""" % ("0" * 64)


def write(folder: Path, text: str) -> Path:
    (folder / "node.toml").write_text(text)
    return folder / "node.toml"


def message(folder: Path, text: str, *overrides: str, client: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_node(write(folder, text), overrides, client)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/")


def test_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ca.crt", "clinic-a.key"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    write(tmp_path, FULL)
    monkeypatch.chdir(tmp_path)
    there = load_node("node.toml")
    monkeypatch.chdir("/")
    node = load_node(tmp_path / "node.toml")
    assert node == there  # wherever it is read from
    assert (node.client, node.server, node.secure) == ("clinic-a", "hofl.example.org:9092", True)
    assert node.ca == str(tmp_path / "ca.crt") and node.key == str(tmp_path / "clinic-a.key")
    assert node.folder == str(tmp_path / "kept")
    assert node.data.train == str(tmp_path / "data/*.csv?split=train:0.9")
    assert (node.data.text, node.data.label) == ("note", "code")
    assert node.model.source == str(tmp_path / "model")
    assert node.device.bytes == 3 * 2**29 and node.device.boundary == 4 and node.device.threads == 2
    assert NodeConfig.model_validate_json(node.model_dump_json()) == node  # as a worker process is told
    assert node.consent.models == ("0" * 64,) and node.consent.split and node.consent.minimum_batch == 8


def test_a_short_file(tmp_path: Path) -> None:
    node = load_node(write(tmp_path, LOCAL))
    assert node == NodeConfig(client="clinic-a", server="127.0.0.1:9092", folder=str(tmp_path / "state"))
    assert not node.secure and not node.consent.split and node.device.bytes == 0


@pytest.mark.parametrize("source", ["hub:glue/sst2:train", "package:demo:rows.csv", "/abs/x.csv"])
def test_sources_that_are_no_relative_path(tmp_path: Path, source: str) -> None:
    assert load_node(write(tmp_path, f'{LOCAL}[data]\ntrain = "{source}"')).data.train == source


@pytest.mark.parametrize(
    ("source", "relative"), [("org/name", False), ("resnet18", False), ("x.gguf", True), ("./x", True)]
)
def test_where_a_model_lies(tmp_path: Path, source: str, relative: bool) -> None:
    node = load_node(write(tmp_path, f'{LOCAL}[model]\nsource = "{source}"'))
    assert node.model.source == (str(tmp_path / source) if relative else source)


def test_paths_of_the_command_line_are_relative_to_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    path = write(tmp_path, f'{LOCAL}folder = "a"\n[data]\ntrain = "a.csv"')
    monkeypatch.chdir(tmp_path / "here")
    node = load_node(path, ["data.train=b.csv"])
    assert node.data.train == str(tmp_path / "here" / "b.csv") and node.folder == str(tmp_path / "a")


def test_a_missing_client_names_the_flag_C55(tmp_path: Path) -> None:
    text = 'server = "localhost:9092"'
    assert message(tmp_path, text) == (
        'node.toml: client is missing; give --client-id ID, or client = "ID" in the node file'
    )
    assert load_node(tmp_path / "node.toml", [], "clinic-b").client == "clinic-b"
    assert load_node(write(tmp_path, LOCAL), [], "clinic-b").client == "clinic-b"
    told = message(tmp_path, LOCAL, client="a b")
    assert told == 'command line: client = "a b": must be a client id: 1 to 64 of A-Z a-z 0-9 _ -'
    assert "--client-id" in message(tmp_path, LOCAL, client="")


def test_the_command_without_a_client_is_exit_2_C55(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, 'server = "localhost:9092"')
    with pytest.raises(SystemExit) as left:
        main(["node", str(path)])
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    assert said.err.startswith(f"hofl: {path}: client is missing; give --client-id ID")


HASHES = "must hold SHA-256 sums, 64 hexadecimal digits each"
ADDRESS = 'must be "host:port", without a scheme'
AWAY = "is another machine, which is reached over TLS alone; give ca and key of hofl keys"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[consent]\nspilt = true", ":4: consent.spilt is unknown, did you mean consent.split?"),
        ("max_rounds = 3", ":3: max_rounds is unknown, did you mean consent.max_rounds?"),
        (
            "frob = 3",
            ":3: frob is unknown; there are client, server, ca, key, folder and "
            "[data], [model], [device], [consent]",
        ),
        (
            "[consent]\nfrob = 1",
            ":4: consent.frob is unknown; [consent] has models, max_probe_cost, split, "
            "minimum_batch, max_rounds, differential_privacy",
        ),
        ("[consent]\nsplit = 1", ":4: consent.split = 1: must be true or false"),
        ("[consent]\nminimum_batch = 0", ":4: consent.minimum_batch = 0: must be >= 1"),
        ("[consent]\nmax_rounds = -1", ":4: consent.max_rounds = -1: must be >= 0"),
        (
            "[consent]\nmax_probe_cost = 1e9",
            ":4: consent.max_probe_cost = 1000000000.0: must be a whole number",
        ),
        ('[consent]\nmodels = ["abc"]', f':4: consent.models = ["abc"]: {HASHES}'),
        ("[consent]\nmodels = [1]", ":4: consent.models = [1]: must be a string in quotes"),
        ('[consent]\nmodels = "abc"', ':4: consent.models = "abc": must be an array such as [8, 16]'),
        ("consent = 3", ":3: consent = 3: must be a section with keys of its own"),
        ("[device]\nboundary = -2", ":4: device.boundary = -2: must be -1 (any) or a number of blocks"),
        ('[device]\ndevice = "tpu"', ":4: device.device = \"tpu\": must be 'auto', 'cpu' or 'cuda'"),
        (
            '[device]\nmemory = "2"',
            ':4: device.memory = "2": must be a size such as "2 GiB" or "512 MB", or "" for no limit',
        ),
        ('folder = ""', ':3: folder = "": must name a folder'),
        ('key = "a.key"', ': ca is missing: a key is used over TLS alone; give ca = "ca.crt" of hofl keys'),
        (
            'ca = "ca.crt"',
            ": key is missing: with ca the server asks for this node's private key; "
            'give key = "ID.key" of hofl keys',
        ),
        ('ca = "ca.crt"\nkey = "no.key"', ":3: ca = ca.crt: no such file"),
        ("x = [", ":3: Invalid value; the file is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, LOCAL + text) == f"node.toml{expected}"


def test_the_command_line_is_named_where_it_said_it(tmp_path: Path) -> None:
    assert message(tmp_path, LOCAL, "consent.spilt=true").startswith("command line: consent.spilt is unknown")
    told = message(tmp_path, LOCAL, "consent.minimum_batch=0")
    assert told == "command line: consent.minimum_batch = 0: must be >= 1"
    assert message(tmp_path, LOCAL, "consent").startswith("command line: 'consent' is no setting")
    assert load_node(tmp_path / "node.toml", ["consent.split=true"]).consent.split


@pytest.mark.parametrize(
    "server",
    ["host", "host:", ":9092", "host:0", "host:65536", "http://host:1", "host:1/x", "a b:1", "::1:9", "[x]:1",
     "[:]:1", "host:१२"],
)  # fmt: skip
def test_servers_that_are_no_address(tmp_path: Path, server: str) -> None:
    told = message(tmp_path, f'client = "a"\nserver = "{server}"')
    assert told == f'node.toml:2: server = "{server}": {ADDRESS}'


def test_a_missing_server(tmp_path: Path) -> None:
    assert message(tmp_path, 'client = "a"') == 'node.toml: server is missing; give server = "host:port"'


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "0.0.0.0", "localhost.example.org", "127.0.0.1.example.org", "[2001:db8::1]", "[::]"]
)
def test_another_machine_without_tls_is_refused(tmp_path: Path, host: str) -> None:
    assert not is_loopback(f"{host}:1")
    told = message(tmp_path, f'client = "a"\nserver = "{host}:1"')
    assert told == f'node.toml:2: server = "{host}:1": {AWAY}'
    for name in ("ca.crt", "a.key"):
        (tmp_path / name).touch()
    secure = f'client = "a"\nserver = "{host}:1"\nca = "ca.crt"\nkey = "a.key"'
    assert load_node(write(tmp_path, secure)).secure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "[::1]"])
def test_this_machine_needs_no_tls(tmp_path: Path, host: str) -> None:
    assert load_node(write(tmp_path, f'client = "a"\nserver = "{host}:1"')).server == f"{host}:1"


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 0), ("2 GiB", 2**31), ("512MB", 512 * 10**6), ("1.5 kB", 1500), ("7 B", 7), ("3 TiB", 3 * 2**40),
     ("1KiB", 1024), ("10 mib", 10 * 2**20)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize(
    "text", ["2", "GiB", "-1 GB", "0 GB", "1e9 B", "2 Gi", "2 iB", "2  GB", "nan GB", " "]
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        bytes_of(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.toml: No such file or directory; give the path of a .toml configuration"
    ):
        load_node(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_node(tmp_path / "x.toml")
