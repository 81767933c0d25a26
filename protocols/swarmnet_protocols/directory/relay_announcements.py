"""Announcements of relays, for peers that get no reservation at the bootstrap peers.

Any peer can announce relays that do not exist. So relays are drawn from different subnets, and
relays that have held a reservation of this peer come first. A relay stops announcing itself only if
other relays answer it.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import relay_of
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.multiaddr import peer_in
from swarmnet_protocols.wire import records_pb2 as pb

TOPIC = "relays"
LIFETIME_S = 300.0
ANNOUNCE_S = 100.0
ENOUGH = 256
"""Number of subnets with announced relays that is enough. Then no other relay announces itself.

All records lie under one topic.
"""
CHECKED = 4
"""Number of announced relays that must answer before a relay stops announcing itself."""
MAX_FOUND = 16
"""Most relays taken from the directory at once. Most records may be stale or invented."""
SAMPLED = MAX_FOUND
"""Records that a storing peer draws: one from each network before a second one from any.

With more, a network that publishes many records could fill the rest, with addresses that it claims
in any subnet. With fewer, real relays would be missing.
"""
MAX_ANSWERED = 4
"""Most relays that a peer remembers because they have held a reservation."""
FIND_S = 30.0
"""Seconds until the directory is asked again. Until then the relays found last are used."""


async def _unknown(_address: str) -> bool:
    return False


def relay_announcer(
    directory: Directory,
    rng: random.Random,
    addresses: Callable[[], Sequence[str]],
    answers: Callable[[str], Awaitable[bool]] = _unknown,
) -> Announcer:
    """Return an announcer of this peer as a relay.

    It announces while the peer has ``addresses`` and there are not ``ENOUGH`` other relays.
    ``answers`` calls the peer at a multiaddr and returns whether it answers. Without it, this peer
    always announces.
    """

    def compose() -> Iterable[Announcement]:
        if direct := [each for each in addresses() if relay_of(each) is None]:
            record = pb.RelayRecord(addresses=direct[:MAX_ADDRESSES])
            yield Announcement(TOPIC, record.SerializeToString(), LIFETIME_S)

    async def is_needed() -> bool:
        return not await _are_enough(directory, rng, answers)

    return Announcer(directory, rng, compose, ANNOUNCE_S, is_needed=is_needed)


async def _are_enough(
    directory: Directory, rng: random.Random, answers: Callable[[str], Awaitable[bool]]
) -> bool:
    """Return whether ``ENOUGH`` subnets have relays, and ``CHECKED`` random ones answer."""
    found = _by_subnet(await directory.sample([TOPIC], ENOUGH, copies=2))
    if len(found) < ENOUGH:
        return False
    drawn = rng.sample([rng.choice(of_subnet) for of_subnet in found], CHECKED)
    return all(await asyncio.gather(*map(answers, drawn)))


class RelayFinder:
    """Finds announced relays, and remembers them for ``FIND_S``."""

    def __init__(
        self,
        directory: Directory,
        rng: random.Random,
        held: Callable[[], Collection[PeerId]] = tuple,
    ) -> None:
        """``held`` returns the relays that hold a reservation of this peer."""
        self._directory = directory
        self._rng = rng
        self._held = held
        self._answered: Latest[PeerId, str] = Latest(MAX_ANSWERED)
        """The multiaddrs of relays that have held a reservation, the latest last."""
        self._found: Sequence[str] = ()
        self._until = 0.0

    async def find(self) -> Sequence[str]:
        """Return one multiaddr each of up to ``MAX_FOUND`` relays.

        Relays that have held a reservation come first, then random announced ones. If the directory
        does not answer, only the former are returned.
        """
        self._remember()
        now = loop_time()
        if now >= self._until:
            self._until = now + FIND_S
            try:
                drawn = choose(await self._directory.sample([TOPIC], SAMPLED, copies=2), self._rng)
            except SwarmnetError:
                drawn = ()
            known = reversed(self._answered.values())
            self._found = list(dict.fromkeys([*known, *drawn]))[:MAX_FOUND]
        return self._found

    def _remember(self) -> None:
        held = self._held()
        for address in self._found:
            peer = peer_in(address)
            if peer in held:
                self._answered[peer] = address


def choose(records: Iterable[Record], rng: random.Random) -> Sequence[str]:
    """Choose up to ``MAX_FOUND`` relays and return one multiaddr of each, over TCP if there is one.

    Takes one relay of each subnet before a second one of any.
    """
    by_subnet = [rng.sample(found, len(found)) for found in _by_subnet(records)]
    rng.shuffle(by_subnet)
    chosen: list[str] = []
    while by_subnet and len(chosen) < MAX_FOUND:
        chosen += [found.pop() for found in by_subnet]
        by_subnet = [found for found in by_subnet if found]
    return chosen[:MAX_FOUND]


def _by_subnet(records: Iterable[Record]) -> list[list[str]]:
    """Group the announced relays by subnet: one direct multiaddr each, over TCP if there is one."""
    found = dict[str, list[str]]()
    for record in records:
        with contextlib.suppress(DecodeError):
            addresses = pb.RelayRecord.FromString(record.body).addresses[:MAX_ADDRESSES]
            own = [
                each for each in addresses if each.endswith(f"/p2p/{record.peer_id}") and not relay_of(each)
            ]
            for address in sorted(own, key=lambda each: "/tcp/" not in each)[:1]:
                found.setdefault(subnet_of(address), []).append(address)
    return list(found.values())
