"""Whom a door has let in."""

import asyncio

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.certificates import Certificate
from swarmnet_protocols.membership.rules import Member
from swarmnet_protocols.net import ProtocolSpec, Refusal, Stream
from swarmnet_protocols.net.resources import Reservation
from swarmnet_protocols.wire.roles import Role, name_roles


class AdmittedPeer:
    """Somebody we have met, and what is open between us."""

    def __init__(self, member: Member, certificate: Certificate | None, place: Reservation) -> None:
        self.member = member
        self._place = place
        self.certificate = certificate
        self.doors: dict[Stream, None] = {}
        self.streams: dict[Stream, None] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.serials: dict[bytes, int] = {}
        self.spoke = asyncio.Event()

    def end(self, refusal: Refusal | None = None) -> None:
        """End everything that is open; the other side is told why, if there is a ``refusal``. The place is free then."""
        self._place.release()
        if self.timer is not None:
            self.timer.cancel()
        for stream in (*self.doors, *self.streams):
            if refusal is None:
                stream.close()
            else:
                stream.refuse(refusal)


def check_role(member: Member, roles: frozenset[Role], protocol: ProtocolSpec) -> None:
    """Raise ``NotAuthorised`` unless ``member`` has one of ``roles``, which ``protocol`` takes."""
    if not member.roles & roles:
        raise NotAuthorised(
            f"{protocol.id} is for {name_roles(roles)}; {member.peer} is in the swarm as {name_roles(member.roles)}",
            hint="ask whoever runs the swarm for an invite with that role",
        )
