"""The admission protocol: newcomers get a certificate, and members renew theirs and the swarm file.

Every member of a private swarm answers under ``/swarmnet/admission/3``:

1. **Redeem.** A newcomer shows an invite. An issuer answers with a certificate and the swarm file.
   Any other member answers with the addresses of issuers.
2. **Renew.** A member shows its certificate after two thirds of its lifetime. The answers are the
   same.
3. **Swarm file.** A member sends its certificate and the serial of its swarm file. It gets the
   other side's file if that is newer.

Every request proves that its sender may ask: by an invite, a certificate, or a peer id in the list
of members. A peer that proves nothing learns nothing about the swarm. Peers outside the swarm may
open only this protocol and the handshake. So requests, pending requests and answers per second are
bounded.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import zip_longest
from typing import Any, TypeGuard, TypeVar

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES
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
from swarmnet_protocols.joining.own_key import OwnerFiles, OwnKey
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.membership.handshake import Handshakes, not_admitted
from swarmnet_protocols.membership.invites import MAX_ADDRESS_CHARS
from swarmnet_protocols.membership.issuer import check_redemption
from swarmnet_protocols.membership.membership import CLOCK_CHECK_S, check_renewable
from swarmnet_protocols.membership.signed import seal, unseal
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.subnets import SubnetSlots
from swarmnet_protocols.net.multiaddr import peer_in
from swarmnet_protocols.net.protocol_ids import ADMISSION, ADMISSION_S
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")

ISSUERS_TOPIC = "issuers"
ANSWER_PAUSE_S = 0.02
"""Seconds between two answers. With less, peers outside the swarm make this peer check more
signatures."""
MAX_ASKED = 16
"""Most peers that a newcomer or member asks for one certificate."""
ISSUERS_CACHE_S = 30.0
"""Seconds that issuers from the directory stay in the cache."""
RETRY_PAUSES_S = (0.5, 2.0)
"""Seconds before each retry with a peer that accepted the stream and closed it."""
RENEW_RETRY_S = 60.0
"""Seconds between a failed renewal and the next try."""
FILE_S = 60.0
"""Seconds between two requests for a newer swarm file."""

_ISSUER_KIND = b"swarmnet-issuer-1"


class Admissions:
    """The admission protocol of one member, on both sides."""

    def __init__(
        self,
        transport: Transport,
        handshakes: Handshakes,
        directory: Directory,
        *,
        bootstrap: Callable[[], Sequence[str]] = tuple,
        owner: OwnerFiles | None = None,
        machine: pb.Machine | None = None,
    ) -> None:
        """``transport`` is the one below ``GuardedTransport``.

        ``bootstrap`` returns the current addresses of bootstrap peers. ``machine`` names the node
        and the client of this machine for renewals.
        """
        self._transport = transport
        self._membership = handshakes.membership
        self._directory = directory
        self._bootstrap = bootstrap
        self._machine = machine
        self._timing = Timing()
        self._pending = SubnetSlots(transport.resources.system, Resource.PENDING_ADMISSIONS)
        self._waiting = SubnetSlots(transport.resources.system, Resource.ADMISSIONS)
        self._answer_lock = asyncio.Lock()
        self._known_issuers: list[str] = []
        self._issuers_until = 0.0
        self._lookup: asyncio.Task[None] | None = None
        self._own_key = None if owner is None else OwnKey(owner, handshakes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests and renew this peer's certificate while the context is open.

        Does nothing in a public swarm. Raises ``ConfigError`` if the key of an issuer is not named
        by the rules.
        """
        if self._membership.is_public:
            yield
            return
        async with AsyncExitStack() as stack:
            loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
                self._renew_certificates,
                self._fetch_swarm_files,
            ]
            if self._own_key is not None:
                own_key = await stack.enter_async_context(self._own_key.running())
                loops.append(self._issuer_announcer(own_key).run)
            await ADMISSION.serve(self._transport, self._answer, self._timing)
            try:
                async with in_background(*(persist("admission", each) for each in loops)):
                    yield
            finally:
                await cancel(self._lookup)

    # ---- answering ------------------------------------------------------------------------------

    async def _answer(self, requests: TypedStream[pb.AdmissionReply, pb.AdmissionRequest]) -> None:
        stream = requests.stream
        with self._pending.slot(stream):
            request, _ = await requests.receive()
        with self._waiting.slot(stream):
            async with self._answer_lock:
                if not self._waiting.has(stream):
                    return  # evicted while it waited
                await asyncio.sleep(ANSWER_PAUSE_S)
                reply = await self._reply(request, stream.peer)
            if reply.HasField("referral"):  # outside the lock: the directory may be slow
                reply.referral.issuers.extend(await self._issuers())
            await requests.send(reply)

    async def _reply(self, request: pb.AdmissionRequest, peer: PeerId) -> pb.AdmissionReply:
        """Return the reply to a request. An issuer writes to its disk in a thread, one request at a
        time.

        Raises ``Refusal`` for a peer that may not ask, or that gets no certificate.
        """
        membership = self._membership
        issuer = None if self._own_key is None else self._own_key.issuer
        revocations, now = membership.revocations, membership.clock()
        try:
            match request.WhichOneof("kind"):
                case "swarm_file":
                    membership.admit(peer, membership.open(request.swarm_file.certificate))
                    return pb.AdmissionReply(swarm_file=self._newer_file(request.swarm_file.serial))
                case "redeem" if issuer is not None:
                    sealed = await asyncio.to_thread(issuer.redeem, request.redeem, peer, revocations, now)
                case "redeem":
                    check_redemption(request.redeem, peer, membership.rules, revocations, now)
                    return pb.AdmissionReply(referral=pb.Referral())
                case "renew" if issuer is not None:
                    sealed = await asyncio.to_thread(issuer.renew, request.renew, peer, revocations, now)
                case "renew":
                    check_renewable(membership.rules, request.renew.certificate, peer, revocations, now)
                    return pb.AdmissionReply(referral=pb.Referral())
                case _:
                    raise ProtocolViolation("an admission request without content")
        except (NotAuthorised, IntegrityError) as error:
            raise Refusal(refusal_pb2.REASON_NOT_AUTHORISED, str(error), unix_time=now) from error
        file = b"" if membership.swarm_file is None else membership.swarm_file()
        return pb.AdmissionReply(admitted=pb.Admitted(certificate=sealed, swarm_file=file))

    def _newer_file(self, serial: int) -> bytes:
        """Return this peer's swarm file if it is newer than ``serial``, else empty bytes."""
        read = self._membership.swarm_file
        return read() if read is not None and serial < self._membership.rules.serial else b""

    async def _issuers(self) -> list[str]:
        """Return addresses of issuers from a cache that is refreshed in the background.

        Peers outside the swarm can trigger this call as often as they like. So a call does not
        cause a look-up of its own.
        """
        now = loop_time()
        if self._lookup is None and now >= self._issuers_until:
            self._lookup = asyncio.create_task(self._refresh_issuers(), name="issuers")
        if self._lookup is not None and not self._known_issuers:
            await asyncio.wait([self._lookup])
        return self._known_issuers

    async def _refresh_issuers(self) -> None:
        try:
            self._known_issuers = await self._find_issuers()
        finally:
            self._issuers_until = loop_time() + ISSUERS_CACHE_S
            self._lookup = None

    async def _find_issuers(self) -> list[str]:
        trusted, others = list[list[str]](), list[list[str]]()
        with contextlib.suppress(SwarmnetError):
            for record in await self._directory.lookup(ISSUERS_TOPIC):
                with contextlib.suppress(IntegrityError):
                    body, signer = unseal(
                        _ISSUER_KIND, pb.IssuerRecord, record.body, max_body_bytes=MAX_RECORD_BYTES
                    )
                    addresses = [each for each in body.addresses if len(each) <= MAX_ADDRESS_CHARS]
                    is_trusted = self._membership.rules.trusts(signer, self._membership.clock())
                    (trusted if is_trusted else others).append(addresses[:MAX_ADDRESSES])
        # Issuers with untrusted keys come last. Such an issuer may be new, known only to a newer
        # swarm file, or it may be a fake.
        return list(dict.fromkeys([*_interleaved(*trusted), *_interleaved(*others)]))[:MAX_ASKED]

    def _issuer_announcer(self, own_key: OwnKey) -> Announcer:
        def compose() -> Iterable[Announcement]:
            if own_key.issuer is None:
                return
            key = own_key.issuer.key
            body = pb.IssuerRecord(addresses=list(self._transport.addresses())[:MAX_ADDRESSES])
            sealed = seal(_ISSUER_KIND, body, key)
            yield Announcement(ISSUERS_TOPIC, sealed, lifetime_s=10 * self._timing.record_s)

        return Announcer(self._directory, random.Random(), compose, 3 * self._timing.record_s)

    # ---- this peer's swarm file and certificate -------------------------------------------------

    async def _fetch_swarm_files(self) -> None:
        """Ask bootstrap peers for a newer swarm file.

        A renewed certificate comes with the swarm file. But members on an allow-list have no
        certificate to renew.
        """
        for number in itertools.count():
            await asyncio.sleep(FILE_S)
            bootstrap = self._bootstrap()
            if not bootstrap:
                continue
            address = bootstrap[number % len(bootstrap)]
            request = pb.AdmissionRequest(
                swarm_file=pb.SwarmFileRequest(
                    serial=self._membership.rules.serial, certificate=self._membership.certificate
                )
            )
            try:
                reply = await _ask_one(self._transport, address, request)
                if reply.swarm_file:
                    self._membership.adopt_swarm_file(reply.swarm_file)
            except SwarmnetError as error:
                _log.debug("%s gave no newer swarm file: %s", address, error)

    async def _renew_certificates(self) -> None:
        while True:
            renew_at = self._membership.renew_at
            left_s = CLOCK_CHECK_S if renew_at is None else renew_at - self._membership.clock()
            if left_s > 0:
                await asyncio.sleep(min(left_s, CLOCK_CHECK_S))
                continue
            try:
                await self._renew()
                _log.info("certificate renewed")
            except SwarmnetError as error:
                _log.warning("the certificate of this peer could not be renewed: %s", error)
                await asyncio.sleep(RENEW_RETRY_S)

    async def _renew(self) -> None:
        if self._own_key is not None and self._own_key.certify():
            return
        request = renewal(self._membership.certificate, self._machine)
        addresses = _interleaved(await self._issuers(), self._bootstrap())
        await request_admission(self._transport, addresses, request, self._adopt, self._membership.clock)

    def _adopt(self, admitted: pb.Admitted) -> None:
        # The file comes first, because only this file may name the key that signed the certificate.
        self._membership.adopt_swarm_file(admitted.swarm_file)
        certificate = self._membership.open(admitted.certificate)
        if certificate is None or certificate.renew_at <= self._membership.clock():
            raise NotAuthorised("the issuer sent a certificate that is due for renewal itself")
        self._membership.replace_certificate(admitted.certificate)


