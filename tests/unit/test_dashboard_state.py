"""The dashboard's state and what it says that happened, from what was seen."""

import json
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.dashboard.observing.sightings import (
    Announced,
    JobSighting,
    Look,
    Reported,
    Sighting,
    SwarmAbout,
)
from swarmnet.dashboard.observing.tally import MAX_PER_SECOND, NO_TIMES, Tallies, between, quantile
from swarmnet.dashboard.state.coverage import advice, quantiles, replicas_of
from swarmnet.dashboard.state.state import State, derive, merge_patch
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.node_reports import MAX_NUMBER
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import report_pb2
from tests.support.merge_patches import merged, without_nulls
from tests.support.recorded_swarm import RecordedSwarm

MODEL = CatalogModel(bytes(32), "org/name", 12)
KEY = MODEL.manifest.hex()
NOW_S = 1_800_000_000.0


def peer(name: str) -> PeerId:
    return Identity.from_seed(name.encode()).peer_id


def report(
    span: tuple[int, int] = (0, 12), *, uptime_s: float = 1000.0, state: str = "online", **numbers: Any
) -> report_pb2.NodeReport:
    host = report_pb2.HostReport(
        manifest=MODEL.manifest,
        total_blocks=12,
        start=span[0],
        end=span[1],
        state=state,
        step_s=0.1,
        **numbers,
    )
    return report_pb2.NodeReport(uptime_s=uptime_s, host=host)


def seen(name: str, span: tuple[int, int] = (0, 12), at_s: float = NOW_S, **fields: Any) -> Sighting:
    return replace(Sighting(peer(name), NOW_S, newest=Reported(report(span), at_s)), **fields)


def announced(state: str = "online") -> Announced:
    return Announced(MODEL.manifest, 0, 12, state, "0.1.0", "", 0.1, 0, 0, None)


def look(*peers: Sighting, now_s: float = NOW_S, jobs: tuple[JobSighting, ...] = ()) -> Look:
    about = SwarmAbout("lab", "ab" * 32, "open", peer("observer"))
    return Look(now_s, NOW_S - 500.0, about, models=(MODEL,), peers=peers, jobs=jobs)


def kinds(state: State) -> list[str]:
    return [event["kind"] for event in state.new_events]


def entry(state: State, name: str) -> Any:
    return state.body["peers"][peer(name)]


def test_blocks_have_as_many_replicas_as_hosts_that_are_online() -> None:
    state = derive(
        look(
            seen("a", (0, 6)),
            seen("b", (4, 12)),
            seen("c", (4, 12), newest=Reported(report((4, 12), state="joining"), NOW_S)),
        )
    )
    model = state.body["models"][KEY]
    assert model["replicas"] == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert model["weakest"] == {"block": 0, "replicas": 1}
    assert model["healthy"]
    assert model["peers"] == 3


def test_a_span_beyond_the_model_counts_within_it() -> None:
    assert replicas_of(4, [{"blocks": [2, 9]}, {"blocks": [7, 9]}]) == [0, 0, 1, 1]


def test_an_empty_swarm_is_not_healthy_and_says_what_to_host() -> None:
    model = derive(look()).body["models"][KEY]
    assert not model["healthy"]
    assert model["advice"]["blocks"] == [0, 4]
    assert model["advice"]["command"] == "swarmnet join swarm.toml --model org/name --blocks 0:4"


def test_what_a_newcomer_types_is_told_even_of_a_swarm_without_models() -> None:
    about = SwarmAbout("a name; reboot", "id", "open", peer("me"), ("swarm.toml", "--bootstrap", "ADDR"))
    state = derive(replace(look(), swarm=about, models=()))
    assert state.body["swarm"]["join"] == "swarm.toml --bootstrap ADDR"


def test_advice_is_the_weakest_window_of_a_usual_length() -> None:
    hosts = [
        (f"p{number}", {"blocks": list(span), "step_s": 0.1, "state": "online"})
        for number, span in enumerate([(0, 4), (0, 4), (8, 12)])
    ]
    found = advice(MODEL, ("swarm.toml",), hosts, replicas_of(12, [each for _, each in hosts]))
    assert found["blocks"] == [4, 8]
    assert found["reason"] == "no peer hosts blocks 4:8: the model cannot answer"


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ([1, 2, 2, 2], "only one peer hosts block 0: when it leaves, the model cannot answer"),
        ([1, 2, 1, 2], "only one peer hosts 2 of blocks 0:3: when it leaves, the model cannot answer"),
        ([3, 2, 3, 3], "block 1 has the fewest peers: 2"),
        ([3, 2, 2, 3], "blocks 1:3 have the fewest peers: 2"),
    ],
)
def test_advice_says_why(replicas: list[int], reason: str) -> None:
    hosts = [("p", {"blocks": [0, 4], "step_s": None, "state": "online"})]
    assert advice(replace(MODEL, blocks=4), ("swarm.toml",), hosts, replicas)["reason"] == reason


