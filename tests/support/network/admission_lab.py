"""An issuer of a private swarm, its members and newcomers, in virtual time."""

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TypeVar

from swarmnet_protocols.joining.admission import Admissions, request_admission
from swarmnet_protocols.joining.own_key import OwnerFiles
from swarmnet_protocols.membership.invites import Invite, InviteTerms, make_invite, read_invite, redemption
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role
from tests.support.network import virtual_time
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.network.private_swarm import (
    AUTHORITY,
    EPOCH,
    PrivateSwarm,
    Someone,
    identity_of,
    virtual_clock,
)

T = TypeVar("T")


class World:
    """A simulated network with an issuer, members and newcomers."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02))
        self.board = MemoryBoard(self.network, virtual_clock)
        self.swarm = PrivateSwarm()
        self.folder = folder
        self._stack = stack

    def directory(self, name: str) -> MemoryDirectory:
        return MemoryDirectory(self.board, identity_of(name), self.swarm.rules.swarm)

    async def issuer(self, name: str) -> Someone:
        """A member that issues certificates."""
        folder = self.folder / name
        folder.mkdir()
        someone = await self.enter(self.swarm.peer(self.network, name))
        await self.issue(
            someone, name, OwnerFiles(lambda: b"", lambda: b"", lambda: AUTHORITY, issued=folder)
        )
        return someone

    async def issue(self, someone: Someone, name: str, owner: OwnerFiles) -> None:
        """Let ``someone`` admit members with the owner's files."""
        someone.membership.swarm_file = someone.membership.swarm_file or (lambda: b"the swarm file")
        owner.certify(someone.membership)
        await self.enter(
            Admissions(someone.raw, someone.handshakes, self.directory(name), owner=owner).running()
        )

    async def member(self, name: str, certificate: bytes, *bootstrap: str) -> Someone:
        someone = await self.enter(self.swarm.peer(self.network, name, certificate))
        someone.membership.check()
        await self.enter(
            Admissions(
                someone.raw, someone.handshakes, self.directory(name), bootstrap=lambda: bootstrap
            ).running()
        )
        return someone

    async def stranger(self, name: str) -> MemoryTransport:
        return await self.enter(self.network.transport(identity_of(name).peer_id))

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        return await self._stack.enter_async_context(context)

    def invite(self, *bootstrap: str, uses: int = 1, not_after: float = EPOCH + 3600) -> Invite:
        terms = InviteTerms(frozenset({Role.CLIENT}), int(not_after), uses)
        text = make_invite(terms, swarm=self.swarm.rules.swarm, key=AUTHORITY, bootstrap=bootstrap)
        return read_invite(text, now=EPOCH)


def run(folder: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(World(folder, stack))

    virtual_time.run(main())


async def redeem(transport: MemoryTransport, invite: Invite) -> pb.Admitted:
    request = pb.AdmissionRequest(redeem=redemption(invite, transport.peer_id))
    return await request_admission(
        transport, invite.bootstrap, request, lambda admitted: admitted, virtual_clock
    )


def address(peer: PeerId) -> str:
    return f"/memory/0/p2p/{peer}"
