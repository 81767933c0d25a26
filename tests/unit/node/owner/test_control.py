"""A node answers its owner over a socket that only the owner can use."""

import asyncio
import json
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from swarmnet_node.owner import control, local_channel
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.local_channel import OPTIONS, PORT_NAME, SOCKET_NAME
from swarmnet_node.owner.machine import PAUSE_NAME
from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.defences import defence, replacing, yes
from tests.support.swarm.fake_node import NO_CORES, STATUS, TRUNK_STATUS, FakeNode


@pytest.fixture
def without_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform without Unix sockets, such as Windows."""
    monkeypatch.setattr(local_channel, "HAS_UNIX_SOCKETS", False)


@pytest.mark.parametrize("status", [STATUS, TRUNK_STATUS], ids=["host", "trunk"])
def test_status_and_finish_reach_the_node(tmp_path: Path, status: NodeStatus) -> None:
    node = FakeNode()
    node.shown = status

    async def main() -> NodeStatus:
        async with control.serve(node, tmp_path):
            await asyncio.to_thread(control.finish, tmp_path, 2.5)
            return await asyncio.to_thread(control.status, tmp_path)

    assert asyncio.run(main()) == status
    assert node.graces_s == [2.5]


def test_only_the_owner_may_use_the_socket(tmp_path: Path) -> None:
    async def main() -> int:
        async with control.serve(FakeNode(), tmp_path):
            return stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode)

    assert asyncio.run(main()) == 0o600


def test_the_socket_is_gone_when_the_node_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with control.serve(FakeNode(), tmp_path):
            pass

    asyncio.run(main())
    assert not list(tmp_path.iterdir())
    with pytest.raises(Unreachable, match="nothing is running"):
        control.status(tmp_path)


@pytest.mark.usefixtures("without_unix_sockets")
def test_without_unix_sockets_a_port_of_loopback_takes_their_place(tmp_path: Path) -> None:
    test_status_and_finish_reach_the_node(tmp_path, STATUS)
    test_the_socket_is_gone_when_the_node_is(tmp_path)


def call_with_token(folder: Path, change: Callable[[str], str]) -> None:
    """Call a node whose token was changed for the caller."""

    async def main() -> None:
        async with control.serve(FakeNode(), folder):
            fields = json.loads((folder / PORT_NAME).read_text())
            assert stat.S_IMODE((folder / PORT_NAME).stat().st_mode) == 0o600
            write_whole(folder / PORT_NAME, json.dumps(fields | {"token": change(fields["token"])}).encode())
            await asyncio.to_thread(control.status, folder)

    asyncio.run(main())


@defence(
    "a node answers at a port of its machine only to those who have its token",
    off=replacing(local_channel.hmac, "compare_digest", yes),
)
@pytest.mark.usefixtures("without_unix_sockets")
def test_a_port_answers_only_those_who_know_the_token(tmp_path: Path) -> None:
    call_with_token(tmp_path, lambda token: token)
    for change in (lambda _: "", lambda token: token[:-1], lambda token: token.swapcase()):
        with pytest.raises(SwarmnetError, match="the token is wrong"):
            call_with_token(tmp_path, change)


@pytest.mark.usefixtures("without_unix_sockets")
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"port": "1", "token": "a"}', b'{"port": 1, "token": "\\n"}', b"\xff"]
)
def test_a_damaged_port_file_is_no_node(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PORT_NAME).write_bytes(content)
    with pytest.raises(Unreachable, match="nothing is running"):
        control.status(tmp_path)


@pytest.mark.usefixtures("without_unix_sockets")
def test_the_port_of_a_killed_node_is_no_node(tmp_path: Path) -> None:
    with socket.socket() as left:
        left.bind(("127.0.0.1", 0))
        (tmp_path / PORT_NAME).write_text(json.dumps({"port": left.getsockname()[1], "token": "left"}))
        with pytest.raises(Unreachable, match="nothing is running"):
            control.status(tmp_path)


def _leave_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_the_socket_of_a_killed_node_counts_as_none_and_is_replaced(tmp_path: Path) -> None:
    _leave_a_socket(tmp_path / SOCKET_NAME)
    with pytest.raises(Unreachable, match="nothing is running") as caught:
        control.status(tmp_path)
    assert "swarmnet join" in caught.value.hint

    async def main() -> NodeStatus:
        async with control.serve(FakeNode(), tmp_path):
            return await asyncio.to_thread(control.status, tmp_path)

    assert asyncio.run(main()) == STATUS


def test_calls_do_not_share_results(tmp_path: Path) -> None:
    """gRPC keeps a connection that failed for as long as it would wait before another try, for
    every caller with the same address."""
    _leave_a_socket(tmp_path / SOCKET_NAME)

    async def main() -> NodeStatus:
        async with control.serve(FakeNode(), tmp_path):
            return await asyncio.to_thread(control.status, tmp_path)

    with grpc.insecure_channel(f"unix:{tmp_path}/{SOCKET_NAME}", options=OPTIONS) as lingering:
        failed = threading.Event()
        lingering.subscribe(
            lambda state: failed.set() if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE else None,
            try_to_connect=True,
        )
        assert failed.wait(50)
        assert asyncio.run(main()) == STATUS


def test_a_path_too_long_for_a_socket_address_works_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()

    async def main() -> NodeStatus:
        async with control.serve(FakeNode(), directory):
            assert (directory / SOCKET_NAME).is_socket()
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
    node = FakeNode()
    caller_checks = iter([True])  # the caller lets it pass, then the node has to refuse it
    real = control._is_possible
    monkeypatch.setattr(control, "_is_possible", lambda value: next(caller_checks, None) or real(value))

    async def main() -> None:
        async with control.serve(node, tmp_path):
            with pytest.raises(Exception, match="out of range"):
                await asyncio.to_thread(control.finish, tmp_path, grace_s)

    asyncio.run(main())
    assert node.graces_s == []


def test_the_owner_pauses_resumes_and_limits_the_node(tmp_path: Path) -> None:
    node = FakeNode()
    limits = OwnerLimits(
        max_ram_bytes=1 << 33, up_bytes_per_s=2.5e6, schedule="19:00-07:00", idle_only=True, cores=2
    )

    async def main() -> tuple[OwnerLimits, OwnerLimits]:
        async with control.serve(node, tmp_path):
            await asyncio.to_thread(control.pause, tmp_path)
            await asyncio.to_thread(control.pause, tmp_path, 7200)
            await asyncio.to_thread(control.resume, tmp_path)
            kept = await asyncio.to_thread(control.set_limits, tmp_path, limits)
            return kept, await asyncio.to_thread(control.get_limits, tmp_path)

    assert asyncio.run(main()) == (limits, limits)
    assert node.asked == ["pause", "pause 7200 s", "resume"]


@pytest.mark.parametrize("for_s", [-1.0, float("nan"), float("inf")])
def test_an_impossible_pause_is_refused_by_the_node(tmp_path: Path, for_s: float) -> None:
    node = FakeNode()

    async def main() -> None:
        async with control.serve(node, tmp_path):
            with pytest.raises(ConfigError, match="out of range"):
                await asyncio.to_thread(control.pause, tmp_path, for_s)

    asyncio.run(main())
    assert node.asked == []


def test_a_pause_ends_while_its_node_restarts(tmp_path: Path) -> None:
    (tmp_path / PAUSE_NAME).write_text('{"until": null}')
    control.resume(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(Unreachable):
        control.resume(tmp_path)


def test_limits_that_the_node_cannot_keep_come_back_with_what_to_do(tmp_path: Path) -> None:
    node = FakeNode()

    async def main() -> None:
        async with control.serve(node, tmp_path):
            with pytest.raises(ConfigError, match="not so many") as caught:
                await asyncio.to_thread(control.set_limits, tmp_path, OwnerLimits(cores=NO_CORES))
            assert caught.value.hint == "use fewer"

    asyncio.run(main())
    assert node.kept == OwnerLimits()


def test_impossible_limits_are_refused_by_the_node(tmp_path: Path) -> None:
    node = FakeNode()

    async def main() -> None:
        async with control.serve(node, tmp_path):
            impossible = control_pb2.Limits(json='{"up_bytes_per_s": -1.0}')
            with pytest.raises(ConfigError, match="out of range"):
                await asyncio.to_thread(control._call, tmp_path, "SetLimits", impossible)

    asyncio.run(main())
    assert node.kept == OwnerLimits()
