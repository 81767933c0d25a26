"""The commands as a person runs them: real processes, the real model, one machine."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MODEL = "smollm2-135m-instruct"
BLOCKS = 30
SWARMNET = (sys.executable, "-m", "swarmnet")


def swarmnet(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWARMNET, *arguments], input=stdin, capture_output=True, text=True, timeout=200, check=False
    )


def answer(*arguments: str, stdin: str = "") -> dict[str, Any]:
    done = swarmnet(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWARMNET, *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        assert event.get("event") != "error", event
        if event.get("event") == name:
            return event
    raise AssertionError(process.stderr.read())


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def end(process: subprocess.Popen[str]) -> None:
    """Whatever happened in a test, nothing of it goes on."""
    if process.poll() is None:
        members = family(process)
        for member in members:
            member.kill()
        psutil.wait_procs(members, timeout=10)
    process.communicate()


def assert_all_end(members: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


@dataclass(frozen=True)
class RunningNode:
    swarm: str
    data_dir: str
    ready: dict[str, Any]

    def ask(self, *arguments: str, stdin: str = "") -> dict[str, Any]:
        return answer("run", MODEL, *arguments, *self.where, stdin=stdin)

    @property
    def where(self) -> tuple[str, ...]:
        return ("--swarm", self.swarm, "--bootstrap", self.ready["addresses"][0])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    directory = tmp_path_factory.mktemp("swarm")
    swarm, data_dir = str(directory / "swarm.toml"), str(directory / "data")
    answer("swarm", "create", "lab", "--out", str(directory))
    process = start(
        *(
            "join",
            swarm,
            "--blocks",
            f"0:{BLOCKS}",
            "--data-dir",
            data_dir,
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
        )
    )
    try:
        yield RunningNode(swarm, data_dir, wait_for(process, "ready"))
        # The last thing the module does to the node: `finish` is how it is meant to end.
        assert answer("finish", "--data-dir", data_dir)["finishing"] is True
        assert process.wait(timeout=60) == 0
        assert not (Path(data_dir) / "control.sock").exists()
    finally:
        end(process)


def test_a_node_says_where_it_is_and_what_it_hosts(node: RunningNode) -> None:
    assert node.ready["model"] == MODEL
    assert node.ready["blocks"] == [0, BLOCKS]
    assert node.ready["addresses"][0].endswith(f"/p2p/{node.ready['peer_id']}")
    assert (Path(node.data_dir) / "addresses").read_text().splitlines() == node.ready["addresses"]


def test_status_tells_what_the_node_does(node: RunningNode) -> None:
    before = answer("status", "--data-dir", node.data_dir)
    assert (before["peer_id"], before["blocks"]) == (node.ready["peer_id"], [0, BLOCKS])
    assert (before["state"], before["swarm"]) == ("online", "lab")

    node.ask("Hello", "-n", "2")
    after = answer("status", "--data-dir", node.data_dir)
    assert after["tokens"] > before["tokens"]
    assert node.ready["peer_id"] in swarmnet("status", "--data-dir", node.data_dir).stdout


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


def test_a_seed_makes_sampling_repeatable(node: RunningNode) -> None:
    sampling = ("--temperature", "1.5", "-n", "12")
    first, again, other = (node.ask("Tell a story", *sampling, "--seed", seed)["token_ids"] for seed in "112")
    assert first == again
    assert first != other


def test_the_prompt_may_come_from_stdin(node: RunningNode) -> None:
    result = node.ask("--raw", "-n", "3", stdin="The capital of France is")
    assert result["text"].startswith(" Paris")


def test_text_goes_to_stdout_and_all_else_to_stderr(node: RunningNode) -> None:
    done = swarmnet("run", MODEL, "The capital of France is", "--raw", "-n", "1", *node.where)
    assert (done.returncode, done.stdout) == (0, " Paris\n")
    assert "1 tokens" in done.stderr


def test_a_prompt_that_is_too_long_is_refused(node: RunningNode) -> None:
    done = swarmnet("run", MODEL, "--raw", *node.where, stdin="word " * 9000)
    assert done.returncode == 2
    assert "shorten" in done.stderr


def test_a_chat_remembers_what_was_said(node: RunningNode) -> None:
    leader, follower = pty.openpty()
    chat = subprocess.Popen(
        [*SWARMNET, "run", MODEL, "-n", "16", "--json", *node.where],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert chat.stdout is not None
        os.write(leader, b"What is the capital of France?\n")
        first = json.loads(chat.stdout.readline())
        before = answer("status", "--data-dir", node.data_dir)["tokens"]
        os.write(leader, b"And of Italy?\n")
        second = json.loads(chat.stdout.readline())
        computed = answer("status", "--data-dir", node.data_dir)["tokens"] - before
        os.write(leader, b"\n")
        assert chat.wait(timeout=30) == 0
        assert second["prompt_tokens"] > first["prompt_tokens"] + len(first["token_ids"]) - 2
        assert computed < second["prompt_tokens"], "what was said before is not computed again"
    finally:
        end(chat)
        os.close(leader)
        os.close(follower)


def test_a_model_without_hosts_is_unreachable(node: RunningNode, tmp_path: Path) -> None:
    answer("swarm", "create", "other", "--open", "--out", str(tmp_path))
    bootstrap = ("--bootstrap", node.ready["addresses"][0])
    done = swarmnet("run", MODEL, "Hello", "--swarm", str(tmp_path), *bootstrap, "--json")
    assert done.returncode == 5
    assert json.loads(done.stdout)["error"] == "unreachable"


def test_sigterm_ends_a_node_in_good_order(node: RunningNode, tmp_path: Path) -> None:
    process = start(
        *(
            "join",
            node.swarm,
            "--blocks",
            "0:2",
            "--data-dir",
            str(tmp_path),
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
        ),
        *("--bootstrap", node.ready["addresses"][0]),
    )
    try:
        wait_for(process, "ready")
        members = family(process)
        process.send_signal(signal.SIGTERM)
        wait_for(process, "finishing")
        wait_for(process, "stopped")
        assert process.wait(timeout=30) == 0
        assert_all_end(members)
    finally:
        end(process)


def test_demo_answers_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start("demo", "--nodes", "3")
    try:
        wait_for(process, "ready")
        members = family(process)
        result = wait_for(process, "answer")
        wait_for(process, "stopped")
        assert process.wait(timeout=60) == 0
        assert "Paris" in result["text"]
        assert [(hop["start"], hop["end"]) for hop in result["route"]] == [(0, 10), (10, 20), (20, 30)]
        assert len({hop["peer_id"] for hop in result["route"]}) == 3
        assert_all_end(members)
        assert not list(tmp_path.glob("swarmnet-demo-*"))
    finally:
        end(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_takes_its_nodes_along(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start("demo", "--nodes", "2")
    members: list[psutil.Process] = []
    try:
        wait_for(process, "ready")
        members = family(process)
        assert len(members) > 2
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert code == (-number if number == signal.SIGKILL else 130)
        assert_all_end(members)
        assert number == signal.SIGKILL or not list(tmp_path.glob("swarmnet-demo-*"))
    finally:
        end(process)
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.kill()
