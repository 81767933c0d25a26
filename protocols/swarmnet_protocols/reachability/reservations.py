"""Reservations at relays: the streams through which others reach a peer that cannot be dialled."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, within
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.multiaddr import Multiaddr, parse_multiaddr, peer_in
from swarmnet_protocols.net.protocol_ids import RELAY
from swarmnet_protocols.reachability.relay import HEARTBEAT_S
from swarmnet_protocols.wire import relay_pb2 as pb

_log = logging.getLogger(__name__)

WANTED = 2
"""Relays at which a peer reserves. When one leaves, the other forwards until a third is found."""
OPEN_S = 4.0
"""Timeout in seconds for reaching a relay, including the membership handshake."""
RETRY_S = 1.0
"""Seconds until a failed relay is tried again. The pause doubles with every failure."""
MAX_RETRY_S = 30.0


@dataclass(frozen=True)
class RelayReservation:
    """A reservation that a relay holds for this peer."""

    relay: PeerId
    address: str
    """The multiaddr over which this peer is connected to the relay, without the relay's peer id."""
    observed: Multiaddr | None
    """The address of this peer as the relay sees it; None if the relay names none."""


class Reservations:
    """Keeps reservations at ``WANTED`` of the relays that ``candidates`` returns."""

    def __init__(
        self,
        transport: Transport,
        candidates: Callable[[], Awaitable[Sequence[str]]],
        address_of: Callable[[PeerId], Awaitable[str]],
        on_incoming: Callable[[RelayReservation, pb.Incoming, bytes], None] = lambda *_: None,
    ) -> None:
        """Make an object without reservations; ``run`` reserves.

        - ``candidates`` returns the multiaddrs of possible relays, with ``/p2p/ID``, preferred ones
          first.
        - ``address_of`` returns the multiaddr over which a peer is connected.
        - ``on_incoming`` is called with each circuit that another peer wants, and the first message
          of its handshake.
        """
        self._transport = transport
        self._candidates = candidates
        self._address_of = address_of
        self._held: dict[PeerId, RelayReservation] = {}
        self._attempts: dict[PeerId, asyncio.Task[bool]] = {}
        self._pauses: dict[PeerId, tuple[float, float]] = {}
        """Relays that failed: when each may be tried again, and the pause after its next failure.
        """
        self._changed = asyncio.Event()
        self._has_one = asyncio.Event()
        """Set while a reservation is held."""
        self._on_incoming = on_incoming

    @property
    def held(self) -> Sequence[RelayReservation]:
        return tuple(self._held.values())

    def has(self, relay: PeerId) -> bool:
        return relay in self._held

    async def wait_for_one(self, within_s: float) -> bool:
        """Wait for a reservation, at most ``within_s``. Returns whether one is held."""
        await within(within_s, self._has_one.wait())
        return bool(self._held)

    async def run(self) -> None:
        """Keep ``WANTED`` reservations until cancelled. Replaces a relay that is lost."""
        try:
            while True:
                self._changed.clear()
                await self._fill()
                await within(RETRY_S, self._changed.wait())
        finally:
            await cancel(*self._attempts.values())

    async def _fill(self) -> None:
        missing = WANTED - len(self._attempts)
        if missing <= 0:
            return
        now = loop_time()
        self._pauses = {peer: pause for peer, pause in self._pauses.items() if now < pause[0] + MAX_RETRY_S}
        for address in await self._candidates():
            peer = peer_in(address)
            retry_at, _ = self._pauses.get(peer, (0.0, 0.0))
            if missing and peer not in self._attempts and peer != self._transport.peer_id and now >= retry_at:
                missing -= 1
                attempt = asyncio.create_task(self._hold(peer, address), name=f"reservation at {peer}")
                self._attempts[peer] = attempt
                attempt.add_done_callback(partial(self._ended, peer))

    def _ended(self, peer: PeerId, attempt: "asyncio.Task[bool]") -> None:
        del self._attempts[peer]
        if not attempt.cancelled() and attempt.result():
            self._changed.set()  # after a failure ``run`` waits for ``RETRY_S`` instead

    async def _hold(self, peer: PeerId, address: str) -> bool:
        """Hold a reservation at one relay until it is lost. Returns whether it was granted."""
        try:
            stream = await RELAY.open(self._transport, peer, addresses=[address], deadline_s=OPEN_S)
            with contextlib.closing(stream):
                await stream.send(pb.RelayRequest(reserve=pb.Reserve()))
                reply, _ = await stream.receive()
                beat = pb.RelayRequest(heartbeat=pb.Heartbeat())
                async with in_background(stream.send_heartbeats(HEARTBEAT_S, lambda: beat)):
                    observed = parse_multiaddr(reply.accepted.observed_address)
                    self._held[peer] = RelayReservation(peer, await self._address_of(peer), observed)
                    self._pauses.pop(peer, None)
                    self._has_one.set()
                    self._changed.set()
                    _log.info("reserved at the relay %s", peer)
                    while True:
                        reply, payload = await stream.receive()
                        if not reply.HasField("incoming"):
                            raise ProtocolViolation("a reservation carries heartbeats and circuits")
                        self._on_incoming(self._held[peer], reply.incoming, bytes(payload))
        except SwarmnetError as error:
            _log.info("no reservation at %s: %s", peer, str(error).partition("\n")[0])
        finally:
            was_held = self._held.pop(peer, None) is not None
            if not self._held:
                self._has_one.clear()
            _, pause_s = self._pauses.get(peer, (0.0, RETRY_S))
            retry_at = loop_time() + pause_s * random.uniform(0.5, 1.0)
            self._pauses[peer] = retry_at, min(2 * pause_s, MAX_RETRY_S)
        return was_held
