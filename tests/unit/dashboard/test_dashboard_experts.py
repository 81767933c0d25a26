"""Routed experts in the dashboard's state: the map of a model, missing experts, and the advice for
newcomers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.dashboard.observing.observations import PeerObservation, Snapshot, SwarmInfo, TimedReport
from swarmnet.dashboard.state import State, derive
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.node_reports import check, describe_experts
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.wire import report_pb2
from swarmnet_protocols.wire.records_pb2 import HostRecord
from tests.support.dashboard.recorded_peers import state_of

MODEL = CatalogModel(bytes(32), "org/name", 4)
NOW_S = 1_800_000_000.0
EXPERTS = 6
ALL = {block: {*range(EXPERTS)} for block in (2, 3)}
"""The experts of the model; blocks 0 and 1 have none."""
Experts = Mapping[int, set[int]]


def peer(name: str) -> PeerId:
    return Identity.from_seed(name.encode()).peer_id


def experts(of: Experts) -> dict[int, frozenset[int]]:
    return {block: frozenset(each) for block, each in of.items()}


def seen(
    name: str, report: report_pb2.NodeReport, before: report_pb2.NodeReport | None = None
) -> PeerObservation:
    check(report)
    earlier = TimedReport(before, NOW_S - 2.0) if before is not None else None
    return PeerObservation(peer(name), NOW_S, newest=TimedReport(report, NOW_S), before=earlier)


def expert_report(of: Experts, rows: Mapping[tuple[int, int], int] | None = None) -> report_pb2.NodeReport:
    host = report_pb2.HostReport(
        record=HostRecord(manifest=MODEL.manifest, state=state_of("online")),
        total_blocks=4,
        experts=describe_experts(experts(of), rows),
        expert_streams=2,
    )
    return report_pb2.NodeReport(uptime_s=1000.0, host=host)


def trunk_report(
    lacks: Experts = ALL, missing: Experts | None = None, own: Experts | None = None
) -> report_pb2.NodeReport:
    host = report_pb2.HostReport(
        record=HostRecord(manifest=MODEL.manifest, end=4, state=state_of("joining" if missing else "online")),
        total_blocks=4,
        experts=describe_experts(experts(own or {})),
        trunk=report_pb2.TrunkReport(
            lacks=describe_experts(experts(lacks)),
            missing=describe_experts(experts(missing or {})),
            round_trips_s=[0.001, 0.002],
            far=1,
            rows=300,
            hedged=2,
        ),
    )
    return report_pb2.NodeReport(uptime_s=1000.0, host=host)


def state(*peers: PeerObservation, previous: State | None = None) -> State:
    about = SwarmInfo("lab", "ab" * 32, "open", peer("observer"))
    return derive(Snapshot(NOW_S, NOW_S - 500.0, about, models=(MODEL,), peers=peers), previous)


def model_of(found: State) -> Any:
    return found.body["models"][MODEL.manifest.hex()]


def test_the_map_has_a_digit_for_each_expert() -> None:
    model = model_of(
        state(
            seen("a", expert_report({2: {0, 1, 2}, 3: {0}})),
            seen("b", expert_report({2: {2, 3}, 3: {*range(EXPERTS)}})),
            seen("trunk", trunk_report(own={2: {5}}, missing={2: {4}})),
        )
    )
    assert model["experts"] == {
        "peers": 3,
        "experts": EXPERTS,
        "replicas": {"2": "1121x1", "3": "211111"},
        "load": {},
        "missing": 1,
        "missing_text": "2:4",
        "single": 9,
    }
    assert model["peers"] == 3
    assert not model["healthy"], "a host that waits for experts is not online"


def test_a_model_without_experts_on_peers_has_no_map() -> None:
    report = report_pb2.HostReport(
        record=HostRecord(manifest=MODEL.manifest, end=4, state=state_of("online")), total_blocks=4
    )
    model = model_of(state(seen("a", report_pb2.NodeReport(uptime_s=1.0, host=report))))
    assert model["experts"] is None


def test_the_load_is_relative_to_the_mean_of_the_block() -> None:
    rows = {(2, 0): 10, (2, 1): 90, (2, 2): 100, (2, 3): 400}
    model = model_of(
        state(
            seen("a", expert_report({2: {0, 1, 2, 3, 4, 5}}, rows)),
            seen("b", expert_report({2: {1}, 3: {0}}, {(2, 1): 20})),
        )
    )
    assert model["experts"]["load"] == {"2": "132400"}, "the mean is 103.3 rows"


def test_experts_beyond_the_model_are_not_counted() -> None:
    assert model_of(state(seen("a", expert_report({4: {0}}))))["experts"] is None


def test_an_expert_peer_is_shown_with_its_rows_and_streams() -> None:
    before, now = expert_report({2: {0, 1}}, {(2, 0): 100}), expert_report({2: {0, 1}}, {(2, 0): 140})
    entry = state(seen("a", now, before)).body["peers"][peer("a")]
    assert (entry["role"], entry["state"], entry["blocks"], entry["trunk"]) == (
        "experts",
        "online",
        None,
        None,
    )
    assert entry["model"] == MODEL.manifest.hex()
    assert entry["experts"] == {
        "count": 2,
        "text": "2:0-1",
        "runs": [[2, 3]],
        "rows_per_s": 20.0,
        "streams": 2,
    }


def test_a_trunk_is_shown_with_what_peers_compute_for_it() -> None:
    entry = state(seen("a", trunk_report(missing={3: {1, 2}}))).body["peers"][peer("a")]
    assert (entry["role"], entry["state"], entry["experts"]) == ("host", "joining", None)
    assert entry["trunk"] == {
        "lacks": 12,
        "missing": 2,
        "missing_text": "3:1-2",
        "peers": 2,
        "round_trip_s": 0.002,
        "far": 1,
        "rows": 300,
        "failed": 0,
        "hedged": 2,
        "loaded": 0,
    }


def test_an_announced_expert_peer_counts_and_a_lost_one_does_not() -> None:
    record = HostInfo(peer("a"), 0, 0, 0.0, manifest=MODEL.manifest)
    announced = PeerObservation(
        peer("a"), NOW_S, announced=record, announced_at_s=NOW_S, experts=experts({2: {0}})
    )
    found = state(announced)
    assert found.body["peers"][peer("a")]["role"] == "experts"
    assert model_of(found)["experts"]["replicas"] == {"2": "1"}
    assert model_of(state(replace(announced, announced=None, experts={})))["experts"] is None


@pytest.mark.parametrize(
    ("peers", "command", "reason"),
    [
        ([], "2-3:0-1", "no peer within reach of the hosts has 12 experts 2-3:0-5 (blocks:experts)"),
        ([{2: {0, 1}, 3: ALL[3]}], "'2:0-5;3:0-1'", "no peer within reach of the hosts has 4 experts 2:2-5"),
        ([ALL], "2-3:0-5", "no spare peer has 12 experts 2-3:0-5"),
        ([ALL, {2: {0, 1, 2}}], "3:0-2", "no spare peer has 9 experts"),
    ],
    ids=["none", "some", "each once", "some twice"],
)
def test_the_advice_is_to_host_the_experts_that_fewest_peers_have(
    peers: list[Experts], command: str, reason: str
) -> None:
    there = {block: {*[each for one in peers for each in one.get(block, ())]} for block in ALL}
    missing = {block: lacked for block in ALL if (lacked := ALL[block] - there[block])}
    observed = [seen(f"p{number}", expert_report(each)) for number, each in enumerate(peers)]
    trunks = [seen(f"t{number}", trunk_report(missing=missing)) for number in range(2)]
    advice = model_of(state(*observed, *trunks))["advice"]
    assert advice["command"] == f"swarmnet join swarm.toml --model org/name --experts {command}"
    assert advice["reason"].startswith(reason)


def test_blocks_without_a_host_come_before_experts() -> None:
    advice = model_of(state(seen("a", expert_report({2: {0}}))))["advice"]
    assert "--blocks" in advice["command"], "no host asks for experts"
    one = model_of(state(seen("a", expert_report(ALL)), seen("t", trunk_report())))["advice"]
    assert "--blocks" in one["command"], "one host, and one peer of each expert: a second host first"


def test_missing_experts_are_events() -> None:
    first = state(seen("a", expert_report(ALL)), seen("t", trunk_report()))
    second = state(seen("t", trunk_report(missing={2: {0, 1}})), previous=first)
    texts = [event["text"] for event in second.new_events if event["kind"] == "weak"]
    assert texts == ["no peer has experts 2:0-1 of org/name"], "the hosts of blocks are there"
    third = state(seen("a", expert_report(ALL)), seen("t", trunk_report()), previous=second)
    assert [event["text"] for event in third.new_events if event["kind"] == "healed"] == [
        "every expert of org/name has a peer again"
    ]
