"""Admission: how a newcomer gets its first certificate, and a member its next one.

Every member of a swarm with an authority answers under ``/swarmnet/admission/1``: an issuer with a certificate, the others
with where an issuer is, all with the newest swarm file. It is the only thing besides the door that a stranger may speak, so it is bounded in every way.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.hosts import MAX_ADDRESSES
from swarmnet_protocols.directory.records import MAX_RECORD_BYTES
from swarmnet_protocols.errors import (
    ConfigError,
    IntegrityError,
    NotAuthorised,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.clock import Clock, clock_advice, wall_clock
from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.invites import MAX_ADDRESS_CHARS, Invite, redemption
from swarmnet_protocols.membership.issuer import Issuer, Ledger
from swarmnet_protocols.membership.membership import LOOK_S, Membership
from swarmnet_protocols.membership.pending_handshakes import PendingHandshakes
from swarmnet_protocols.membership.signed import Signer, seal, unseal
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import ADMISSION
from swarmnet_protocols.net.refusal import MAX_REASON_CHARS, printable
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import ANY_ROLE

_log = logging.getLogger(__name__)

T = TypeVar("T")

ISSUERS_TOPIC = "issuers"
PACE_S = 0.02
"""Between two answers: signatures are checked for anybody who asks."""
MAX_ASKED = 16
"""Peers a newcomer asks before it gives up."""
ISSUERS_S = 30.0
"""How long what the directory says of issuers is good for."""
ASK_S = 10.0
"""For an issuer to be reached, and again to answer: a newcomer has nowhere else to go."""
AGAIN_S = (0.5, 2.0)
"""Before each further try at a peer that takes the stream and ends it."""
RETRY_S = 60.0
FILE_S = 60.0
"""Between two questions after a newer swarm file."""

_ISSUER_KIND = b"swarmnet-issuer-1"


@dataclass(frozen=True)
class IssuerConfig:
    """What makes a peer an issuer: a key that the rules believe, where its ledger is kept, and the swarm file it hands out."""

    key: Signer
    folder: Path
    swarm_file: bytes

    def certify(self, membership: Membership) -> None:
        """Give ``membership`` a certificate by this key, in all roles, unless it has one with life left."""
        with contextlib.suppress(NotAuthorised):
            membership.check()
            if not membership.certificate or membership.clock() < (membership.renew_at or 0.0):
                return
        rules = membership.rules
        sealed = issue(
            Admittance(membership.peer, ANY_ROLE),
            swarm=rules.swarm,
            key=self.key,
            now=membership.clock(),
            lifetime_s=rules.certificate_lifetime_s,
        )
        membership.take_certificate(sealed)


class Admissions:
    """Made by :meth:`run`."""

    def __init__(
        self, transport: Transport, membership: Membership, directory: Directory, bootstrap: Sequence[str]
    ) -> None:
        self._transport = transport
        self._membership = membership
        self._directory = directory
        self._bootstrap = tuple(bootstrap)
        self._timing = Timing()
        self._newcomers = PendingHandshakes(transport.resources.system, Resource.PENDING_ADMISSIONS)
        self._asking = PendingHandshakes(transport.resources.system, Resource.ADMISSIONS)
        self._one = asyncio.Lock()
        self._known: list[str] = []
        self._known_until = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._config: IssuerConfig | None = None
        self._issuer: Issuer | None = None

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        transport: Transport,
        membership: Membership,
        directory: Directory,
        *,
        bootstrap: Sequence[str] = (),
        issuer: IssuerConfig | None = None,
    ) -> AsyncIterator[None]:
        """Answer who asks, and have our own certificate renewed, while the context is open.

        ``transport`` is the one below the door. Raises ``ConfigError`` for an issuer with a key that the rules do not name.
        """
        if membership.is_public:
            yield
            return
        admissions = cls(transport, membership, directory, bootstrap)
        with ExitStack() as stack:
            tasks = [admissions._keep_renewed(), admissions._keep_current()]
            if issuer is not None:
                ledger = stack.enter_context(Ledger.open(issuer.folder))
                now = membership.clock()
                admissions._config = issuer
                admissions._issuer = Issuer(issuer.key, membership.rules, ledger, now=now)
                tasks.append(admissions._keep_announced(issuer.key))
            await transport.serve(ADMISSION, admissions._answer)
            running = [asyncio.create_task(task, name="admission") for task in tasks]
            try:
                yield
            finally:
                await cancel(*running, admissions._looking)

    # ---- who asks us ------------------------------------------------------------------------------------

    async def _answer(self, stream: Stream) -> None:
        with self._newcomers.enter(stream):
            message = await receive_within(stream, self._timing.handshake_s)
        request = parse(pb.AdmissionRequest, message.header)
        with self._asking.enter(stream):
            async with self._one:
                if not self._asking.has(stream):
                    return  # somebody else has its place
                await asyncio.sleep(PACE_S)
                reply = self._reply(request, stream.peer)
            if reply.refused.elsewhere:  # the directory may be slow: nobody else waits for it
                reply.refused.issuers.extend(await self._issuers())
            await send_within(stream, Message(reply.SerializeToString()), self._timing.reply_s)

    def _reply(self, request: pb.AdmissionRequest, peer: PeerId) -> pb.AdmissionReply:
        if request.HasField("swarm_file"):
            is_newer = request.swarm_file.serial < self._membership.rules.serial
            read = self._membership.swarm_file
            return pb.AdmissionReply(swarm_file=read() if read is not None and is_newer else b"")
        if self._issuer is None or self._config is None:
            refused = pb.AdmissionRefused(reason="this peer lets nobody in", elsewhere=True)
            return pb.AdmissionReply(refused=refused)
        revocations, now = self._membership.revocations, self._membership.clock()
        try:
            match request.WhichOneof("kind"):
                case "redeem":
                    sealed = self._issuer.redeem(request.redeem, peer, revocations, now)
                case "renew":
                    sealed = self._issuer.renew(request.renew.certificate, peer, revocations, now)
                case _:
                    raise ProtocolViolation("nothing was asked for")
        except (NotAuthorised, IntegrityError) as error:
            refused = pb.AdmissionRefused(
                reason=str(error)[:MAX_REASON_CHARS], time_ms=max(0, round(now * 1000))
            )
            return pb.AdmissionReply(refused=refused)
        return pb.AdmissionReply(admitted=pb.Admitted(certificate=sealed, swarm_file=self._config.swarm_file))

    async def _issuers(self) -> list[str]:
        """Where issuers say they are. Strangers may ask as often as they like, so it is not looked up each time.

        What was known last is good enough while it is looked up again.
        """
        now = asyncio.get_running_loop().time()
        if self._looking is None and now >= self._known_until:
            self._looking = asyncio.create_task(self._look_for_issuers(), name="issuers")
        if self._looking is not None and not self._known:
            await asyncio.wait([self._looking])
        return self._known

    async def _look_for_issuers(self) -> None:
        try:
            self._known = await self._find_issuers()
        finally:
            self._known_until = asyncio.get_running_loop().time() + ISSUERS_S
            self._looking = None

    async def _find_issuers(self) -> list[str]:
        believed, others = list[list[str]](), list[list[str]]()
        with contextlib.suppress(SwarmnetError):
            for record in await self._directory.lookup(ISSUERS_TOPIC):
                with contextlib.suppress(IntegrityError):
                    said, signer = unseal(
                        _ISSUER_KIND, pb.IssuerRecord, record.body, max_body_bytes=MAX_RECORD_BYTES
                    )
                    addresses = [each for each in said.addresses if len(each) <= MAX_ADDRESS_CHARS]
                    is_believed = self._membership.rules.believe(signer, self._membership.clock())
                    (believed if is_believed else others).append(addresses[:MAX_ADDRESSES])
        # An issuer with a key that only a newer swarm file names may have just that to give; so may anybody say.
        return list(dict.fromkeys([*_in_turn(*believed), *_in_turn(*others)]))[:MAX_ASKED]

    async def _keep_announced(self, key: Signer) -> None:
        while True:
            said = pb.IssuerRecord(addresses=list(self._transport.addresses())[:MAX_ADDRESSES])
            with contextlib.suppress(SwarmnetError):
                await self._directory.publish(
                    ISSUERS_TOPIC, seal(_ISSUER_KIND, said, key), lifetime_s=10 * self._timing.record_s
                )
            await asyncio.sleep(3 * self._timing.record_s)

    # ---- our own swarm file and certificate -------------------------------------------------------------

    async def _keep_current(self) -> None:
        """Take the newer file that a peer we begin with has: where a list says who is in, nobody renews anything."""
        for number in itertools.count():
            await asyncio.sleep(FILE_S)
            if not self._bootstrap:
                continue
            address = self._bootstrap[number % len(self._bootstrap)]
            request = pb.AdmissionRequest(
                swarm_file=pb.SwarmFileRequest(serial=self._membership.rules.serial)
            )
            try:
                reply = await _ask_one(self._transport, address, request)
                if reply.swarm_file:
                    self._membership.take_swarm_file(reply.swarm_file)
            except SwarmnetError as error:
                _log.debug("%s has no newer swarm file for us: %s", address, error)

    async def _keep_renewed(self) -> None:
        while True:
            renew_at = self._membership.renew_at
            left_s = LOOK_S if renew_at is None else renew_at - self._membership.clock()
            if left_s > 0:
                await asyncio.sleep(min(left_s, LOOK_S))
                continue
            try:
                await self._renew()
                _log.info("certificate renewed")
            except SwarmnetError as error:
                _log.warning("the certificate of this peer cannot be renewed now: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _renew(self) -> None:
        if self._config is not None:
            self._config.certify(self._membership)
            return
        request = pb.AdmissionRequest(renew=pb.Renew(certificate=self._membership.certificate))
        addresses = _in_turn(await self._issuers(), self._bootstrap)
        await ask(self._transport, addresses, request, self._take, self._membership.clock)

    def _take(self, admitted: pb.Admitted) -> None:
        # First the file: the certificate may be signed by a key that only this one names.
        self._membership.take_swarm_file(admitted.swarm_file)
        certificate = self._membership.open(admitted.certificate)
        if certificate is None or certificate.renew_at <= self._membership.clock():
            raise NotAuthorised("what came is no certificate that could follow ours")
        self._membership.take_certificate(admitted.certificate)


async def ask(
    transport: Transport,
    addresses: Iterable[str],
    request: pb.AdmissionRequest,
    take: Callable[[pb.Admitted], T],
    clock: Clock,
) -> T:
    """What ``take`` makes of the first answer it accepts, of issuers at ``addresses`` and of those they send us to.

    ``take`` raises a ``SwarmnetError`` for an answer that will not do: then others are asked. Raises that, or ``NotAuthorised``
    when one says no and none yes, and ``Unreachable`` when none can be asked.
    """
    waiting, asked = deque(addresses), set[str]()
    refusal: SwarmnetError | None = None
    while waiting and len(asked) < MAX_ASKED:
        address = waiting.popleft()
        if address in asked:
            continue
        asked.add(address)
        try:
            reply = await _ask_again(transport, address, request)
        except SwarmnetError as error:
            _log.info("%s: %s", address, error)
            continue
        if reply.HasField("admitted"):
            try:
                return take(reply.admitted)
            except SwarmnetError as error:
                _log.warning("%s lets us in with what will not do: %s", address, error)
                refusal = refusal or error
                continue
        if reply.refused.elsewhere:
            waiting.extend(reply.refused.issuers[:MAX_ADDRESSES])
            continue
        reason = printable(reply.refused.reason)
        said_ms = reply.refused.time_ms
        advice = clock_advice(said_ms / 1000 - clock()) if said_ms else ""
        refusal = refusal or NotAuthorised(
            f"not let in: {reason}", hint=advice or "ask whoever runs the swarm for an invite"
        )
    raise refusal or Unreachable(
        "nobody who could let us in can be reached",
        hint="an issuer has to run: swarmnet join SWARM --issuer authority.key; or try again later",
    )


async def _ask_again(transport: Transport, address: str, request: pb.AdmissionRequest) -> pb.AdmissionReply:
    """As ``_ask_one``; whom a crowded peer sends off without a word comes again. To redeem twice uses nothing up."""
    for wait_s in AGAIN_S:
        with contextlib.suppress(StreamEnded):
            return await _ask_one(transport, address, request)
        await asyncio.sleep(wait_s)
    return await _ask_one(transport, address, request)


async def _ask_one(transport: Transport, address: str, request: pb.AdmissionRequest) -> pb.AdmissionReply:
    _, _, peer = address.rpartition("/p2p/")
    if not peer or peer == transport.peer_id:
        raise ConfigError(f"{address[:100]!r} is nobody to ask")
    stream = await transport.open(PeerId(peer), ADMISSION, addresses=[address], deadline_s=ASK_S)
    try:
        await stream.send(Message(request.SerializeToString()))
        return parse(pb.AdmissionReply, (await receive_within(stream, ASK_S)).header)
    finally:
        stream.close()


async def redeem(invite: Invite, identity_path: Path, take: Callable[[pb.Admitted], T]) -> T:
    """Exchange an invite for a certificate of the identity in ``identity_path``, made if there is none, and the swarm file.

    ``take`` checks both, as for ``ask``. Raises as ``ask`` does.
    """
    from swarmnet_protocols.joining.network import LOOPBACK
    from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport

    identity = Identity.load_or_create(identity_path)
    request = pb.AdmissionRequest(redeem=redemption(invite, identity.peer_id))
    config = P2pdConfig(identity_path, listen=LOOPBACK, named=tuple(invite.bootstrap), only_dials=True)
    async with P2pdTransport.create(config) as transport:
        return await ask(transport, invite.bootstrap, request, take, wall_clock)


def _in_turn(*lists: Iterable[str]) -> list[str]:
    """The first of each list, then the second of each: no list is hidden behind a longer one."""
    return [each for turn in zip_longest(*lists) for each in turn if each is not None]
