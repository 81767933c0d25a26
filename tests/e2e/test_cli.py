"""The commands as a person runs them: real processes, the real model, one machine."""

import io
import json
import os
import pty
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest

from swarmnet.cli import execute
from swarmnet_protocols.machine import native_code
from tests.support.processes.commands import SWARMNET, RunningCommand, call, run
from tests.support.processes.nodes import NodeProcess

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
BLOCKS = 30
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def assert_all_end(members: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


@dataclass(frozen=True)
class RunningNode:
    swarm: str
    data_dir: str
    ready: dict[str, Any]

    def ask(self, *arguments: str) -> dict[str, Any]:
        """The answer of ``run``."""
        answer: dict[str, Any] = call("run", MODEL, *arguments, *self.where)
        return answer

    @property
    def where(self) -> tuple[str, ...]:
        return ("--swarm", self.swarm, "--bootstrap", self.ready["addresses"][0])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    directory = tmp_path_factory.mktemp("swarm")
    swarm, data_dir = str(directory / "swarm.toml"), str(directory / "data")
    call("swarm", "create", "lab", "--open", "--out", str(directory))
    with NodeProcess((swarm, "--blocks", f"0:{BLOCKS}"), Path(data_dir)) as process:
        yield RunningNode(swarm, data_dir, process.wait("ready"))
        # Last in this module: `finish` is the intended way to end a node.
        assert call("finish", "--data-dir", data_dir)["finishing"] is True
        assert process.wait_for_end() == 0
        assert not (Path(data_dir) / "control.sock").exists()


def test_a_node_says_where_it_is_and_what_it_hosts(node: RunningNode) -> None:
    assert node.ready["model"] == MODEL
    assert node.ready["blocks"] == [0, BLOCKS]
    assert node.ready["addresses"][0].endswith(f"/p2p/{node.ready['peer_id']}")
    assert (Path(node.data_dir) / "addresses").read_text().splitlines() == node.ready["addresses"]


def test_a_peer_that_is_started_again_is_where_others_know_it_to_be(tmp_path: Path) -> None:
    """The swarm file that names it stays true."""
    call("swarm", "create", "lab", "--open", "--out", str(tmp_path))
    arguments = ("bootstrap", str(tmp_path), "--data-dir", str(tmp_path / "peer"))
    seen = []
    for _ in range(2):
        with RunningCommand(arguments, tmp_path / "peer.log") as peer:
            seen.append(peer.wait("ready")["addresses"])
            peer.send_signal(signal.SIGTERM, children=False)
            assert peer.wait_for_end() == 0
    assert seen[0] == seen[1]
    assert any("/udp/" in address for address in seen[0])


def test_status_tells_what_the_node_does(node: RunningNode) -> None:
    before = call("status", "--data-dir", node.data_dir)
    assert (before["peer_id"], before["blocks"]) == (node.ready["peer_id"], [0, BLOCKS])
    assert (before["state"], before["swarm"]) == ("online", "lab")
    assert before["kernels"] in {each.name for each in native_code.targets()}

    node.ask("Hello", "-n", "2")
    after = call("status", "--data-dir", node.data_dir)
    assert after["tokens"] > before["tokens"]
    assert node.ready["peer_id"] in run("status", "--data-dir", node.data_dir).stdout


def test_a_prompt_is_answered(node: RunningNode) -> None:
    result = node.ask("What is the capital of France?", "-n", "32")
    assert "Paris" in result["text"]
    assert 0 < len(result["token_ids"]) <= 32
    assert result["prompt_tokens"] > 10
    assert 0 < result["first_token_s"] <= result["total_s"]
    assert result["tokens_per_s"] > 0
    assert result["route"] == [{"peer_id": node.ready["peer_id"], "start": 0, "end": BLOCKS}]
    assert (result["failovers"], result["longest_stall_s"] >= 0) == (0, True)


def test_raw_sends_the_prompt_as_it_is_and_greedy_answers_repeat(node: RunningNode) -> None:
    results = [node.ask("The capital of France is", "--raw", "-n", "5") for _ in range(2)]
    assert results[0]["prompt_tokens"] == 5
    assert results[0]["text"].startswith(" Paris")
    assert results[0]["token_ids"] == results[1]["token_ids"]


def test_a_trace_shows_each_trip_of_an_answer(node: RunningNode, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    answer = node.ask("The capital of France is", "--raw", "-n", "3", "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names["trip around the chain"] == names["computing"] == answer["trips"]
    # a host notes that it has sent a step, which may be after the client has received it
    of_client = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert max(event["ts"] + event["dur"] for event in of_client) <= answer["total_s"] * 1e6
    assert execute(["run", MODEL, "--chat", "--trace", str(file), *node.where]) == 2
    nowhere = str(tmp_path / "none" / "file")
    assert execute(["run", MODEL, "Hello", "--trace", nowhere, *node.where]) == 1


def test_bench_measures_each_chain(node: RunningNode) -> None:
    report = call("bench", MODEL, "--runs", "2", "--prompt-tokens", "40", "-n", "6", *node.where)
    assert len(report["runs"]) == 2
    for each in report["runs"]:
        assert each["route"] == [{"peer_id": node.ready["peer_id"], "start": 0, "end": BLOCKS}]
        assert each["failovers"] == 0
        assert min(each["first_token_s"], each["tokens_per_s"]) > 0
    middle = sum(each["tokens_per_s"] for each in report["runs"]) / 2
    assert report["tokens_per_s"] == pytest.approx(middle)


def test_a_seed_makes_sampling_repeatable(node: RunningNode) -> None:
    sampling = ("--temperature", "1.5", "-n", "12")
    first, again, other = (node.ask("Tell a story", *sampling, "--seed", seed)["token_ids"] for seed in "112")
    assert first == again
    assert first != other


def test_a_draft_model_changes_no_answer(node: RunningNode) -> None:
    question = ("What is a swarm?", "-n", "16")
    plain, drafted = (node.ask(*question, *options) for options in (("--no-speculate",), ("--draft", MODEL)))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["trips"] <= plain["trips"] == 16


def test_the_prompt_may_come_from_stdin(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is"))
    result = node.ask("--raw", "-n", "3")
    assert result["text"].startswith(" Paris")


def test_text_goes_to_stdout_and_all_else_to_stderr(node: RunningNode) -> None:
    done = run("run", MODEL, "The capital of France is", "--raw", "-n", "1", *node.where)
    assert (done.returncode, done.stdout) == (0, " Paris\n")
    assert "1 token in " in done.stderr


def test_a_prompt_that_is_too_long_is_refused(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", MODEL, "word " * 9000, "--raw", *node.where]) == 2
    assert "shorten" in capsys.readouterr().err


def test_an_answer_imports_neither_torch_nor_transformers(node: RunningNode, tmp_path: Path) -> None:
    trace = ("--trace", str(tmp_path / "trace.json"))
    arguments = ("run", MODEL, "The capital of France is", "--raw", "-n", "2", *trace, *node.where)
    assert execute([*arguments]) == 0  # the cache has the vocabulary afterwards
    logged = [SWARMNET[0], "-X", "importtime", *SWARMNET[1:]]
    done = subprocess.run([*logged, *arguments], capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "swarmnet_client.model.native_layers" in imported
    assert not imported & {"torch", "transformers"}


def test_a_chat_remembers_the_talk_and_ctrl_c_stops_one_answer(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    leader, follower = pty.openpty()
    chat = subprocess.Popen(
        [*SWARMNET, "run", MODEL, "--json", "--stream", *node.where],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert chat.stdout is not None
        events = map(json.loads, chat.stdout)
        os.write(leader, b"What is the capital of France? Answer in one word.\n")
        first = next(event for event in events if "token_ids" in event)
        before = call("status", "--data-dir", node.data_dir)["tokens"]
        # An answer so long that it runs when a busy machine lets this test interrupt it.
        os.write(leader, b"/set max_new_tokens 4000\nNow count from 1 to 1000.\n")
        assert next(events)["event"] == "token"
        chat.send_signal(signal.SIGINT)
        stopped = next(event for event in events if "token_ids" in event)
        assert len(stopped["token_ids"]) < 4000
        computed = call("status", "--data-dir", node.data_dir)["tokens"] - before
        # At most two more: those in flight when the answer was stopped.
        assert computed <= stopped["prompt_tokens"] - first["prompt_tokens"] + len(stopped["token_ids"]) + 2
        os.write(leader, b"/set max_new_tokens 4\nAnd of Italy?\n/route\n/quit\n")
        third = next(event for event in events if "token_ids" in event)
        assert third["prompt_tokens"] > stopped["prompt_tokens"] + len(stopped["token_ids"])
        _, told = chat.communicate(timeout=30)
        assert chat.returncode == 0
        assert "stopped" in told
        assert told.count(node.ready["peer_id"]) == 1
        assert "Traceback" not in told
    finally:
        chat.kill()
        chat.communicate()
        os.close(leader)
        os.close(follower)


def test_without_a_terminal_each_line_of_a_chat_is_answered(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n/undo\nHi\n"))
    assert execute(["run", MODEL, "--chat", "-n", "2", "--json", *node.where]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_model_without_hosts_is_unreachable(
    node: RunningNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("swarm", "create", "other", "--open", "--out", str(tmp_path))
    where = ("--swarm", str(tmp_path), "--bootstrap", node.ready["addresses"][0])
    assert execute(["run", MODEL, "Hello", *where, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["error"] == "unreachable"


def test_sigterm_ends_a_node_in_good_order(node: RunningNode, tmp_path: Path) -> None:
    options = ("--blocks", "0:2", "--data-dir", str(tmp_path / "data"), "--listen", LOOPBACK)
    join = ("join", node.swarm, *options, "--bootstrap", node.ready["addresses"][0])
    with RunningCommand(join, tmp_path / "node.log") as process:
        process.wait("ready")
        members = process.family
        process.send_signal(signal.SIGTERM, children=False)
        process.wait("finishing")
        process.wait("stopped")
        assert process.wait_for_end() == 0
        assert_all_end(members)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder in which the path of a Unix socket stays below the 107 bytes that Linux
    allows."""
    with TemporaryDirectory(prefix="sn-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_peer_removes_the_sockets_of_one_that_was_killed(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    call("swarm", "create", "lab", "--open", "--out", str(tmp_path))
    arguments = ("bootstrap", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--listen", LOOPBACK)
    sockets = set[Path]()
    for _ in range(2):
        with RunningCommand(arguments, tmp_path / "peer.log") as process:
            process.wait("ready")
            found = set(short_path.glob("swarmnet-*"))
            assert len(found) == 1
            assert not found & sockets
            members, sockets = process.family, found
            process.send_signal(signal.SIGKILL, children=False)
            assert process.wait_for_end() == -signal.SIGKILL
            assert_all_end(members)
            assert all(folder.is_dir() for folder in sockets)


def test_demo_answers_serves_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with RunningCommand(("demo", "--nodes", "3", "--keep"), tmp_path / "demo.log") as process:
        result = process.wait("answer")
        assert "Paris" in result["text"]
        assert [(hop["start"], hop["end"]) for hop in result["route"]] == [(0, 10), (10, 20), (20, 30)]
        assert len({hop["peer_id"] for hop in result["route"]}) == 3
        serving = process.wait("serving")
        question = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
        served = httpx.post(f"{serving['url']}/v1/completions", json=question, timeout=60).json()
        assert served["choices"][0]["text"].startswith(" Paris")
        members = process.family
        process.send_signal(signal.SIGINT, children=False)
        process.wait("stopped")
        assert process.wait_for_end() == 0
        assert_all_end(members)
        assert not list(tmp_path.glob("swarmnet-demo-*"))


def test_the_node_of_a_demo_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    with RunningCommand(("demo", "--nodes", "1"), tmp_path / "demo.log") as process:
        process.wait("ready")
        members = process.family
        assert len(members) > 2  # the demo, its node, and p2pd
        process.send_signal(signal.SIGKILL, children=False)
        assert process.wait_for_end() == -signal.SIGKILL
        assert_all_end(members)
