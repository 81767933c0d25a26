"""Requests and validates the reports that nodes make about themselves (report.proto)."""

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from swarmnet_protocols.directory.expert_announcements import (
    MAX_EXPERT_BLOCKS,
    MAX_EXPERTS,
    BlockExperts,
    format_experts,
    from_bits,
    to_bits,
)
from swarmnet_protocols.directory.host_announcements import (
    MAX_NAME_CHARS,
    MAX_NUMBER,
    MAX_TEXT_CHARS,
    is_possible,
)
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import REPORT
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import report_pb2 as pb
from swarmnet_protocols.wire.records_pb2 import HOST_STATE_UNSPECIFIED, HostState

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
"""Upper bounds of the buckets of ``Times`` in seconds. A last bucket counts everything slower."""
ASK_S = 5.0
"""Seconds that a command waits for a report. With less, peers behind relays are missed. With more,
a user waits longer for a peer that is gone."""
MAX_FLOWS = 64
MAX_CONTRIBUTIONS = 256
MAX_EXPERT_PEERS = 64
"""Most peers that compute experts for one host."""
_PEER = re.compile("[1-9A-HJ-NP-Za-km-z]{32,64}")


def is_peer_id(text: str) -> bool:
    """Return whether ``text`` has the form of a peer id."""
    return _PEER.fullmatch(text) is not None


def experts_of(blocks: Iterable[pb.BlockExperts]) -> BlockExperts:
    """Return the experts in a part of a report."""
    return {each.block: from_bits(each.experts) for each in blocks}


def experts_text(blocks: Iterable[pb.BlockExperts]) -> str:
    """Return the experts in a part of a report, as ``join --experts`` takes them; "" for none."""
    return format_experts(experts_of(blocks))


def rows_of(blocks: Iterable[pb.BlockExperts]) -> dict[tuple[int, int], int]:
    """Return how many rows each (block, expert) has computed. Leaves out experts with no rows."""
    return {
        (each.block, expert): rows
        for each in blocks
        for expert, rows in zip(sorted(from_bits(each.experts)), each.rows, strict=False)
        if rows
    }


def describe_experts(
    experts: BlockExperts, rows: Mapping[tuple[int, int], int] | None = None
) -> list[pb.BlockExperts]:
    """Encode experts for a report. ``rows``: how many rows each (block, expert) has computed."""
    found = []
    for block in sorted(experts):
        counts = [(rows or {}).get((block, expert), 0) for expert in sorted(experts[block])]
        bits = to_bits(experts[block])
        found.append(pb.BlockExperts(block=block, experts=bits, rows=counts if any(counts) else ()))
    return found


ReportStream = TypedStream[pb.ReportRequest, pb.NodeReport]


async def request_report(stream: ReportStream) -> pb.NodeReport:
    """Request the report of the node at the other end of a REPORT stream.

    Raises ``StreamEnded``, ``DeadlineExceeded`` without an answer, and ``ProtocolViolation`` for a
    report that :func:`check` rejects.
    """
    await stream.send(pb.ReportRequest())
    report, _ = await stream.receive()
    check(report)
    return report


async def ask_report(transport: Transport, peer: PeerId, addresses: Sequence[str]) -> pb.NodeReport | None:
    """Return the report of a node, or None if it gives no valid one within ``ASK_S``."""
    try:
        async with asyncio.timeout(ASK_S):
            stream = await REPORT.open(transport, peer, Timing(), addresses=addresses)
            try:
                return await request_report(stream)
            finally:
                stream.close()
    except (SwarmnetError, TimeoutError):
        return None


