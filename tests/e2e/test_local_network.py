"""Machines in one local network need only the swarm file, or an invite: no address is named
anywhere here."""

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.commands import Place, RunningCommand, call
from tests.support.processes.nodes import NodeProcess


def why_not() -> str:
    """Why this machine cannot run the lab; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "the ip command is not installed"


@contextlib.contextmanager
def lan(count: int) -> Iterator[list[Place]]:
    """``count`` hosts, 192.168.77.1 and so on. Their names are unique, so that several labs may run
    at once."""
    name = f"lan{uuid.uuid4().hex[:6]}"
    with contextlib.ExitStack() as stack:
        bridge = f"{name}B"
        _run(f"ip netns add {bridge}")
        stack.callback(_run, f"ip netns del {bridge}")
        _run(f"ip -n {bridge} link add br0 type bridge mcast_snooping 0")
        _run(f"ip -n {bridge} link set br0 up")
        places = []
        for number in range(1, count + 1):
            host = f"{name}A{number}"
            _run(f"ip netns add {host}")
            stack.callback(_run, f"ip netns del {host}")
            _run(f"ip -n {host} link set lo up")
            _run(f"ip link add eth0 netns {host} type veth peer name p{number} netns {bridge}")
            _run(f"ip -n {bridge} link set p{number} master br0 up")
            _run(f"ip -n {host} addr add 192.168.77.{number}/24 broadcast + dev eth0")
            _run(f"ip -n {host} link set eth0 up")
            places.append(Place(f"192.168.77.{number}", ("ip", "netns", "exec", host)))
        yield places


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.net,
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

MODEL = "smollm2-135m-instruct"
UNREACHABLE = 5
"""Exit code."""
FIND_S = 15.0
"""For a peer that has started to find the others and to join, with time for a busy machine."""


@pytest.fixture
def hosts() -> Iterator[list[Place]]:
    with lan(4) as places:
        yield places


def test_three_nodes_and_a_client_answer_with_only_the_swarm_file(
    hosts: list[Place], tmp_path: Path, cache_dir: Path
) -> None:
    """All start at once, so the first two nodes see no peer when they start."""
    call("swarm", "create", "lab", "--open", "--mdns", "--out", str(tmp_path))
    file, cache = str(tmp_path / "swarm.toml"), ("--cache-dir", str(cache_dir))
    began = time.monotonic()
    nodes = [
        NodeProcess(
            (file, "--blocks", f"{10 * each}:{10 * each + 10}", *cache), tmp_path / f"node{each}", host
        )
        for each, host in enumerate(hosts[:3])
    ]
    try:
        for node in nodes:
            _ = node.ready
        ready_s = time.monotonic() - began
        prompt = ("run", MODEL, "What is the capital of France?", "-n", "12", "--swarm", file, *cache)
        with RunningCommand(
            (*prompt, "--data-dir", str(tmp_path / "client")), tmp_path / "run.log", hosts[3]
        ) as run:
            assert run.wait_for_end() == 0, run.log.read_text()
        answered_s = time.monotonic() - began
        answer = run.events[-1]
    finally:
        for node in nodes:
            node.kill()
    assert "Paris" in answer["text"]
    print(f"ready after {ready_s:.1f} s, the first answer {answered_s - ready_s:.1f} s after that")


def test_two_commands_and_a_code_make_a_swarm_of_two_computers(
    hosts: list[Place], tmp_path: Path, cache_dir: Path
) -> None:
    """No file is copied: each computer has its own, empty home."""
    began = time.monotonic()
    options = ("--cache-dir", str(cache_dir), "--stop-on-eof", "--priority", "normal")
    first = ("start", *options, "--data-dir", str(tmp_path / "first"))
    second = ("join", *options, "--data-dir", str(tmp_path / "second"), "--num-blocks", "3")
    ask = ("run", MODEL, "What is the capital of France?", "-n", "12", "--cache-dir", str(cache_dir))
    with contextlib.ExitStack() as stack:

        def command(arguments: tuple[str, ...], name: str, host: Place) -> RunningCommand:
            running = RunningCommand(arguments, tmp_path / f"{name}.log", host, stdin=subprocess.PIPE)
            return stack.enter_context(running)

        def type_code(running: RunningCommand, code: str) -> None:
            assert running.process.stdin is not None
            running.process.stdin.write(f"{code[:3]} {code[3:]}\n")
            running.process.stdin.flush()

        start = command(first, "start", hosts[0])
        start.wait("household")
        join = command(second, "join", hosts[1])
        join.wait("asks_code", tries=None)
        code = start.wait("code")["code"]
        type_code(join, f"{(int(code) + 1) % 10**6:06}")
        join.wait("asks_code", tries=2)
        type_code(join, code)
        join.wait("paired", swarm="home")
        paired_s = time.monotonic() - began
        start.wait("ready")
        place = ("--swarm", "home", "--data-dir", str(tmp_path / "second"))
        run = command((*ask, *place), "run", hosts[1])
        assert run.wait_for_end() == 0, run.log.read_text()
        answered_s = time.monotonic() - began
        assert "Paris" in run.events[-1]["text"]
        join.wait("ready")
        members = call("swarm", "members", start.events[0]["path"], "--data-dir", str(tmp_path / "first"))
        (member,) = members["members"]
        assert (member["roles"], bool(member["label"])) == (["client", "host"], True)
        join.kill()
        again = command(second, "again", hosts[1])
        again.wait("ready")
        assert not [event for event in again.events if event["event"] == "asks_code"]
    print(f"paired after {paired_s:.1f} s, the first answer after {answered_s:.1f} s")


def test_members_without_addresses_come_and_go_in_a_local_network(hosts: list[Place], tmp_path: Path) -> None:
    call("swarm", "create", "lab", "--out", str(tmp_path / "lab"))
    issuer = ("bootstrap", str(tmp_path / "lab"), "--issuer", str(tmp_path / "lab" / "authority.key"))
    invite = call("swarm", "invite", str(tmp_path / "lab"), "--role", "bootstrap")["invite"]
    with (
        RunningCommand((*issuer, "--data-dir", str(tmp_path / "one")), tmp_path / "one.log", hosts[0]) as one,
    ):
        one.wait("ready")
        two = ("bootstrap", invite, "--data-dir", str(tmp_path / "two"))
        with RunningCommand(two, tmp_path / "two.log", hosts[1]) as newcomer:
            newcomer.wait("ready", timeout_s=FIND_S)
            members = call("swarm", "members", str(tmp_path / "lab"), "--data-dir", str(tmp_path / "one"))
            (member,) = members["members"]
            assert member["roles"] == ["bootstrap"]
            revoke = ("swarm", "revoke", member["peer_id"], str(tmp_path / "lab"))
            with RunningCommand(revoke, tmp_path / "revoke.log", hosts[0]) as revoking:
                assert revoking.wait_for_end() == 0, (revoking.events, revoking.log.read_text())
            assert one.events[0]["peer_id"] in revoking.events[-1]["told"]


def test_a_client_alone_in_its_local_network_is_told_so(hosts: list[Place], tmp_path: Path) -> None:
    call("swarm", "create", "lab", "--open", "--mdns", "--out", str(tmp_path))
    prompt = (
        "run",
        MODEL,
        "Hello",
        "--swarm",
        str(tmp_path / "swarm.toml"),
        "--data-dir",
        str(tmp_path / "c"),
    )
    with RunningCommand(prompt, tmp_path / "run.log", hosts[3]) as run:
        assert run.wait_for_end() == UNREACHABLE
    assert "local network" in run.events[-1]["message"]
