"""The meter of bytes on the wire, from the kernel's counters of sockets."""

import errno
import os
import socket
import struct

import pytest

from swarmnet_protocols.net.p2pd.wire_meter import WireMeter


class KernelWithout:
    """A netlink socket of a kernel without socket statistics."""

    def __init__(self, *_: int) -> None:
        pass

    def __enter__(self) -> "KernelWithout":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settimeout(self, timeout_s: float) -> None:
        pass

    def send(self, request: bytes) -> None:
        pass

    def recv(self, size_bytes: int) -> bytes:
        return struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -errno.ENOENT)


@pytest.mark.skipif(not WireMeter.is_supported(), reason="sock_diag")
def test_a_kernel_without_counters_is_an_error_and_not_zero_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", KernelWithout)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        WireMeter(os.getpid()).read()


@pytest.mark.skipif(not WireMeter.is_supported(), reason="sock_diag")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_traffic_of_this_process_is_counted(host: str) -> None:
    meter = WireMeter(os.getpid())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
        server.accept()[0] as accepted,
    ):
        meter.read()
        client.sendall(bytes(10_000))
        received = 0
        while received < 10_000:
            received += len(accepted.recv(1 << 16))
        traffic = meter.read()
    assert traffic.up >= 10_000
    assert traffic.down >= 10_000