def check(report: pb.NodeReport) -> None:
    """Check that every number is finite and in its range, and every text short and printable.

    Raises ``ProtocolViolation``.
    """
    _require(len(report.public_name) <= MAX_NAME_CHARS, "a long name")
    texts = [report.version, report.public_name]
    given = report.given
    numbers = [report.uptime_s, given.active_s, given.kwh, given.since]
    numbers += [given.block_positions, given.clients, given.samples]
    numbers += [given.sent_bytes, given.received_bytes]
    if report.HasField("host"):
        host = report.host
        record = host.record
        texts += [host.model, record.precision, record.arithmetic, record.version]
        texts += [record.public_name, record.missing_experts]
        numbers += [record.token_s, record.cache_bytes_free, record.sessions, record.load, record.room]
        numbers += [host.queue_s, host.cache_bytes, host.cache_bytes_limit]
        numbers += [host.forwards, host.positions, host.answered]
        numbers += [host.rebuilt, host.links_lost, host.clients_lost]
        for times in (host.first_tokens, host.token_times):
            _require(len(times.counts) in {0, len(BOUNDS_S) + 1}, "a histogram has 14 counts")
            _require(list(times.counts) == sorted(times.counts), "a histogram never decreases")
            numbers += [times.total_s, *times.counts]
        _require(len(host.flows) <= MAX_FLOWS, "too many flows")
        for flow in host.flows:
            _require(
                all(not peer or is_peer_id(peer) for peer in (flow.upstream, flow.downstream)),
                "a flow with an invalid peer id",
            )
            numbers += [flow.sessions, flow.positions]
        _require(len(record.manifest) == 32, "no manifest hash")
        _require(record.state != HOST_STATE_UNSPECIFIED and record.state in HostState.values(), "no state")
        numbers += [host.expert_streams, *_experts_checked(host.experts)]
        if host.HasField("trunk"):
            trunk = host.trunk
            _experts_checked(trunk.lacks)
            _experts_checked(trunk.missing)
            _require(len(trunk.round_trips_s) <= MAX_EXPERT_PEERS, "too many peers with experts")
            numbers += [*trunk.round_trips_s, trunk.far]
            numbers += [trunk.rows, trunk.failed, trunk.hedged, trunk.loaded]
        _require(is_possible(record), "an impossible announcement")
        # A node that hosts only experts has no blocks.
        _require(record.start < record.end or record.end == 0, "no span")
        _require(
            record.end <= host.total_blocks and 0 < host.total_blocks <= MAX_BLOCKS, "no span of a model"
        )
    elif report.HasField("worker"):
        worker = report.worker
        texts += [worker.name, worker.method, worker.state, worker.waited_for, worker.waited_why]
        numbers += [worker.round, worker.rounds, worker.tokens, worker.bytes_sent, worker.bytes_received]
        numbers += [abs(worker.loss), abs(worker.val_loss), worker.val_tokens, worker.waited_s]
        recent, stage = worker.recent, worker.stage
        numbers += [recent.seconds, recent.compute_s, recent.tokens]
        numbers += [recent.forward_bytes, recent.backward_bytes]
        _require(stage.start <= stage.end <= MAX_BLOCKS, "no span of a model")
        _require(stage.number <= MAX_BLOCKS, "a stage beyond every model")
        _require(len(worker.job) == 32, "no id of a job")
        _require(len(worker.contributions) <= MAX_CONTRIBUTIONS, "too many contributions")
        for each in worker.contributions:
            _require(is_peer_id(each.peer), "a contribution with an invalid peer id")
            numbers.append(each.rounds)
    else:
        raise ProtocolViolation("a report of neither a host nor a worker")
    _require(all(len(text) <= MAX_TEXT_CHARS and text.isprintable() for text in texts), "a text is too long")
    _require(
        all(math.isfinite(number) and 0 <= number <= MAX_NUMBER for number in numbers),
        "a number is out of range",
    )


def _experts_checked(blocks: Sequence[pb.BlockExperts]) -> list[int]:
    """Check blocks and experts against the limits of an announcement. Returns the numbers of rows.

    Raises ``ProtocolViolation``.
    """
    numbers = [each.block for each in blocks]
    _require(len(numbers) <= MAX_EXPERT_BLOCKS, "too many blocks with experts")
    _require(numbers == sorted({*numbers}), "blocks with experts must ascend")
    _require(not numbers or numbers[-1] < MAX_BLOCKS, "a block beyond every model")
    for each in blocks:
        _require(0 < len(each.experts) <= MAX_EXPERTS // 8, "no experts, or too many")
        _require(
            len(each.rows) in {0, int.from_bytes(each.experts).bit_count()},
            "there must be a number of rows for each expert, or none",
        )
    return [rows for each in blocks for rows in each.rows]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolViolation(f"invalid report: {what}")
