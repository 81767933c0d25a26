"""Hosts with too much work refuse more of it at once, and clients use other hosts, wait, or fail
with the expected wait."""

import asyncio
import re
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.failures import RetryPolicy
from swarmnet_client.chain.hops import LiveHop, SessionRole
from swarmnet_client.chain.sessions import HopSessions
from swarmnet_client.hosts import exclusions
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_node.hosting import client_limits, host
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.session import HostedSession
from swarmnet_protocols.errors import HostsOverloaded
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.session.steps import Row
from tests.defences import Patch, defence, replacing, yes
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.gateway import Caller, refused, served
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

BLOCKS = (0, 6)
PROMPT = [5, 6, 7]
TOKENS = 4
LONG = 300
FORWARD_S = 0.4
"""Seconds of every forward of a slow host, whatever its positions: with sessions of several
clients, 32 of a prompt."""
LIMITS = ClientLimits(max_wait_s=5.0)
ALWAYS_BUSY = ClientLimits(max_wait_s=-1.0)


async def start_slow_host(lab: Lab, limits: ClientLimits = LIMITS) -> None:
    await lab.start("a", lab.hosting(BLOCKS, limits=limits), TimedExecutor(FORWARD_S))


@asynccontextmanager
async def sending_prompts(lab: Lab, clients: dict[str, int]) -> AsyncIterator[None]:
    """Clients that compute long prompts in so many sessions at once, for as long as the context is
    open."""

    async def ask(name: str, chain: Chain) -> None:
        while True:
            await chain.forward((Row(0, 0, LONG, 1, 0, True),), np.arange(LONG) % 50)

    async with AsyncExitStack() as stack:
        asking = []
        for name, count in clients.items():
            swarm = await stack.enter_async_context(lab.client(name))
            await swarm.refresh()
            for _ in range(count):
                chain = await stack.enter_async_context(lab.chain(swarm))
                asking.append(asyncio.create_task(ask(name, chain)))
        await asyncio.sleep(10 * FORWARD_S)
        try:
            yield
            assert not any(task.done() for task in asking), "the load went on"
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def answer(lab: Lab, swarm: ModelHosts, wait_s: float = 0.0) -> list[int]:
    async with lab.chain(swarm, wait_s=wait_s) as chain:
        return await lab.generate(chain, PROMPT, TOKENS)


BUSY_CLIENTS = {f"client {number}": 1 for number in range(6)}


@defence(
    "a host with too much work refuses more of it at once",
    off=replacing(host, "expected_wait_s", lambda *_: 0.0),
)
def test_a_client_learns_at_once_that_all_hosts_are_busy(reference: Reference) -> None:
    async def scenario(lab: Lab) -> tuple[HostsOverloaded, float]:
        clock = asyncio.get_running_loop().time
        await start_slow_host(lab)
        async with sending_prompts(lab, BUSY_CLIENTS), lab.client("late") as swarm:
            await swarm.refresh()
            began = clock()
            with pytest.raises(HostsOverloaded) as refused:
                await answer(lab, swarm)
            return refused.value, clock() - began

    error, took_s = simulate(reference, scenario)
    assert took_s < 1.0
    assert LIMITS.max_wait_s < error.retry_after_s < 60.0
    assert str(error) == (
        f"all hosts of blocks 0:6 are overloaded; the shortest expected wait is {error.retry_after_s:.0f} s"
    )


def test_other_hosts_are_used_before_a_busy_one_is_waited_for(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start_slow_host(lab)
        async with sending_prompts(lab, BUSY_CLIENTS), lab.client("late") as swarm:
            await swarm.refresh()
            with pytest.raises(HostsOverloaded):
                await answer(lab, swarm)
            await lab.start("b", lab.hosting(BLOCKS))
            await swarm.refresh()
            return await answer(lab, swarm)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, TOKENS)


