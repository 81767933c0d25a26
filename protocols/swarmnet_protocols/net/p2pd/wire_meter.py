"""What a process really sends and receives over TCP, headers and repetitions included, as the Linux kernel counts it."""

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet_protocols.net.p2pd import sock_diag

_TCP_INFO = struct.Struct("=128xQII56xQ")  # bytes_received, segs_out, segs_in, bytes_sent
_TCP_HEADER_BYTES = 32  # with timestamps, as everybody sends them
_IP_HEADER_BYTES: Mapping[int, int] = {socket.AF_INET: 20, socket.AF_INET6: 40}


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

    def read(self) -> Carried:
        """What went since the last time. Raises ``OSError`` when the process has ended, or the kernel does not say.

        What a connection carried between the last look and its end is not seen.
        """
        own = sock_diag.sockets_of(self._pid)
        now = {
            each.inode: _carried(each)
            for family in sock_diag.FAMILIES
            for each in sock_diag.tcp_sockets(family)
            if each.inode in own and len(each.info) >= _TCP_INFO.size
        }
        before = self._seen
        self._seen = now
        nothing = Carried()
        return Carried(
            sum(carried.up - before.get(inode, nothing).up for inode, carried in now.items()),
            sum(carried.down - before.get(inode, nothing).down for inode, carried in now.items()),
        )


def _carried(seen: sock_diag.TcpSocket) -> Carried:
    received, segments_out, segments_in, sent = _TCP_INFO.unpack_from(seen.info)
    header_bytes = _IP_HEADER_BYTES[seen.family] + _TCP_HEADER_BYTES
    return Carried(sent + segments_out * header_bytes, received + segments_in * header_bytes)
