"""Hosts and clients over p2pd and over py-libp2p are in one swarm, and one kind takes over from the
other."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from swarmnet.paths import TRANSPORT_VARIABLE
from swarmnet_protocols.models import resolve
from tests.support.processes.faults import At, Strike, kill
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.swarm.generation import greedy

pytestmark = pytest.mark.slow

TOKENS = 40
IDS = list(range(100, 132))
LIBP2P_HOST = "third"


@pytest.fixture
def lab(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """Two hosts over p2pd, and one over py-libp2p with the blocks of the second. The client is over
    py-libp2p, too."""
    lab = Swarm(tmp_path / "lab", cache_dir)
    try:
        monkeypatch.setenv(TRANSPORT_VARIABLE, "p2pd")
        _ = lab.launch("first", "--blocks", "0:15").ready
        _ = lab.launch("second", "--blocks", "15:30")
        monkeypatch.setenv(TRANSPORT_VARIABLE, "libp2p")
        _ = lab.launch(LIBP2P_HOST, "--blocks", "15:30")
        for node in lab.nodes.values():
            _ = node.ready
        yield lab
    finally:
        lab.close()


def test_one_host_of_each_kind_is_killed_in_the_middle_of_an_answer(
    lab: Swarm, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve("smollm2-135m-instruct", cache_dir=cache_dir).load_whole(
        dtype=torch.float32, device=torch.device("cpu")
    )
    expected = greedy(whole, [IDS], TOKENS)[0]

    def relaunch(node: NodeProcess) -> None:
        name = next(name for name, each in lab.nodes.items() if each is node)
        node.kill()
        monkeypatch.setenv(TRANSPORT_VARIABLE, "libp2p" if name == LIBP2P_HOST else "p2pd")
        _ = lab.launch(name, "--blocks", "15:30").ready

    def has_p2pd(pid: int) -> bool:
        return any(child.name() == "p2pd" for child in psutil.Process(pid).children())

    assert [has_p2pd(node.pid) for node in lab.nodes.values()] == [True, True, False]
    with lab.connect() as model:
        assert not has_p2pd(os.getpid())
        assert greedy(model, [IDS], TOKENS)[0] == expected
        strike = Strike(lab, model, kill, block=20)
        killed = []

        def restart() -> None:
            killed.append(strike.hit[0])
            relaunch(strike.hit[0])

        assert greedy(model, [IDS], TOKENS, At((8, strike), (16, restart), (30, strike)))[0] == expected
        assert model.last_run.failovers >= 2
    assert strike.hit[0] is not strike.hit[1]
