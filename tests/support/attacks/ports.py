"""Listening ports that count connections."""

import asyncio
import contextlib
import socket
from collections import Counter

QUIET_HOST = "127.0.0.77"
"""A loopback address that nothing else uses. At 127.0.0.1, peers of tests that run meanwhile dial
ports that belonged to ended peers."""


class Ports:
    """Ports of this machine with the number of connections to each."""

    def __init__(
        self, stack: contextlib.ExitStack, count: int, banner: bytes, host: str = QUIET_HOST
    ) -> None:
        self.connections: Counter[int] = Counter()
        self._banner = banner
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.ports = [self._listen(stack) for _ in range(count)]

    def _listen(self, stack: contextlib.ExitStack) -> int:
        listener = stack.enter_context(socket.create_server((self._host, 0)))
        listener.setblocking(False)
        port: int = listener.getsockname()[1]
        self._loop.add_reader(listener, self._accept, listener, port)
        stack.callback(self._loop.remove_reader, listener)
        return port

    def _accept(self, listener: socket.socket, port: int) -> None:
        self.connections[port] += 1
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.send(self._banner)
