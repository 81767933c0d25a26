"""Announcements of relays, for peers that the bootstrap peers have no reservation for.

Any peer can announce relays that do not exist. So relays are drawn from different subnets, those
that have held a reservation of this peer come first, and a relay stops announcing itself only if
others answer it.
"""

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement, Announcer
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import relay_of
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.wire import records_pb2 as pb

TOPIC = "relays"
LIFETIME_S = 300.0
ANNOUNCE_S = 100.0
ENOUGH = 256
"""Subnets with announced relays from which on no other peer announces itself: all records lie under
one topic."""
CHECKED = 4
"""Announced relays that must answer before a relay counts on them, and does not announce itself."""
MAX_FOUND = 16
"""Most relays that a peer takes from the directory at once: most records may be stale or invented.
"""
SAMPLED = MAX_FOUND
"""Records that a storing peer draws, one of each network that published any before a second one.
More than are taken would be filled up by a network that publishes many, with addresses that it
claims in any subnet; fewer would leave out real relays.
"""
MAX_ANSWERED = 4
"""Relays that a peer remembers because they have held a reservation."""
FIND_S = 30.0
"""Seconds for which the relays that were found are used again."""


async def _unknown(_address: str) -> bool:
    return False


def relay_announcer(
    directory: Directory,
    rng: random.Random,
    addresses: Callable[[], Sequence[str]],
    answers: Callable[[str], Awaitable[bool]] = _unknown,
) -> Announcer:
    """Return an announcer of this peer as a relay: it announces while the peer has ``addresses``
    and there are not ``ENOUGH`` other relays.

    ``answers`` calls the peer at a multiaddr, and returns whether it answers; without it, this peer
    is never silent.
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
    """Whether there are relays in ``ENOUGH`` subnets, and ``CHECKED`` of them, drawn at random,
    answer."""
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
        """``held``: the relays that hold a reservation of this peer."""
        self._directory = directory
        self._rng = rng
        self._held = held
        self._answered: OrderedDict[PeerId, str] = OrderedDict()
        """The multiaddrs of relays that have held a reservation, those of the latest last."""
        self._found: Sequence[str] = ()
        self._until = 0.0

    async def find(self) -> Sequence[str]:
        """One multiaddr each of up to ``MAX_FOUND`` relays: those that have held a reservation,
        then announced ones, drawn at random.

        None are drawn if the directory does not answer.
        """
        self._remember()
        now = asyncio.get_running_loop().time()
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
            peer = PeerId(address.rpartition("/p2p/")[2])
            if peer in held:
                self._answered[peer] = address
                self._answered.move_to_end(peer)
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)


def choose(records: Iterable[Record], rng: random.Random) -> Sequence[str]:
    """One multiaddr each of up to ``MAX_FOUND`` relays, over TCP where there is one; one of each
    subnet before a second one of any."""
    by_subnet = [rng.sample(found, len(found)) for found in _by_subnet(records)]
    rng.shuffle(by_subnet)
    chosen: list[str] = []
    while by_subnet and len(chosen) < MAX_FOUND:
        chosen += [found.pop() for found in by_subnet]
        by_subnet = [found for found in by_subnet if found]
    return chosen[:MAX_FOUND]


def _by_subnet(records: Iterable[Record]) -> list[list[str]]:
    """One direct multiaddr of each announced relay, over TCP where there is one, in a list for each
    subnet."""
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