def renewal(certificate: bytes, machine: pb.Machine | None) -> pb.AdmissionRequest:
    """Return the request to renew a certificate for the two peers of ``machine``."""
    return pb.AdmissionRequest(renew=pb.Renew(certificate=certificate, machine=machine))


async def request_admission(
    transport: Transport,
    addresses: Iterable[str],
    request: pb.AdmissionRequest,
    accept: Callable[[pb.Admitted], T],
    clock: Clock,
) -> T:
    """Send ``request`` to peers, and to the issuers that they name, until ``accept`` accepts an
    answer.

    ``accept`` raises a ``SwarmnetError`` for an invalid answer. Returns what ``accept`` returns. If
    it accepts no answer, raises its first error or the first refusal (``NotAuthorised``), whichever
    came first. Raises ``Unreachable`` if nobody answered.
    """
    waiting, asked = deque(addresses), set[str]()
    refusal: SwarmnetError | None = None
    while waiting and len(asked) < MAX_ASKED:
        address = waiting.popleft()
        if address in asked:
            continue
        asked.add(address)
        try:
            reply = await _ask_with_retries(transport, address, request)
        except SwarmnetError as error:
            if _is_final(error):
                refusal = refusal or not_admitted(error, clock())
            _log.info("%s: %s", address, error)
            continue
        if reply.HasField("admitted"):
            try:
                return accept(reply.admitted)
            except SwarmnetError as error:
                _log.warning("the answer of %s is not accepted: %s", address, error)
                refusal = refusal or error
        waiting.extend(reply.referral.issuers[:MAX_ADDRESSES])
    raise refusal or Unreachable(
        "no issuer of the swarm can be reached",
        hint="start an issuer (swarmnet join SWARM --issuer authority.key), or try again later",
    )


