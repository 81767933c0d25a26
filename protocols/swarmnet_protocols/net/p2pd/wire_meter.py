"""Count the TCP bytes that a process sends and receives, headers and retransmissions included.

The Linux kernel does the counting (sock_diag(7)).
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Numbers of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_INET_DIAG_INFO = 2
_ANY_STATE = 0xFFFFFFFF
_REPLY_BYTES = 1 << 16
_ERRNO = struct.Struct("=i")
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_SOCKET = struct.Struct("=B67xI")
"""Family and inode, of ``struct inet_diag_msg``."""
_ATTRIBUTE = struct.Struct("=HH")
_TCP_INFO = struct.Struct("=128xQII56xQ")
"""bytes_received, segs_out, segs_in and bytes_sent, of ``struct tcp_info``."""

_IP_HEADER_BYTES: Mapping[int, int] = {socket.AF_INET: 20, socket.AF_INET6: 40}
_TCP_HEADER_BYTES = 32
"""Header with the timestamps option, which every current system sends."""


@dataclass(frozen=True)
class WireTraffic:
    """Bytes of packets sent and received."""

    up: int = 0
    down: int = 0


class WireMeter:
    """Counts the TCP traffic of one process. Only on Linux (:meth:`is_supported`)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._previous: Mapping[int, WireTraffic] = {}
        """Totals of each connection at the last reading, by inode."""

    @staticmethod
    def is_supported() -> bool:
        return sys.platform == "linux"

    def read(self) -> WireTraffic:
        """Return the traffic since the last reading.

        What a connection carried between the last reading and its end is not counted. Raises
        ``OSError`` when the process has ended, or the kernel does not answer.
        """
        inodes = _socket_inodes(self._pid)
        current = {
            each.inode: _traffic(each)
            for family in _IP_HEADER_BYTES
            for each in _tcp_sockets(family)
            if each.inode in inodes and len(each.info) >= _TCP_INFO.size
        }
        previous, self._previous = self._previous, current
        zero = WireTraffic()
        return WireTraffic(
            sum(total.up - previous.get(inode, zero).up for inode, total in current.items()),
            sum(total.down - previous.get(inode, zero).down for inode, total in current.items()),
        )


class _TcpSocket(NamedTuple):
    family: int
    inode: int
    info: bytes
    """``struct tcp_info`` of linux/tcp.h, as much of it as this kernel has."""


def _traffic(connection: _TcpSocket) -> WireTraffic:
    received, segments_out, segments_in, sent = _TCP_INFO.unpack_from(connection.info)
    header_bytes = _IP_HEADER_BYTES[connection.family] + _TCP_HEADER_BYTES
    return WireTraffic(sent + segments_out * header_bytes, received + segments_in * header_bytes)


def _tcp_sockets(family: int) -> Iterator[_TcpSocket]:
    """Yield the TCP sockets of this network namespace. Raises ``OSError`` if the kernel does not
    list them.
    """
    if sys.platform != "linux":
        raise OSError("only Linux counts the bytes of sockets")
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _ANY_STATE)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        while True:
            reply = kernel.recv(_REPLY_BYTES)
            while reply:
                length, kind, *_ = _HEADER.unpack_from(reply)
                if kind == _NLMSG_ERROR:  # an empty list would count as no traffic
                    number = -_ERRNO.unpack_from(reply, _HEADER.size)[0]
                    raise OSError(number, os.strerror(number))
                if kind == _NLMSG_DONE:
                    return
                yield _parse(reply[_HEADER.size : length])
                reply = reply[(length + 3) & ~3 :]


def _parse(message: bytes) -> _TcpSocket:
    family, inode = _SOCKET.unpack_from(message)
    rest, info = message[_SOCKET.size :], b""
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INET_DIAG_INFO:
            info = rest[_ATTRIBUTE.size : length]
        rest = rest[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    return _TcpSocket(family, inode, info)


def _socket_inodes(pid: int) -> set[int]:
    """Return the sockets of a process. Raises ``OSError`` when the process has ended."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:  # closed since the listing
            continue
        if target.startswith("socket:["):
            inodes.add(int(target.removeprefix("socket:[").removesuffix("]")))
    return inodes
