"""The directory: signed records that every peer of a swarm publishes and looks up by topic. Here is its interface."""

from collections.abc import Sequence
from typing import Protocol

from swarmnet_protocols.directory.records import Record


class Directory(Protocol):
    """Signed records by topic, eventually visible to every peer of the swarm."""

    @property
    def swarm(self) -> bytes:
        """Id of the swarm, 32 bytes."""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        """Replace this peer's record under ``topic``.

        The new record lives for ``lifetime_s``, or longer if the one it replaces would outlive it.
        """

    async def lookup(self, topic: str) -> Sequence[Record]:
        """The newest record of every signer, verified and not expired; empty if no other peer answers."""
