"""The command line: exit codes, messages with a next step, and commands that do nothing when
something is wrong."""

import asyncio
import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import platformdirs
import pytest
import typer

from swarmnet import cli
from swarmnet.cli.chat.generation import Screen
from swarmnet.cli.commands import run
from swarmnet.cli.failures import EXIT_INTERRUPTED, explain
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.paths import locked_data_dir
from swarmnet_node.loading import block_speed
from swarmnet_node.owner import control
from swarmnet_protocols import errors
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.training.job_templates import TEMPLATES
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.models.tiny import save_tiny_llama
from tests.support.processes.commands import every_command
from tests.support.swarm.fake_node import TRUNK_STATUS, FakeNode

PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
COMMANDS = every_command()
HEAVY = ("torch", "transformers", "hivemind", "grpc", "numpy", "safetensors", "huggingface_hub", "fastapi", "uvicorn", "pydantic", "rich", "cryptography", "google.protobuf", "prometheus_client")  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path / "lab")]) == 0
    capsys.readouterr()
    return str(tmp_path / "lab" / "swarm.toml")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute([*command, "--help"]) == 0
    usage, _, _ = capsys.readouterr().out.partition("\n")
    assert usage.startswith("Usage: swarmnet")
    assert "{" not in usage, "that is how typer writes what has to be there"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from swarmnet import cli\n"
        f"for command in {COMMANDS!r}: cli.execute([*command, '--help'])\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_every_argument_and_option_is_explained() -> None:
    root: Any = typer.main.get_command(cli.app)
    context = root.make_context("swarmnet", [], resilient_parsing=True)
    loaded = [root.get_command(context, name) for name in root.list_commands(context)]
    commands = [below for each in loaded for below in getattr(each, "commands", {"": each}).values()]
    shown = [
        (command.name, parameter.name, parameter.help)
        for command in commands
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    assert len(shown) > 100
    assert [each for each in shown if not each[2]] == []


def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SWARMNET_COMPLETE", "complete_bash")
    for typed, wanted in (
        ("swarmnet fin", "finish"),
        ("swarmnet swarm cre", "create"),
        ("swarmnet join --blo", "--blocks"),
    ):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        with pytest.raises(SystemExit):
            cli.execute([])
        assert wanted in capsys.readouterr().out.split()


def test_the_environment_chooses_the_target_of_native_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(native_code._CHOSEN, "target", "")
    monkeypatch.setenv("SWARMNET_NATIVE_TARGET", "plain")
    assert cli.execute(["status", "--data-dir", str(tmp_path)]) != 0  # no node runs there
    assert [each.name for each in native_code.targets()] == ["plain"]


def test_colours_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert cli.execute(["--no-color", "status", "--data-dir", str(tmp_path)]) == 5
    assert os.environ["NO_COLOR"] == "1"


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute([]) == 0
    assert "Use a model:" in capsys.readouterr().out


def test_the_public_name_is_imported_lazily() -> None:
    program = (
        "import sys; from swarmnet import AutoSwarmModelForCausalLM\n"
        f"print(AutoSwarmModelForCausalLM.__name__, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "AutoSwarmModelForCausalLM []"


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
        (OSError(errno.ENOSPC, "No space left on device", "here"), "out_of_resources", 6),
        (OSError(errno.EDQUOT, "Quota exceeded"), "out_of_resources", 6),
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


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "nothing is running" in capsys.readouterr().err


def status_of(node: FakeNode, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    async def main() -> int:
        async with control.serve(node, folder):
            return await asyncio.to_thread(cli.execute, ["status", "--data-dir", str(folder), *options])

    assert asyncio.run(main()) == 0
    return capsys.readouterr().out


def test_status_shows_experts_on_peers_and_for_other_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode()
    assert "experts" not in status_of(node, tmp_path, capsys)
    node.shown = TRUNK_STATUS
    shown = " ".join(status_of(node, tmp_path, capsys).split())
    assert "10:0-3 (blocks:experts) for other hosts 1099511627776 rows, 2 open streams" in shown
    assert "computed by 2 peers, round trips 0.5, 2.0 ms; 1 peer too far" in shown
    assert "missing experts 11:7 (1 expert): swarmnet join SWARM --experts" in shown
    found = json.loads(status_of(node, tmp_path, capsys, "--json"))
    assert found["trunk"]["round_trips_s"] == [0.0005, 0.002]
    assert (found["expert_rows"], found["expert_streams"]) == (1 << 40, 2)


def test_bench_measures_blocks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["bench", "smollm2-135m-instruct", "--local", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["precision"]) == ("cpu", "q4_1")
    assert (report["blocks"], report["total_blocks"]) == (4, 30)
    assert 2_000_000 < report["block_bytes"] < 4_000_000, "weights stay packed, as in a host"
    assert min(report["decode"], report["batch"], report["prompt"]) > 0
    assert report["kernels"] == native_code.targets()[0].name
    assert report["kernel_times"] == {}, "tests measure no target"


def test_bench_shows_the_times_of_other_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = native_code.targets()[0].name
    times = {"Q4_K": {own: 1.0, "other": 2.0}, "F32": {own: 1.0, "other": 1.5}}
    monkeypatch.setattr(block_speed, "times_by_format", lambda _: times)
    assert cli.execute(["bench", "smollm2-135m-instruct", "--local"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"kernels {own} time with other 1.50 (F32) to 2.00 x (Q4_K)" in shown


def test_status_names_the_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = FakeNode()
    node.shown = NodeStatus.FromString(TRUNK_STATUS.SerializeToString())
    node.shown.host.record.arithmetic, node.shown.kernels = "exact-1", "avx2"
    assert "exact-1, avx2 kernels" in status_of(node, tmp_path, capsys)
    assert json.loads(status_of(node, tmp_path, capsys, "--json"))["kernels"] == "avx2"


def test_models_from_the_hub_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("models", "datasets"):
        snapshot = tmp_path / f"{kind}--org--{kind[:-1]}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert cli.execute(["model", "ls", "--json", "--cache-dir", str(tmp_path / "ours")]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "models": [
            {"name": "smollm2-135m-instruct", "default": True},
            {"name": "org/model", "default": False, "present_bytes": 2, "total_bytes": None},
        ]
    }
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "absent"))
    assert cli.execute(["model", "ls", "--cache-dir", str(tmp_path / "ours")]) == 0
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


def test_one_look_at_a_swarm_tells_jobs_from_unknown_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    @asynccontextmanager
    async def connect(*_: object, **__: object) -> AsyncIterator[tuple[None, None]]:
        looks.append(1)
        yield None, None

    monkeypatch.setattr("swarmnet_protocols.joining.without_hub.connect", connect)
    for found in ("catalog.announced_model", "revisions.announced_revision"):
        monkeypatch.setattr(f"swarmnet_protocols.directory.{found}", AsyncMock(return_value=None))
    catalog = SimpleNamespace(models=[SimpleNamespace(name="trunk")])
    monkeypatch.setattr("swarmnet_protocols.directory.catalog.read_catalog", AsyncMock(return_value=catalog))
    monkeypatch.setattr("swarmnet_protocols.training.job_records.find_jobs", AsyncMock(return_value=[]))
    network: Any = SimpleNamespace(rules=SimpleNamespace(names={}))
    client = ClientOptions(hosts=(), data_dir=tmp_path, cache_dir=tmp_path, max_disk_bytes=None)
    for name, error, message in (
        ("0" * 64, errors.Unreachable, "no machine serves the job"),
        ("nosuchmodel", errors.ConfigError, "nosuchmodel"),
    ):
        with pytest.raises(error, match=message) as caught:
            client.resolve(name, network, lambda *_: None)
    assert caught.value.hint == "the swarm has trunk"
    assert len(looks) == 2


def test_a_stopped_batch_says_what_it_has_and_how_it_goes_on(
    swarm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(answering: Any) -> None:
        answering.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("swarmnet.cli.endpoint.batch.run_until_stopped", stopped)
    monkeypatch.setattr(ClientOptions, "resolve", lambda *_: None)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = [str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), "--bootstrap", PEER]
    assert cli.execute(["batch", *arguments, "--swarm", swarm]) == EXIT_INTERRUPTED
    assert "stopped with 0 of 2 answers: the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(("piece", "shown"), [("Par", "Par\n"), ("Paris\n", "Paris\n"), ("", "")])
def test_ctrl_c_ends_the_line_of_an_answer(
    piece: str, shown: str, swarm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_resident: object, _prompt: object, _sampling: object, screen: Screen) -> None:
        if piece:
            screen.show(piece)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "find", lambda *_: "an endpoint")
    monkeypatch.setattr(run, "ask", stopped)
    command = ["run", "m", "Where?", "--raw", "--swarm", swarm, "--bootstrap", PEER]
    assert cli.execute(command) == EXIT_INTERRUPTED
    assert capsys.readouterr().out == shown


