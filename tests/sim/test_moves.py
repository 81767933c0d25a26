"""Hosts move to blocks that the swarm needs more: clients lose no token, and no block is without a host."""

import asyncio
from dataclasses import replace

import pytest
import torch

from swarmnet_node.engine.stage import Stage
from swarmnet_node.node import Node
from swarmnet_node.owner.limits import Limits
from swarmnet_node.supervisor import Supervisor
from swarmnet_protocols.routing.rebalancing import CONFIRM_S, LOOK_S
from swarmnet_protocols.session.steps import Row
from tests.support.fake_machine import FakeMachine
from tests.support.swarm_lab import Lab, Reference, simulate
from tests.support.virtual_time import TimedExecutor

PROMPT = [5, 6, 7, 8]
FOUND_S = CONFIRM_S + 20 * LOOK_S
"""A shortage is confirmed, and the move made, at each look with some chance."""
GAP_S = 120.0
"""A third of the hosts may leave without a word: within this time every block has a host again."""
PAUSE_S = 2.0
"""Seconds between two tokens of a slow reader."""


async def wait_for_span(node: Node | Supervisor, span: tuple[int, int], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while node.span != span:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(1.0)


class Reader:
    """A client that reads one answer slowly, token by token, until it is told to stop."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.tokens: list[int] = []
        self.waits_s: list[float] = []
        self.handovers = 0
        self.is_enough = False
        self.begun = asyncio.Event()

    async def read(self) -> None:
        clock = asyncio.get_running_loop().time
        async with self._lab.client() as swarm, self._lab.chain(swarm) as chain:
            fed, new = 0, list(PROMPT)
            while not self.is_enough:
                began = clock()
                hidden = await chain.forward((Row(0, fed, len(new), 1, 0),), torch.tensor(new))
                self.waits_s.append(clock() - began)
                fed += len(new)
                new = [self._lab.reference.next_token(hidden)]
                self.tokens += new
                self.begun.set()
                await asyncio.sleep(PAUSE_S)
            self.handovers = chain.report.handovers

    def check(self) -> None:
        assert self.tokens == self._lab.reference.greedy(PROMPT, len(self.tokens))


def test_a_host_moves_to_where_hosts_are_short_while_its_clients_go_on(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        moved: list[tuple[int, int]] = []
        hosting = lab.hosting((0, 3), num_blocks=3, may_move=True, on_move=lambda: moved.append(mover.span))
        mover = await lab.start("mover", hosting)
        await lab.start("short", lab.hosting((3, 6)))
        reader = Reader(lab)
        reading = asyncio.create_task(reader.read())
        await reader.begun.wait()
        assert mover.status().sessions == 1
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 3)))
        await wait_for_span(mover, (3, 6), FOUND_S)
        await asyncio.sleep(20.0)
        assert mover.status().sessions == 0
        reader.is_enough = True
        await reading
        reader.check()
        assert reader.handovers >= 1
        assert max(reader.waits_s[1:]) <= 2 * max(reader.waits_s[1:20]), "a token waited for the move"
        assert moved == [(3, 6)]
        status = mover.status()
        assert (status.moved_from, status.moving_to, status.state) == ((0, 3), (), "online")
        assert "lacks hosts" in status.blocks_reason
        await lab.stop("short")
        async with lab.client("late") as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0)


def test_blocks_whose_host_is_gone_are_filled(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        mover = await lab.start("mover", lab.hosting((0, 3), num_blocks=3, may_move=True))
        await lab.start("stays", lab.hosting((0, 3)))
        await lab.start("gone", lab.hosting((3, 6)))
        await asyncio.sleep(5.0)
        await lab.stop("gone")
        await wait_for_span(mover, (3, 6), GAP_S)
        await asyncio.sleep(10.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0)


def test_a_host_whose_owner_forbids_it_stays(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        nodes = [await lab.start(name, lab.hosting((0, 3), num_blocks=3)) for name in ("a", "b")]
        await lab.start("gone", lab.hosting((3, 6)))
        await asyncio.sleep(5.0)
        await lab.stop("gone")
        await asyncio.sleep(2 * GAP_S)
        assert [node.span for node in nodes] == [(0, 3), (0, 3)]

    simulate(reference, scenario, limit_s=2000.0)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_two_hosts_that_could_fill_a_gap_one_moves(reference: Reference, names: tuple[str, str]) -> None:
    async def scenario(lab: Lab) -> None:
        hosting = lab.hosting((0, 3), num_blocks=3, may_move=True)
        nodes = [await lab.start(name, hosting) for name in names]
        await lab.start("gone", lab.hosting((3, 6)))
        await asyncio.sleep(5.0)
        await lab.stop("gone")
        await asyncio.sleep(3 * GAP_S)
        assert sorted(node.span for node in nodes) == [(0, 3), (3, 6)]

    simulate(reference, scenario, limit_s=2000.0)


def test_a_host_without_memory_for_both_leaves_its_blocks_first(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine(free=0)
        hosting = lab.hosting((0, 3), num_blocks=3, may_move=True)
        await lab.start("short", lab.hosting((3, 6)))
        async with lab.supervised("mover", hosting, machine, Limits()) as mover:
            said: list[tuple[tuple[int, ...], tuple[int, int]]] = []
            mover.on_move(lambda status: said.append((status.moved_from, (status.start, status.end))))
            reader = Reader(lab)
            reading = asyncio.create_task(reader.read())
            await reader.begun.wait()
            for name in ("a", "b"):
                await lab.start(name, lab.hosting((0, 3)))
            await wait_for_span(mover, (3, 6), FOUND_S)
            await asyncio.sleep(20.0)
            reader.is_enough = True
            await reading
            reader.check()
            assert reader.handovers >= 1
            assert max(reader.waits_s[1:]) <= 2 * max(reader.waits_s[1:20]), "a token waited for the move"
            assert said == [((0, 3), (3, 6))]
            assert mover.status().state == "online"

    simulate(reference, scenario, limit_s=2000.0)


def test_a_move_during_which_its_owner_pauses_the_node_is_told_once_it_serves(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        pauses: list[Supervisor] = []

        def load(start: int, end: int) -> Stage:
            if (start, end) == (3, 6) and pauses:
                pauses.pop().pause()
            return reference.stage(start, end)

        hosting = replace(lab.hosting((0, 3), num_blocks=3, may_move=True), load=load)
        await lab.start("stays", lab.hosting((0, 3)))
        await lab.start("gone", lab.hosting((3, 6)))
        machine, slow = FakeMachine(free=0), TimedExecutor(1.0)
        async with lab.supervised("mover", hosting, machine, Limits(), executor=slow) as mover:
            pauses.append(mover)
            said: list[tuple[tuple[int, ...], tuple[int, int]]] = []
            mover.on_move(lambda status: said.append((status.moved_from, (status.start, status.end))))
            paused = asyncio.Event()
            mover.on_change(lambda status: paused.set() if status.state == "paused" else None)
            await lab.stop("gone")
            await paused.wait()
            assert said == []
            mover.resume()
            await asyncio.sleep(20.0)
            assert (mover.status().state, said) == ("online", [((0, 3), (3, 6))])

    simulate(reference, scenario, limit_s=2000.0)
