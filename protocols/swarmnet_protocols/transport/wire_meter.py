"""What a process really sends and receives over TCP, headers and repetitions included, as the Linux kernel counts it."""

import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SOCK_DIAG = 4  # of linux/netlink.h; the rest of linux/sock_diag.h, inet_diag.h and tcp.h
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301
_DONE, _ERROR = 3, 2
_ERRNO = struct.Struct("=i")
_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_REPLY_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_SOCKET = struct.Struct("=BBBB48xIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_TCP_INFO = struct.Struct("=128xQII56xQ")  # bytes_received, segs_out, segs_in, bytes_sent
_TCP_HEADER_BYTES = 32  # with timestamps, as everybody sends them
_IP_HEADER_BYTES = {socket.AF_INET: 20, socket.AF_INET6: 40}


@dataclass(frozen=True)
class Carried:
    """Bytes of packets."""

    up: int = 0
    down: int = 0


class WireMeter:
    """The TCP traffic of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: Mapping[int, Carried] = {}

    @staticmethod
    def is_possible() -> bool:
        """Whether this system tells."""
        return sys.platform == "linux"

    def read(self) -> Carried:
        """What went since the last time. Raises ``OSError`` when the process has ended, or the kernel does not say.

        What a connection carried between the last look and its end is not seen.
        """
        own = _sockets_of(self._pid)
        now = {inode: carried for inode, carried in _tcp_sockets() if inode in own}
        before = self._seen
        self._seen = now
        nothing = Carried()
        return Carried(
            sum(carried.up - before.get(inode, nothing).up for inode, carried in now.items()),
            sum(carried.down - before.get(inode, nothing).down for inode, carried in now.items()),
        )


def _sockets_of(pid: int) -> set[int]:
    """The inodes of a process's sockets."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes


def _tcp_sockets() -> Iterator[tuple[int, Carried]]:
    """Every TCP socket of this network namespace: inode and traffic."""
    for family in _IP_HEADER_BYTES:
        yield from _dump(family)


def _dump(family: int) -> Iterator[tuple[int, Carried]]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ALL_STATES)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        while True:
            reply = kernel.recv(_REPLY_BYTES)
            while reply:
                length, kind, *_ = _HEADER.unpack_from(reply)
                if kind == _ERROR:  # no socket at all would be taken for no traffic
                    number = -_ERRNO.unpack_from(reply, _HEADER.size)[0]
                    raise OSError(number, os.strerror(number))
                if kind == _DONE:
                    return
                yield from _socket_in(reply[_HEADER.size : length])
                reply = reply[(length + 3) & ~3 :]


def _socket_in(message: bytes) -> Iterator[tuple[int, Carried]]:
    family, *_, inode = _SOCKET.unpack_from(message)
    rest = message[_SOCKET.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INFO and length - _ATTRIBUTE.size >= _TCP_INFO.size:
            received, segments_out, segments_in, sent = _TCP_INFO.unpack_from(rest, _ATTRIBUTE.size)
            header_bytes = _IP_HEADER_BYTES[family] + _TCP_HEADER_BYTES
            yield inode, Carried(sent + segments_out * header_bytes, received + segments_in * header_bytes)
        rest = rest[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
