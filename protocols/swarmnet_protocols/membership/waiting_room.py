"""Where those wait who have opened a stream and not yet said who they are, or what they want."""

from collections.abc import Iterator
from contextlib import contextmanager

from swarmnet_protocols.resources import Hold, Scope, Stock
from swarmnet_protocols.transport import Stream


class WaitingRoom:
    """Has as many places as ``in_all`` has of ``stock``. Where they are taken the slowest has to go: members speak at once."""

    def __init__(self, in_all: Scope, stock: Stock) -> None:
        self._in_all = in_all
        self._stock = stock
        self._waiting: dict[Stream, Hold] = {}

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """A place while the context is open. Raises ``Exhausted`` for a peer that has its share of them."""
        while self._waiting and self._in_all.spare(self._stock) < 1 <= stream.scope.spare(self._stock):
            slowest = next(iter(self._waiting))
            self._waiting.pop(slowest).release()
            slowest.close()
        self._waiting[stream] = hold = stream.scope.hold(self._stock)
        try:
            yield
        finally:
            self._waiting.pop(stream, None)
            hold.release()
