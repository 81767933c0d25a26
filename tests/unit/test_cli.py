"""The command line: exit codes, messages with a next step, and nothing done when something is wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmnet import cli
from swarmnet.cli.failures import explain
from swarmnet.paths import locked_data_dir
from swarmnet_protocols import errors
from tests.support.tiny import save_tiny_llama

PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
COMMANDS = [
    [],
    ["demo"],
    ["join"],
    ["run"],
    ["status"],
    ["finish"],
    ["swarm"],
    ["swarm", "create"],
    ["swarm", "show"],
    ["swarm", "verify"],
    ["swarm", "sign"],
    ["swarm", "new-key"],
    ["swarm", "rotate-key"],
    ["swarm", "invite"],
    ["swarm", "members"],
    ["swarm", "approve"],
    ["swarm", "revoke"],
    ["model"],
    ["model", "ls"],
    ["model", "pull"],
    ["model", "show"],
    ["model", "verify"],
    ["train"],
    ["train", "template"],
    ["train", "create"],
    ["train", "join"],
    ["train", "status"],
    ["train", "export"],
    ["train", "plot"],
    ["tune"],
]
HEAVY = ("torch", "transformers", "hivemind", "grpc", "numpy", "safetensors", "huggingface_hub")
TUNE = ["tune", "--swarm", "SWARM", "--data", "rows.jsonl", "--out", "out"]


@pytest.fixture
def swarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path / "lab")]) == 0
    capsys.readouterr()
    return str(tmp_path / "lab" / "swarm.toml")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute([*command, "--help"]) == 0
    assert "Usage: swarmnet" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from swarmnet import cli\n"
        f"for command in {COMMANDS!r}: cli.execute([*command, '--help'])\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_public_name_is_imported_lazily() -> None:
    program = (
        "import sys; from swarmnet import AutoSwarmModelForCausalLM\n"
        f"print(AutoSwarmModelForCausalLM.__name__, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "AutoSwarmModelForCausalLM []"


USAGE = [
    (["bogus"], "bogus"),
    (["swarm"], "command"),
    (["swarm", "create"], "NAME"),
    (["run", "m", "hi"], "--swarm"),
    (["run", "m", "hi", "--swarm", "SWARM", "-n", "0"], "-n"),
    (["run", "m", "hi", "--swarm", "SWARM", "-n", "many"], "-n"),
    (["run", "m", "hi", "--swarm", "SWARM", "--temperature", "nan"], "--temperature"),
    (["run", "m", "hi", "--swarm", "SWARM", "--temperature", "inf"], "--temperature"),
    (["run", "m", "hi", "--swarm", "SWARM", "--temperature=-0.1"], "--temperature"),
    (["run", "m", "hi", "--swarm", "SWARM", "--dtype", "int3"], "--dtype"),
    (["run", "m", " ", "--swarm", "SWARM"], "prompt"),
    (["join", "SWARM", "--blocks", "5"], "--blocks"),
    (["join", "SWARM", "--blocks", "5:5"], "--blocks"),
    (["join", "SWARM", "--blocks", "9:5"], "--blocks"),
    (["join", "SWARM", "--blocks=-1:5"], "--blocks"),
    (["join", "SWARM", "--blocks", "a:b"], "--blocks"),
    (["join", "SWARM", "--blocks", "0:5", "--num-blocks", "5"], "--num-blocks"),
    (["join", "SWARM", "--num-blocks", "0"], "--num-blocks"),
    (["join", "SWARM", "--device", "toaster"], "--device"),
    (["join", "SWARM", "--dtype", "float8"], "--dtype"),
    (["join", "SWARM", "--max-cache", "lots"], "--max-cache"),
    (["join", "SWARM", "--max-cache", "0"], "--max-cache"),
    (["join", "SWARM", "--name", "bell\a"], "--name"),
    (["demo", "--nodes", "0"], "--nodes"),
    (["finish", "--grace", "nan"], "--grace"),
    ([*TUNE, "--method", "magic"], "--method"),
    ([*TUNE, "--learning-rate", "nan"], "--learning-rate"),
    ([*TUNE, "--learning-rate", "0"], "--learning-rate"),
    ([*TUNE, "--held-out", "1"], "--held-out"),
    ([*TUNE, "--steps", "0"], "--steps"),
    ([*TUNE, "--batch-size", "257"], "--batch-size"),
    ([*TUNE, "--device", "toaster"], "--device"),
    (["tune", "--swarm", "SWARM", "--out", "out"], "--data"),
]
CONFIG = [
    (["join", "nowhere.toml"], "nowhere.toml"),
    (["join", "SWARM", "--bootstrap", "127.0.0.1:4000"], "multiaddr"),
    (["join", "SWARM", "--bootstrap", "/ip4/127.0.0.1/tcp/4000"], "peer id"),
    (["join", "SWARM", "--listen", "/ip4/127.0.0.1/tcp/70000"], "port"),
    (["join", "SWARM", "--announce", "/ip4/300.0.0.1/tcp/1"], "host"),
    (["run", "m", "hi", "--swarm", "nowhere.toml"], "nowhere.toml"),
    (["run", "m", "hi", "--swarm", "SWARM", "--bootstrap", "x"], "multiaddr"),
    (["run", "m", "hi", "--swarm", "SWARM", "--adapter", "nowhere"], "adapter_config.json"),
    ([*TUNE, "--bootstrap", "x"], "multiaddr"),
    (TUNE, "rows.jsonl"),
    (["swarm", "create", "a/b", "--out", "out"], "a/b"),
    (["swarm", "verify", "nowhere.toml"], "nowhere.toml"),
    (["swarm", "create", "lab", "--out", "out", "--bootstrap", "x"], "multiaddr"),
]


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [(arguments, words, 2) for arguments, words in USAGE]
    + [(arguments, words, 3) for arguments, words in CONFIG],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_said_with_a_next_step_and_nothing_is_done(  # one test per invocation, text and JSON
    arguments: list[str],
    words: str,
    exit_code: int,
    swarm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    arguments = [swarm if argument == "SWARM" else argument for argument in arguments]
    if arguments[0] == "join":
        arguments += ["--data-dir", "data", "--cache-dir", "cache"]

    assert cli.execute(arguments) == exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert words in shown.err
    assert "\nhint: " in shown.err
    assert "Traceback" not in shown.err

    if arguments[-1:] != ["bogus"] and arguments != ["swarm"]:
        assert cli.execute([*arguments, "--json"]) == exit_code
        shown = capsys.readouterr()
        event = json.loads(shown.out)
        assert shown.err == ""
        assert (event["event"], event["exit_code"]) == ("error", exit_code)
        assert words in event["message"]
        assert event["hint"]
    assert not list(empty.iterdir())


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (errors.ConfigError("x"), "config", 3),
        (errors.NotAuthorised("x"), "not_authorised", 4),
        (errors.PeerUnreachable("x"), "unreachable", 5),
        (errors.NoRoute([(0, 3)]), "unreachable", 5),
        (errors.DeadlineExceeded("x"), "unreachable", 5),
        (errors.OutOfResources("x"), "out_of_resources", 6),
        (errors.IntegrityError("x"), "integrity", 7),
        (errors.IncompatibleVersion("x"), "incompatible_version", 8),
        (errors.StreamEnded("x"), "failed", 1),
        (FileNotFoundError(2, "No such file", "here"), "failed", 1),
        (KeyError("x"), "internal", 1),
        (
            ExceptionGroup("", [ValueError(), ExceptionGroup("", [errors.OutOfResources("x")])]),
            "out_of_resources",
            6,
        ),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: Exception, kind: str, exit_code: int) -> None:
    failure = explain(error)
    assert (failure.kind, failure.exit_code) == (kind, exit_code)
    assert failure.message
    assert failure.hint


def test_a_bug_shows_its_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("swarmnet.swarm_file.load", broken)
    assert cli.execute(["swarm", "show", "x"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert cli.execute(["--debug", "swarm", "show", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["--version"]) == 0
    assert capsys.readouterr().out.startswith("swarmnet ")


def test_a_swarm_is_created_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab"

    def run(*arguments: str) -> dict[str, Any]:
        assert cli.execute([*arguments, "--json"]) == 0
        fields: dict[str, Any] = json.loads(capsys.readouterr().out)
        return fields

    created = run("swarm", "create", "lab", "--out", str(out), "--bootstrap", PEER, "--days", "7")
    path = created.pop("path")
    assert path == str(out / "swarm.toml")
    assert run("swarm", "show", path) == created
    assert run("swarm", "verify", path) == created | {"valid": True}
    assert created["bootstrap"] == [PEER]
    assert created["open"] is False

    Path(path).write_text(Path(path).read_text().replace("serial = 1", "serial = 9"))
    assert cli.execute(["swarm", "verify", path]) == 7


def test_no_node_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "finish"):
        assert cli.execute([command, "--data-dir", str(tmp_path)]) == 5
        assert "no node is running" in capsys.readouterr().err


def test_models_from_the_hub_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("models", "datasets"):
        snapshot = tmp_path / f"{kind}--org--{kind[:-1]}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert cli.execute(["model", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "models": [
            {"name": "smollm2-135m-instruct", "default": True},
            {"name": "org/model", "default": False},
        ]
    }
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "absent"))
    assert cli.execute(["model", "ls"]) == 0
    assert capsys.readouterr().out == "smollm2-135m-instruct  (the default)\n"


def test_the_files_of_a_model_are_shown_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    for command in ("pull", "show", "verify"):
        arguments = ["model", command, str(model), "--cache-dir", str(tmp_path / "cache"), "--json"]
        assert cli.execute(arguments) == 0
        fields = json.loads(capsys.readouterr().out)
        assert len(fields["manifest"]) == 64
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert cli.execute(arguments[:-1]) == 7
    assert weights.name in capsys.readouterr().err


def test_two_nodes_cannot_share_a_data_directory(
    swarm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_data_dir(tmp_path / "data") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert cli.execute(["join", swarm, "--data-dir", str(directory)]) == 3
        assert "already runs" in capsys.readouterr().err
    with locked_data_dir(tmp_path / "data"):
        pass


def test_a_data_directory_that_cannot_be_used_is_refused(
    swarm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.execute(["join", swarm, "--data-dir", str(tmp_path / "file")]) == 3
    assert "--data-dir" in capsys.readouterr().err


def test_a_prompt_of_any_size_is_not_read_into_memory(
    swarm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swarmnet.cli.run.MAX_PROMPT_CHARS", 10)
    stdin = io.StringIO("x" * 100)
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.execute(["run", "m", "--swarm", swarm]) == 2
    assert "longer than 10" in capsys.readouterr().err
    assert stdin.tell() == 11


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    program = "import sys; from swarmnet import cli; sys.exit(cli.execute(['join', '--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate()
    assert stderr == b""
