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
        """Tokens that clients kept of the outputs of this host, as the last hop of their chains."""
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
    """Time at which the step arrived. For a part of a prompt, that of the first part."""
    row: Row
    is_prompt: bool


class _Sequences:
    """The last steps of the sequences of one session."""

    def __init__(self) -> None:
        self._last: Latest[int, _LastStep] = Latest(MAX_SEQUENCES)

    def follow(self, row: Row, now_s: float) -> tuple[_LastStep, _LastStep | None]:
        """Return the step that ``row`` makes, and the step of its sequence before it.

        A step is part of a prompt if it begins a sequence, continues a part of a prompt, or wants
        fewer outputs than it has positions. Any other step carries the newest token of an answer
        and perhaps a draft, and wants all outputs.
        """
        last = self._last.get(row.sequence)
        goes_on = last is not None and last.row.outputs == 0
        is_prompt = goes_on or row.start == 0 or row.outputs < row.count
        began_s = last.at_s if last is not None and goes_on else now_s
        step = self._last[row.sequence] = _LastStep(began_s, row, is_prompt)
        return step, last


def _kept_tokens(last: _LastStep, row: Row) -> int:
    """Return how many tokens the client kept of the outputs of ``last``, at least one.

    The start of the next row tells: a client goes back before the tokens of a draft that the model
    rejected.
    """
    if last.is_prompt:
        return 1
    return max(1, min(row.start - (last.row.end - last.row.outputs), last.row.outputs))


class AnsweredTokens:
    """Counts the tokens that clients keep of the outputs of a last hop.

    A step gives at least one token, counted at once. The tokens of an accepted draft are counted
    with the next step of the sequence. So a draft in the last step of an answer is not counted.
    """

    def __init__(self, counters: HostCounters) -> None:
        self._counters = counters
        self._sequences = _Sequences()

    def sent(self, rows: Iterable[Row]) -> None:
        """Count a step whose outputs were sent to the client."""
        for row in rows:
            step, last = self._sequences.follow(row, 0.0)
            if last is not None and not step.is_prompt:
                self._counters.answered += _kept_tokens(last, row) - 1
            self._counters.answered += min(1, row.outputs)


class TokenTimes:
    """Measures how long a client waits for its tokens, at the first hop of its chain.

    A step carries the token that the previous step produced. So the time between the two steps is
    one trip through the chain. The tokens of an accepted draft share it.
    """

    def __init__(self, counters: HostCounters) -> None:
        self._counters = counters
        self._sequences = _Sequences()

    def arrived(self, rows: Iterable[Row], now_s: float) -> None:
        """Count a step that arrived at ``now_s`` on any monotonic clock."""
        for row in rows:
            step, last = self._sequences.follow(row, now_s)
            if last is None or step.is_prompt:
                continue
            if last.is_prompt:
                self._counters.first_tokens.observe(now_s - last.at_s)
                continue
            tokens = _kept_tokens(last, row)
            for _ in range(tokens):
                self._counters.token_times.observe((now_s - last.at_s) / tokens)
