"""Detects whether other peers can dial this one, and keeps it reachable.

It reacts when networks, routers and relays change.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, loop_time, persist
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import PeerId, ReachKind, Transport
from swarmnet_protocols.net.dialling import own_interfaces
from swarmnet_protocols.net.multiaddr import peer_in
from swarmnet_protocols.net.protocol_ids import PROBE
from swarmnet_protocols.reachability.dial_back import Probed, ports_of, probe
from swarmnet_protocols.reachability.reservations import Reservations
from swarmnet_protocols.reachability.routed_transport import RoutedTransport

_log = logging.getLogger(__name__)

MAX_ASKED = 3
"""Most peers that are asked to dial this one. The majority decides, so that one false answer does
not."""
ASK_S = 6.0
"""Timeout in seconds for one probe, including the connection."""
FIRST_RESERVATION_S = 5.0
"""Seconds that the start waits for the first reservation."""
CHECK_S = 2.0
"""Seconds between two checks for changed addresses of this machine and changed forwarded ports."""
UNKNOWN_S = 60.0
"""Seconds until peers are asked again, after the start and while no peer has answered."""
AGAIN_S = 600.0
"""Seconds until peers are asked again although nothing changed."""


def judge(answers: Sequence[Probed]) -> bool | None:
    """Return whether most answers say that this peer can be dialled.

    False on a tie; None without answers.
    """
    if not answers:
        return None
    return sum(bool(each.reached) for each in answers) * 2 > len(answers)


class Reachability:
    """The reachability of this peer, as far as it knows."""

    def __init__(
        self,
        transport: RoutedTransport,
        guarded: Transport,
        bootstrap: Sequence[str],
        clock: Clock,
        address_of: Callable[[PeerId], Awaitable[str]],
        was_dialled: Callable[[], Awaitable[bool]],
    ) -> None:
        """``was_dialled`` returns whether a peer on another machine has dialled this one."""
        self._transport = transport
        self._guarded = guarded
        self._bootstrap = tuple(bootstrap)
        self._clock = clock
        self._more_relays: Callable[[], Awaitable[Sequence[str]]] | None = None
        self._on_change: Callable[[bool], None] | None = None
        self._reservations = Reservations(guarded, self._candidates, address_of, transport.accept_circuit)
        self._reserving: asyncio.Task[None] | None = None
        self._is_open: bool | None = None
        """The judgement of the asked peers; None until one has answered."""
        self._asks_if_dialled = was_dialled
        self._was_dialled = False
        self._is_forwarded = False
        self._own_when_asked: tuple[object, object] | None = None

    @property
    def is_open(self) -> bool:
        """True if other peers can dial this one. True while unknown."""
        return self._is_open is not False

    @property
    def is_surely_open(self) -> bool:
        """True if other peers have dialled this one when asked."""
        return self._is_open is True

    @property
    def kind(self) -> ReachKind:
        if self._is_open is None:
            return ReachKind.OPEN if self._was_dialled else ReachKind.UNKNOWN
        if self._is_open:
            return ReachKind.FORWARDED if self._is_forwarded else ReachKind.OPEN
        return ReachKind.RELAYED if self._reservations.held else ReachKind.UNREACHABLE

    @property
    def nat(self) -> str:
        """The kind of router in front of this peer: ``cone`` if relays see one external
        address, ``symmetric`` if each relay sees another one; empty if unknown."""
        observed = [
            each.observed
            for each in self._reservations.held
            if each.observed is not None and each.observed.kind == "tcp"
        ]
        if self._is_open is not False or len(observed) < 2:
            return ""
        # If two relays see different ports, the router may still be a cone: connections that were
        # not dialled from the listening port have a mapping of their own.
        own_ports = ports_of(self._transport.own_addresses())
        is_kept = any(each.port in own_ports for each in observed)
        return "cone" if is_kept or len(set(observed)) == 1 else "symmetric"

    @property
    def relays_held(self) -> tuple[PeerId, ...]:
        """The relays that hold a reservation for this peer."""
        return tuple(each.relay for each in self._reservations.held)

    async def find_out(self) -> None:
        """Ask peers to dial this one. If they cannot, reserve at relays."""
        self._own_when_asked = self._own()
        ports = ports_of(self._transport.own_addresses())
        asked = random.sample(self._bootstrap, min(MAX_ASKED, len(self._bootstrap)))
        replies = await asyncio.gather(*(self._ask(each, ports) for each in asked))
        # A peer that dialled nothing has no opinion. It may see only a relay's address.
        answers = [each for each in replies if each is not None and each.observed_ip]
        self._is_open = judge(answers) if answers or self._is_open is None else self._is_open
        self._was_dialled = self._is_open is None and await self._asks_if_dialled()
        if self._on_change is not None:
            self._on_change(self.is_open)
        own = {host for host, _ in own_interfaces()}
        # An address that is not this machine's own belongs to a router that forwards the port.
        outside = [each for each in answers if each.reached and each.observed_ip not in own]
        self._is_forwarded = bool(self._is_open and outside)
        self._transport.reached_at(
            dict.fromkeys(_multiaddr(each.observed_ip, port) for each in outside for port in each.reached)
        )
        if self._is_open is False:
            if self._reserving is None:
                _log.info("peers cannot dial this one: reserving at relays")
                self._transport.reserve_at_relays(self._reservations)
                reserving = persist("the reservation at relays", self._reservations.run)
                self._reserving = asyncio.create_task(reserving, name="reservations")
            await self._reservations.wait_for_one(FIRST_RESERVATION_S)
        elif self._reserving is not None:
            await self.close()

    async def run(
        self, more_relays: Callable[[], Awaitable[Sequence[str]]], on_change: Callable[[bool], None]
    ) -> NoReturn:
        """Call ``find_out`` until cancelled: when this machine's addresses change, when its router
        forwards a port, and every ``AGAIN_S``.

        - ``more_relays`` finds the multiaddrs of relays, in addition to the bootstrap peers.
        - ``on_change`` is called with ``is_open`` after each round of probes.
        """
        self._more_relays, self._on_change = more_relays, on_change
        await persist("the check whether peers can dial this one", self._watch)

    async def close(self) -> None:
        """Give the reservations back."""
        await cancel(self._reserving)
        self._reserving = None
        self._transport.reserve_at_relays(None)

    async def _watch(self) -> NoReturn:
        again_at = loop_time() + UNKNOWN_S
        while True:
            await asyncio.sleep(CHECK_S)
            # Nobody could be asked: the first peer that dials this one shows that others can.
            if self._is_open is None and not self._was_dialled:
                self._was_dialled = await self._asks_if_dialled()
            if self._own() != self._own_when_asked or loop_time() >= again_at:
                await self.find_out()
                again_at = loop_time() + (UNKNOWN_S if self._is_open is None else AGAIN_S)

    def _own(self) -> tuple[object, object]:
        """Return this machine's addresses, and the ports that others may reach.

        These are the ports it listens on, and the ports its router forwards to it.
        """
        return own_interfaces(), set(ports_of(self._transport.own_addresses()))

    async def _ask(self, address: str, ports: Sequence[int]) -> Probed | None:
        peer = peer_in(address)
        try:
            async with asyncio.timeout(ASK_S):
                stream = await PROBE.open(self._guarded, peer, addresses=[address], deadline_s=ASK_S)
                return await probe(stream, ports, self._clock)
        except (SwarmnetError, TimeoutError) as error:
            _log.debug("%s did not dial back: %s", address, error)
            return None

    async def answers(self, address: str) -> bool:
        """Return whether a member that may be a relay answers at a multiaddr."""
        return await self._ask(address, ()) is not None

    async def _candidates(self) -> Sequence[str]:
        bootstrap = random.sample(self._bootstrap, len(self._bootstrap))
        return [*bootstrap, *(await self._more_relays() if self._more_relays is not None else ())]


def _multiaddr(host: str, port: int) -> str:
    family = "ip6" if ":" in host else "ip4"
    return f"/{family}/{host}/tcp/{port}"
