"""Pairing: a newcomer in the same room becomes a member by a short code, without a file to copy.

A machine of a household swarm, the *house*, announces itself in the local network under
``HOUSES``, an id that everybody knows. It answers newcomers under ``/swarmnet/pairing/1``:

1. **Knock.** The newcomer says its name, and the house shows a code to the people in the room.
2. **Try.** Somebody types the code at the newcomer. Both run SPAKE2 with it (Abdalla and
   Pointcheval 2005). Whoever listens learns nothing about the code, and each run tries one only.
3. **Confirm.** The newcomer proves first that it has the key, then the house does, together with an
   invite for the newcomer's peer id. The newcomer redeems it like any other.

The two peer ids, which libp2p authenticates, are SPAKE2's identities. So somebody in the middle,
who has another peer id on each side, gets two different keys. A code counts three tries, however
many peers make them, and lives for a minute. After ``MAX_TRIES`` tries without a newcomer in
between, the door stays shut until its owner starts the house again. So the chance to guess a code
is ``MAX_TRIES`` in a million, however slowly somebody tries.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation
from swarmnet_protocols.joining.local_network import LocalNetwork
from swarmnet_protocols.joining.mdns_record import is_local
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.membership.handshake import MAX_NAME_CHARS
from swarmnet_protocols.membership.invites import MAX_INVITE_CHARS
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.dialling import LOOPBACK_NETWORKS
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.subnets import SubnetSlots
from swarmnet_protocols.net.protocol_ids import PAIRING
from swarmnet_protocols.net.refusal import Refusal, printable
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import pairing_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

if TYPE_CHECKING:
    from spake2 import SPAKE2_A, SPAKE2_B

    from swarmnet_protocols.net.p2pd.transport import P2pdTransport

HOUSES = hashlib.sha256(b"swarmnet-houses-1").digest()
"""Stands for the swarm id in the mDNS record of a house, because newcomers know no swarm id."""
DIGITS = 6
TRIES = 3
"""Tries with one code, by all newcomers together."""
CODE_S = 60.0
"""Seconds that a code is valid. With less, nobody types it in time. With more, somebody who passes
by may read it."""
MAX_TRIES = 15
"""Most tries in vain, with all codes together, before the house pairs no more."""
MAX_HOUSES = 8
"""Most houses that a newcomer knocks at."""
ELEMENT_BYTES = 33
"""The side that sends it, and a point."""

_NEWCOMER = b"swarmnet-pairing-1 newcomer"
_HOUSE = b"swarmnet-pairing-1 house"

NewcomerStream = TypedStream[pb.PairingRequest, pb.PairingReply]
HouseStream = TypedStream[pb.PairingReply, pb.PairingRequest]


class Codes:
    """The code that the house shows. Decisions only: the caller gives the time."""

    def __init__(self, make: Callable[[], str], show: Callable[[str, str], None]) -> None:
        """``show`` shows a new code to the people in the room, and the name of a newcomer."""
        self._make = make
        self._show = show
        self._code = ""
        self._until = 0.0
        self._left = 0
        self._tried = 0

    def has_valid(self, now: float) -> bool:
        return self._left > 0 and now < self._until and self._tried < MAX_TRIES

    def ensure_shown(self, name: str, now: float) -> None:
        """Show a new code for the newcomer ``name`` unless one is valid. Raises ``Refusal`` if the
        door is shut."""
        if self.has_valid(now):
            return
        if self._tried >= MAX_TRIES:
            raise Refusal(
                refusal_pb2.REASON_NOT_AUTHORISED,
                "too many wrong codes were tried: stop `swarmnet start` there and start it again",
            )
        self._code, self._until, self._left = self._make(), now + CODE_S, TRIES
        self._show(self._code, name)

    def take_try(self) -> str:
        """Return the valid code for one try, which counts before its result is known: a newcomer
        that does not finish a try has tried, too."""
        self._left -= 1
        self._tried += 1
        return self._code

    def fail(self, code: str, name: str, now: float) -> int:
        """Note that a try of ``name`` with ``code`` was wrong, and show another code if it was the
        last. Returns how many tries the shown code has left; 0 if another code is shown now. Raises
        ``Refusal`` if the door is shut."""
        if code == self._code and self.has_valid(now):
            return self._left
        self.ensure_shown(name, now)
        return 0

    def succeed(self) -> None:
        """Note that a newcomer has the code: it is used up, and the door stays open."""
        self._left, self._tried = 0, 0


def random_code() -> str:
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}}"


@dataclass(frozen=True)
class House:
    """The name of a house's swarm, and the callbacks of its door."""

    name: str
    """The name of its swarm."""
    invite: Callable[[PeerId, str], str]
    """Makes an invite for a peer id, with the name of its machine as the label."""
    show_code: Callable[[str, str], None]
    """Shows a code, and who knocked."""
    show_newcomer: Callable[[str], None]
    """Says that a newcomer was given an invite."""


