"""Hosts move to blocks that the swarm needs more: clients lose no token, and no block is without a
host."""

import asyncio
import gc
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from swarmnet_node.engine.memory_account import P2PD_BYTES, Footprint
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers import torch_stage as stage_module
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.relocating import DRAIN_GAP_S, DROP_S, MAY_LEAVE_LOOKS
from swarmnet_node.supervisor import Supervisor
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.routing.relocation import CONFIRM_S, LOOK_S
from tests.support.network.private_swarm import PrivateSwarm
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.fake_machine import FakeMachine
from tests.support.swarm.relocation import GAP_S, PROMPT, Reader, wait_for_span
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

FOUND_S = CONFIRM_S + 20 * LOOK_S
"""A shortage is confirmed, and the move made, at each look with some chance."""
MAX_POSITIONS = 512
"""Positions of the tiny model. A reader that waits longer for a move makes longer pauses."""


def test_a_host_moves_to_where_hosts_are_short_and_clients_go_on(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        moved: list[tuple[int, int]] = []
        hosting = lab.hosting((0, 3), num_blocks=3, may_move=True, on_move=lambda: moved.append(mover.span))
        mover = await lab.start("mover", hosting)
        await lab.start("short", lab.hosting((3, 6)))
        reader = Reader(lab)
        reading = asyncio.create_task(reader.read())
        await reader.begun.wait()
        assert mover.status().host.record.sessions == 1
        for name in ("a", "b"):
            await lab.start(name, lab.hosting((0, 3)))
        await wait_for_span(mover, (3, 6), FOUND_S)
        await asyncio.sleep(20.0)
        assert mover.status().host.record.sessions == 0
        reader.is_enough = True
        await reading
        reader.check()
        assert reader.handovers >= 1
        assert max(reader.waits_s[1:]) <= 2 * max(reader.waits_s[1:20]), "a token waited for the move"
        assert moved == [(3, 6)]
        status = mover.status()
        assert (list(status.moved_from), status.host.record.next_end, status.state) == ([0, 3], 0, "online")
        assert "lacks hosts" in status.blocks_reason
        await lab.stop("short")
        async with lab.client("late") as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0)


@pytest.mark.parametrize("private", [None, PrivateSwarm()], ids=["open", "private"])
def test_blocks_whose_host_is_gone_are_filled(reference: Reference, private: PrivateSwarm | None) -> None:
    async def scenario(lab: Lab) -> None:
        mover = await lab.start("mover", lab.hosting((0, 3), num_blocks=3, may_move=True))
        await lab.start_all({"stays": (0, 3), "gone": (3, 6)})
        await asyncio.sleep(5.0)
        await lab.stop("gone")
        await wait_for_span(mover, (3, 6), GAP_S)
        await asyncio.sleep(10.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0, private=private)


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
        async with lab.supervised("mover", hosting, machine, OwnerLimits()) as mover:
            said: list[tuple[tuple[int, ...], tuple[int, int]]] = []
            mover.on_move(
                lambda status: said.append(
                    (tuple(status.moved_from), (status.host.record.start, status.host.record.end))
                )
            )
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


def test_a_move_that_the_owner_paused_is_told_once_it_serves(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        pauses: list[Supervisor] = []

        def load(start: int, end: int) -> Stage:
            if (start, end) == (3, 6) and pauses:
                pauses.pop().pause()
            return reference.stage(start, end)

        hosting = replace(lab.hosting((0, 3), num_blocks=3, may_move=True), load=load)
        await lab.start_all({"stays": (0, 3), "gone": (3, 6)})
        machine, slow = FakeMachine(free=0), TimedExecutor(1.0)
        async with lab.supervised("mover", hosting, machine, OwnerLimits(), executor=slow) as mover:
            pauses.append(mover)
            said: list[tuple[tuple[int, ...], tuple[int, int]]] = []
            mover.on_move(
                lambda status: said.append(
                    (tuple(status.moved_from), (status.host.record.start, status.host.record.end))
                )
            )
            paused = asyncio.Event()
            mover.on_change(lambda status: paused.set() if status.state == "paused" else None)
            await lab.stop("gone")
            await paused.wait()
            assert said == []
            mover.resume()
            await asyncio.sleep(20.0)
            assert (mover.status().state, said) == ("online", [((0, 3), (3, 6))])

    simulate(reference, scenario, limit_s=2000.0)


BARE_BYTES = 200 << 20
"""Resident memory of a node without blocks."""
BLOCK_BYTES = 100 << 20
"""That of each block. The tiny blocks of these tests are small compared with the memory that a node
needs for anything else."""


@dataclass
class MeasuredMachine(FakeMachine):
    """A machine on which each block has memory until nothing refers to it."""

    blocks: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)

    def ram_bytes(self) -> int:
        return BARE_BYTES + BLOCK_BYTES * len(self.blocks)

    def release(self) -> None:
        gc.collect()
        super().release()


