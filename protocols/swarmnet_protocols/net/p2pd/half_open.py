"""Ends TCP connections at p2pd that do not become connections of libp2p in time.

go-libp2p gives whoever connects 15 s for its handshake, and p2pd has no option for less. But p2pd is our child: the kernel lends us
its sockets (pidfd_getfd(2)), and one that is shut down by us has ended for p2pd too. Where that is forbidden the 15 s hold.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable

from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.net.p2pd import sock_diag
from swarmnet_protocols.net.p2pd.daemon import P2pd
from swarmnet_protocols.net.p2pd.sock_diag import TcpSocket, sockets_of, tcp_sockets

_log = logging.getLogger(__name__)

# Of asm-generic/unistd.h, on every processor that p2pd is built for. A Python that was built on an old system has no os.pidfd_open.
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_ROUND_TRIP = struct.Struct("=68xI")  # in microseconds, of struct tcp_info
_MAPPED = bytes(10) + b"\xff\xff"
_OVER_TCP = re.compile(r"(?:/ip6zone/[^/]+)?/ip([46])/([^/]+)/tcp/(\d+)")
_LOOKS = 3
"""So many times there is a look at a connection before it should have finished its handshake."""
_libc = ctypes.CDLL(None, use_errno=True)

FAR_US = 500_000
"""Over longer round trips a few lost packets make a handshake last longer than we wait: they have p2pd's 15 s."""

Listener = tuple[int, int]
"""Its family and port."""


async def end_half_open(daemon: P2pd, handshake_s: float) -> None:
    """Do so until p2pd ends; where the system does not let us, say so in the log and return.

    A connection that p2pd accepted, and does not list among the authenticated ones, is ended between ``handshake_s`` and about 4/3
    of it later. One that p2pd dialled is never touched.
    """
    pid = daemon.process.pid
    try:
        listeners = await asyncio.to_thread(_listeners, pid)
    except OSError as error:
        _log.info("whoever connects and says nothing is gone after 15 s, no sooner: %s", error)
        return
    newcomers = Newcomers()
    while listeners and daemon.process.returncode is None:
        await asyncio.sleep(handshake_s / _LOOKS)
        try:
            if due := newcomers.due(await asyncio.to_thread(_accepted, listeners)):
                listed = [each for those in (await daemon.connections()).values() for each in those]
                half_open = newcomers.half_open(due, listed)
                await asyncio.to_thread(_shut_down, pid, half_open)
        except (OSError, PeerUnreachable) as error:  # no file is left, say: there will be another look
            _log.debug("connections without a handshake stay for now: %s", error)


class Newcomers:
    """For how many looks there have been connections that p2pd is not known to have authenticated."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._known: set[int] = set()

    def due(self, accepted: Iterable[TcpSocket]) -> list[TcpSocket]:
        """Those that should have finished their handshake."""
        there = {each.inode: each for each in accepted}
        self._known &= there.keys()
        self._looks = {inode: self._looks.get(inode, -1) + 1 for inode in there.keys() - self._known}
        return [
            there[inode]
            for inode, looks in self._looks.items()
            if looks >= _LOOKS and not _is_far(there[inode])
        ]

    def half_open(self, due: Iterable[TcpSocket], listed: Iterable[str]) -> list[TcpSocket]:
        """Those of ``due`` that come from none of the multiaddrs in ``listed``; of the others nothing more is asked."""
        endpoints = set(map(endpoint_of, listed))
        half_open = []
        for each in due:
            host, port = each.remote
            if (host.removeprefix(_MAPPED), port) in endpoints:
                self._known.add(each.inode)
            else:
                half_open.append(each)
        return half_open


def endpoint_of(address: str) -> tuple[bytes, int] | None:
    """Where a multiaddr leads if it is over TCP, as in ``TcpSocket.remote``."""
    found = _OVER_TCP.match(address)
    if not found:
        return None
    version, host, port = found.groups()
    return socket.inet_pton(socket.AF_INET if version == "4" else socket.AF_INET6, host), int(port)


def _is_far(each: TcpSocket) -> bool:
    return len(each.info) >= _ROUND_TRIP.size and _ROUND_TRIP.unpack_from(each.info)[0] > FAR_US


def _listeners(pid: int) -> set[Listener]:
    """Where a process listens. Raises ``OSError`` if we may not borrow its sockets."""
    own = sockets_of(pid)
    listening = [
        each
        for family in sock_diag.FAMILIES
        for each in tcp_sockets(family, states=sock_diag.LISTEN)
        if each.inode in own
    ]
    with contextlib.ExitStack() as stack:
        pidfd = _open(pid)
        stack.callback(os.close, pidfd)
        for each in listening:
            stack.callback(os.close, _borrow(pidfd, own[each.inode]))
    return {(each.family, each.port) for each in listening}


def _accepted(listeners: Iterable[Listener]) -> list[TcpSocket]:
    return [
        each
        for family, port in listeners
        for each in tcp_sockets(family, states=sock_diag.ESTABLISHED, port=port, accepted=True)
        if each.inode  # else p2pd has not got it yet
    ]


def _shut_down(pid: int, half_open: Iterable[TcpSocket]) -> None:
    own = sockets_of(pid)
    pidfd = _open(pid)
    try:
        for each in half_open:
            if each.inode in own:
                with contextlib.suppress(OSError):  # it has ended meanwhile, or is looked at again
                    _shut_down_one(_borrow(pidfd, own[each.inode]), each.inode)
    finally:
        os.close(pidfd)


def _shut_down_one(descriptor: int, inode: int) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISSOCK(found.st_mode) and found.st_ino == inode:
        with socket.socket(fileno=descriptor) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    else:  # p2pd has closed it, and has given the number to another
        os.close(descriptor)


def _open(pid: int) -> int:
    """A descriptor of a process. Raises ``OSError`` if it has ended, or the system forbids it."""
    return _descriptor("pidfd_open", _PIDFD_OPEN, pid, 0)


def _borrow(pidfd: int, descriptor: int) -> int:
    """A descriptor of ours for the same file. Raises ``OSError`` if the system forbids it."""
    return _descriptor("pidfd_getfd", _PIDFD_GETFD, pidfd, descriptor, 0)


def _descriptor(name: str, number: int, *arguments: int) -> int:
    """What a call of the system gives."""
    descriptor: int = _libc.syscall(number, *arguments)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return descriptor
