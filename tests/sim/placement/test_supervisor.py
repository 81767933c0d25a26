"""A node that pauses and resumes: its clients lose no token, and its owner gets the memory."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.hosted_blocks import Hosting, Placed
from swarmnet_node.loading.memory_limit import GOVERN_S
from swarmnet_node.owner.guard import OBSERVE_S
from swarmnet_node.owner.limits import MonthlyUsage, OwnerLimits
from swarmnet_node.supervisor import PAUSE_GRACE_S, Supervisor
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.wire.records_pb2 import HOST_STATE_PAUSED
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.swarm.fake_machine import MONDAY_NOON, FakeMachine
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, peer, simulate

PROMPT = [5, 6, 7, 8]
TOKENS = 12
PAUSED_S = 5.0


async def turns(supervisor: Supervisor, wanted: str) -> float:
    """Wait until the state of the node is ``wanted``; returns the loop time."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    supervisor.on_change(lambda status: changed.set())
    while supervisor.status().state != wanted:
        changed.clear()
        await changed.wait()
    return loop.time()


def test_sessions_leave_a_node_that_pauses_and_it_serves_again(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        await lab.start("rest", lab.hosting((2, 6)))
        async with lab.supervised("node", lab.hosting((0, 2)), machine, OwnerLimits()) as supervisor:
            loop = asyncio.get_running_loop()
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, 3)
                await lab.start("replica", lab.hosting((0, 2)))
                asked_at: list[float] = []

                def pause(number: int) -> None:
                    if number == 4:
                        supervisor.pause()
                        asked_at.append(loop.time())

            async with lab.client("second") as swarm, lab.chain(swarm) as chain:
                tokens = await lab.generate(chain, PROMPT, TOKENS, pause)
                assert tokens == reference.greedy(PROMPT, TOKENS)
                paused_at = await turns(supervisor, "paused")
                assert paused_at - asked_at[0] < PAUSED_S
            status = supervisor.status()
            assert (status.reason, status.weight_bytes, status.host.cache_bytes) == (
                "its owner paused it",
                0,
                0,
            )
            assert supervisor.engine is supervisor.host is None
            assert machine.released == 2  # after loading, and now

            supervisor.resume()
            await turns(supervisor, "online")
            await lab.stop("replica")
            assert supervisor.span == (0, 2)
            async with lab.client("third") as swarm, lab.chain(swarm) as chain:
                assert await lab.generate(chain, PROMPT, TOKENS) == reference.greedy(PROMPT, TOKENS)

    simulate(reference, scenario)


