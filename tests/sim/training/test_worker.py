"""Complete workers train a tiny job in virtual time while some of them fail."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint, params_hash
from swarmnet_node.training.replica import RESIDUAL
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import EXCHANGE, MATCHMAKING
from swarmnet_protocols.training.job_records import find_records, find_workers
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.network.virtual_time import run
from tests.support.training.workers import ROUNDS, SWARM, WorkerLab, train, write_job

NAMES = ("anna", "boris", "clara", "dora")
SETTINGS = {
    "allreduce": "",
    "diloco": "sync_every = 2",
    "streaming": "sync_every = 4\nfragments = 2\noverlap_steps = 1",
    "eager": "sync_every = 2",
    "noloco": "sync_every = 2",
    "sparseloco": "sync_every = 2",
    "co2": "sync_every = 2",
    "zo": "sync_every = 2\nlearning_rate = 1e-3",
}

MIN = "min_workers = %d"


@pytest.mark.parametrize("method", SETTINGS)
def test_every_method_completes_a_job(method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 3))
    run(train(lab, *NAMES[:3]))

    for name in NAMES[:3]:
        if method != "noloco":  # its workers do not wait for each other at the start
            assert list(lab.rounds(name)) == list(range(ROUNDS))
        assert lab.events[name][-1]["event"] == "done"
        assert all(event["loss"] > 0 for event in lab.rounds(name).values())
    if method != "noloco":  # its replicas are close but never equal
        lab.check_equal()
        assert all(len(event["contributors"]) == 3 for event in lab.rounds("anna").values())


@pytest.mark.parametrize("method", ["allreduce", "diloco", "streaming", "zo"])
def test_the_totals_of_workers_are_what_they_trained(method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 2))
    run(train(lab, *NAMES[:2]))

    job = open_job(lab.sealed).job
    trained = sum(event["tokens"] for event in lab.rounds("anna").values())
    given = [lab.workers[name]._dependencies.given for name in NAMES[:2]]
    assert sum(each.samples for each in given) * job.data.sequence_length == trained
    blocks = lab.workers["anna"]._replica.trainer.blocks
    assert sum(each.block_positions for each in given) == 2 * trained * blocks


def test_a_worker_that_leaves_says_so_in_the_directory(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", SETTINGS["diloco"], MIN % 3))

    async def scenario() -> list[tuple[int, tuple[str, ...]]]:
        reader = Identity.from_seed(b"reader")
        async with lab.network.transport(reader.peer_id):
            await train(lab, *NAMES[:3])
            directory = MemoryDirectory(lab.board, reader, SWARM)
            job = open_job(lab.sealed).id
            assert not await find_workers(directory, job)
            left = await find_records(directory, job)
        return [(each.position.round, each.worker.addresses) for each in left]

    assert run(scenario()) == [(ROUNDS, ())] * 3


def test_different_replicas_are_merged_at_the_end(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "noloco", SETTINGS["noloco"], MIN % 3))
    run(train(lab, *NAMES[:3]))

    ended = {name: merge(lab, name) for name in NAMES[:3]}
    assert all(event["committed"] and len(event["contributors"]) == 3 for event in ended.values())
    assert len({event["params_hash"] for event in ended.values()}) == 1
    saved = [saved_hash(lab, name) for name in NAMES[:3]]
    assert saved == [event["params_hash"] for event in ended.values()]
    last = {lab.rounds(name)[ROUNDS - 1]["params_hash"] for name in NAMES[:3]}
    assert len(last) > 1, "before it they differed"


def test_replicas_without_a_majority_are_not_merged(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "noloco", SETTINGS["noloco"], MIN % 3))
    names = {lab.peer(name): name for name in NAMES[:3]}

    def isolate_all(delivery: Delivery) -> None:
        """Isolate all workers when the first one sends its contribution to the merge."""
        ready = all(lab.rounds(name).get(ROUNDS - 1) for name in names.values())
        if ready and delivery.protocol == EXCHANGE and len(delivery.message.payload) > 1000:
            for peer in names:
                lab.network.isolate(peer)

    lab.network.observers.append(isolate_all)
    run(train(lab, *NAMES[:3]))

    for name in NAMES[:3]:
        event = merge(lab, name)
        assert not event["committed"]
        assert event["reason"]
        assert event["params_hash"] == lab.rounds(name)[ROUNDS - 1]["params_hash"] == saved_hash(lab, name)
        assert lab.events[name][-1]["event"] == "done"


def merge(lab: WorkerLab, name: str) -> dict[str, Any]:
    (event,) = [event for event in lab.events[name] if event["event"] == "merge"]
    return event


def saved(lab: WorkerLab, name: str) -> WorkerCheckpoint:
    checkpoint = CheckpointStore(lab.folder / name).load_newest(open_job(lab.sealed).id)
    assert checkpoint is not None
    return checkpoint


def saved_hash(lab: WorkerLab, name: str) -> str:
    return params_hash(saved(lab, name).parameters)


@pytest.mark.parametrize("codec", ["bfloat16", "float16", "int8", "int4", "fp4", "topk"])
def test_workers_stay_equal_under_every_codec(codec: str, tmp_path: Path) -> None:
    lab = WorkerLab(
        tmp_path, write_job(tmp_path, "diloco", "sync_every = 1", f'{MIN % 3}\ncodec = "{codec}"', rounds=3)
    )
    run(train(lab, *NAMES[:3]))

    lab.check_equal()
    assert all(len(lab.rounds(name)) == 3 for name in NAMES[:3])
    for name in NAMES[:3]:
        outer = saved(lab, name).outer
        assert bool(outer[RESIDUAL].any()) if codec != "bfloat16" else RESIDUAL not in outer


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
@pytest.mark.parametrize("method", ["diloco", "streaming", "eager"])
def test_a_failed_worker_costs_only_its_own_contribution(fault: str, method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 3))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round" and event["round"] == 1:
            if fault == "crash":
                lab.crash("boris")
            else:
                getattr(lab.network, fault)(lab.peer("boris"))
                lab.tasks["boris"].cancel()  # a frozen worker does not end by itself

    lab.observer = watch
    run(train(lab, *NAMES))

    lab.check_equal()
    for name in ("anna", "clara", "dora"):
        assert lab.events[name][-1]["event"] == "done"
        assert max(lab.rounds(name)) == ROUNDS - 1
        assert lab.peer("boris") not in lab.rounds(name)[ROUNDS - 1]["contributors"]


def test_a_newcomer_downloads_the_state_and_contributes_a_round_later(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", MIN % 2, rounds=8))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round" and event["round"] == 1:
            lab.start("dora")

    lab.observer = watch
    run(train(lab, *NAMES[:2]))

    lab.check_equal()
    healed = next(event for event in lab.events["dora"] if event["event"] == "healed")
    first, *later = sorted(lab.rounds("dora"))
    assert healed["round"] <= first
    assert later[-1] == 7
    contributors = [lab.rounds("anna")[number]["contributors"] for number in (first, *later)]
    assert lab.peer("dora") not in contributors[0]
    assert all(lab.peer("dora") in each for each in contributors[1:])


def test_a_newcomer_during_an_exchange_downloads_one_state_only(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", MIN % 2, rounds=6))
    slow = LinkProfile(delay_s=0.02, bytes_per_s=2e4)
    lab.network.set_link(lab.peer("anna"), lab.peer("boris"), slow)  # an exchange takes a second

    def come(delivery: Delivery) -> None:
        if delivery.protocol == EXCHANGE and delivery.message.payload and lab.rounds("anna"):
            lab.network.observers.remove(come)
            lab.start("dora")

    lab.network.observers.append(come)
    run(train(lab, *NAMES[:2]))

    lab.check_equal()
    assert [event["event"] for event in lab.events["dora"]].count("healed") == 1
    assert lab.peer("dora") in lab.rounds("anna")[3]["contributors"]


@pytest.mark.parametrize("during", ["steps", "exchange"])
def test_a_worker_that_pauses_keeps_nobody_waiting(during: str, tmp_path: Path) -> None:
    """In the middle of an exchange it ends the round with the others. Later it goes on from
    there."""
    job = write_job(tmp_path, "diloco", "sync_every = 2", MIN % 2, rounds=12)
    lab = WorkerLab(tmp_path, job, step_s=dict.fromkeys(NAMES, 2.0))
    paused: list[int] = []

    def pause(round: int) -> None:
        if not paused:
            lab.workers["boris"].pause()
            paused.append(round)

    def on_delivery(delivery: Delivery) -> None:
        is_own = delivery.source == lab.peer("boris") and delivery.protocol == EXCHANGE
        if is_own and 1 in lab.rounds("anna") and len(delivery.message.payload) > 1000:
            pause(2)

    def on_event(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round" and event["round"] == 1 and during == "steps":
            asyncio.get_running_loop().call_later(1.0, pause, 1)
        if name == "anna" and event["event"] == "round" and event["round"] == 5:
            lab.start("boris")

    if during == "exchange":
        lab.network.observers.append(on_delivery)
    lab.observer = on_event
    run(train(lab, *NAMES[:3]))

    lab.check_equal()
    (last,) = paused
    boris, rounds = lab.peer("boris"), lab.rounds("anna")
    assert list(rounds) == list(range(12))
    assert [boris in rounds[number]["contributors"] for number in (last, last + 1, 5, 11)] == [
        True,
        False,
        False,
        True,
    ]
    assert all(event["wait_s"] < 3.0 for event in rounds.values())
    assert [event["event"] for event in lab.events["boris"]].count("done") == 1
    resumed = [event["round"] for event in lab.events["boris"] if event["event"] == "ready"]
    assert resumed == [0, last + 1]


@pytest.mark.parametrize("place", range(3), ids=["first", "second", "last"])
def test_a_state_is_served_until_a_newcomer_has_downloaded_it(place: int, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", MIN % 2, rounds=6))
    lab.step_s = dict.fromkeys(NAMES, 0.1)
    others = sorted(NAMES[:3], key=lab.peer)
    newcomer = others.pop(place)
    for name in others:
        slow = LinkProfile(delay_s=0.02, bytes_per_s=3e4)  # the download takes longer than a round
        lab.network.set_link(lab.peer(newcomer), lab.peer(name), slow)

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == others[0] and event["event"] == "round" and event["round"] == 1:
            lab.start(newcomer)

    lab.observer = watch
    run(train(lab, *others))

    lab.check_equal()
    assert [event["event"] for event in lab.events[newcomer]].count("healed") == 1
    assert lab.peer(newcomer) in lab.rounds(others[0])[4]["contributors"]


def test_the_last_worker_continues_alone_and_others_rejoin(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", rounds=6))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round":
            if event["round"] == 1:
                lab.crash("boris")
            elif event["round"] == 3:
                lab.start("clara")

    lab.observer = watch
    run(train(lab, *NAMES[:2]))

    lab.check_equal()
    assert max(lab.rounds("anna")) == max(lab.rounds("clara")) == 5
    assert [event["event"] for event in lab.events["clara"]].count("healed") == 1, "the round waits for it"


@pytest.mark.parametrize("method", ["diloco", "streaming", "eager", "co2"])
def test_a_worker_behind_in_its_last_round_repeats_it(method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method]))
    names = {lab.peer(name): name for name in NAMES[:2]}

    def cut_the_last_exchange(delivery: Delivery) -> None:
        last = all(ROUNDS - 2 in lab.rounds(name) for name in names.values())
        if last and delivery.protocol == EXCHANGE and delivery.message.payload:
            for peer in names:
                lab.network.isolate(peer)

    lab.network.observers.append(cut_the_last_exchange)
    run(train(lab, *names.values()))

    for peer, name in names.items():
        assert [event["round"] for event in lab.events[name] if event["event"] == "behind"] == [ROUNDS - 1]
        assert lab.rounds(name)[ROUNDS - 1]["contributors"] == [peer]
        assert lab.events[name][-1]["round"] == ROUNDS


@pytest.mark.parametrize("method", ["eager", "co2"])
def test_a_worker_that_ended_behind_resumes_from_the_shared_state(method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 3))
    *_, (lost, name) = sorted((lab.peer(name), name) for name in NAMES[:3])
    cut: list[float] = []
    weights: list[float] = []

    def observe(delivery: Delivery) -> None:
        if not cut and delivery.protocol == EXCHANGE and delivery.message.payload and 1 in lab.rounds(name):
            cut.append(asyncio.get_running_loop().time())
            lab.network.isolate(lost)
        if delivery.protocol == MATCHMAKING and delivery.source == lost and behind():
            weights.append(pb.MatchmakingRequest.FromString(delivery.message.header).member.weight)

    def behind() -> bool:
        return any(event["event"] == "behind" for event in lab.events[name])

    def watch(_: str, event: dict[str, Any]) -> None:
        if event["event"] == "behind":
            lab.network.rejoin(lost)

    lab.network.observers.append(observe)
    lab.observer = watch
    run(train(lab, *NAMES[:3]))

    lab.check_equal()
    assert weights[0] == 0
    assert lab.events[name][-1] == {"event": "done", "round": ROUNDS, "rounds": ROUNDS, "revision": ROUNDS}


def test_a_job_resumes_from_the_checkpoint_of_any_worker(tmp_path: Path) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2", rounds=6)
    lab = WorkerLab(tmp_path, toml)

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 4:
            for each in NAMES[:3]:
                lab.crash(each)

    lab.observer = watch
    run(train(lab, *NAMES[:3]))
    before = lab.rounds("anna")[3]["params_hash"]

    again = WorkerLab(tmp_path, toml)
    run(train(again, "anna"))
    assert min(again.rounds("anna")) == 4, "the checkpoint was written after round 3"
    assert before != again.rounds("anna")[4]["params_hash"]
    assert again.events["anna"][-1] == {"event": "done", "round": 6, "rounds": 6, "revision": 6}


def test_a_slow_disk_delays_no_round(tmp_path: Path) -> None:
    """A checkpoint is written while the next round runs. Its outer step waits for the write."""
    ends: dict[float, float] = {}
    for write_s in (0.0, 0.3):
        (folder := tmp_path / str(write_s)).mkdir()

        def clock(_: str, event: dict[str, Any], write_s: float = write_s) -> None:
            if event["event"] == "round":
                ends[write_s] = asyncio.get_running_loop().time()

        lab = WorkerLab(
            folder, write_job(folder, "diloco", SETTINGS["diloco"]), observer=clock, write_s=write_s
        )
        run(train(lab, "anna"))
        assert saved(lab, "anna").round == ROUNDS
    assert ends[0.3] == pytest.approx(ends[0.0])


def test_a_checkpoint_is_of_one_round_while_training_goes_on(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", rounds=3), write_s=5.0)
    run(train(lab, "anna"))
    older = min((tmp_path / "anna").glob("checkpoint-*"))
    progress = json.loads((older / "progress.json").read_text())
    assert progress["round"] == 2
    assert progress["params_hash"] == lab.rounds("anna")[1]["params_hash"]
    assert load_file(older / "state" / "optimizer.safetensors")["step"] == 2 * 2


def test_a_full_disk_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OutOfResources("the disk is full")

    monkeypatch.setattr(CheckpointStore, "save", full)
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", SETTINGS["diloco"]))
    with pytest.raises(OutOfResources, match="the disk is full"):
        run(train(lab, "anna"))
    assert len(lab.rounds("anna")) < ROUNDS
