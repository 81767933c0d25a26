"""Machines in one local network need only the swarm file, or an invite: no address is named
anywhere here."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network.local_lan import lan, why_not
from tests.support.processes.commands import Place, RunningCommand, call
from tests.support.processes.nodes import NodeProcess

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
