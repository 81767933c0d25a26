"""A real node on its owner's machine: it gives its memory back, takes limits while it runs, and
comes back."""

from contextlib import closing
from pathlib import Path

import pytest

from swarmnet_node.owner import control
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import OutOfResources
from tests.support.processes.commands import call, family, run
from tests.support.processes.nodes import NodeProcess, Swarm

pytestmark = pytest.mark.slow
MIB = 1 << 20


def rss_bytes(node: NodeProcess) -> int:
    return sum(process.memory_info().rss for process in family(node.process.pid))


def answer(lab: Swarm) -> list[int]:
    where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
    tokens: list[int] = call("run", lab.model, "Once upon a time", "--raw", "-n", "8", *where)["token_ids"]
    return tokens


def test_a_node_pauses_is_limited_and_serves_again(tmp_path: Path, cache_dir: Path) -> None:
    lab = Swarm(tmp_path / "lab", cache_dir)
    with closing(lab):
        node = lab.launch("torch", "--dtype", "float32")
        assert node.ready["blocks"] == [0, 30]
        place = ("--data-dir", str(node.data_dir))
        assert rss_bytes(node) > 500 * MIB
        answered = answer(lab)
        peer, addresses, given = node.status.peer_id, node.status.addresses, node.status.given
        assert call("stats", *place)["block_positions"] == given.block_positions > 0

        assert call("pause", *place, "--for", "1h") == {"pausing": True, "for_s": 3600}
        paused = node.wait("paused")
        assert paused["reason"] == "its owner paused it"
        assert paused["until"] == node.status.paused_until > 0
        assert rss_bytes(node) < 200 * MIB
        status = node.status
        assert (status.state, status.peer_id, status.addresses) == ("paused", peer, addresses)
        assert (status.host.record.start, status.host.record.end) == (0, 30)
        assert status.given.block_positions == given.block_positions

        limits = call("limits", *place, "--up", "20mbit", "--schedule", "00:00-24:00", "--cores", "1")
        assert (limits["up_bytes_per_s"], limits["cores"]) == (2.5e6, 1)
        with pytest.raises(OutOfResources) as refused:
            control.set_limits(node.data_dir, OwnerLimits(max_ram_bytes=10_000_000))
        assert "--max-ram" in refused.value.hint

        control.resume(node.data_dir)
        assert node.wait("serving")["blocks"] == [0, 30]
        assert answer(lab) == answered
        assert control.get_limits(node.data_dir).up_bytes_per_s == 2.5e6
        assert node.status.usage.up_bytes > 0


def test_a_node_takes_as_many_blocks_as_its_memory_allows(tmp_path: Path, cache_dir: Path) -> None:
    lab = Swarm(tmp_path / "lab", cache_dir)
    try:
        # All blocks of the packed model would fit into what the process itself takes.
        dense = ("--dtype", "float32")
        node = lab.launch("small", "--max-ram", "900MB", *dense)
        start, end = node.ready["blocks"]
        assert 0 < end - start < 30
        assert rss_bytes(node) < 900e6
        where = ("--model", lab.model, "--cache-dir", str(cache_dir), "--data-dir", str(tmp_path / "other"))
        too_many = run(
            "join", str(lab.file), *where, "--blocks", "0:30", "--max-ram", "600MB", *dense, "--json"
        )
        assert too_many.returncode == 6
        assert "--max-ram" in too_many.stdout
    finally:
        lab.close()