def test_sessions_leave_a_node_that_frees_the_machine_and_it_returns(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("rest", lab.hosting((2, 6)))
        async with lab.supervised("node", lab.hosting((0, 2)), FakeMachine(), OwnerLimits()) as supervisor:
            begun, is_aside = asyncio.Event(), asyncio.Event()

            async def answer() -> list[int]:
                async with lab.client() as swarm, lab.chain(swarm) as chain:
                    await chain.forward((Row(0, 0, 1, 1, 0),), np.array(PROMPT[:1]))
                    begun.set()
                    await is_aside.wait()
                    hidden = await chain.forward((Row(0, 1, 3, 1, 0),), np.array(PROMPT[1:]))
                    return [reference.next_token(hidden)]

            answering = asyncio.create_task(answer())
            await begun.wait()
            await lab.start("replica", lab.hosting((0, 2)))
            async with supervisor.step_aside("p2pd is restarted"):
                assert (supervisor.status().reason, supervisor.host) == ("p2pd is restarted", None)
                is_aside.set()
                assert await answering == reference.greedy(PROMPT, 1)
            await turns(supervisor, "online")

    simulate(reference, scenario)


def test_a_node_that_has_ended_releases_the_machine_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        async with lab.supervised("node", lab.hosting((0, 6)), FakeMachine(), OwnerLimits()) as supervisor:
            supervisor.finish(1.0)
            await supervisor.finished()
            began = asyncio.get_running_loop().time()
            async with supervisor.step_aside("p2pd is restarted"):
                assert asyncio.get_running_loop().time() == began

    simulate(reference, scenario)


def test_a_session_without_another_host_does_not_keep_the_memory(reference: Reference) -> None:
    """A session with steps in flight has ``PAUSE_GRACE_S`` to move."""

    async def scenario(lab: Lab) -> None:
        async with (
            lab.supervised("node", lab.hosting((0, 6)), FakeMachine(), OwnerLimits()) as supervisor,
            lab.client() as swarm,
            lab.chain(swarm) as chain,
        ):
            begun = asyncio.Event()
            answering = asyncio.create_task(lab.generate(chain, PROMPT, 400, lambda number: begun.set()))
            await begun.wait()
            assert supervisor.status().host.cache_bytes > 0
            began = asyncio.get_running_loop().time()
            supervisor.pause()
            took_s = await turns(supervisor, "paused") - began
            assert PAUSE_GRACE_S <= round(took_s, 6) < PAUSED_S
            assert supervisor.status().host.cache_bytes == 0
            assert not answering.done()
            await cancel(answering)

    simulate(reference, scenario)


def test_an_idle_session_without_a_replica_frees_memory_in_the_grace(
    reference: Reference,
) -> None:
    """Its next step waits until the node serves again."""

    async def scenario(lab: Lab) -> None:
        async with (
            lab.supervised("node", lab.hosting((0, 6)), FakeMachine(), OwnerLimits()) as supervisor,
            lab.client() as swarm,
            lab.chain(swarm) as chain,
        ):
            tokens = await lab.generate(chain, PROMPT, 3)
            assert supervisor.status().host.cache_bytes > 0
            began = asyncio.get_running_loop().time()
            supervisor.pause()
            assert await turns(supervisor, "paused") - began < PAUSE_GRACE_S
            assert supervisor.status().host.cache_bytes == 0

            supervisor.resume()
            await turns(supervisor, "online")
            row = Row(0, len(PROMPT) + 2, 1, 1, 0)
            hidden = await chain.forward((row,), np.array(tokens[-1:]))
            assert [*tokens, reference.next_token(hidden)] == reference.greedy(PROMPT, 4)

    simulate(reference, scenario)


def test_nothing_holds_what_a_paused_node_had_loaded(reference: Reference) -> None:
    loaded: list[weakref.ref[object]] = []

    def load(start: int, end: int) -> Stage:
        stage = load_stage(
            reference.local,
            start,
            end,
            dtype=reference.stage(0, 1).dtype,
            device=reference.stage(0, 1).device,
        )
        loaded.append(weakref.ref(stage))
        return stage

    async def scenario(lab: Lab) -> None:
        hosting = replace(lab.hosting((0, 6)), load=load)
        async with (
            lab.supervised("node", hosting, FakeMachine(), OwnerLimits()) as supervisor,
            lab.client() as swarm,  # whose pings go on
            lab.chain(swarm) as chain,
        ):
            await lab.generate(chain, PROMPT, 3)
            supervisor.pause()
            await turns(supervisor, "paused")
            gc.collect()
            assert [reference() for reference in loaded] == [None]

    simulate(reference, scenario)


def test_a_paused_node_announces_it_and_gets_no_clients(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        async with lab.supervised("node", lab.hosting((0, 6)), FakeMachine(), OwnerLimits()) as supervisor:
            supervisor.pause()
            await turns(supervisor, "paused")
            await asyncio.sleep(2 * lab.timing.record_s)  # announced again and again
            async with lab.client("looker"):
                directory = MemoryDirectory(lab.board, peer("looker"), SWARM)
                [found] = await HostSample(directory, lab.manifest, random.Random(0)).refresh()
            assert found.state == "paused"
            assert not found.online

    simulate(reference, scenario, limit_s=300)


@pytest.mark.parametrize(
    ("limits", "forbid", "allow", "reason"),
    [
        (
            OwnerLimits(schedule="mon-fri 10:00-14:00"),
            lambda machine: machine.see(now=MONDAY_NOON.replace(hour=14)),
            lambda machine: machine.see(now=MONDAY_NOON.replace(day=24)),
            "outside its hours",
        ),
        (
            OwnerLimits(no_battery=True),
            lambda machine: machine.see(on_battery=True),
            lambda machine: machine.see(on_battery=False),
            "battery",
        ),
        (
            OwnerLimits(idle_only=True, idle_after_s=60),
            lambda machine: machine.see(idle_s=3.0),
            lambda machine: machine.see(idle_s=60.0),
            "this machine is in use",
        ),
        (
            OwnerLimits(monthly_bytes=1000),
            lambda machine: setattr(machine, "used", MonthlyUsage("2026-11", 600, 400)),
            lambda machine: machine.see(now=MONDAY_NOON.replace(month=12)),
            "used up",
        ),
    ],
    ids=["schedule", "battery", "idle", "monthly"],
)
def test_a_node_pauses_and_resumes_by_its_limits(
    reference: Reference,
    limits: OwnerLimits,
    forbid: Callable[[FakeMachine], None],
    allow: Callable[[FakeMachine], None],
    reason: str,
) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        machine.see(idle_s=1e6)
        async with lab.supervised("node", lab.hosting((0, 6)), machine, limits) as supervisor:
            assert supervisor.status().state == "online"
            forbid(machine)
            await turns(supervisor, "paused")
            assert reason in supervisor.status().reason
            allow(machine)
            await turns(supervisor, "online")
            assert supervisor.status().reason == ""

    simulate(reference, scenario)


def test_a_node_that_must_not_run_loads_nothing(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        machine.see(on_battery=True)
        async with lab.supervised(
            "node", lab.hosting(num_blocks=3), machine, OwnerLimits(no_battery=True)
        ) as supervisor:
            assert supervisor.status().state == "paused"
            assert supervisor.engine is None
            machine.see(on_battery=False)
            await turns(supervisor, "online")

    simulate(reference, scenario)


def test_a_pause_for_a_time_ends_by_itself(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        async with lab.supervised("node", lab.hosting((0, 6)), machine, OwnerLimits()) as supervisor:
            supervisor.pause(7200)
            await turns(supervisor, "paused")
            assert supervisor.status().paused_until == MONDAY_NOON.timestamp() + 7200
            machine.see(now=MONDAY_NOON + timedelta(hours=2))
            await turns(supervisor, "online")
            assert supervisor.status().paused_until == 0

    simulate(reference, scenario)


def test_a_node_whose_memory_stays_finishes_for_a_restart(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine, hosting, wakes = FakeMachine(), lab.hosting(num_blocks=3, may_move=True), []
        async with lab.supervised("node", hosting, machine, OwnerLimits()) as supervisor:
            supervisor.restart_for_pauses(lambda: True)
            span = supervisor.span
            async with supervisor.step_aside("p2pd is restarted"):
                assert supervisor.resting is None
            await turns(supervisor, "online")
            supervisor.pause()
            await supervisor.finished()
            resting = supervisor.resting
        assert resting is not None
        assert (resting.start, resting.end, resting.may_move) == (*span, True)

        async def wake() -> Hosting:
            wakes.append(asyncio.get_running_loop().time())
            return hosting

        light = replace(hosting, placed=Placed(span, resting.reason))
        async with lab.supervised("node", light, machine, OwnerLimits(), wake=wake) as again:
            assert (again.status().state, wakes) == ("paused", [])
            assert again.status().host.record.state == HOST_STATE_PAUSED
            again.resume()
            await turns(again, "online")
            assert (again.span, len(wakes)) == (span, 1)
            again.pause()
            await turns(again, "paused")
            again.resume()
            await turns(again, "online")
            assert len(wakes) == 1, "the model is read once"

    simulate(reference, scenario)


def test_work_counts_positions_by_blocks_and_distinct_clients(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("rest", lab.hosting((2, 6)))
        async with lab.supervised("node", lab.hosting((0, 2)), FakeMachine(), OwnerLimits()) as supervisor:
            for name in ("anna", "boris", "anna"):
                async with lab.client(name) as swarm, lab.chain(swarm) as chain:
                    await lab.generate(chain, PROMPT, TOKENS)
            given = supervisor.status().given
            assert given.block_positions == 3 * (len(PROMPT) + TOKENS - 1) * 2
            assert given.clients == 2
            assert supervisor.report().given == given
            supervisor.pause()
            await turns(supervisor, "paused")
            assert supervisor.status().given == given

    simulate(reference, scenario)


def test_limits_change_while_a_node_runs(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        machine.see(on_battery=True)
        async with lab.supervised("node", lab.hosting((0, 6)), machine, OwnerLimits()) as supervisor:
            supervisor.set_limits(OwnerLimits(no_battery=True))
            await turns(supervisor, "paused")
            assert machine.enforced == [OwnerLimits(no_battery=True)] == [supervisor.limits()]
            supervisor.set_limits(OwnerLimits())
            await turns(supervisor, "online")

    simulate(reference, scenario)


def test_a_limit_that_already_holds_interrupts_no_session(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine = FakeMachine()
        machine.see(idle_s=1e6)
        async with lab.supervised("node", lab.hosting((0, 6)), machine, OwnerLimits()) as supervisor:
            said: list[str] = []
            supervisor.on_change(lambda status: said.append(status.state))
            # the limits are applied again before the next observation of the machine
            supervisor.resume()
            supervisor.set_limits(OwnerLimits(idle_only=True))
            await asyncio.sleep(2 * OBSERVE_S)
            assert said == []
            machine.see(idle_s=1.0)
            await turns(supervisor, "paused")

    simulate(reference, scenario)


@pytest.mark.parametrize("paused", [False, True])
def test_a_node_finishes_paused_or_not(reference: Reference, *, paused: bool) -> None:
    async def scenario(lab: Lab) -> None:
        async with lab.supervised("node", lab.hosting((0, 6)), FakeMachine(), OwnerLimits()) as supervisor:
            if paused:
                supervisor.pause()
                await turns(supervisor, "paused")
            supervisor.finish(1.0)
            await supervisor.finished()

    simulate(reference, scenario)


def test_a_node_that_cannot_resume_ends_with_the_error(reference: Reference) -> None:
    loads = iter([reference.stage])

    def load(start: int, end: int) -> Stage:
        for load in loads:
            return load(start, end)
        raise IntegrityError("the file has changed")

    async def scenario(lab: Lab) -> None:
        hosting = replace(lab.hosting((0, 6)), load=load)
        async with lab.supervised("node", hosting, FakeMachine(), OwnerLimits()) as supervisor:
            supervisor.pause()
            await turns(supervisor, "paused")
            supervisor.resume()
            with pytest.raises(IntegrityError, match="has changed"):
                await supervisor.finished()

    simulate(reference, scenario)


def test_a_node_over_its_owners_limit_ends_the_largest_session(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        machine, limit_bytes = FakeMachine(ram=1 << 20), 1 << 30
        limits = OwnerLimits(max_ram_bytes=limit_bytes)
        async with (
            lab.supervised("node", lab.hosting((0, 6)), machine, limits) as supervisor,
            lab.client() as swarm,
            lab.chain(swarm) as small,
            lab.client("second") as other,
            lab.chain(other) as large,
        ):
            await lab.generate(small, PROMPT, 1)
            await lab.generate(large, PROMPT * 8, 1)
            assert supervisor.host is not None
            least, most = sorted(supervisor.host.sessions, key=lambda session: session.held_bytes)
            machine.ram = limit_bytes
            await asyncio.sleep(GOVERN_S)
            assert set(supervisor.host.sessions) == {least, most}
            status = supervisor.status()
            # there is no room for more
            assert status.host.cache_bytes_limit == status.host.cache_bytes
            machine.ram = limit_bytes + 1
            await asyncio.sleep(GOVERN_S)
            machine.ram = limit_bytes
            await asyncio.sleep(GOVERN_S)
            assert least in supervisor.host.sessions
            assert most not in supervisor.host.sessions

    simulate(reference, scenario)