async def _ask_with_retries(
    transport: Transport, address: str, request: pb.AdmissionRequest
) -> pb.AdmissionReply:
    """Ask as :func:`_ask_one` does, with retries, because an overloaded peer closes the stream.

    Redeeming an invite twice counts as one use.
    """
    for wait_s in RETRY_PAUSES_S:
        try:
            return await _ask_one(transport, address, request)
        except StreamEnded as error:
            if _is_final(error):
                raise
        await asyncio.sleep(wait_s)
    return await _ask_one(transport, address, request)


async def _ask_one(transport: Transport, address: str, request: pb.AdmissionRequest) -> pb.AdmissionReply:
    peer = peer_in(address)
    if not peer or peer == transport.peer_id:
        raise ConfigError(f"{address[:100]!r} is not the address of another peer")
    stream = await ADMISSION.open(transport, peer, addresses=[address], deadline_s=ADMISSION_S)
    reply, _ = await stream.ask(request)
    return reply


def _is_final(error: SwarmnetError) -> TypeGuard[Refused]:
    """Tell whether a peer has decided not to admit this one. At a resource limit it has not
    decided.
    """
    return isinstance(error, Refused) and error.reason == refusal_pb2.REASON_NOT_AUTHORISED


def _interleaved(*lists: Iterable[str]) -> list[str]:
    """Return the first item of each list, then the second of each, and so on.

    So the first address of each issuer comes before the second of any.
    """
    return [each for turn in zip_longest(*lists) for each in turn if each is not None]