def test_a_prompt_of_any_size_is_not_read_into_memory(
    swarm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swarmnet.cli.commands.run.MAX_MESSAGE_CHARS", 10)
    stdin = io.StringIO("x" * 100)
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.execute(["run", "m", "--swarm", swarm]) == 2
    assert "longer than 10" in capsys.readouterr().err
    assert stdin.tell() == 12


def test_a_prompt_that_is_no_text_is_refused(
    swarm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert cli.execute(["run", "m", "--swarm", swarm]) == 2
    assert "not UTF-8 at byte 2" in capsys.readouterr().err
    assert cli.execute(["run", "m", "a\udcff", "--swarm", swarm]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffHi"))
    assert run._question(None) == "Hi"


def test_a_reader_that_leaves_ends_a_command_as_documented() -> None:
    program = "import sys; from swarmnet import cli; sys.exit(cli.execute(['--version']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, b"")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "utf-8"])
def test_letters_that_an_encoding_lacks_are_replaced(encoding: str) -> None:
    program = (
        "from swarmnet import cli; from swarmnet.cli.output import print_text; "
        "cli.execute = lambda _: print_text('Привет!'); cli.main()"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=60
    )
    shown = done.stdout.decode(encoding if encoding != "ascii" else "utf-8").strip()
    assert shown in {"??????!", "Привет!"}


def test_without_a_home_the_options_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(platformdirs, "user_data_path", no_home)
    monkeypatch.setattr(platformdirs, "user_cache_path", no_home)
    for command in ("status", "doctor", "model ls"):
        assert cli.execute(command.split()) == 3
        assert "set HOME, or give --data-dir DIR and --cache-dir DIR" in capsys.readouterr().err


def test_the_help_of_the_templates_names_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["train", "template", "--help"]) == 0
    words = capsys.readouterr().out.partition("METHOD  ")[2].partition("[required]")[0]
    assert set(TEMPLATES) <= set(re.findall(r"\w+", words))
