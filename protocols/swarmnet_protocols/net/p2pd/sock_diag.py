"""TCP sockets as the Linux kernel lists them: sock_diag(7)."""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

_SOCK_DIAG = 4  # of linux/netlink.h; the rest of linux/sock_diag.h and inet_diag.h
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301
_DONE, _ERROR = 3, 2
_ERRNO = struct.Struct("=i")
_INFO, _BYTECODE = 2, 1
_UNBOUND = struct.pack("=HHBBH", 8, _BYTECODE, 6, 4, 8)
"""A program of one instruction: on to its end if nobody bound the socket to its port, else beyond it, which says no."""
_REPLY_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s46x")
_SOCKET = struct.Struct("=B3x2s2s16x16s28xI")  # family, ports, the other address, inode
_ATTRIBUTE = struct.Struct("=HH")

FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 16}
"""How many bytes an address has."""
ESTABLISHED, LISTEN, ANY_STATE = 1 << 1, 1 << 10, 0xFFFFFFFF


class TcpSocket(NamedTuple):
    family: int
    inode: int
    """0 as long as no process has it."""
    port: int
    remote: tuple[bytes, int]
    """The address as it is in packets, and the port."""
    info: bytes
    """``struct tcp_info`` of linux/tcp.h, as much as this kernel has of it."""


def is_possible() -> bool:
    """Whether this system tells."""
    return sys.platform == "linux"


def tcp_sockets(
    family: int, *, states: int = ANY_STATE, port: int = 0, accepted: bool = False
) -> Iterator[TcpSocket]:
    """Those of this network namespace, or of one local port. Raises ``OSError`` when the kernel does not say.

    With ``accepted``, none that was bound to its port: no listener, and no connection that was dialled from a listener's port.
    """
    request = _REQUEST.pack(
        family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, states, port.to_bytes(2, "big")
    ) + (_UNBOUND if accepted else b"")
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
                yield _parse(reply[_HEADER.size : length])
                reply = reply[(length + 3) & ~3 :]


def _parse(message: bytes) -> TcpSocket:
    family, port, remote_port, remote, inode = _SOCKET.unpack_from(message)
    rest, info = message[_SOCKET.size :], b""
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if kind == _INFO:
            info = rest[_ATTRIBUTE.size : length]
        rest = rest[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    return TcpSocket(
        family,
        inode,
        int.from_bytes(port, "big"),
        (remote[: FAMILIES[family]], int.from_bytes(remote_port, "big")),
        info,
    )


def sockets_of(pid: int) -> dict[int, int]:
    """The inodes of a process's sockets, and a descriptor it has of each. Raises ``OSError`` when the process has ended."""
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found[int(target[len("socket:[") : -1])] = int(entry)
    return found
