"""Commands without blocks, such as `swarmnet bootstrap`: their owner watches and stops them as a
node."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarmnet.cli import execute
from swarmnet.web.monitoring import Monitor
from swarmnet_node.owner import control
from swarmnet_node.owner.watched_peer import Purpose, WatchedPeer
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.report_pb2 import WorkerReport
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork

ME, OTHER = Identity.from_seed(b"me"), Identity.from_seed(b"other")
SWARM = b"s" * 32


@asynccontextmanager
async def watched(
    folder: Path, command: str = "bootstrap", add: Callable[[NodeStatus], None] = lambda _: None
) -> AsyncIterator[WatchedPeer]:
    network = MemoryNetwork(random.Random(0), LinkProfile())
    async with network.transport(ME.peer_id) as transport, network.transport(OTHER.peer_id):
        directory = MemoryDirectory(MemoryBoard(network, lambda: 1e9), ME, SWARM)
        purpose = Purpose(command, "lab", folder, LinkLimiter(), add)
        async with WatchedPeer(purpose, transport, directory).running() as peer, control.serve(peer, folder):
            yield peer


def ask(
    command: list[str],
    folder: Path,
    *,
    name: str = "bootstrap",
    add: Callable[[NodeStatus], None] = lambda _: None,
) -> tuple[int, bool]:
    """The exit code of a command, and whether it stops the peer that runs in ``folder``."""

    async def scenario() -> tuple[int, bool]:
        async with watched(folder, name, add) as peer:
            code = await asyncio.to_thread(execute, [*command, "--data-dir", str(folder)])
            return code, peer.stopping.is_set()

    return asyncio.run(scenario())


def trains(status: NodeStatus) -> None:
    status.worker.CopyFrom(WorkerReport(name="tiny", round=3, rounds=10, loss=2.5, state="training"))


def shows(status: NodeStatus) -> None:
    status.url = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("name", "add", "headline"),
    [
        ("bootstrap", lambda _: None, "this bootstrap peer lets others into the swarm lab"),
        ("dashboard", shows, "this dashboard shows the swarm lab at http://127.0.0.1:8080"),
        ("train join", trains, "this worker trains tiny, round 3 of 10, loss 2.500, training"),
    ],
)
def test_status_begins_with_what_the_command_does(
    name: str,
    add: Callable[[NodeStatus], None],
    headline: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask(["status"], tmp_path, name=name, add=add) == (0, False)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == headline
    assert "1 other peer known" in rows[0]
    assert any(ME.peer_id in row for row in rows)
    assert ask(["status", "--json"], tmp_path, name=name, add=add) == (0, False)


def test_finish_stops_a_command_without_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(["finish"], tmp_path) == (0, True)
    assert capsys.readouterr().out == "`swarmnet bootstrap` stops\n"
    assert ask(["finish"], tmp_path, name="train join", add=trains) == (0, True)
    assert capsys.readouterr().out == "the worker ends its round and stops\n"


@pytest.mark.parametrize("command", ["pause", "resume", "limits"])
def test_a_command_without_blocks_refuses_pauses_and_limits(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask([command], tmp_path) == (3, False)
    assert "neither hosts nor trains" in capsys.readouterr().err


def test_a_dashboard_is_found_in_the_data_directory_of_its_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> int:
        (tmp_path / "dashboard").mkdir()
        async with watched(tmp_path / "dashboard", "dashboard", shows):
            return await asyncio.to_thread(execute, ["status", "--data-dir", str(tmp_path)])

    assert asyncio.run(scenario()) == 0
    assert "shows the swarm lab at" in capsys.readouterr().out


def test_its_metrics_and_probes_are_those_of_every_peer(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, Any]:
        monitor = Monitor()
        async with (
            monitor.serve("127.0.0.1", 0) as url,
            watched(tmp_path, "train join", trains) as peer,
            httpx.AsyncClient(base_url=url) as client,
        ):
            monitor.watch(peer)
            metrics = (await client.get("/metrics")).text
            assert (await client.get("/readyz")).json() == {"ready": True, "state": "online"}
            peer.finish(0.0)
            return metrics, (await client.get("/readyz")).json()

    metrics, ready = asyncio.run(scenario())
    assert 'swarmnet_peer_info{command="train join",swarm="lab"' in metrics
    for sample in (
        "peer_known_peers 1.0",
        "peer_relay_reservations 0.0",
        "worker_round 3.0",
        "worker_loss 2.5",
    ):
        assert f"\nswarmnet_{sample}\n" in metrics
    assert "swarmnet_node_" not in metrics
    assert ready == {"ready": False, "state": "leaving"}
