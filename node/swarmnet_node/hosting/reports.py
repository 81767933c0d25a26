"""What a node says of itself to whoever watches the swarm: numbers, and no client, no session, no token in them."""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import Histogram

from swarmnet_node.engine.counters import cumulative_counts, node_histogram, total
from swarmnet_protocols.directory.node_reports import BOUNDS_S, MAX_FLOWS, clean
from swarmnet_protocols.errors import DeadlineExceeded
from swarmnet_protocols.net import Message, PeerId, Stream
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.resources import Rate, Resource
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import report_pb2 as pb
from swarmnet_protocols.wire import session_pb2 as pb_session

if TYPE_CHECKING:
    from swarmnet_node.hosting.host import Host
    from swarmnet_node.owner.control import NodeStatus

_log = logging.getLogger(__name__)

EVERY_S = 0.5
"""A report that is younger than this is not made anew."""
IDLE_S = 60.0
"""A stream on which nobody asks, or reads what was asked for, for so long is closed."""
MAX_PAIRS = 1024
"""Pairs of neighbours whose positions are counted; of more, those that sent last."""
MAX_SEQUENCES = 1024
"""Of a session, whose times are measured."""


class Pair(NamedTuple):
    """Who sends to a session, and to whom it sends on. Empty: clients, of whom one is as good as another."""

    upstream: str
    downstream: str


class HostNumbers:
    """What a host counts from its start."""

    def __init__(self) -> None:
        self.answered = 0
        self.rebuilt = 0
        self.links_lost = 0
        self.clients_lost = 0
        self.refused: Counter[str] = Counter()
        """How often something was refused for a reason, by the names of session.proto."""
        self.first_tokens = node_histogram(
            "first_token_seconds", "From a prompt to its first token, by its first hop.", BOUNDS_S
        )
        self.token_times = node_histogram(
            "token_seconds", "From one token to the next, by their first hop.", BOUNDS_S
        )
        self._positions: OrderedDict[Pair, int] = OrderedDict()

    def refuse(self, refusal: Refused, peer: PeerId) -> None:
        """Count that ``peer`` was refused something."""
        reason = pb_session.Reason.Name(refusal.reason).removeprefix("REASON_").lower()
        self.refused[reason] += 1
        _log.info("refused", extra={"reason": reason, "peer": peer})

    def passed(self, pair: Pair, positions: int) -> None:
        """Count positions that came and went between ``pair``."""
        self._positions[pair] = self._positions.pop(pair, 0) + positions
        if len(self._positions) > MAX_PAIRS:
            self._positions.popitem(last=False)

    def flows(self, open_sessions: Iterable[Pair]) -> list[pb.Flow]:
        """The busiest pairs: those with most sessions open, then those with most positions."""
        sessions = Counter(open_sessions)
        pairs = {
            pair: (sessions[pair], self._positions.get(pair, 0)) for pair in (*self._positions, *sessions)
        }
        busiest = sorted(pairs, key=lambda pair: (*pairs[pair], pair), reverse=True)[:MAX_FLOWS]
        return [
            pb.Flow(**pair._asdict(), sessions=pairs[pair][0], positions=pairs[pair][1]) for pair in busiest
        ]


class TokenTimes:
    """How long a client waits for its tokens, as the first hop of its chain sees its steps arrive.

    A step of one position of a lane carries the token that the step before gave, so between the two lies one whole trip.
    """

    def __init__(self, numbers: HostNumbers) -> None:
        self._numbers = numbers
        self._last: dict[int, tuple[float, bool, bool]] = {}
        """Of each lane: when its last step came, whether that was of a prompt, and whether more of that prompt was to come."""

    def arrived(self, rows: Iterable[Row], now_s: float) -> None:
        """Take note of a step that came at ``now_s``, by any clock that never goes back."""
        for row in rows:
            last = self._last.get(row.sequence)
            if row.count > 1 or row.start == 0:
                began_s = last[0] if last is not None and last[2] else now_s
                self._last[row.sequence] = began_s, True, row.outputs == 0
            elif last is not None:
                times = self._numbers.first_tokens if last[1] else self._numbers.token_times
                times.observe(now_s - last[0])
                self._last[row.sequence] = now_s, False, False
        while len(self._last) > MAX_SEQUENCES:
            del self._last[next(iter(self._last))]


def describe_host(status: "NodeStatus", host: "Host", *, step_s: float, public_name: str) -> pb.NodeReport:
    """What a node that hosts says of itself."""
    engine, numbers = host.engine, host.numbers
    pairs = [pair for session in host.sessions if (pair := session.pair) is not None]
    report = pb.HostReport(
        manifest=status.manifest,
        model=clean(status.model),
        total_blocks=status.total_blocks,
        start=status.start,
        end=status.end,
        state=status.state,
        dtype=str(engine.stage.dtype).removeprefix("torch."),
        step_s=step_s,
        token_s=engine.token_s,
        queue_s=engine.queue_s,
        cache_bytes=status.cache_bytes,
        cache_bytes_limit=status.cache_bytes_limit,
        sessions=status.sessions,
        forwards=engine.forwards,
        positions=engine.tokens,
        answered=numbers.answered,
        rebuilt=numbers.rebuilt,
        links_lost=numbers.links_lost,
        clients_lost=numbers.clients_lost,
        first_tokens=_times(numbers.first_tokens),
        token_times=_times(numbers.token_times),
        flows=numbers.flows(pairs),
    )
    return pb.NodeReport(
        version=status.version, public_name=public_name, uptime_s=status.uptime_s, host=report
    )


class Reporter:
    """Answers with what ``describe`` says, made anew at most every ``EVERY_S`` whoever asks and however often."""

    def __init__(self, describe: Callable[[], pb.NodeReport]) -> None:
        self._describe = describe
        self._sealed = b""
        self._sealed_at_s = -EVERY_S

    async def handle(self, stream: Stream) -> None:
        """Serve one REPORT stream until its other end closes it or falls silent. Who asks too often waits.

        Raises ``ResourceLimitReached`` for somebody who watches on enough streams already.
        """
        clock = asyncio.get_running_loop().time
        with stream.scope.reserve(Resource.REPORTS), contextlib.suppress(DeadlineExceeded):
            while True:
                parse(pb.ReportRequest, (await receive_within(stream, IDLE_S)).header)
                if wait_s := stream.scope.charge(Rate.REPORTS_SENT, 1, clock()):
                    await asyncio.sleep(wait_s)
                await send_within(stream, Message(self._report()), IDLE_S)

    def _report(self) -> bytes:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._sealed_at_s >= EVERY_S:
            self._sealed = self._describe().SerializeToString()
            self._sealed_at_s = now_s
        return self._sealed


def _times(histogram: Histogram) -> pb.Times:
    return pb.Times(counts=cumulative_counts(histogram), total_s=total(histogram))