def test_a_client_that_waits_is_answered_when_the_load_has_gone(
    reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start_slow_host(lab)
        async with lab.client("late") as swarm:
            async with sending_prompts(lab, BUSY_CLIENTS):
                await swarm.refresh()
                waiting = asyncio.create_task(answer(lab, swarm, wait_s=60.0))
                await asyncio.sleep(1.0)
                assert not waiting.done()
            return await waiting

    assert simulate(reference, scenario) == reference.greedy(PROMPT, TOKENS)
    assert re.search(
        r"all hosts of blocks 0:6 are overloaded; the shortest expected wait is \d+ s: waiting", caplog.text
    )


def wait_for_all_that_is_queued(queued: Mapping[Hashable, int], _: Hashable, position_s: float) -> float:
    return position_s * sum(queued.values())


@defence(
    "a flood of one client does not have others refused",
    off=replacing(host, "expected_wait_s", wait_for_all_that_is_queued),
)
def test_a_flood_of_one_client_does_not_have_others_refused(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start_slow_host(lab)
        async with sending_prompts(lab, {"flooding": 6}), lab.client("modest") as swarm:
            await swarm.refresh()
            return await answer(lab, swarm)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, TOKENS)


def only_at_the_opening(patch: Patch) -> None:
    check = Host._check_wait

    def check_new(self: Host, client: PeerId, own: HostedSession | None = None, **about: bool) -> None:
        if own is None:
            check(self, client, **about)

    patch.setattr(Host, "_check_wait", check_new)


@defence(
    "it does so also when the first step comes long after the session was opened", off=only_at_the_opening
)
def test_a_session_opened_before_the_load_came_is_refused_at_step_one(
    reference: Reference,
) -> None:
    async def scenario(lab: Lab) -> float:
        clock = asyncio.get_running_loop().time
        await start_slow_host(lab)
        async with lab.client("late") as swarm:
            await swarm.refresh()
            async with lab.chain(swarm) as chain:
                await asyncio.sleep(1.0)
                assert lab.sessions() == {"a": 1}
                async with sending_prompts(lab, BUSY_CLIENTS):
                    began = clock()
                    with pytest.raises(HostsOverloaded):
                        await lab.generate(chain, PROMPT, 1)
                    return clock() - began

    assert simulate(reference, scenario) < 1.0


@defence(
    "hosts that always say that they are busy do not prolong the wait of a client",
    off=replacing(RetryPolicy, "may_wait", yes),
)
def test_hosts_that_always_say_they_are_busy_do_not_prolong_the_wait(reference: Reference) -> None:
    wait_s = 4.5

    async def scenario(lab: Lab) -> float:
        clock = asyncio.get_running_loop().time
        await lab.start("a", lab.hosting(BLOCKS, limits=ALWAYS_BUSY))
        async with lab.client() as swarm:
            await swarm.refresh()
            began = clock()
            with pytest.raises(HostsOverloaded):
                await answer(lab, swarm, wait_s)
            return clock() - began

    assert wait_s - 2 < simulate(reference, scenario) < wait_s


@defence(
    "a client does not flood a busy host with requests", off=replacing(exclusions, "MIN_OVERLOADED_S", 0.0)
)
def test_a_busy_host_is_asked_at_most_once_a_second(reference: Reference) -> None:
    async def scenario(lab: Lab) -> int:
        node = await lab.start("a", lab.hosting(BLOCKS, limits=ALWAYS_BUSY))
        async with lab.client() as swarm:
            await swarm.refresh()
            with pytest.raises(HostsOverloaded):
                await answer(lab, swarm, 10.0)
        assert node.host is not None
        return node.host.counters.refused["overloaded"]

    assert 5 <= simulate(reference, scenario) <= 10


def test_a_gateway_whose_hosts_are_all_busy_says_when_to_try_again(tiny: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> tuple[Any, Any]:
        for node in lab.nodes.values():
            assert node.host is not None
            node.host.limits = ALWAYS_BUSY
        busy = await caller.complete(max_tokens=2)
        for node in lab.nodes.values():
            assert node.host is not None
            node.host.limits = LIMITS
        await asyncio.sleep(float(busy.headers["retry-after"]))
        return busy, await caller.complete(max_tokens=2)

    busy, later = served(tiny, scenario)
    assert refused(busy) == (503, None, "overloaded")
    assert busy.headers["retry-after"] == "1"
    assert later.status_code == 200


def test_an_answer_waits_for_busy_hosts_as_long_as_for_a_failed_one(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start("a", lab.hosting(BLOCKS))
        async with lab.client() as swarm:
            await swarm.refresh()
            async with lab.chain(swarm) as chain:
                began = await lab.generate(chain, PROMPT, 1)
                node = await lab.start("b", lab.hosting(BLOCKS, limits=ALWAYS_BUSY))
                assert node.host is not None
                await swarm.refresh()
                await lab.stop("a")
                rest = asyncio.create_task(chain.forward((Row(0, len(PROMPT), 1, 1, 0),), np.array(began)))
                await asyncio.sleep(4.0)
                assert not rest.done()
                node.host.limits = LIMITS
                return [*began, reference.next_token(await rest)]

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 2)


async def lose_the_only_idle_host(lab: Lab, max_wait_s: float) -> list[int]:
    """Two tokens of a chain that lost its host after the first. The other host is busy for about 20
    s, and refuses new sessions beyond ``max_wait_s``."""
    await start_slow_host(lab, ClientLimits(max_wait_s=max_wait_s))
    async with sending_prompts(lab, BUSY_CLIENTS), lab.client("late") as swarm:
        await swarm.refresh()
        with pytest.raises(HostsOverloaded):
            await answer(lab, swarm)
        await lab.start("b", lab.hosting(BLOCKS))
        await swarm.refresh()
        async with lab.chain(swarm) as chain:
            began = await lab.generate(chain, PROMPT, 1)
            assert lab.sessions()["b"] == 1
            await lab.stop("b")
            output = await chain.forward((Row(0, len(PROMPT), 1, 1, 0),), np.array(began))
            return [*began, lab.reference.next_token(output)]


@defence("an answer under way goes before new work", off=replacing(client_limits, "CONTINUED_WAITS", 1.0))
def test_an_answer_under_way_goes_on_at_a_host_that_refuses_new_ones(reference: Reference) -> None:
    def scenario(lab: Lab) -> Any:
        return lose_the_only_idle_host(lab, max_wait_s=12.0)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 2)


@defence(
    "it does not go to a host that would take too long",
    off=replacing(client_limits, "CONTINUED_WAITS", 100.0),
)
def test_a_host_that_is_far_too_busy_refuses_answers_under_way_too(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        with pytest.raises(HostsOverloaded):
            await lose_the_only_idle_host(lab, max_wait_s=5.0)

    simulate(reference, scenario)


@defence(
    "a session that only claims to continue an answer is refused like a new one", off=only_at_the_opening
)
def test_a_session_that_only_claims_to_continue_is_refused(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session = HopSessions._open

    async def claim(*arguments: Any) -> LiveHop:
        return await open_session(*arguments[:-1], SessionRole.SUCCESSOR)

    monkeypatch.setattr(HopSessions, "_open", claim)

    async def scenario(lab: Lab) -> int:
        await start_slow_host(lab, ClientLimits(max_wait_s=12.0))
        async with sending_prompts(lab, BUSY_CLIENTS), lab.client("late") as swarm:
            await swarm.refresh()
            with pytest.raises(HostsOverloaded):
                await answer(lab, swarm)
        host = lab.nodes["a"].host
        assert host is not None
        return host.counters.refused["overloaded"]

    assert simulate(reference, scenario) == 1
