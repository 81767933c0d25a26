"""A node's report for dashboards: numbers only, without clients, sessions or tokens.

The report of a node that hosts blocks contains:

1. Identity: model, blocks, state, precision, version, the public name that the owner chose, uptime.
2. Speed: the time of a step, of a token and in the queue. Histograms of times to the first token
   and between tokens.
3. Load: sessions, and the KV caches with their limit.
4. Counts since the start: forwards, positions, answers, sessions rebuilt by a replay, lost links
   and lost clients.
5. Flows: sessions and positions of the busiest pairs of upstream and downstream hop.
6. Experts: experts that the node computes for other hosts, with their rows, and experts that peers
   compute for this node.

The report of an expert peer contains its identity and its experts.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from prometheus_client import Histogram

from swarmnet_node.engine.counters import cumulative_counts, total
from swarmnet_node.hosting.counters import HostCounters, Pair
from swarmnet_protocols.errors import DeadlineExceeded
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import report_pb2 as pb

EVERY_S = 0.5
"""Seconds that a report is reused. A shorter time lets requests cost more work; a longer one shows
old numbers."""


def add_counts(report: pb.HostReport, counters: HostCounters, open_sessions: Iterable[Pair]) -> None:
    """Add a host's counts to its report.

    ``open_sessions``: for each open session, its upstream and downstream hop.
    """
    report.answered = counters.answered
    report.rebuilt = counters.rebuilt
    report.links_lost = counters.links_lost
    report.clients_lost = counters.clients_lost
    report.first_tokens.CopyFrom(_times(counters.first_tokens))
    report.token_times.CopyFrom(_times(counters.token_times))
    report.flows.extend(counters.flows(open_sessions))


def describe_reach(reach: pb.Reach) -> pb.Reach:
    """Return how peers reach the node, for a report, without the node's addresses."""
    return pb.Reach(kind=reach.kind, relays=reach.relays[:2], punched=reach.punched)


class Reporter:
    """Answers requests for reports. Calls ``describe`` at most once in ``EVERY_S``, however many
    ask."""

    def __init__(self, describe: Callable[[], pb.NodeReport]) -> None:
        self._describe = describe
        self._newest = pb.NodeReport()
        self._newest_at_s = -EVERY_S

    async def handle(self, stream: TypedStream[pb.NodeReport, pb.ReportRequest]) -> None:
        """Serve one REPORT stream until the peer closes it or falls silent.

        Requests above the rate limit wait. Raises ``ResourceLimitReached`` if the peer has too many
        such streams.
        """
        scope = stream.stream.scope
        with scope.reserve(Resource.REPORTS), contextlib.suppress(DeadlineExceeded):
            while True:
                await stream.receive()
                if wait_s := scope.charge(Rate.REPORTS_SENT, 1, loop_time()):
                    await asyncio.sleep(wait_s)
                await stream.send(self._report())

    def _report(self) -> pb.NodeReport:
        now_s = loop_time()
        if now_s - self._newest_at_s >= EVERY_S:
            self._newest = self._describe()
            self._newest_at_s = now_s
        return self._newest


def _times(histogram: Histogram) -> pb.Times:
    return pb.Times(counts=cumulative_counts(histogram), total_s=total(histogram))