def limit_for(blocks: int, reference: Reference) -> int:
    """A limit with which a node on such a machine may have so many blocks."""
    widths = reference.stage(0, 1).widths
    return Footprint(BARE_BYTES - P2PD_BYTES, BLOCK_BYTES, widths).min_ram_bytes(blocks) + 1


@pytest.fixture
def heavy(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> tuple[MeasuredMachine, dict[str, Any]]:
    """A machine, and options for a node on it that chose its blocks itself."""
    machine = MeasuredMachine()

    def weight_bytes(model: Any) -> int:
        return BLOCK_BYTES * len(model.layers)

    monkeypatch.setattr(stage_module, "weight_bytes", weight_bytes)

    def load(start: int, end: int) -> Stage:
        cpu = torch.device("cpu")
        stage = load_stage(reference.local, start, end, dtype=torch.float32, device=cpu)
        machine.blocks.update(stage._model.layers)
        return stage

    return machine, {"load": load, "may_move": True, "most_blocks": 6}


def test_a_node_that_must_free_memory_drops_blocks_and_clients_go_on(
    reference: Reference, heavy: tuple[MeasuredMachine, dict[str, Any]]
) -> None:
    machine, options = heavy

    async def scenario(lab: Lab) -> None:
        hosting = replace(lab.hosting((0, 6)), **options)
        limits = OwnerLimits(max_ram_bytes=limit_for(6, reference))
        async with lab.supervised("node", hosting, machine, limits) as node:
            said: list[tuple[int, ...]] = []
            node.on_move(
                lambda status: said.append(
                    (*status.moved_from, status.host.record.start, status.host.record.end)
                )
            )
            reader = Reader(lab)
            reading = asyncio.create_task(reader.read())
            await reader.begun.wait()
            await lab.start_all({"other": (0, 4), "another": (1, 3)})
            await asyncio.sleep(10.0)
            assert node.status().host.record.sessions == 1

            with pytest.raises(OutOfResources, match="a block does not fit"):
                node.set_limits(OwnerLimits(max_ram_bytes=limit_for(1, reference) - 2))
            assert node.limits() == limits
            lower = OwnerLimits(max_ram_bytes=limit_for(3, reference))
            node.set_limits(lower)
            await wait_for_span(node, (3, 6), 5.0)
            await asyncio.sleep(DROP_S)
            assert lower.max_ram_bytes is not None
            assert machine.ram_bytes() == BARE_BYTES + 3 * BLOCK_BYTES <= lower.max_ram_bytes
            reader.is_enough = True
            await reading
            reader.check()
            assert reader.failovers == reader.handovers >= 1
            assert max(reader.waits_s[1:]) <= 2 * max(reader.waits_s[1:5]), "a token waited for the move"
            assert said == [(0, 6, 3, 6)]
            assert "memory limit" in node.status().blocks_reason

            node.pause()
            await asyncio.sleep(10.0)
            assert node.status().state == "paused"
            node.set_limits(OwnerLimits(max_ram_bytes=limit_for(2, reference)))
            await asyncio.sleep(10.0)
            node.resume()
            await asyncio.sleep(10.0)
            assert (node.span, said[1:]) == ((4, 6), [(3, 6, 4, 6)])
            async with lab.client("late") as swarm, lab.chain(swarm) as chain:
                assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0)


