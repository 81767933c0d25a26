"""The dashboard's state and events, derived from snapshots."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.dashboard.models import advice, block_list, quantiles, replicas_of
from swarmnet.dashboard.observing.counts import (
    MAX_PER_SECOND,
    NO_TIMES,
    Totals,
    Work,
    counts_between,
    quantile,
    work_between,
)
from swarmnet.dashboard.observing.observations import (
    JobObservation,
    PeerObservation,
    Snapshot,
    SwarmInfo,
    TimedReport,
)
from swarmnet.dashboard.state import State, derive, known_before, merge_patch
from swarmnet_protocols.averages import pooled
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.host_announcements import MAX_NUMBER
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.wire import report_pb2
from swarmnet_protocols.wire.records_pb2 import HostRecord
from tests.defences import defence, replacing
from tests.support.dashboard.merge_patches import merged, without_nulls
from tests.support.dashboard.recorded_peers import state_of
from tests.support.dashboard.recorded_swarm import RecordedSwarm

MODEL = CatalogModel(bytes(32), "org/name", 12)
KEY = MODEL.manifest.hex()
NOW_S = 1_800_000_000.0


def peer(name: str) -> PeerId:
    return Identity.from_seed(name.encode()).peer_id


def report(
    span: tuple[int, int] = (0, 12), *, uptime_s: float = 1000.0, state: str = "online", **numbers: Any
) -> report_pb2.NodeReport:
    record = HostRecord(
        manifest=MODEL.manifest,
        start=span[0],
        end=span[1],
        state=state_of(state),
        step_s=0.1,
        sessions=numbers.pop("sessions", 0),
    )
    host = report_pb2.HostReport(record=record, total_blocks=12, **numbers)
    return report_pb2.NodeReport(uptime_s=uptime_s, host=host)


def seen(name: str, span: tuple[int, int] = (0, 12), at_s: float = NOW_S, **fields: Any) -> PeerObservation:
    return replace(PeerObservation(peer(name), NOW_S, newest=TimedReport(report(span), at_s)), **fields)


def announcement(state: str = "online") -> HostInfo:
    return HostInfo(peer("host"), 0, 12, 0.1, state=state, manifest=MODEL.manifest, version="0.1.0")


def snapshot(
    *peers: PeerObservation, now_s: float = NOW_S, jobs: tuple[JobObservation, ...] = ()
) -> Snapshot:
    about = SwarmInfo("lab", "ab" * 32, "open", peer("observer"))
    return Snapshot(now_s, NOW_S - 500.0, about, models=(MODEL,), peers=peers, jobs=jobs)


def kinds(state: State) -> list[str]:
    return [event["kind"] for event in state.new_events]


def entry(state: State, name: str) -> Any:
    return state.body["peers"][peer(name)]


def test_blocks_have_as_many_replicas_as_hosts_that_are_online() -> None:
    state = derive(
        snapshot(
            seen("a", (0, 6)),
            seen("b", (4, 12)),
            seen("c", (4, 12), newest=TimedReport(report((4, 12), state="joining"), NOW_S)),
        )
    )
    model = state.body["models"][KEY]
    assert model["replicas"] == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert model["weakest"] == {"block": 0, "replicas": 1}
    assert model["healthy"]
    assert model["peers"] == 3


def test_a_span_beyond_the_model_counts_within_it() -> None:
    assert replicas_of(4, [{"blocks": [2, 9]}, {"blocks": [7, 9]}]) == [0, 0, 1, 1]


def test_an_empty_swarm_is_unhealthy_and_has_advice() -> None:
    model = derive(snapshot()).body["models"][KEY]
    assert not model["healthy"]
    start, end = model["advice"]["blocks"]
    assert (start, end) in {(0, 4), (8, 12)}
    assert model["advice"]["command"] == f"swarmnet join swarm.toml --model org/name --blocks {start}:{end}"


def test_a_swarm_without_models_has_a_join_command() -> None:
    about = SwarmInfo("a name; reboot", "id", "open", peer("me"), ("swarm.toml", "--bootstrap", "ADDR"))
    state = derive(replace(snapshot(), swarm=about, models=()))
    assert state.body["swarm"]["join"] == "swarm.toml --bootstrap ADDR"


def test_advice_is_the_weakest_window_of_a_usual_length() -> None:
    hosts = [
        (f"p{number}", {"blocks": list(span), "step_s": 0.1, "state": "online"})
        for number, span in enumerate([(0, 4), (0, 4), (8, 12)])
    ]
    found = advice(MODEL, ("swarm.toml",), hosts, replicas_of(12, [each for _, each in hosts]))
    assert found["blocks"] == [4, 8]
    assert found["reason"] == "no host has blocks 4:8, so the model cannot answer"


def test_a_long_gap_gets_more_than_the_short_span_of_a_host() -> None:
    hosts = [("p", {"blocks": [10, 12], "step_s": 0.1, "state": "online"})]
    found = advice(MODEL, ("swarm.toml",), hosts, replicas_of(12, [each for _, each in hosts]))
    assert found["blocks"] in ([0, 4], [6, 10])
    assert found["reason"] == "no host has blocks 0:10, so the model cannot answer"


@pytest.mark.parametrize(
    ("replicas", "blocks", "reason"),
    [
        ([1, 0, 0, 1], [1, 3], "no host has blocks 1:3, so the model cannot answer"),
        ([1, 2, 2, 2], [0, 2], "block 0 has only one host: if it leaves, the model cannot answer"),
        ([1, 2, 1, 2], [0, 2], "block 0 has only one host: if it leaves, the model cannot answer"),
        (
            [3, 3, 2, 3],
            [1, 3],
            "block 2 has the fewest hosts (2), which limits how many people the model can serve",
        ),
        (
            [2, 2, 2, 2],
            [0, 2],
            "each block has 2 hosts: another one lets more people use the model at once",
        ),
    ],
)
def test_advice_is_the_blocks_with_the_fewest_hosts(
    replicas: list[int], blocks: list[int], reason: str
) -> None:
    hosts = [("p", {"blocks": [0, 2], "step_s": None, "state": "online"})]
    found = advice(replace(MODEL, blocks=4), ("swarm.toml",), hosts, replicas)
    assert (found["blocks"], found["reason"]) == (blocks, reason)


def test_advice_never_leaves_out_the_weakest_block() -> None:
    """The headline of the page names the blocks with the fewest hosts."""
    rng = random.Random(7)
    for _ in range(200):
        spans = [sorted(rng.sample(range(13), 2)) for _ in range(rng.randrange(1, 6))]
        hosts = [(str(n), {"blocks": each, "step_s": 0.1, "state": "online"}) for n, each in enumerate(spans)]
        replicas = replicas_of(12, [each for _, each in hosts])
        start, end = advice(MODEL, ("swarm.toml",), hosts, replicas)["blocks"]
        assert min(replicas[start:end]) == min(replicas)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([3], "block 3"),
        ([3, 4, 5], "blocks 3:6"),
        ([4, 5, 17, 21, 22], "blocks 4:6, 17 and 21:23"),
        ([0, 2, 4, 6, 8, 10], "blocks 0, 2, 4, 6 and 2 further ranges"),
    ],
)
def test_blocks_are_named_as_commands_take_them(blocks: list[int], text: str) -> None:
    assert block_list(blocks) == text


@pytest.mark.parametrize("name", ["x; rm -rf ~", "$(reboot)", "--help", "a b", "`id`", "x\u202ey"])
def test_a_model_name_that_is_unsafe_in_a_shell_is_not_in_the_command(name: str) -> None:
    found = advice(replace(MODEL, name=name), ("swarm.toml",), [], [0] * 12)
    start, end = found["blocks"]
    assert found["command"] == f"swarmnet join swarm.toml --model MODEL --blocks {start}:{end}"


def test_rates_are_measured_between_two_reports() -> None:
    before, newest = report(positions=100, answered=10), report(positions=300, answered=20, uptime_s=1004.0)
    host = seen("a", newest=TimedReport(newest, NOW_S), before=TimedReport(before, NOW_S - 4.0))
    state = derive(snapshot(host))
    assert entry(state, "a")["positions_per_s"] == 50.0
    assert state.body["models"][KEY]["tokens_per_s"] == 2.5
    later = derive(snapshot(host, now_s=NOW_S + 60.0))
    assert entry(later, "a")["positions_per_s"] == 0.0, "the report is stale"


def test_counts_restart_at_zero_with_a_node() -> None:
    counts = counts_between(report(positions=1000, uptime_s=500.0), report(positions=30, uptime_s=2.0), 4.0)
    assert counts.positions == 30


def test_impossible_rates_and_decreasing_counters_are_limited() -> None:
    counts = counts_between(report(positions=0), report(positions=1 << 50, uptime_s=1001.0), 2.0)
    assert counts.positions == 2 * MAX_PER_SECOND
    assert counts_between(report(positions=50), report(positions=20, uptime_s=1001.0), 2.0).positions == 0


def test_totals_only_grow() -> None:
    totals = Totals()
    totals.add(
        peer("a"),
        report(positions=10, links_lost=1),
        report(positions=30, links_lost=3, uptime_s=1002.0),
        2.0,
    )
    totals.add_failure(MODEL.manifest)
    assert totals.models[MODEL.manifest].positions == 20
    assert totals.models[MODEL.manifest].failures == 3
    totals.keep_only({peer("b")})
    assert not totals.peers


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


def test_a_peer_that_stops_answering_is_lost_and_recovers() -> None:
    here = derive(snapshot(seen("a"), seen("b")))
    gone = derive(
        snapshot(seen("a"), seen("b", failed_at_s=NOW_S + 1, announced=announcement()), now_s=NOW_S + 2), here
    )
    assert entry(gone, "b")["state"] == "gone"
    assert kinds(gone) == ["lost", "weak"]
    back = derive(snapshot(seen("a"), seen("b", at_s=NOW_S + 4), now_s=NOW_S + 4), gone)
    assert kinds(back) == ["recovered", "healed"]
    assert [event["kind"] for event in back.body["events"]] == ["healed", "recovered", "weak", "lost"]


def test_a_peer_that_announced_its_leave_is_not_lost() -> None:
    here = derive(snapshot(seen("a")))
    gone = derive(
        snapshot(seen("a", failed_at_s=NOW_S + 1, announced=announcement("leaving")), now_s=NOW_S + 2), here
    )
    assert kinds(gone) == ["left", "weak"]


def test_a_paused_peer_hosts_no_blocks() -> None:
    here = derive(snapshot(seen("a")))
    paused = derive(
        snapshot(seen("a", failed_at_s=NOW_S + 1, announced=announcement("paused")), now_s=NOW_S + 2), here
    )
    assert entry(paused, "a")["state"] == "paused"
    assert paused.body["models"][KEY]["replicas"] == [0] * 12
    assert kinds(paused) == ["weak"]


def test_an_unreachable_peer_that_announces_itself_is_silent_not_gone() -> None:
    never_reached = PeerObservation(peer("a"), NOW_S, announcement(), NOW_S, failed_at_s=NOW_S)
    state = derive(snapshot(never_reached))
    assert (entry(state, "a")["state"], entry(state, "a")["silent"]) == ("online", True)
    lost_but_alive = seen("a", failed_at_s=NOW_S, announced=announcement(), announced_at_s=NOW_S + 10)
    assert entry(derive(snapshot(lost_but_alive, now_s=NOW_S + 11)), "a")["state"] == "online"


def test_only_a_peer_that_started_after_the_observer_joins() -> None:
    before = derive(snapshot())
    old = derive(snapshot(seen("a", newest=TimedReport(report(uptime_s=5000.0), NOW_S))), before)
    new = derive(snapshot(seen("a", newest=TimedReport(report(uptime_s=5.0), NOW_S))), before)
    assert kinds(old) == ["healed"]
    assert kinds(new) == ["joined", "healed"]


def test_a_peer_that_is_gone_is_hidden_after_ten_minutes() -> None:
    lost = seen("a", failed_at_s=NOW_S)
    assert derive(snapshot(lost, now_s=NOW_S + 500)).body["peers"]
    assert not derive(snapshot(lost, now_s=NOW_S + 700)).body["peers"]


def test_edges_come_from_the_receiver_and_name_no_client() -> None:
    one, two = peer("a"), peer("b")
    flows = {
        "a": [report_pb2.Flow(downstream=two, sessions=2, positions=100)],
        "b": [
            report_pb2.Flow(upstream=one, sessions=2, positions=100),
            report_pb2.Flow(upstream=peer("stranger"), sessions=1),
        ],
    }
    observations = [
        seen(
            name,
            newest=TimedReport(report(flows=each, uptime_s=1002.0), NOW_S),
            before=TimedReport(report(), NOW_S - 2.0),
        )
        for name, each in flows.items()
    ]
    found = derive(snapshot(*observations)).body["flows"]
    assert {edge: flow["sessions"] for edge, flow in found.items()} == {
        f"client>{one}": 2,
        f"{one}>{two}": 2,
        f"{two}>client": 3,
    }


JOB = JobObservation("cd" * 32, "stories", "diloco", 100, (peer("w"), peer("v")), 7)


def worker(
    name: str, at_s: float = NOW_S, failed_at_s: float | None = None, **fields: Any
) -> PeerObservation:
    contributions = [
        report_pb2.Contribution(peer=peer("w"), rounds=3),
        report_pb2.Contribution(peer=peer("v"), rounds=1),
    ]
    known: dict[str, Any] = {"round": 8, "state": "training", "tokens": 50}
    about = report_pb2.WorkerReport(
        job=bytes.fromhex(JOB.id), rounds=100, contributions=contributions, **known | fields
    )
    node = report_pb2.NodeReport(uptime_s=at_s - NOW_S + 10.0, worker=about)
    return PeerObservation(peer(name), NOW_S, newest=TimedReport(node, at_s), failed_at_s=failed_at_s)


def test_a_job_is_summed_from_the_reports_of_its_workers() -> None:
    job = replace(JOB, workers=(*JOB.workers, peer("never seen")))
    workers = [worker(name, loss=loss, bytes_sent=MAX_NUMBER) for name, loss in (("w", 2.0), ("v", 3.0))]
    state = derive(snapshot(*workers, jobs=(job,)))
    shown = state.body["jobs"][job.id]
    assert (shown["round"], shown["loss"], shown["val_loss"], shown["tokens"]) == (8, 2.5, None, 50)
    assert (shown["workers"], shown["state"], shown["ended_s"]) == (2, "training", None)
    assert [each["share"] for each in shown["contributors"]] == [0.75, 0.25]
    assert entry(state, "w")["role"] == "worker"
    assert entry(state, "w")["job"] == job.id
    assert shown["bytes_sent"] == MAX_NUMBER, "the largest number that history and page can store"


@defence(
    "a worker counts at most one evaluation in the loss of all",
    off=replacing("swarmnet.dashboard.state", "pooled", lambda losses, most: pooled(losses, most=1 << 62)),
)
def test_the_loss_of_all_workers_is_that_of_all_their_tokens() -> None:
    job = replace(JOB, workers=(peer("w"), peer("v"), peer("liar")), evaluation_tokens=192)
    said = {"w": (2.0, 64), "v": (4.0, 192), "liar": (9.0, 1 << 60)}
    workers = [worker(name, val_loss=loss, val_tokens=tokens) for name, (loss, tokens) in said.items()]
    shown = derive(snapshot(*workers, jobs=(job,))).body["jobs"][job.id]
    assert shown["val_loss"] == pytest.approx((2 * 64 + 4 * 192 + 9 * 192) / 448, abs=1e-5)


def test_the_numbers_of_a_job_stay_when_its_workers_leave() -> None:
    here = derive(snapshot(worker("w", bytes_sent=500, loss=2.0, val_loss=3.0, val_tokens=64), jobs=(JOB,)))
    job = replace(JOB, workers=())
    left = derive(snapshot(now_s=NOW_S + 60, jobs=(job,)), here).body["jobs"][JOB.id]
    assert (left["workers"], left["state"], left["ended_s"]) == (0, "idle", NOW_S + 60)
    assert (left["round"], left["bytes_sent"], left["loss"], left["val_loss"]) == (8, 500, 2.0, 3.0)
    assert len(left["contributors"]) == 2


@pytest.mark.parametrize(
    ("last", "left", "done", "ending", "event"),
    [
        (90, 100, True, "finished", "finished its training job"),
        (99, None, True, "finished", "finished its training job"),
        (8, 9, False, "left", "left in good order"),
        (8, 9, True, "left", "left in good order"),
        (8, None, False, "lost", "was lost"),
        (8, None, True, "lost", "was lost"),
    ],
)
def test_a_worker_that_finished_or_left_was_not_lost(
    last: int, left: int | None, done: bool, ending: str, event: str
) -> None:
    """``last``: the round of its last report; ``left``: that of its last record, which says that it
    leaves; ``done``: whether another worker reports that the job is done."""
    here = derive(snapshot(worker("w", round=last), jobs=(JOB,)))
    job = replace(JOB, left={} if left is None else {peer("w"): left})
    peers = [worker("w", failed_at_s=NOW_S + 2, round=last)]
    if done:
        peers.append(worker("v", round=100, state="done"))
    gone = derive(snapshot(*peers, now_s=NOW_S + 3, jobs=(job,)), here)
    assert (entry(gone, "w")["state"], entry(gone, "w")["ending"]) == ("gone", ending)
    said = next(each for each in gone.new_events if each["peer_id"] == peer("w"))
    assert said["text"].endswith(event)
    assert said["kind"] == ("lost" if ending == "lost" else "left")


def test_a_job_is_done_when_a_worker_that_is_gone_said_so() -> None:
    done = worker("w", failed_at_s=NOW_S + 2, round=100, state="done", loss=2.0)
    shown = derive(snapshot(done, now_s=NOW_S + 3, jobs=(replace(JOB, workers=()),))).body["jobs"][JOB.id]
    assert (shown["state"], shown["round"], shown["workers"], shown["loss"]) == ("done", 100, 0, 2.0)


def test_a_worker_is_shown_once_it_has_answered() -> None:
    unknown = PeerObservation(peer("w"), NOW_S)
    first = derive(snapshot(unknown, jobs=(JOB,)))
    assert not first.body["peers"]
    assert (first.body["jobs"][JOB.id]["workers"], first.body["jobs"][JOB.id]["state"]) == (1, "training")
    answered = derive(snapshot(worker("w"), jobs=(JOB,)), first)
    assert entry(answered, "w")["state"] == "online"
    assert kinds(answered) == ["joined"], "it was never gone"


def test_a_host_that_left_stays_so_when_its_record_expires() -> None:
    here = derive(snapshot(seen("a")))
    leaving = seen("a", failed_at_s=NOW_S + 1, announced=announcement("leaving"))
    left = derive(snapshot(leaving, now_s=NOW_S + 2), here)
    later = derive(snapshot(replace(leaving, announced=None), now_s=NOW_S + 99), left)
    assert [entry(each, "a")["ending"] for each in (left, later)] == ["left", "left"]
    assert not later.new_events


def test_a_peer_that_is_gone_was_last_seen_with_its_last_report() -> None:
    here = derive(snapshot(seen("a")))
    for at_s in (NOW_S + 2, NOW_S + 300):
        gone = derive(snapshot(seen("a", failed_at_s=NOW_S + 2), now_s=at_s), here)
        assert entry(gone, "a")["last_seen_s"] == NOW_S
        assert entry(gone, "a")["started_s"] == NOW_S - 1000


def test_a_finished_job_is_kept_for_thirty_days() -> None:
    done = derive(snapshot(worker("w", round=100, state="done", loss=2.0), jobs=(JOB,)))
    ended = derive(snapshot(now_s=NOW_S + 60), done)
    assert ended.body["jobs"][JOB.id]["state"] == "done"
    history = json.loads(json.dumps(ended.body["jobs"]))
    for days, is_kept in ((1, True), (29.9, True), (30.1, False)):
        again = derive(snapshot(now_s=NOW_S + 60 + days * 86400), known_before(jobs=history))
        assert bool(again.body["jobs"]) is is_kept, f"after a restart of the dashboard on day {days}"


def test_work_is_counted_by_positions_and_the_blocks_they_passed() -> None:
    totals = Totals()
    before, after = report(positions=5), report(positions=15, uptime_s=1002.0)
    again = report(positions=1, uptime_s=1.0)
    for node, given in ((before, 60), (after, 160), (again, 180)):
        node.given.CopyFrom(report_pb2.Given(block_positions=given))
    totals.add(peer("a"), before, after, 2.0)
    totals.add(peer("a"), after, again, 2.0)
    assert totals.peers[peer("a")] == Work(10 + 1, 120), "what was given counts on over a restart"
    trained = [report_pb2.NodeReport(uptime_s=each, given={"samples": each}) for each in (3, 7)]
    totals.add(peer("w"), *trained, 4.0)
    assert totals.peers[peer("w")] == Work(samples=4)


def test_impossible_work_is_limited() -> None:
    node = report(positions=1 << 40, uptime_s=1001.0)
    node.given.CopyFrom(report_pb2.Given(block_positions=1 << 60, samples=1 << 40))
    work = work_between(report(), node, 2.0)
    most = 2 * MAX_PER_SECOND
    assert work == Work(most, most * MAX_BLOCKS, 0, most)


@pytest.mark.parametrize("kind", ["full", "empty", "broken"])
def test_patches_turn_each_state_into_the_next(kind: str) -> None:
    now_s = NOW_S
    swarm = RecordedSwarm(kind, lambda: now_s)
    state = derive(swarm.snapshot())
    copy = json.loads(json.dumps(state.body))
    for _ in range(20):
        now_s += 4.0
        after = derive(swarm.snapshot(), state)
        copy = merged(copy, json.loads(json.dumps(merge_patch(state.body, after.body))))
        state = after
        assert without_nulls(copy) == without_nulls(json.loads(json.dumps(state.body)))


def test_the_state_has_no_addresses() -> None:
    text = json.dumps(derive(RecordedSwarm("full", lambda: NOW_S).snapshot()).body)
    assert "/ip4/" not in text
    assert "/tcp/" not in text
