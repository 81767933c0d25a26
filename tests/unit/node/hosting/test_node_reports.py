"""Reports of nodes: their counters, their rate limit, and the checks of a received report."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, cast

import pytest

from swarmnet_node.engine.counters import cumulative_counts, total
from swarmnet_node.hosting.counters import MAX_PAIRS, AnsweredTokens, HostCounters, Pair, TokenTimes
from swarmnet_node.hosting.reports import EVERY_S, Reporter
from swarmnet_protocols.directory import catalog, node_reports
from swarmnet_protocols.directory.catalog import MAX_MODELS, CatalogModel, made_jobs, merge
from swarmnet_protocols.directory.expert_announcements import MAX_EXPERT_BLOCKS, MAX_EXPERTS
from swarmnet_protocols.directory.host_announcements import MAX_NUMBER, clean
from swarmnet_protocols.directory.node_reports import (
    MAX_EXPERT_PEERS,
    MAX_FLOWS,
    check,
    describe_experts,
    experts_of,
    request_report,
    rows_of,
)
from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, Resource
from swarmnet_protocols.net.limits.resources import ResourceManager, Scope
from swarmnet_protocols.net.protocol_ids import REPORT, REPORT_IDLE_S
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire import records_pb2, report_pb2
from tests.defences import defence, replacing
from tests.support.attacks.switched_off import count_only
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.wire.examples import report_messages

STREAMS_EACH = PEER_LIMITS[Resource.REPORTS]
NODE, ASKER = (Identity.from_seed(name).peer_id for name in (b"node", b"asker"))


def host_report() -> report_pb2.NodeReport:
    return next(message for message in report_messages() if isinstance(message, report_pb2.NodeReport))


def worker_report() -> report_pb2.NodeReport:
    return [message for message in report_messages() if isinstance(message, report_pb2.NodeReport)][1]


def test_a_report_has_a_bounded_number_of_pairs_with_sessions_first() -> None:
    numbers = HostCounters()
    for number in range(2 * MAX_PAIRS):
        numbers.passed(Pair("", f"{number}"), number)
    flows = numbers.flows([Pair("", "3"), Pair("", "3"), Pair("a", "b")])
    assert len(flows) == MAX_FLOWS
    assert [(flow.downstream, flow.sessions) for flow in flows[:3]] == [
        ("3", 2),
        ("b", 1),
        (f"{2 * MAX_PAIRS - 1}", 0),
    ]
    assert len(numbers._positions) == MAX_PAIRS


def steps(*rows: tuple[float, int, int, int]) -> HostCounters:
    """The counters after some steps of one sequence, each given as time, start, count and
    outputs."""
    numbers = HostCounters()
    times, tokens = TokenTimes(numbers), AnsweredTokens(numbers)
    for at_s, start, count, outputs in rows:
        times.arrived([Row(0, start, count, outputs, 0)], at_s)
        tokens.sent([Row(0, start, count, outputs, 0)])
    return numbers


def test_a_prompt_in_chunks_is_timed_from_its_first() -> None:
    numbers = steps((0.0, 0, 64, 0), (0.5, 64, 64, 0), (1.0, 128, 10, 1), (3.0, 138, 1, 1), (3.25, 139, 1, 1))
    assert (total(numbers.first_tokens), total(numbers.token_times)) == (3.0, 0.25)


def test_the_time_between_two_questions_of_a_person_is_not_counted() -> None:
    numbers = steps((0.0, 0, 5, 1), (1.0, 5, 1, 1), (600.0, 6, 20, 1), (601.5, 26, 1, 1))
    assert cumulative_counts(numbers.first_tokens)[-1] == 2
    assert total(numbers.first_tokens) == 2.5
    assert total(numbers.token_times) == 0.0


def test_a_replacement_begins_without_a_measured_time() -> None:
    assert cumulative_counts(steps((5.0, 17, 1, 1)).token_times)[-1] == 0


def test_rejected_drafts_are_not_tokens() -> None:
    """A prompt of 5, and three drafts of 3 tokens: the model accepts 1, all and none."""
    numbers = steps((0.0, 0, 5, 1), (1.0, 5, 4, 4), (2.0, 7, 4, 4), (4.0, 11, 4, 4), (5.0, 12, 1, 1))
    assert numbers.answered == 1 + 2 + 4 + 1 + 1
    assert cumulative_counts(numbers.first_tokens)[-1] == 1
    assert cumulative_counts(numbers.token_times)[-1] == 2 + 4 + 1
    assert total(numbers.token_times) == pytest.approx(1.0 + 2.0 + 1.0)


def test_a_prompt_that_wants_all_outputs_is_one_token() -> None:
    assert steps((0.0, 0, 64, 0), (0.5, 64, 64, 64), (1.0, 128, 1, 1)).answered == 2


def test_a_prompt_whose_last_part_is_one_position_is_a_prompt() -> None:
    numbers = steps((0.0, 0, 64, 0), (0.5, 64, 1, 1), (2.0, 65, 1, 1))
    assert (total(numbers.first_tokens), cumulative_counts(numbers.token_times)[-1]) == (2.0, 0)


def asked(describe: Callable[[], report_pb2.NodeReport], scenario: Callable[[Any], Any]) -> None:
    """``scenario`` with a function that opens another REPORT stream to a node, in virtual time."""

    async def world() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.01))
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(network.transport(NODE))
            asker = await stack.enter_async_context(network.transport(ASKER))
            await REPORT.serve(node, Reporter(describe).handle)
            async with asyncio.timeout(100):
                await scenario(lambda: REPORT.open(asker, NODE))

    run(world())


@defence("reports are sent at a limited rate", off=replacing(Scope, "charge", lambda *_: 0.0))
def test_frequent_requests_wait_and_share_one_report() -> None:
    made: list[float] = []

    def describe() -> report_pb2.NodeReport:
        made.append(asyncio.get_running_loop().time())
        return host_report()

    async def scenario(connect: Any) -> None:
        began_s = asyncio.get_running_loop().time()
        streams = [await connect() for _ in range(STREAMS_EACH)]
        for _ in range(5):
            await asyncio.gather(*(request_report(stream) for stream in streams))
        assert asyncio.get_running_loop().time() - began_s >= 9 * EVERY_S
        assert all(later - earlier >= EVERY_S for earlier, later in pairwise(made))

    asked(describe, scenario)


@defence("report streams of a peer are limited", off=count_only)
def test_streams_for_reports_are_limited_per_peer_and_end_when_idle() -> None:
    async def scenario(connect: Any) -> None:
        streams = [await connect() for _ in range(STREAMS_EACH + 1)]
        for stream in streams[:-1]:
            await request_report(stream)
        with pytest.raises(Refused, match="out of resources"):
            await request_report(streams[-1])
        await asyncio.sleep(REPORT_IDLE_S + 1.0)
        with pytest.raises(StreamEnded):
            await request_report(streams[0])
        await request_report(await connect())

    asked(host_report, scenario)


def expert_peer_report() -> report_pb2.NodeReport:
    return [message for message in report_messages() if isinstance(message, report_pb2.NodeReport)][2]


def trunk_report() -> report_pb2.NodeReport:
    return [message for message in report_messages() if isinstance(message, report_pb2.NodeReport)][3]


@pytest.mark.parametrize(
    "report",
    [host_report(), worker_report(), expert_peer_report(), trunk_report()],
    ids=["host", "worker", "expert peer", "trunk"],
)
def test_possible_values_are_accepted(report: report_pb2.NodeReport) -> None:
    check(report)


HOST_LIES: dict[str, Callable[[report_pb2.NodeReport], object]] = {
    "no peer": lambda report: report.ClearField("host"),
    "a long name": lambda report: setattr(report, "public_name", "x" * 65),
    "a name that turns text around": lambda report: setattr(report, "public_name", "a\u202eb"),
    "no time": lambda report: setattr(report, "uptime_s", float("nan")),
    "endless": lambda report: setattr(report.host, "queue_s", float("inf")),
    "before its start": lambda report: setattr(report, "uptime_s", -1.0),
    "more than can be": lambda report: setattr(report.host, "positions", MAX_NUMBER + 1),
    "more given than can be": lambda report: setattr(report.given, "clients", MAX_NUMBER + 1),
    "endless energy": lambda report: setattr(report.given, "kwh", float("inf")),
    "no model": lambda report: setattr(report.host.record, "manifest", b"short"),
    "a span beyond the model": lambda report: setattr(report.host.record, "end", 127),
    "an empty span": lambda report: setattr(report.host.record, "end", 3),
    "a state of its own": lambda report: setattr(report.host.record, "state", 99),
    "no state": lambda report: report.host.record.ClearField("state"),
    "a step of no time": lambda report: setattr(report.host.record, "step_s", float("nan")),
    "a precision of its own": lambda report: setattr(report.host.record, "precision", "x" * 129),
    "an arithmetic of its own": lambda report: setattr(report.host.record, "arithmetic", "x" * 129),
    "a histogram that falls": lambda report: report.host.token_times.counts.__setitem__(13, 0),
    "half a histogram": lambda report: report.host.token_times.counts.pop(),
    "a flow from nowhere": lambda report: report.host.flows.add(upstream="<script>"),
    "too many flows": lambda report: report.host.flows.extend([report_pb2.Flow()] * MAX_FLOWS),
}


@pytest.mark.parametrize("lie", HOST_LIES)
def test_impossible_values_are_refused(lie: str) -> None:
    report = host_report()
    HOST_LIES[lie](report)
    with pytest.raises(ProtocolViolation):
        check(report)


def test_a_worker_names_a_job_and_peers() -> None:
    for change in (
        lambda worker: setattr(worker, "job", b""),
        lambda worker: setattr(worker, "loss", float("nan")),
        lambda worker: worker.contributions.add(peer="no peer"),
        lambda worker: worker.contributions.extend([worker.contributions[0]] * 256),
    ):
        report = worker_report()
        change(report.worker)
        with pytest.raises(ProtocolViolation):
            check(report)


def test_experts_of_a_report_are_those_that_were_described() -> None:
    experts = {3: frozenset({0, 5, 17}), 40: frozenset({1})}
    rows = {(3, 5): 7, (3, 17): 1 << 40}
    described = describe_experts(experts, rows)
    assert experts_of(described) == experts
    assert rows_of(described) == rows
    assert [len(each.rows) for each in described] == [3, 0], "no rows are sent where none were computed"


EXPERT_LIES: dict[str, Callable[[Any], object]] = {
    "no experts": lambda experts: setattr(experts[0], "experts", b""),
    "too many experts": lambda experts: setattr(experts[0], "experts", b"\x01" * (MAX_EXPERTS // 8 + 1)),
    "a block twice": lambda experts: setattr(experts[1], "block", experts[0].block),
    "a block beyond every model": lambda experts: setattr(experts[1], "block", MAX_BLOCKS),
    "more rows than experts": lambda experts: experts[0].rows.append(1),
    "more rows than can be": lambda experts: experts[0].rows.__setitem__(0, MAX_NUMBER + 1),
    "too many blocks": lambda experts: experts.extend(
        report_pb2.BlockExperts(block=5 + number, experts=b"\x01") for number in range(MAX_EXPERT_BLOCKS)
    ),
}


@defence(
    "lists of experts in reports are bounded before they are read",
    off=replacing(node_reports, "_experts_checked", lambda _: []),
    lie="too many experts",
)
@pytest.mark.parametrize("lie", EXPERT_LIES)
def test_impossible_experts_are_refused(lie: str) -> None:
    for report, experts in (
        (peer := expert_peer_report(), peer.host.experts),
        (trunk := trunk_report(), trunk.host.experts),
    ):
        EXPERT_LIES[lie](experts)
        with pytest.raises(ProtocolViolation):
            check(report)


TRUNK_LIES: dict[str, Callable[[report_pb2.TrunkReport], object]] = {
    "lacks nothing of a block": lambda trunk: trunk.lacks.add(block=9),
    "misses nothing of a block": lambda trunk: trunk.missing.add(block=9),
    "too many peers": lambda trunk: trunk.round_trips_s.extend([0.1] * MAX_EXPERT_PEERS),
    "no round trip": lambda trunk: trunk.round_trips_s.append(float("nan")),
    "more than can be": lambda trunk: setattr(trunk, "rows", MAX_NUMBER + 1),
}


@pytest.mark.parametrize("lie", TRUNK_LIES)
def test_an_impossible_trunk_is_refused(lie: str) -> None:
    report = trunk_report()
    TRUNK_LIES[lie](report.host.trunk)
    with pytest.raises(ProtocolViolation):
        check(report)


@pytest.mark.parametrize("field", ["manifest", "state", "total_blocks"])
def test_an_expert_peer_names_its_model_and_state(field: str) -> None:
    report = expert_peer_report()
    (report.host if field == "total_blocks" else report.host.record).ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation):
        check(report)


def test_a_text_from_a_peer_loses_control_characters_and_is_cut() -> None:
    assert clean("/home/\x00me/" + "m" * 200) == "m" * 128


def catalog_entry(manifest: int, name: str = "org/name", blocks: int = 4) -> bytes:
    model = records_pb2.CatalogModel(manifest=bytes([manifest]) * 32, name=name, blocks=blocks)
    return records_pb2.CatalogRecord(model=model).SerializeToString()


def test_a_model_has_the_name_that_most_hosts_give_it() -> None:
    found = merge(
        [catalog_entry(1, "evil"), catalog_entry(1), catalog_entry(1), catalog_entry(2, "other", 9)]
    )
    assert found.models == (CatalogModel(b"\x01" * 32, "org/name", 4), CatalogModel(b"\x02" * 32, "other", 9))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff",
        b"",
        catalog_entry(1, ""),
        catalog_entry(1, "a\nb"),
        catalog_entry(1, "x" * 200),
        catalog_entry(1, "a", 0),
        catalog_entry(1, "a", 1 << 31),
    ],
)
def test_an_invalid_catalog_entry_is_left_out(body: bytes) -> None:
    assert merge([body, catalog_entry(7)]).models == (CatalogModel(b"\x07" * 32, "org/name", 4),)


def test_a_flood_of_models_hides_none_that_many_host() -> None:
    flood = [catalog_entry(number, "junk") for number in range(255)]
    found = merge([*flood, catalog_entry(254), catalog_entry(254)])
    assert len(found.models) == MAX_MODELS
    assert found.models[0].manifest == bytes([254]) * 32


def test_jobs_are_listed_by_their_ids() -> None:
    job = records_pb2.CatalogRecord(job=records_pb2.CatalogJob(id=b"\x05" * 32)).SerializeToString()
    assert merge([job, job, b"\x12\x00"]).jobs == ("05" * 32,)


def test_jobs_that_nobody_trains_are_listed_last() -> None:
    trained = records_pb2.CatalogRecord(job=records_pb2.CatalogJob(id=b"\x05" * 32)).SerializeToString()
    made = made_jobs(["01" * 32, "05" * 32], 60.0).body
    assert merge([made, trained]).jobs == ("05" * 32, "01" * 32)


def test_a_peer_that_repeats_a_job_counts_once() -> None:
    repeated = made_jobs(["07" * 32] * 16, 60.0).body
    others = [made_jobs(["09" * 32], 60.0).body] * 2
    assert merge([repeated, *others]).jobs == ("09" * 32, "07" * 32)


@defence("a peer lists at most sixteen jobs as made by itself", off=replacing(catalog, "MAX_MADE", 1000))
def test_one_peer_lists_at_most_sixteen_jobs_of_its_own() -> None:
    ids = [records_pb2.CatalogJob(id=bytes([number]) * 32) for number in range(200)]
    flood = records_pb2.CatalogRecord(made=[*ids, records_pb2.CatalogJob(id=b"short")]).SerializeToString()
    assert merge([flood]).jobs == tuple(f"{number:02x}" * 32 for number in range(16))


class Unread:
    """The stream of a peer that requests a report and never reads it."""

    peer = ASKER

    def __init__(self) -> None:
        self.scope = ResourceManager().peer(ASKER, 0.0)

    async def receive(self) -> Message:
        return Message(report_pb2.ReportRequest().SerializeToString())

    async def send(self, message: Message) -> None:
        await asyncio.get_running_loop().create_future()


def test_peers_that_never_read_keep_no_slot() -> None:
    async def main() -> float:
        stream = Unread()
        await Reporter(host_report).handle(REPORT.accept(cast("Stream", stream)))
        assert not stream.scope.used[Resource.REPORTS]
        return asyncio.get_running_loop().time()

    assert run(main()) == REPORT_IDLE_S
