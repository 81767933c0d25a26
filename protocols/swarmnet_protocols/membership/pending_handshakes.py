"""Incoming streams that have not sent their first message: a bounded number, shared fairly between subnets."""

from collections.abc import Iterator
from contextlib import contextmanager

from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.resources import Reservation, Resource, Scope
from swarmnet_protocols.net.subnets import Occupancy, Place, subnet_of


class PendingHandshakes:
    """As many slots as ``system`` has of ``resource``. When all are taken, a new stream evicts one: members send at once.

    The oldest stream from the subnet with the most streams is evicted, so a peer with many identities in one subnet evicts its own.
    """

    def __init__(self, system: Scope, resource: Resource) -> None:
        self._system = system
        self._resource = resource
        self._pending: dict[Stream, tuple[Reservation, str]] = {}
        """Each stream's reservation and subnet, oldest first."""

    @contextmanager
    def slot(self, stream: Stream) -> Iterator[None]:
        """A slot while the context is open. Raises ``ResourceLimitReached`` for a peer that has used its share."""
        while (
            self._system.available(self._resource) < 1 <= stream.scope.available(self._resource)
            and (oldest := self._oldest_of_largest_subnet()) is not None
        ):
            self._pending.pop(oldest)[0].release()
            oldest.close()
        reservation = stream.scope.reserve(self._resource)
        self._pending[stream] = reservation, subnet_of(stream.address) or stream.peer
        try:
            yield
        finally:
            self._pending.pop(stream, None)
            reservation.release()

    def has(self, stream: Stream) -> bool:
        """Whether ``stream`` has its slot still."""
        return stream in self._pending

    def _oldest_of_largest_subnet(self) -> Stream | None:
        places = [
            Place(subnet, stream.peer, 1, (number,), stream)
            for number, (stream, (_, subnet)) in enumerate(self._pending.items())
        ]
        return Occupancy(places).victim(lambda _: True)