@pytest.mark.parametrize("name", ["x; rm -rf ~", "$(reboot)", "--help", "a b", "`id`", "x\u202ey"])
def test_nobody_pastes_what_a_stranger_calls_a_model(name: str) -> None:
    found = advice(replace(MODEL, name=name), ("swarm.toml",), [], [0] * 12)
    assert found["command"] == "swarmnet join swarm.toml --model MODEL --blocks 0:4"


def test_rates_are_what_happened_between_two_reports() -> None:
    before, newest = report(positions=100, answered=10), report(positions=300, answered=20, uptime_s=1004.0)
    host = seen("a", newest=Reported(newest, NOW_S), before=Reported(before, NOW_S - 4.0))
    state = derive(look(host))
    assert entry(state, "a")["tokens_per_s"] == 50.0
    assert state.body["models"][KEY]["tokens_per_s"] == 2.5
    later = derive(look(host, now_s=NOW_S + 60.0))
    assert entry(later, "a")["tokens_per_s"] == 0.0, "that is long ago"


def test_a_node_that_was_started_again_counts_from_nothing() -> None:
    counts = between(report(positions=1000, uptime_s=500.0), report(positions=30, uptime_s=2.0), 4.0)
    assert counts.positions == 30


def test_nobody_drowns_the_others_with_what_cannot_be() -> None:
    counts = between(report(positions=0), report(positions=1 << 50, uptime_s=1001.0), 2.0)
    assert counts.positions == 2 * MAX_PER_SECOND
    assert between(report(positions=50), report(positions=20, uptime_s=1001.0), 2.0).positions == 0


def test_tallies_only_grow() -> None:
    tallies = Tallies()
    tallies.add(
        peer("a"),
        report(positions=10, links_lost=1),
        report(positions=30, links_lost=3, uptime_s=1002.0),
        2.0,
    )
    tallies.lost(MODEL.manifest)
    assert tallies.models[MODEL.manifest].positions == 20
    assert tallies.models[MODEL.manifest].failures == 3
    tallies.keep_only({peer("b")})
    assert not tallies.peers


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({}, 0.5, None),
        ({3: 10}, 0.5, 0.0375),
        ({3: 10}, 1.0, 0.05),
        ({3: 90, 6: 10}, 0.95, 0.375),
        ({13: 5}, 0.5, 50.0),
    ],
)
def test_quantiles_lie_within_their_bucket(
    counts: dict[int, int], share: float, expected: float | None
) -> None:
    times = tuple(counts.get(index, 0) for index in range(len(NO_TIMES)))
    assert quantile(times, share) == (expected if expected is None else pytest.approx(expected))
    assert (quantiles(times) is None) == (not counts)


def test_who_does_not_answer_any_more_is_lost() -> None:
    here = derive(look(seen("a"), seen("b")))
    gone = derive(
        look(seen("a"), seen("b", failed_at_s=NOW_S + 1, announced=announced()), now_s=NOW_S + 2), here
    )
    assert entry(gone, "b")["state"] == "gone"
    assert kinds(gone) == ["lost", "weak"]
    back = derive(look(seen("a"), seen("b", at_s=NOW_S + 4), now_s=NOW_S + 4), gone)
    assert kinds(back) == ["recovered", "healed"]
    assert [event["kind"] for event in back.body["events"]] == ["healed", "recovered", "weak", "lost"]


def test_who_said_goodbye_is_not_lost() -> None:
    here = derive(look(seen("a")))
    gone = derive(
        look(seen("a", failed_at_s=NOW_S + 1, announced=announced("leaving")), now_s=NOW_S + 2), here
    )
    assert kinds(gone) == ["left", "weak"]


def test_who_pauses_is_paused_and_hosts_nothing() -> None:
    here = derive(look(seen("a")))
    paused = derive(
        look(seen("a", failed_at_s=NOW_S + 1, announced=announced("paused")), now_s=NOW_S + 2), here
    )
    assert entry(paused, "a")["state"] == "paused"
    assert paused.body["models"][KEY]["replicas"] == [0] * 12
    assert kinds(paused) == ["weak"]