class Door:
    """The pairing protocol on the side of the house. Made by :func:`open_door`."""

    def __init__(
        self, house: House, transport: Transport, is_near: Callable[[PeerId], Awaitable[bool]]
    ) -> None:
        """``is_near`` tells whether a peer is in a local network of this machine."""
        self._house = house
        self._own = transport.peer_id
        self._is_near = is_near
        self._codes = Codes(random_code, house.show_code)
        self._slots = SubnetSlots(transport.resources.system, Resource.PAIRINGS)

    async def answer(self, stream: HouseStream) -> None:
        """Talk to one newcomer."""
        with self._slots.slot(stream.stream):
            if not await self._is_near(stream.peer):
                raise Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "pairing works in the local network only")
            await self._talk(stream)

    async def _talk(self, stream: HouseStream) -> None:
        request, _ = await stream.receive()
        if request.WhichOneof("kind") != "knock":
            raise ProtocolViolation("the first message is no knock")
        name = printable(request.knock.name[:MAX_NAME_CHARS])
        self._codes.ensure_shown(name, loop_time())
        await stream.send(pb.PairingReply(house=pb.House(name=self._house.name[:MAX_NAME_CHARS])))
        while not await self._one_try(stream, name):
            pass

    async def _one_try(self, stream: HouseStream, name: str) -> bool:
        """Take one try, and return whether it succeeded."""
        request, _ = await stream.receive()
        if request.WhichOneof("kind") != "attempt":
            raise ProtocolViolation("a pairing message other than a try")
        if not self._codes.has_valid(loop_time()):
            self._codes.ensure_shown(name, loop_time())
            await stream.send(pb.PairingReply(wrong=pb.Wrong(left=0)))
            return False
        code = self._codes.take_try()
        exchange = house_side(code, newcomer=stream.peer, house=self._own)
        # SPAKE2 takes milliseconds of pure Python: a stranger must not hold up the node.
        await stream.send(pb.PairingReply(answer=await asyncio.to_thread(exchange.start)))
        key = await asyncio.to_thread(finished, exchange, request.attempt)
        confirmation, _ = await stream.receive()
        if key is None or not hmac.compare_digest(confirmation.confirm, _mac(key, _NEWCOMER)):
            left = self._codes.fail(code, name, loop_time())
            await stream.send(pb.PairingReply(wrong=pb.Wrong(left=left)))
            return False
        self._codes.succeed()
        invite = self._house.invite(stream.peer, name)
        welcome = pb.Welcome(invite=invite, proof=_proof(key, invite))
        await stream.send(pb.PairingReply(welcome=welcome))
        self._house.show_newcomer(name)
        return True


@asynccontextmanager
async def open_door(
    house: House, transport: Transport, raw: "P2pdTransport", listen: Sequence[str]
) -> AsyncIterator[None]:
    """Announce the house and pair newcomers while the context is open. ``transport`` is the one
    below ``GuardedTransport``, and ``raw`` is the one below that."""

    async def is_near(peer: PeerId) -> bool:
        return is_local(await raw.address_of(peer), (*LOOPBACK_NETWORKS, *raw.networks()))

    await PAIRING.serve(transport, Door(house, transport, is_near).answer)
    async with LocalNetwork(HOUSES, listen=listen, own=raw.addresses).run():
        yield


@dataclass(frozen=True)
class Found:
    """A house that answered a knock."""

    name: str
    """The name of its swarm."""
    stream: NewcomerStream


async def knock(stream: NewcomerStream, name: str) -> Found:
    """Knock at a house, which then shows a code. ``name``: the name of this machine. Raises
    ``SwarmnetError``."""
    await stream.send(pb.PairingRequest(knock=pb.Knock(name=name[:MAX_NAME_CHARS])))
    reply, _ = await stream.receive()
    return Found(printable(reply.house.name[:MAX_NAME_CHARS]), stream)


async def try_code(found: Found, code: str, own: PeerId) -> str | int:
    """Try a code at a house. Returns the invite, or how many tries the shown code has left; 0 if
    another code is shown now.

    Raises ``NotAuthorised`` if the house does not prove that it knows the code.
    """
    stream = found.stream
    exchange = newcomer_side(code, newcomer=own, house=stream.peer)
    await stream.send(pb.PairingRequest(attempt=exchange.start()))
    reply, _ = await stream.receive()
    if reply.HasField("wrong"):
        return min(reply.wrong.left, TRIES)
    if (key := finished(exchange, reply.answer)) is None:
        raise NotAuthorised(_NOT_PROVEN, hint=_BEGIN_AGAIN)
    await stream.send(pb.PairingRequest(confirm=_mac(key, _NEWCOMER)))
    reply, _ = await stream.receive()
    if reply.HasField("wrong"):
        return min(reply.wrong.left, TRIES)
    invite = reply.welcome.invite
    if len(invite) > MAX_INVITE_CHARS or not hmac.compare_digest(reply.welcome.proof, _proof(key, invite)):
        raise NotAuthorised(_NOT_PROVEN, hint=_BEGIN_AGAIN)
    return invite


_NOT_PROVEN = "the other machine did not prove that it shows this code"
_BEGIN_AGAIN = "somebody else in this network may have answered: type `swarmnet join` again"


def newcomer_side(code: str, *, newcomer: PeerId, house: PeerId) -> "SPAKE2_A":
    """Return one run of SPAKE2 for the newcomer. Both peer ids are part of what it proves."""
    from spake2 import SPAKE2_A

    return SPAKE2_A(code.encode(), idA=newcomer.encode(), idB=house.encode())


def house_side(code: str, *, newcomer: PeerId, house: PeerId) -> "SPAKE2_B":
    """Return one run of SPAKE2 for the house: see :func:`newcomer_side`."""
    from spake2 import SPAKE2_B

    return SPAKE2_B(code.encode(), idA=newcomer.encode(), idB=house.encode())


def finished(exchange: "SPAKE2_A | SPAKE2_B", element: bytes) -> bytes | None:
    """Return the key of a run, or None for an invalid ``element``."""
    from spake2 import SPAKEError
    from spake2.ed25519_basic import NotOnCurve

    if len(element) != ELEMENT_BYTES:
        return None
    try:
        key: bytes = exchange.finish(element)
    except (SPAKEError, NotOnCurve, ValueError):
        return None
    return key


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def _proof(key: bytes, invite: str) -> bytes:
    return _mac(key, _HOUSE + b"\0" + invite.encode())
