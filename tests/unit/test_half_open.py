"""Which connections are taken for half-open."""

import contextlib
import os
import socket
import struct
import sys

import pytest

from swarmnet_protocols.net.p2pd import sock_diag
from swarmnet_protocols.net.p2pd.half_open import FAR_US, Newcomers, endpoint_of
from swarmnet_protocols.net.p2pd.sock_diag import TcpSocket

MAPPED = bytes(10) + b"\xff\xff"


def accepted(inode: int, *, host: bytes = bytes((10, 0, 0, 1)), round_trip_us: int = 100) -> TcpSocket:
    return TcpSocket(socket.AF_INET, inode, 4001, (host, inode), struct.pack("=68xI", round_trip_us))


def addresses(*ports: int) -> list[str]:
    return [f"/ip4/10.0.0.1/tcp/{port}" for port in ports]


def test_a_connection_is_due_once_it_was_there_for_four_looks() -> None:
    newcomers = Newcomers()
    old, new = accepted(1), accepted(2)
    assert newcomers.due([old]) == []
    assert newcomers.due([old, new]) == []
    assert newcomers.due([old, new]) == []
    assert newcomers.due([old, new]) == [old]
    assert newcomers.due([old, new]) == [old, new]  # the first was not ended: it still is


def test_another_connection_with_the_number_of_one_that_went_begins_anew() -> None:
    newcomers = Newcomers()
    for _ in range(3):
        newcomers.due([accepted(1)])
    newcomers.due([])
    assert newcomers.due([accepted(1)]) == []


def test_of_what_p2pd_lists_nothing_more_is_asked() -> None:
    newcomers = Newcomers()
    both = [accepted(1), accepted(2)]
    for _ in range(3):
        newcomers.due(both)
    due = newcomers.due(both)
    assert newcomers.half_open(due, addresses(1, 3)) == [both[1]]
    assert newcomers.due(both) == [both[1]]


def test_whoever_is_far_is_left_to_p2pd() -> None:
    newcomers = Newcomers()
    far, near = accepted(1, round_trip_us=FAR_US + 1), accepted(2, round_trip_us=FAR_US)
    for _ in range(4):
        due = newcomers.due([far, near])
    assert due == [near]


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("/ip4/10.0.0.1/tcp/7", socket.inet_aton("10.0.0.1")),
        ("/ip4/10.0.0.1/tcp/7/ws", socket.inet_aton("10.0.0.1")),
        ("/ip4/10.0.0.1/tcp/7", MAPPED + socket.inet_aton("10.0.0.1")),
        ("/ip6/2001:db8::1/tcp/7", socket.inet_pton(socket.AF_INET6, "2001:db8::1")),
        ("/ip6zone/eth0/ip6/fe80::1/tcp/7", socket.inet_pton(socket.AF_INET6, "fe80::1")),
    ],
)
def test_a_multiaddr_is_found_among_sockets(address: str, host: bytes) -> None:
    assert Newcomers().half_open([accepted(7, host=host)], [address]) == []
    assert Newcomers().half_open([accepted(8, host=host)], [address]) == [accepted(8, host=host)]


@pytest.mark.parametrize("address", ["/ip4/10.0.0.1/udp/7/quic-v1", "/p2p-circuit", ""])
def test_what_is_not_over_tcp_is_no_endpoint(address: str) -> None:
    assert endpoint_of(address) is None


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag")
@pytest.mark.parametrize("family", sock_diag.FAMILIES)
def test_a_connection_dialled_from_a_listeners_port_is_not_taken_for_accepted(family: int) -> None:
    """As p2pd dials."""
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with contextlib.ExitStack() as stack:

        def listener(port: int = 0) -> socket.socket:
            listening = stack.enter_context(socket.socket(family))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind((host, port))
            return listening

        ours, other = listener(), listener()
        ours.listen()
        other.listen()
        port = ours.getsockname()[1]
        dialled = listener(port)
        dialled.connect(other.getsockname()[:2])
        client = stack.enter_context(socket.create_connection((host, port)))
        taken = stack.enter_context(ours.accept()[0])
        waiting = stack.enter_context(socket.create_connection((host, port)))

        def seen(*, accepted: bool) -> set[int]:
            found = sock_diag.tcp_sockets(family, states=sock_diag.ESTABLISHED, port=port, accepted=accepted)
            return {each.remote[1] for each in found if each.inode}

        assert seen(accepted=True) == {client.getsockname()[1]}
        assert seen(accepted=False) == {client.getsockname()[1], other.getsockname()[1]}
        assert waiting.getsockname()[1] not in seen(accepted=False)
        (listed,) = [
            each
            for each in sock_diag.tcp_sockets(family, states=sock_diag.ESTABLISHED, port=port)
            if each.remote[1] == client.getsockname()[1]
        ]
        assert listed.remote == (socket.inet_pton(family, host), client.getsockname()[1])
        assert taken.fileno() == sock_diag.sockets_of(os.getpid())[listed.inode]
