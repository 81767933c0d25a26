"""Hosts that failed recently and are left out of chains for a while."""

import math

from swarmnet_protocols.net import PeerId

BAN_S = 15.0
"""Seconds of the ban after a host's first failure."""
BAN_MAX_S = 240.0
"""Longest ban in seconds, after repeated failures."""


class Bans:
    """Hosts that failed recently. A failure after a ban doubles the next ban; a success clears
    it."""

    def __init__(self) -> None:
        self._failed: dict[PeerId, tuple[float, float]] = {}
        """Time of the last failure, and seconds of the ban since then."""

    def failed(self, peer: PeerId, now: float) -> None:
        at, ban_s = self._failed.get(peer, (-math.inf, BAN_S))
        if now > at + 2 * ban_s:  # no failure for another ban's length clears the history
            ban_s = BAN_S
        elif now > at + ban_s:
            ban_s = min(2 * ban_s, BAN_MAX_S)
        # Entries end by time, because hosts that have left never succeed again.
        self._failed = {each: (at, ban) for each, (at, ban) in self._failed.items() if now <= at + 2 * ban}
        self._failed[peer] = (now, ban_s)

    def served(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)

    def at(self, now: float) -> dict[PeerId, float]:
        """Return the hosts that are banned at ``now`` → time of the failure, the oldest first."""
        banned = {peer: at for peer, (at, ban_s) in self._failed.items() if at + ban_s > now}
        return dict(sorted(banned.items(), key=lambda each: each[1]))
