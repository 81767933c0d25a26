"""``swarmnet stats``: what a running node, its file, or neither says."""

import asyncio
import json
from pathlib import Path

import pytest

from swarmnet.cli import execute
from swarmnet_node.owner import control
from swarmnet_node.owner.given import GIVEN_NAME, Given
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.swarm.fake_node import STATUS, FakeNode


def _stats(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert execute(["stats", "--data-dir", str(folder), *options]) == 0
    return capsys.readouterr().out


def _with_node(node: FakeNode, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    async def main() -> str:
        async with control.serve(node, folder):
            return await asyncio.to_thread(_stats, folder, capsys, *options)

    return asyncio.run(main())


def _given(positions: int) -> Given:
    given = Given()
    given.computed(positions, 30)
    given.clients.add("a peer")
    return given


def test_a_machine_that_gave_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has given nothing yet" in _stats(tmp_path, capsys)
    assert json.loads(_stats(tmp_path, capsys, "--json"))["block_positions"] == 0


def test_the_stored_numbers_are_shown_without_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / GIVEN_NAME).write_text(_given(50_000).to_json())
    shown = _stats(tmp_path, capsys)
    assert "1.5 million positions × blocks" in shown
    assert "1 client served" in shown
    assert "less than 0.01 kWh" in shown
    node = FakeNode()  # such as a bootstrap peer, which counts nothing
    assert "1.5 million positions × blocks" in _with_node(node, tmp_path, capsys)


def test_a_running_node_says_its_numbers_of_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / GIVEN_NAME).write_text(_given(1).to_json())
    node = FakeNode()
    node.shown = NodeStatus.FromString(STATUS.SerializeToString())
    node.shown.given.CopyFrom(_given(7).message())
    found = json.loads(_with_node(node, tmp_path, capsys, "--json"))
    assert (found["block_positions"], found["clients"], found["core_watts"]) == (210, 1, 10)
