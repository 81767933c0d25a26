"""Where those wait who have opened a stream and not yet said who they are, or what they want."""

from collections.abc import Iterator
from contextlib import contextmanager

from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.resources import Reservation, Resource, Scope
from swarmnet_protocols.net.subnets import Occupancy, Place, subnet_of


class PendingHandshakes:
    """Has as many places as ``in_all`` has of ``stock``. Where they are taken somebody has to go: members speak at once.

    It is the slowest of those who come from where most come from: who has many identities in one place displaces its own.
    """

    def __init__(self, in_all: Scope, resource: Resource) -> None:
        self._in_all = in_all
        self._resource = resource
        self._waiting: dict[Stream, tuple[Reservation, str]] = {}
        """Each with its place, and where it comes from."""

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """A place while the context is open. Raises ``ResourceLimitReached`` for a peer that has its share of them."""
        while (
            self._in_all.available(self._resource) < 1 <= stream.scope.available(self._resource)
            and (slowest := self._slowest()) is not None
        ):
            self._waiting.pop(slowest)[0].release()
            slowest.close()
        hold = stream.scope.reserve(self._resource)
        self._waiting[stream] = hold, subnet_of(stream.address) or stream.peer
        try:
            yield
        finally:
            self._waiting.pop(stream, None)
            hold.release()

    def has(self, stream: Stream) -> bool:
        """Whether it has its place still."""
        return stream in self._waiting

    def _slowest(self) -> Stream | None:
        """Of the largest crowd, the first that came."""
        places = [
            Place(origin, stream.peer, 1, (number,), stream)
            for number, (stream, (_, origin)) in enumerate(self._waiting.items())
        ]
        return Occupancy(places).victim(lambda _: True)