def test_who_is_out_of_our_reach_but_announces_itself_is_silent_not_gone() -> None:
    never_reached = Sighting(peer("a"), NOW_S, announced(), NOW_S, failed_at_s=NOW_S)
    state = derive(look(never_reached))
    assert (entry(state, "a")["state"], entry(state, "a")["silent"]) == ("online", True)
    lost_but_alive = seen("a", failed_at_s=NOW_S, announced=announced(), announced_at_s=NOW_S + 10)
    assert entry(derive(look(lost_but_alive, now_s=NOW_S + 11)), "a")["state"] == "online"


def test_only_who_came_after_us_joined() -> None:
    before = derive(look())
    old = derive(look(seen("a", newest=Reported(report(uptime_s=5000.0), NOW_S))), before)
    new = derive(look(seen("a", newest=Reported(report(uptime_s=5.0), NOW_S))), before)
    assert kinds(old) == ["healed"]
    assert kinds(new) == ["joined", "healed"]


def test_what_is_gone_for_long_is_not_shown() -> None:
    lost = seen("a", failed_at_s=NOW_S)
    assert derive(look(lost, now_s=NOW_S + 500)).body["peers"]
    assert not derive(look(lost, now_s=NOW_S + 700)).body["peers"]


def test_flows_are_told_by_who_receives_and_name_no_client() -> None:
    one, two = peer("a"), peer("b")
    flows = {
        "a": [report_pb2.Flow(downstream=two, sessions=2, positions=100)],
        "b": [
            report_pb2.Flow(upstream=one, sessions=2, positions=100),
            report_pb2.Flow(upstream=peer("stranger"), sessions=1),
        ],
    }
    sightings = [
        seen(
            name,
            newest=Reported(report(flows=each, uptime_s=1002.0), NOW_S),
            before=Reported(report(), NOW_S - 2.0),
        )
        for name, each in flows.items()
    ]
    found = derive(look(*sightings)).body["flows"]
    assert {edge: flow["sessions"] for edge, flow in found.items()} == {
        f"client>{one}": 2,
        f"{one}>{two}": 2,
        f"{two}>client": 3,
    }


def test_a_job_is_what_its_workers_say() -> None:
    job = JobSighting("cd" * 32, "stories", "diloco", 100, (peer("w"), peer("v"), peer("gone")), 7)
    workers = [
        Sighting(
            peer(name),
            NOW_S,
            newest=Reported(
                report_pb2.NodeReport(
                    uptime_s=10.0,
                    worker=report_pb2.WorkerReport(
                        job=bytes.fromhex(job.id),
                        round=8,
                        rounds=100,
                        loss=loss,
                        tokens=50,
                        bytes_sent=MAX_NUMBER,
                        contributions=[
                            report_pb2.Contribution(peer=peer("w"), rounds=3),
                            report_pb2.Contribution(peer=peer("v"), rounds=1),
                        ],
                    ),
                ),
                NOW_S,
            ),
        )
        for name, loss in (("w", 2.0), ("v", 3.0))
    ]
    state = derive(look(*workers, jobs=(job,)))
    shown = state.body["jobs"][job.id]
    assert (shown["round"], shown["loss"], shown["val_loss"], shown["tokens"]) == (8, 2.5, None, 50)
    assert [each["share"] for each in shown["contributors"]] == [0.75, 0.25]
    assert entry(state, "w")["role"] == "trainer"
    assert entry(state, "w")["job"] == job.id
    assert shown["bytes_sent"] == MAX_NUMBER, "more is no number that the history or a page can hold"


@pytest.mark.parametrize("kind", ["full", "empty", "broken"])
def test_patches_lead_from_state_to_state(kind: str) -> None:
    now_s = NOW_S
    swarm = RecordedSwarm(kind, lambda: now_s)
    state = derive(swarm.look())
    copy = json.loads(json.dumps(state.body))
    for _ in range(20):
        now_s += 4.0
        after = derive(swarm.look(), state)
        copy = merged(copy, json.loads(json.dumps(merge_patch(state.body, after.body))))
        state = after
        assert without_nulls(copy) == without_nulls(json.loads(json.dumps(state.body)))


def test_nothing_about_the_place_of_anybody_is_in_the_state() -> None:
    text = json.dumps(derive(RecordedSwarm("full", lambda: NOW_S).look()).body)
    assert "/ip4/" not in text
    assert "/tcp/" not in text
