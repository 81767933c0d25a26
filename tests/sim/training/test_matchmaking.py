"""Matchmaking under crashes, hangs, cuts and lying peers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking import group_state, matchmaking
from swarmnet_protocols.training.matchmaking.matchmaking import ELSEWHERE_S, Matchmaking
from swarmnet_protocols.training.matchmaking.positions import OutOfSync, PositionAsker
from swarmnet_protocols.training.matchmaking.rosters import (
    Roster,
)
from swarmnet_protocols.wire.workers_pb2 import Position
from tests.defences import Patch, defence, replacing
from tests.support.network.memory_network import Delivery, MemoryNetwork
from tests.support.training.peers import AT_START, START, TIMEOUT_S, TIMING, Worker, names, simulate


def test_all_workers_get_the_same_roster() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers))
        assert set(rosters) == {rosters[0]}
        assert names(rosters[0]) == [worker.member.peer for worker in workers]
        assert [rosters[0].slot(worker.member.peer) for worker in workers] == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() < 1.0, "no worker waits when all are there"

    simulate(4, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
def test_a_round_does_not_wait_for_dead_workers(fault: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        getattr(network, fault)(workers[2].member.peer)
        present = [worker for worker in workers if worker is not workers[2]]
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in present))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in present]] * 3
        assert asyncio.get_running_loop().time() < 2 * TIMING.silence_s

    simulate(4, scenario)


def test_a_worker_that_is_late_is_left_out() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        present = workers[:3]
        await workers[3].matchmaking.set_position(AT_START)
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in present))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in present]] * 3
        assert TIMEOUT_S <= asyncio.get_running_loop().time() < TIMEOUT_S + 1

    simulate(4, scenario)


def test_of_two_leaders_the_earlier_one_gets_both_groups() -> None:
    """Workers that start together read the directory at different times. So one may lead already
    when a worker comes that is before it in the order of leaders."""

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        first, *early, last = workers
        await last.matchmaking.set_position(AT_START)
        waiting = [asyncio.create_task(each.gather(workers[1:])) for each in early]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in waiting), "they wait for the last one"
        rosters = await asyncio.gather(first.gather(workers), last.gather(workers), *waiting)
        assert set(rosters) == {rosters[0]}
        assert names(rosters[0]) == [worker.member.peer for worker in workers]
        assert asyncio.get_running_loop().time() < 1.0 + TIMING.matchmaking_heartbeat_s

    simulate(4, scenario)


def by_peer_id(patch: Patch) -> None:
    patch.setattr(group_state, "place_as_leader", lambda peer, *_: peer.encode())


@defence("no worker leads every round", off=by_peer_id)
def test_a_liar_leaves_a_mate_out_of_few_rounds() -> None:
    """The liar has the lowest peer id, and leaves the mate out whenever it leads."""
    missed: list[int] = []

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar, mate, *others = workers
        ready = liar.matchmaking._followers.ready
        liar.matchmaking._followers.ready = lambda mine: {  # type: ignore[method-assign]
            peer: each for peer, each in ready(mine).items() if peer != mate.member.peer
        }
        for round in range(12):
            async with cancelled(mate.gather(workers, round=round)):
                roster, *_rest = await asyncio.gather(
                    liar.gather([liar, *others], round=round),
                    *(each.gather(workers, round=round) for each in others),
                )
            if mate.member.peer not in names(roster):
                missed.append(round)

    simulate(4, scenario)
    assert 0 < len(missed) <= 5, "about every fourth round"


async def nobody(*_: object) -> dict[PeerId, Position]:
    return {}


@defence("a leader holds nobody for long", off=replacing(PositionAsker, "ask_few", nobody))
def test_a_leader_that_holds_a_mate_is_left() -> None:
    """The liar leads. It gives the others a roster, and sends the mate heartbeats."""

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar, mate, *others = workers
        followers = liar.matchmaking._followers
        ready = followers.ready
        followers.ready = lambda mine: {  # type: ignore[method-assign]
            peer: each for peer, each in ready(mine).items() if peer != mate.member.peer
        }
        held = asyncio.create_task(mate.gather(workers))
        await asyncio.gather(liar.gather([liar, *others]), *(each.gather([liar, *others]) for each in others))
        for each in others:
            await each.matchmaking.set_position(WorkerPosition(4, START))
        with pytest.raises(OutOfSync) as caught:
            await held
        assert caught.value.peer in {each.member.peer for each in others}
        assert asyncio.get_running_loop().time() < TIMING.matchmaking_poll_s + 1

    simulate(4, scenario)


async def believe_one(*_: object) -> bool:
    return True


@defence("one worker cannot say that a job is full", off=replacing(Matchmaking, "_is_full", believe_one))
def test_one_worker_cannot_close_a_job() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar, *honest = workers
        await liar.matchmaking.set_position(AT_START)
        liar.matchmaking._state.has_no_place = lambda _: True  # type: ignore[method-assign]
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in honest))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in honest]] * 3

    simulate(4, scenario)


@defence(
    "a leader does not wait long for a worker at another round",
    off=replacing(matchmaking, "ELSEWHERE_S", 1e9),
    behind=2,
)
@pytest.mark.parametrize("behind", [2, 1], ids=["two rounds behind", "one round behind"])
def test_a_leader_waits_a_few_seconds_for_a_worker_at_another_round(behind: int) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        present, elsewhere = workers[:2], workers[2]
        await elsewhere.matchmaking.set_position(WorkerPosition(5 - behind, b"another state"))
        rosters = await asyncio.gather(*(worker.gather(workers, round=5) for worker in present))
        assert [names(roster) for roster in rosters] == [[each.member.peer for each in present]] * 2
        waited_s = asyncio.get_running_loop().time()
        assert ELSEWHERE_S <= waited_s < ELSEWHERE_S + 1.0 < TIMEOUT_S

    simulate(3, scenario)


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("moment", ["before", "asked"])
def test_the_next_worker_leads_when_the_leader_fails(fault: str, moment: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        first = workers[0].member.peer
        fail = getattr(network, fault)

        def watch(delivery: Delivery) -> None:
            if delivery.protocol == MATCHMAKING and delivery.target == first:
                fail(first)

        if moment == "before":
            fail(first)
        else:
            network.observers.append(watch)
        rosters = await asyncio.gather(*(worker.gather(workers) for worker in workers[1:]))
        assert set(rosters) == {rosters[0]}
        assert names(rosters[0]) == [worker.member.peer for worker in workers[1:]]

    simulate(4, scenario)


@pytest.mark.parametrize("place", [0, 2], ids=["leader", "follower"])
def test_no_worker_waits_for_one_that_leaves(place: int) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        leaver = workers[place]
        present = [worker for worker in workers if worker is not leaver]
        await leaver.matchmaking.set_position(AT_START)
        asking = [asyncio.create_task(worker.gather(workers)) for worker in present]
        await asyncio.sleep(TIMING.ping_s / 2)
        assert not any(task.done() for task in asking), "they wait for it"
        await leaver.matchmaking.leave()
        rosters = await asyncio.gather(*asking)
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in present]] * 3
        assert asyncio.get_running_loop().time() < 2 * TIMING.ping_s
        again = await asyncio.gather(*(worker.gather(workers, round=4) for worker in present))
        assert [names(roster) for roster in again] == [[worker.member.peer for worker in present]] * 3
        assert asyncio.get_running_loop().time() < 3 * TIMING.ping_s

    simulate(4, scenario)


def test_a_single_worker_gets_a_roster_of_one() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        assert names(await workers[0].gather([])) == [workers[0].member.peer]

    simulate(1, scenario)


def test_a_worker_that_is_behind_gets_the_position_of_the_others() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        await asyncio.gather(*(worker.gather(workers[:3], round=1) for worker in workers[:3]))
        # The other workers might be about to follow.
        late = asyncio.ensure_future(workers[3].gather(workers, round=2))
        await asyncio.sleep(1)
        rosters = await asyncio.gather(*(worker.gather(workers[:3], round=5) for worker in workers[:3]))
        with pytest.raises(OutOfSync) as caught:
            await late
        assert caught.value.position == WorkerPosition(5, START)
        assert len(rosters[0].members) == 3

    simulate(4, scenario)


def test_a_newcomer_that_would_lead_gets_the_position_of_others() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        newcomer, others = workers[0], workers[1:]
        await asyncio.gather(*(worker.gather(others, round=7) for worker in others))
        with pytest.raises(OutOfSync) as caught:
            await newcomer.gather(workers, round=0, state=b"0" * 32)
        assert caught.value.position == WorkerPosition(7, START)

        # Meanwhile no worker waits for it.
        started = asyncio.get_running_loop().time()
        rosters = await asyncio.gather(*(worker.gather(workers, round=8) for worker in others))
        assert names(rosters[0]) == [worker.member.peer for worker in others]
        assert asyncio.get_running_loop().time() - started < TIMEOUT_S

    simulate(4, scenario)


def test_a_worker_with_another_state_than_most_is_out_of_sync() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        newcomer, others = workers[0], workers[1:]
        rosters = asyncio.gather(*(worker.gather(others) for worker in others))
        await asyncio.sleep(0.1)
        with pytest.raises(OutOfSync) as caught:
            await newcomer.gather(workers, state=b"x" * 32)
        assert caught.value.position == AT_START
        await rosters

    simulate(4, scenario)


def test_a_follower_with_another_state_is_out_of_sync() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        strange = asyncio.ensure_future(workers[2].gather(workers, state=b"x" * 32))
        rosters = await asyncio.gather(*(worker.gather(workers[:2]) for worker in workers[:2]))
        with pytest.raises(OutOfSync) as caught:
            await strange
        assert caught.value.position == AT_START
        assert names(rosters[0]) == [worker.member.peer for worker in workers[:2]]

    simulate(3, scenario)


def test_a_full_round_takes_contributors_before_newcomers() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        for worker in workers:
            worker.matchmaking._state.max_members = 3
        workers[1].member = replace(workers[1].member, weight=0.0)
        await workers[0].gather([], round=2)
        others = [asyncio.ensure_future(worker.gather(workers)) for worker in workers[1:]]
        await asyncio.sleep(1)
        roster = await workers[0].gather(workers)
        assert names(roster) == [workers[index].member.peer for index in (0, 2, 3)]
        for task in others:
            task.cancel()

    simulate(4, scenario)


def test_a_follower_of_a_follower_is_redirected_to_the_leader() -> None:
    """The last worker does not know the first one, and asks the second one, which follows it."""

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        first, second, third = workers
        await first.matchmaking.set_position(AT_START)  # still at its inner steps
        asking = [asyncio.create_task(second.gather(workers))]
        await asyncio.sleep(1)
        asking.append(asyncio.create_task(third.gather([second])))
        await asyncio.sleep(1)
        rosters = await asyncio.gather(*asking, first.gather(workers))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in workers]] * 3
        assert asyncio.get_running_loop().time() < TIMEOUT_S

    simulate(3, scenario)


def test_a_worker_that_caught_up_joins_those_that_do_not_know_it() -> None:
    """The worker that is back would lead, but the others read the directory before."""

    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        back, *others = workers
        for worker in others:
            await worker.matchmaking.set_position(AT_START)
        with pytest.raises(OutOfSync):
            await back.gather(workers, round=0, state=b"0" * 32)
        asking = [asyncio.create_task(back.gather(workers))]
        await asyncio.sleep(1)  # the others are still at their inner steps
        rosters = await asyncio.gather(*asking, *(worker.gather(others) for worker in others))
        assert [names(roster) for roster in rosters] == [[worker.member.peer for worker in workers]] * 3
        assert asyncio.get_running_loop().time() < TIMEOUT_S

    simulate(3, scenario)


@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_a_follower_stays_if_the_leader_it_is_sent_to_is_unreachable(fault: str) -> None:
    async def scenario(network: MemoryNetwork, workers: list[Worker]) -> None:
        first, second, third = workers
        await first.matchmaking.set_position(AT_START)
        asking = [asyncio.create_task(second.gather(workers))]
        await asyncio.sleep(1)
        if fault == "cut":
            network.cut(first.member.peer, third.member.peer)
        asking.append(asyncio.create_task(third.gather([second])))
        await asyncio.sleep(1)
        if fault == "crash":
            network.crash(first.member.peer)
            rosters = await asyncio.gather(*asking)
            assert [names(roster) for roster in rosters] == [names(rosters[0])] * 2
            assert names(rosters[0]) == [second.member.peer, third.member.peer]
        else:
            roster, _ = await asyncio.gather(first.gather(workers[:2]), asking[0])
            assert names(roster) == [first.member.peer, second.member.peer]
            await second.matchmaking.set_position(WorkerPosition(4, b"t" * 32))
            with pytest.raises(OutOfSync) as caught:
                await asking[1]
            assert caught.value.position == WorkerPosition(4, b"t" * 32)

    simulate(3, scenario)


def excluding_none(patch: Patch) -> None:
    honest = Matchmaking.__init__

    def begin(self: Matchmaking, *args: Any, **options: Any) -> None:
        honest(self, *args, **options | {"is_excluded": lambda _: False})

    patch.setattr(Matchmaking, "__init__", begin)


@defence("an excluded worker waits in no group", off=excluding_none, moment="waiting")
@pytest.mark.parametrize("moment", ["before", "waiting"])
def test_an_excluded_follower_is_in_no_roster(moment: str) -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        leader, liar, other = workers
        await leader.matchmaking.set_position(AT_START)
        if moment == "before":
            leader.excluded.add(liar.member.peer)
        async with cancelled(liar.gather([leader])):
            await asyncio.sleep(1)
            leader.excluded.add(liar.member.peer)
            rosters = await asyncio.gather(leader.gather(workers), other.gather([leader]))
        assert [names(roster) for roster in rosters] == [[leader.member.peer, other.member.peer]] * 2
        assert asyncio.get_running_loop().time() < TIMEOUT_S, "no worker waits for an excluded one"

    simulate(3, scenario)


@defence("no worker is redirected to an excluded leader", off=excluding_none)
def test_no_worker_follows_a_redirect_to_an_excluded_leader() -> None:
    async def scenario(_: MemoryNetwork, workers: list[Worker]) -> None:
        liar, second, third = workers
        third.excluded.add(liar.member.peer)
        await liar.matchmaking.set_position(AT_START)
        async with cancelled(second.gather([liar]), third.gather([second])):
            # The second worker has a leader, the third is redirected.
            await asyncio.sleep(2 * TIMING.matchmaking_heartbeat_s)
            roster = await liar.gather([second])
        assert names(roster) == [liar.member.peer, second.member.peer]

    simulate(3, scenario)


@contextlib.asynccontextmanager
async def cancelled(*waiting: Coroutine[Any, Any, Roster]) -> AsyncIterator[None]:
    """Run ``waiting`` in the background until the context ends."""
    tasks = [asyncio.create_task(each) for each in waiting]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
