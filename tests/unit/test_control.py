"""A node answers its owner over a socket that only the owner can use."""

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from swarmnet_node import control
from swarmnet_node.control import NodeStatus
from swarmnet_protocols.errors import ConfigError, Unreachable

STATUS = NodeStatus(
    peer_id="12D3KooW",
    state="online",
    model="smollm2-135m-instruct",
    manifest=b"\x01" * 32,
    start=10,
    end=20,
    total_blocks=30,
    addresses=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooW", "/ip4/10.0.0.1/tcp/1/p2p/12D3KooW"),
    uptime_s=12.5,
    sessions=2,
    cache_bytes=1 << 33,
    cache_bytes_limit=1 << 34,
    weight_bytes=70_000_000,
    tokens=1 << 40,
    forwards=7,
    version="0.1.0",
    swarm="lab",
)


class _Node:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.graces_s: list[float] = []

    def status(self) -> NodeStatus:
        return STATUS

    def finish(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)


def test_status_and_finish_reach_the_node(tmp_path: Path) -> None:
    node = _Node()

    async def main() -> NodeStatus:
        async with control.serve(node, tmp_path):
            await asyncio.to_thread(control.finish, tmp_path, 2.5)
            return await asyncio.to_thread(control.status, tmp_path)

    assert asyncio.run(main()) == STATUS
    assert node.graces_s == [2.5]


def test_only_the_owner_may_use_the_socket(tmp_path: Path) -> None:
    async def main() -> int:
        async with control.serve(_Node(), tmp_path):
            return stat.S_IMODE((tmp_path / control.SOCKET_NAME).stat().st_mode)

    assert asyncio.run(main()) == 0o600


def test_the_socket_is_gone_when_the_node_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with control.serve(_Node(), tmp_path):
            pass

    asyncio.run(main())
    assert not list(tmp_path.iterdir())
    with pytest.raises(Unreachable, match="no node is running"):
        control.status(tmp_path)


def _leave_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_a_socket_left_by_a_killed_node_is_no_node_and_in_nobodys_way(tmp_path: Path) -> None:
    _leave_a_socket(tmp_path / control.SOCKET_NAME)
    with pytest.raises(Unreachable, match="no node is running") as caught:
        control.status(tmp_path)
    assert "swarmnet join" in caught.value.hint

    async def main() -> NodeStatus:
        async with control.serve(_Node(), tmp_path):
            return await asyncio.to_thread(control.status, tmp_path)

    assert asyncio.run(main()) == STATUS


def test_a_path_too_long_for_a_socket_address_works_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()

    async def main() -> NodeStatus:
        async with control.serve(_Node(), directory):
            assert (directory / control.SOCKET_NAME).is_socket()
            return await asyncio.to_thread(control.status, directory)

    assert asyncio.run(main()) == STATUS


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_an_impossible_grace_is_refused_by_the_caller(tmp_path: Path, grace_s: float) -> None:
    with pytest.raises(ConfigError, match="grace"):
        control.finish(tmp_path, grace_s)


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), 1e9])
def test_an_impossible_grace_is_refused_by_the_node(
    tmp_path: Path, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _Node()
    caller_checks = iter([True])  # the caller lets it pass, then the node has to refuse it
    real = control._is_grace
    monkeypatch.setattr(control, "_is_grace", lambda value: next(caller_checks, None) or real(value))

    async def main() -> None:
        async with control.serve(node, tmp_path):
            with pytest.raises(Exception, match="out of range"):
                await asyncio.to_thread(control.finish, tmp_path, grace_s)

    asyncio.run(main())
    assert node.graces_s == []
