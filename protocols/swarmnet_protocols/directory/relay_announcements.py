"""Announcements of relays, for peers that the bootstrap peers have no reservation for."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net.dialling import relay_of
from swarmnet_protocols.wire import records_pb2 as pb

TOPIC = "relays"
LIFETIME_S = 300.0
ANNOUNCE_S = 100.0
ENOUGH = 256
"""Announced relays from which on no other peer announces itself: all of their records lie under one key of the DHT."""
MAX_FOUND = 16
"""Most relays that a peer takes from the directory at once: most records may be stale or invented."""
FIND_S = 30.0
"""Seconds for which the relays that were found are used again."""


async def keep_relay_announced(
    directory: Directory, addresses: Callable[[], Sequence[str]], rng: random.Random
) -> NoReturn:
    """Announce this peer as a relay until cancelled, whenever it has ``addresses`` and there are not ``ENOUGH`` relays."""
    while True:
        if direct := [each for each in addresses() if relay_of(each) is None]:
            with contextlib.suppress(SwarmnetError):  # the record outlives a missed announcement
                if len(await directory.lookup(TOPIC)) < ENOUGH:
                    record = pb.RelayRecord(addresses=direct[:MAX_ADDRESSES])
                    await directory.publish(TOPIC, record.SerializeToString(), lifetime_s=LIFETIME_S)
        await asyncio.sleep(ANNOUNCE_S * rng.uniform(0.8, 1.0))


class RelayFinder:
    """Finds announced relays, and remembers them for ``FIND_S``."""

    def __init__(self, directory: Directory, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._found: Sequence[str] = ()
        self._until = 0.0

    async def find(self) -> Sequence[str]:
        """One multiaddr each of up to ``MAX_FOUND`` announced relays, chosen at random; none if the directory does not answer."""
        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._until = now + FIND_S
            try:
                self._found = choose(await self._directory.lookup(TOPIC), self._rng)
            except SwarmnetError:
                self._found = ()
        return self._found


def choose(records: Sequence[Record], rng: random.Random) -> Sequence[str]:
    """One multiaddr each of up to ``MAX_FOUND`` relays, over TCP where there is one."""
    found = []
    for record in rng.sample(records, min(MAX_FOUND, len(records))):
        with contextlib.suppress(DecodeError):
            addresses = pb.RelayRecord.FromString(record.body).addresses[:MAX_ADDRESSES]
            own = [
                each for each in addresses if each.endswith(f"/p2p/{record.peer_id}") and not relay_of(each)
            ]
            found += sorted(own, key=lambda each: "/tcp/" not in each)[:1]
    return found
