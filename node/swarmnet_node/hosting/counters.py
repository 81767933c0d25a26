"""Counters of a host since its start, for Prometheus and node reports."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from swarmnet_node.engine.counters import node_histogram
from swarmnet_protocols.directory.node_reports import BOUNDS_S, MAX_FLOWS
from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import report_pb2 as pb

_log = logging.getLogger(__name__)

MAX_PAIRS = 1024
"""Positions are counted for at most this many pairs of neighbours. Beyond this, the longest idle
pair is dropped, so many strangers cannot fill the memory."""
MAX_SEQUENCES = 1024
"""Times are measured for at most this many sequences of one session."""


class Pair(NamedTuple):
    """The peers that a session receives from and sends to. An empty string stands for any
    client."""

    upstream: str
    downstream: str


class HostCounters:
    """Cumulative counts since the start of a host."""

    def __init__(self) -> None:
        self.answered = 0
        self.rebuilt = 0
        self.links_lost = 0
        self.clients_lost = 0
        self.refused: Counter[str] = Counter()
        """Refusals by reason, named as in refusal.proto."""
        self.first_tokens = node_histogram(
            "first_token_seconds", "From a prompt to its first token, measured by the first hop.", BOUNDS_S
        )
        self.token_times = node_histogram(
            "token_seconds", "From one token to the next, measured by the first hop.", BOUNDS_S
        )
        self._positions: Latest[Pair, int] = Latest(MAX_PAIRS)

    def refuse(self, refusal: Refusal, peer: PeerId) -> None:
        """Count and log that this host refused ``peer``."""
        reason = refusal_pb2.Reason.Name(refusal.reason).removeprefix("REASON_").lower()
        self.refused[reason] += 1
        _log.info("a request is refused", extra={"reason": reason, "peer": peer})

    def passed(self, pair: Pair, positions: int) -> None:
        """Count positions that flowed through this host from one peer of ``pair`` to the other."""
        self._positions[pair] = self._positions.get(pair, 0) + positions

    def flows(self, open_sessions: Iterable[Pair]) -> list[pb.Flow]:
        """Return the busiest pairs: by open sessions, then by positions."""
        sessions = Counter(open_sessions)
        pairs = {
            pair: (sessions[pair], self._positions.get(pair, 0)) for pair in (*self._positions, *sessions)
        }
        busiest = sorted(pairs, key=lambda pair: (*pairs[pair], pair), reverse=True)[:MAX_FLOWS]
        return [
            pb.Flow(**pair._asdict(), sessions=pairs[pair][0], positions=pairs[pair][1]) for pair in busiest
        ]


class _LastStep(NamedTuple):
    """The last step of a sequence that reached this host."""

    at_s: float
    """When the step arrived; for a part of a prompt, when the first part arrived."""
    is_prompt: bool
    goes_on: bool
    """Whether more of the same prompt follows."""


class TokenTimes:
    """Measures how long a client waits for its tokens, at the first hop of its chain.

    A step of one position carries the token that the previous step produced. So the time between
    the two steps is one trip through the chain.
    """

    def __init__(self, counters: HostCounters) -> None:
        self._counters = counters
        self._last: dict[int, _LastStep] = {}
        """The last step of each sequence."""

    def arrived(self, rows: Iterable[Row], now_s: float) -> None:
        """Count a step that arrived at ``now_s`` on any monotonic clock."""
        for row in rows:
            last = self._last.get(row.sequence)
            if row.count > 1 or row.start == 0:
                began_s = last.at_s if last is not None and last.goes_on else now_s
                self._last[row.sequence] = _LastStep(began_s, is_prompt=True, goes_on=row.outputs == 0)
            elif last is not None:
                times = self._counters.first_tokens if last.is_prompt else self._counters.token_times
                times.observe(now_s - last.at_s)
                self._last[row.sequence] = _LastStep(now_s, is_prompt=False, goes_on=False)
        while len(self._last) > MAX_SEQUENCES:
            del self._last[next(iter(self._last))]
