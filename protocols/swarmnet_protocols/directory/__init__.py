"""The directory: signed records that every peer of a swarm publishes and looks up by topic. Here is its interface."""

from collections.abc import Collection, Sequence
from typing import Protocol

from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.machine.clock import Clock


class Directory(Protocol):
    """Signed records by topic, eventually visible to every peer of the swarm."""

    @property
    def swarm(self) -> bytes:
        """Id of the swarm, 32 bytes."""

    @property
    def clock(self) -> Clock:
        """Clock by which records expire."""

    @property
    def refused(self) -> int:
        """Stores of this peer's records that other peers refused, since the start."""

    def warning(self) -> str:
        """The warning for the owner of this peer if few others can find its records; else empty."""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        """Replace this peer's record under ``topic``.

        The new record lives for ``lifetime_s``, or longer if the one it replaces would outlive it.
        """

    async def lookup(self, topic: str) -> Sequence[Record]:
        """The newest record of every signer, verified and not expired; empty if no other peer answers."""

    async def sample(
        self,
        topics: Collection[str],
        most: int,
        *,
        blocks: tuple[int, int] | None = None,
        copies: int = 1,
    ) -> Sequence[Record]:
        """Records under ``topics``, at most ``most`` of each, drawn at random by a peer that stores them.

        A cheaper :meth:`lookup`, for topics under which many peers publish. ``blocks``: only announcements of hosts with one of these
        blocks [start, end). ``copies``: peers that draw for each topic, so that more is found, of up to ``most`` records each. Verified,
        not expired, the newest of each signer.
        """