def test_a_host_with_spare_blocks_takes_over_what_another_drops(
    reference: Reference, heavy: tuple[MeasuredMachine, dict[str, Any]]
) -> None:
    machine, options = heavy

    async def scenario(lab: Lab) -> None:
        for name in ("spare", "stays"):
            await lab.start(name, lab.hosting((4, 6), num_blocks=2, may_move=True))
        limits = OwnerLimits(max_ram_bytes=limit_for(6, reference))
        hosting = replace(lab.hosting((0, 6)), **options)
        async with lab.supervised("node", hosting, machine, limits) as node:
            reader = Reader(lab)
            reading = asyncio.create_task(reader.read())
            await reader.begun.wait()
            node.set_limits(OwnerLimits(max_ram_bytes=limit_for(3, reference)))
            await wait_for_span(node, (0, 3), 1.2 * MAY_LEAVE_LOOKS * LOOK_S)
            await asyncio.sleep(DROP_S)
            assert len(machine.blocks) == 3
            reader.is_enough = True
            await reading
            reader.check()
            assert reader.failovers == reader.handovers
            assert max(reader.waits_s[1:]) <= 2.1 * max(reader.waits_s[1:5]), "a token waited for the move"

    simulate(reference, scenario, limit_s=2000.0)


def test_a_node_drops_blocks_that_no_other_host_takes_over(
    reference: Reference, heavy: tuple[MeasuredMachine, dict[str, Any]]
) -> None:
    machine, options = heavy

    async def scenario(lab: Lab) -> None:
        limits = OwnerLimits(max_ram_bytes=limit_for(6, reference))
        hosting = replace(lab.hosting((0, 6)), **options)
        async with lab.supervised("node", hosting, machine, limits) as node:
            node.set_limits(OwnerLimits(max_ram_bytes=limit_for(2, reference)))
            await asyncio.sleep(10.0)
            node.set_limits(limits)
            await asyncio.sleep(MAY_LEAVE_LOOKS * LOOK_S)
            assert node.span == (0, 6), "its owner allows them again"
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, 4)
                began = asyncio.get_running_loop().time()
                node.set_limits(OwnerLimits(max_ram_bytes=limit_for(2, reference)))
                while node.span == (0, 6) or node.status().host.record.sessions:  # noqa: ASYNC110 - in virtual time
                    await asyncio.sleep(0.5)
                took_s = asyncio.get_running_loop().time() - began
                assert LOOK_S < took_s < 1.2 * (MAY_LEAVE_LOOKS - 1) * LOOK_S + DRAIN_GAP_S + 1.0
            del swarm, chain  # in one process, a client has what a host raised
            await asyncio.sleep(5.0)
            assert len(machine.blocks) == node.span[1] - node.span[0] == 2

    simulate(reference, scenario, limit_s=2000.0)


def test_a_node_with_more_memory_grows_once_the_swarm_gains_by_it(
    reference: Reference, heavy: tuple[MeasuredMachine, dict[str, Any]]
) -> None:
    machine, options = heavy

    async def scenario(lab: Lab) -> None:
        limits = OwnerLimits(max_ram_bytes=limit_for(3, reference))
        hosting = replace(lab.hosting((0, 3)), **options)
        await lab.start("short", lab.hosting((3, 6)))
        async with lab.supervised("node", hosting, machine, limits) as node:
            reader = Reader(lab, pause_s=3 * FOUND_S / MAX_POSITIONS)
            reading = asyncio.create_task(reader.read())
            await reader.begun.wait()
            node.set_limits(OwnerLimits(max_ram_bytes=limit_for(10, reference)))
            await asyncio.sleep(CONFIRM_S + 5 * LOOK_S)
            assert node.span == (0, 3), "the swarm gains nothing"
            for name in ("a", "b"):
                await lab.start(name, lab.hosting((0, 3)))
            await wait_for_span(node, (0, 6), FOUND_S)
            await asyncio.sleep(30.0)
            machine.release()
            assert len(machine.blocks) == 6, "the former ones are freed"
            reader.is_enough = True
            await reading
            reader.check()
            assert reader.failovers == reader.handovers
            assert max(reader.waits_s[1:]) <= 2.1 * max(reader.waits_s[1:5]), "a token waited for the move"
            assert "lacks hosts" in node.status().blocks_reason
            for name in ("short", "a", "b"):
                await lab.stop(name)
            async with lab.client("late") as swarm, lab.chain(swarm) as chain:
                assert await lab.generate(chain, PROMPT, 8) == reference.greedy(PROMPT, 8)

    simulate(reference, scenario, limit_s=2000.0)
