"""Hosts that a client does not use for a while: failed ones, wrong ones, and pairs that do not reach each other. Pure: time is an argument."""

import math

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import Bans, pair_of

PARTED_S = 60.0
"""Seconds for which two hosts that did not reach each other are not made neighbours."""
CONVICTED_S = 6 * 3600.0
"""Seconds for which a host with wrong outputs is not used."""


class Exclusions:
    """Three kinds, from the mildest to the strictest:

    1. A pair of hosts that do not reach each other: both are used, but not one after the other.
    2. A banned host, which failed: it is used where no other host has its blocks. An answer lifts the ban.
    3. A convicted host, whose outputs were wrong: it is not used at all.
    """

    def __init__(self) -> None:
        self.bans = Bans()
        self._convicted_until: dict[PeerId, float] = {}
        self._parted_until: dict[tuple[PeerId, PeerId], float] = {}

    def part(self, one: PeerId, other: PeerId, now: float) -> None:
        """Keep two hosts apart for ``PARTED_S``."""
        self._parted_until = {pair: until for pair, until in self._parted_until.items() if until > now}
        self._parted_until[pair_of(one, other)] = now + PARTED_S

    def parted(self, now: float) -> frozenset[tuple[PeerId, PeerId]]:
        """The pairs that are kept apart."""
        return frozenset(pair for pair, until in self._parted_until.items() if until > now)

    def convict(self, peer: PeerId, now: float) -> None:
        """Exclude a host for ``CONVICTED_S``."""
        self._convicted_until = {each: until for each, until in self._convicted_until.items() if until > now}
        self._convicted_until[peer] = now + CONVICTED_S

    def is_convicted(self, peer: PeerId, now: float) -> bool:
        """Whether a host is excluded for wrong outputs."""
        return self._convicted_until.get(peer, -math.inf) > now
