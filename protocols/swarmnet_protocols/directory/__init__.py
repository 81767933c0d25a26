"""The interface of the directory: signed records that peers publish and look up by topic."""

from collections.abc import Collection, Sequence
from typing import Protocol

from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.machine.clock import Clock


class Directory(Protocol):
    """Signed records by topic. Every peer of the swarm eventually sees them."""

    @property
    def swarm(self) -> bytes:
        """Id of the swarm, 32 bytes."""

    @property
    def clock(self) -> Clock:
        """The clock for the expiry of records."""

    @property
    def refused(self) -> int:
        """Number of times that peers refused to store this peer's records, since the start."""

    @property
    def known_peers(self) -> int:
        """Number of other peers of the swarm that this one can ask."""

    def warning(self) -> str:
        """Return a warning for the owner if few peers can find this peer's records, else ""."""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        """Replace this peer's record under ``topic``.

        The new record lives for ``lifetime_s``, or longer if its predecessor would outlive it.
        """

    async def lookup(self, topic: str) -> Sequence[Record]:
        """Return the newest record of every signer, verified and not expired.

        Empty if no other peer answers.
        """

    async def sample(
        self,
        topics: Collection[str],
        most: int,
        *,
        blocks: tuple[int, int] | None = None,
        copies: int = 1,
    ) -> Sequence[Record]:
        """Return at most ``most`` random records for each of ``topics``.

        A peer that stores the records draws them. A cheaper :meth:`lookup` for topics under which
        many peers publish. The records are verified, not expired, and the newest of each signer.

        - ``blocks``: return only announcements of hosts with one of these blocks [start, end).
        - ``copies``: number of storing peers that draw for each topic, up to ``most`` records each.
          More copies find more records.
        """
