"""More workers than a group has members: several groups, one state; and spares."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.training import MAX_WORKERS
from swarmnet_protocols.training.matchmaking import followers, matchmaking, rosters
from swarmnet_protocols.training.matchmaking.rosters import (
    NO_ADDRESSES,
    JoinRequest,
    arranged,
    request_to_wire,
)
from tests.defences import defence, replacing
from tests.support.network.memory_network import MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training import peers
from tests.support.training.crowd import Crowd, simulate
from tests.support.training.peers import AT_START, JOB, Worker
from tests.support.training.workers import WorkerLab, train, write_job

MEMBERS = 4


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (followers, matchmaking, rosters):
        monkeypatch.setattr(module, "MAX_MEMBERS", MEMBERS)


def lab_of(folder: Path, method: str, most: int, **fields: Any) -> WorkerLab:
    toml = write_job(folder, method, rounds=fields.pop("rounds", 3))
    return WorkerLab(folder, toml.replace("max_workers = 8", f"max_workers = {most}"), **fields)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("method", ["sparseloco", "noloco"])
def test_workers_of_several_groups_hold_one_state(method: str, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, method, 16)
    names = [f"worker-{number}" for number in range(9)]
    run(train(lab, *names))
    event = "merge" if method == "noloco" else "round"
    last = [[each for each in lab.events[name] if each["event"] == event][-1] for name in names]
    assert {each["committed"] for each in last} == {True}
    assert {each["workers"] for each in last} == {len(names)}
    assert len({each["params_hash"] for each in last}) == 1
    assert len(last[0]["contributors"]) == len(names)


def test_a_spare_takes_the_place_of_a_worker_that_leaves(tmp_path: Path) -> None:
    names = ["lea", "ben", "cyd", "dan"]

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "spare" and not crashed:
            crashed.append(next(each for each in names if each != name))
            asyncio.get_running_loop().call_later(6.0, lab.crash, crashed[0])

    crashed: list[str] = []
    lab = lab_of(tmp_path, "diloco", 3, observer=watch, rounds=16)
    run(train(lab, *names))
    lab.check_equal()
    spares = {name for name in names if any(each["event"] == "spare" for each in lab.events[name])}
    assert len(spares) == 1
    (spare,) = spares
    told = [each for each in lab.events[spare] if each["event"] == "spare"]
    assert [each["max_workers"] for each in told] == [3], "it is told once"
    rounds = lab.rounds(spare)
    assert rounds, "it trains in the end"
    assert all(event["workers"] <= 3 for name in names for event in lab.rounds(name).values())
    healed = [each for each in lab.events[spare] if each["event"] == "healed"]
    assert len(healed) == 1, "it downloads the state when it has a place, not before"


@pytest.mark.usefixtures("small_groups")
def test_a_tenth_of_many_workers_leaves_during_a_round() -> None:
    async def scenario(crowd: Crowd) -> list[dict[str, Any]]:
        rng, found = random.Random(0), []
        for number in range(2):
            if number == 1:
                for peer in rng.sample(sorted(crowd.members), 2):
                    asyncio.get_running_loop().call_later(rng.uniform(0.0, 1.0), crowd.leave, peer)
            await crowd.round(number)
            found.append(crowd.about())
        return found

    first, second = simulate(Crowd(20, 1 << 15), scenario)
    assert first["rosters"] == [20]
    assert first["groups"] == [5]
    assert first["contributors"] == 20
    for about in (first, second):
        assert about["states"] == 1
        assert about["committed"] + about["healed"] == about["workers"]


def test_groups_are_of_near_workers_and_equal_sizes() -> None:
    places = {
        PeerId(f"{site}-{number:02}"): Coordinate((0.1 * site, 0.001 * number, 0.0))
        for site in range(2)
        for number in range(65)
    }
    groups = arranged(places)
    assert sorted(map(len, groups)) == [43, 43, 44]
    assert sum(len({peer[0] for peer in group}) == 1 for group in groups) == 2
    assert arranged({peer: Coordinate() for peer in places}) == arranged(
        {peer: Coordinate() for peer in places}
    )


def test_the_workers_of_one_group_need_no_coordinates() -> None:
    peers = [PeerId(name) for name in "cab"]
    assert arranged({peer: Coordinate() for peer in peers}) == [sorted(peers)]


@defence(
    "a follower forwards no more requests than a job has workers",
    off=replacing(followers, "MAX_WORKERS", 1 << 30),
)
def test_too_many_forwarded_requests_are_refused_at_once() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        leader, other = workers
        await leader.matchmaking.set_position(AT_START)
        stream = await MATCHMAKING.open(other.transport, leader.member.peer)
        request = request_to_wire(JOB, JoinRequest(other.member, AT_START, {}), NO_ADDRESSES)
        request.followers = MAX_WORKERS
        await stream.send(request)
        with pytest.raises(SwarmnetError):
            await stream.receive()
        assert asyncio.get_running_loop().time() < 1.0

    peers.simulate(2, scenario)
