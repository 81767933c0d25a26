"""Exclusions and bans: hosts that a client does not use for a while. Pure: times are arguments."""

import math
from collections.abc import Mapping, Sequence

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import pair_of
from swarmnet_protocols.routing.host_info import HostInfo

BAN_S = 15.0
"""Seconds of the ban after a host's first failure."""
BAN_MAX_S = 240.0
"""Longest ban in seconds, after repeated failures."""
SEPARATED_S = 60.0
"""Seconds that two hosts are kept apart after one did not reach the other."""
CONVICTED_S = 6 * 3600.0
"""Seconds that a host with wrong outputs is not used."""
MIN_OVERLOADED_S = 1.0
"""Least seconds before a host that refused work because of its load is asked again."""


def shortest_wait_s(
    missing: Sequence[tuple[int, int]], hosts: Sequence[HostInfo], waits_s: Mapping[PeerId, float]
) -> float | None:
    """Return the seconds until each of the ``missing`` blocks has a host that is not overloaded.
    Pure.

    ``waits_s``: the seconds left, by host. None if one of the blocks has no host at all.
    """
    of_blocks = [
        min(
            (waits_s[host.peer] for host in hosts if host.peer in waits_s and host.start <= block < host.end),
            default=math.inf,
        )
        for start, end in missing
        for block in range(start, end)
    ]
    longest_s = max(of_blocks, default=math.inf)
    return longest_s if math.isfinite(longest_s) else None


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


class Exclusions:
    """Hosts that a client does not use for a while. Pure: the time is an argument.

    There are four kinds, from the mildest to the strictest:

    1. A pair of hosts that do not reach each other: both are used, but not as neighbours.
    2. A banned host, which failed: it is used where no other host has its blocks. An answer lifts
       the ban.
    3. An overloaded host, which refused work because of its load: it is not used until its expected
       wait is over. If it refused only new work, it may still continue an answer.
    4. A convicted host, whose outputs were wrong: it is not used at all.
    """

    def __init__(self) -> None:
        self.bans = Bans()
        self._overloaded_until: dict[PeerId, tuple[float, float]] = {}
        """Times when a host may be asked again: for new work, and for work that continues an
        answer."""
        self._convicted_until: dict[PeerId, float] = {}
        self._separated_until: dict[tuple[PeerId, PeerId], tuple[float, PeerId]] = {}
        """The end of the separation, and the host that reported that it does not reach the
        other."""

    def refused(self, peer: PeerId, wait_s: float, now: float, *, continues: bool = False) -> None:
        """Leave an overloaded host alone for ``wait_s``, at least ``MIN_OVERLOADED_S``.

        It gets no new work. With ``continues`` it refused to continue an answer, and gets no work
        at all.
        """
        self._overloaded_until = {
            each: until for each, until in self._overloaded_until.items() if max(until) > now
        }
        until_s = now + max(wait_s, MIN_OVERLOADED_S)
        _, continued_s = self._overloaded_until.get(peer, (now, now))
        self._overloaded_until[peer] = until_s, until_s if continues else continued_s

    def overloaded(self, now: float, *, continues: bool = False) -> dict[PeerId, float]:
        """Return the overloaded hosts, each with the seconds left. ``continues`` as for
        ``refused``.
        """
        untils_s = {peer: until[continues] for peer, until in self._overloaded_until.items()}
        return {peer: until_s - now for peer, until_s in untils_s.items() if until_s > now}

    def separate(self, one: PeerId, other: PeerId, now: float) -> bool:
        """Keep two hosts apart for ``SEPARATED_S``, after ``one`` reported that it does not reach
        ``other``.

        Returns whether a third host has reported the same of ``other`` recently.
        """
        self._separated_until = {
            pair: until for pair, until in self._separated_until.items() if until[0] > now
        }
        self._separated_until[pair_of(one, other)] = now + SEPARATED_S, one
        return any(
            other in pair and reporter not in (one, other)
            for pair, (_, reporter) in self._separated_until.items()
        )

    def separated(self, now: float) -> dict[tuple[PeerId, PeerId], float]:
        """Return the pairs that are kept apart, each with the time of the report."""
        pairs = self._separated_until.items()
        return {pair: until - SEPARATED_S for pair, (until, _) in pairs if until > now}

    def reporters(self, now: float) -> frozenset[PeerId]:
        """Return the hosts that reported the separations of these pairs."""
        return frozenset(one for until, one in self._separated_until.values() if until > now)

    def convict(self, peer: PeerId, now: float) -> None:
        """Exclude a host for ``CONVICTED_S``."""
        self._convicted_until = {each: until for each, until in self._convicted_until.items() if until > now}
        self._convicted_until[peer] = now + CONVICTED_S

    def is_convicted(self, peer: PeerId, now: float) -> bool:
        """Return whether a host is excluded for wrong outputs."""
        return self._convicted_until.get(peer, -math.inf) > now
