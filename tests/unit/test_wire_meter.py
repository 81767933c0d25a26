"""What is made of what the kernel says of sockets."""

import errno
import os
import socket
import struct
import sys

import pytest

from swarmnet_protocols.net.p2pd.wire_meter import WireMeter


class KernelWithout:
    """A netlink socket of a kernel that cannot tell of sockets."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_kernel_that_does_not_tell_is_not_taken_for_one_that_saw_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", KernelWithout)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        WireMeter(os.getpid()).read()
