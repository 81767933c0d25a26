"""Two real processes, on one network, with copies of one identity key. In virtual time:
``unit/protocols/directory/test_duplicate_identity.py``."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.tiny import BLOCKS
from tests.support.processes.commands import call
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.swarm.tiny_swarm import load_tiny

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TIMEOUT_S = 240.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Swarm]:
    load_tiny(tmp_path)
    lab = Swarm(tmp_path / "lab", tmp_path / "cache", model=str(tmp_path / "model"))
    try:
        yield lab
    finally:
        lab.close()


def warned(*nodes: NodeProcess) -> NodeProcess:
    """The first of the nodes that has a warning for its owner."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for node in nodes:
            if node.status.warning:
                return node
        time.sleep(0.5)
    pytest.fail("no owner was warned: " + " ".join(node.log.read_text() for node in nodes))


def test_the_owner_learns_where_the_other_node_is_and_both_continue(lab: Swarm) -> None:
    lab.start((0, BLOCKS))
    one = lab.launch("one", "--blocks", f"0:{BLOCKS}")
    peer = one.ready["peer_id"]
    (lab.directory / "other").mkdir(mode=0o700)
    shutil.copy2(one.data_dir / "identity.key", lab.directory / "other" / "identity.key")
    lab.nodes.pop("one")  # no peer can dial itself
    other = lab.launch("other", "--blocks", f"0:{BLOCKS}")
    lab.nodes["one"] = one
    assert other.ready["peer_id"] == peer
    node = warned(one, other)
    double = other if node is one else one
    assert f"another process is on the network as {peer}, at " in node.status.warning
    assert any(address in node.status.warning for address in double.ready["addresses"])
    assert "another --data-dir" in node.log.read_text()
    assert {each.status.state for each in (one, other)} == {"online"}
    assert peer in call("status", "--data-dir", str(node.data_dir))["warning"]
