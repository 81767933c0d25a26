"""Blame for a session that cannot continue: the input of the client, or one of the hosts."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.failures import UnhandledMessage
from swarmnet_client.chain.hops import ChainSpec, LiveHop
from swarmnet_client.chain.standby import Standbys
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from tests.support.attacks.faulty_adapters import HIDDEN, HUGE, pair, unknown_module
from tests.support.models.peft_oracle import prefix_tensors, with_prefix
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

# PEFT 0.21 uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

PROMPT = [2, 7, 1, 8]
PREFIX = 5
LAYOUTS: dict[str, Mapping[str, tuple[int, int]]] = {
    "one host": {"a": (0, 6)},
    "two hosts": {"a": (0, 6), "b": (0, 6)},
    "many": dict.fromkeys("abcd", (0, 6)),
    "a chain": {"a": (0, 2), "b": (2, 4), "c": (4, 6)},
    "a chain with a second": {"a": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6)},
    "a chain with a second first": {"a": (0, 2), "a2": (0, 2), "b": (2, 4), "c": (4, 6)},
    "two chains": {"a": (0, 2), "b": (2, 4), "c": (4, 6), "a2": (0, 2), "b2": (2, 4), "c2": (4, 6)},
}


async def assert_ends_at_once(lab: Lab, swarm: ModelHosts, spec: ChainSpec, what: str) -> ConfigError:
    """The request ends and no host is blamed: the same hosts are asked again."""
    async with Chain(swarm, spec, lab.reference.layers.embed).open() as chain:
        started = asyncio.get_running_loop().time()
        for _ in "now", "later":
            with pytest.raises(ConfigError, match=what) as caught:
                await lab.generate(chain, PROMPT, 2)
        assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4
    assert not swarm._view().banned
    async with lab.chain(swarm) as plain:
        assert await lab.generate(plain, PROMPT, 2) == lab.reference.greedy(PROMPT, 2)
    return caught.value


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_adapter_that_no_host_can_compute_is_named_without_blame(
    reference: Reference, layout: Mapping[str, tuple[int, int]]
) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=pair(HUGE, HUGE))
            error = await assert_ends_at_once(lab, swarm, spec, "not finite")
            assert "learning rate" in error.hint

    simulate(reference, scenario)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_adapter_that_fits_no_block_is_refused_at_once(
    reference: Reference, layout: Mapping[str, tuple[int, int]]
) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        async with lab.client() as swarm:
            spec = ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=unknown_module())
            await assert_ends_at_once(lab, swarm, spec, "no_such_proj")

    simulate(reference, scenario)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_session_that_hosts_find_too_long_ends_at_once(
    reference: Reference, layout: Mapping[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client counts wrongly: it forgets the prefix."""
    whole = reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    adapter = Adapter(prefix_tensors(with_prefix(whole, PREFIX, seed=1)))
    monkeypatch.setattr(ChainSpec, "prefix_positions", 0)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        async with lab.client() as swarm:
            longest = PREFIX + len(PROMPT) - 1
            spec = ChainSpec(6, HIDDEN, longest, ElementType.FLOAT32, adapter=adapter)
            error = await assert_ends_at_once(lab, swarm, spec, f"position {longest + 1} of {longest}")
            assert "shorter" in error.hint

    simulate(reference, scenario)


def break_on(patch: pytest.MonkeyPatch, is_bad: Callable[[PeerId], bool]) -> None:
    """Have outputs of these hosts cause an error in the client that no code foresaw."""
    complete = ChainSupervisor._complete_step

    def complete_or_break(supervisor: ChainSupervisor, live: LiveHop, *others: Any) -> None:
        if is_bad(live.peer):
            raise KeyError("no such thing")
        complete(supervisor, live, *others)

    patch.setattr(ChainSupervisor, "_complete_step", complete_or_break)


def test_a_host_whose_message_breaks_the_client_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[PeerId] = []

    def is_first(peer: PeerId) -> bool:
        first.append(peer)
        return peer == first[0]

    break_on(monkeypatch, is_first)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["two hosts"])
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, 4) == reference.greedy(PROMPT, 4)
            assert chain.report.failovers == 1
            assert swarm.banned.keys() == {first[0]}

    simulate(reference, scenario)


@pytest.mark.parametrize("layout", ["one host", "two hosts", "many"])
def test_a_bug_that_messages_of_all_hosts_meet_ends_the_chain(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    break_on(monkeypatch, lambda _: True)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS[layout])
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            started = asyncio.get_running_loop().time()
            with pytest.raises(UnhandledMessage, match="KeyError: 'no such thing'"):
                await lab.generate(chain, PROMPT, 1)
            assert asyncio.get_running_loop().time() - started < swarm.timing.recover_s / 4
            assert not swarm.banned

    simulate(reference, scenario)


def test_a_bug_in_the_search_for_standbys_ends_the_chain(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the search would begin again at every look at the chain."""

    def no_route(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(Standbys, "_route", no_route)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(LAYOUTS["two hosts"])
        async with lab.client() as swarm, lab.chain(swarm, standby=True) as chain:
            with pytest.raises(SwarmnetError, match="the chain broke: KeyError: 'no such thing'"):
                await lab.generate(chain, PROMPT, 8)

    simulate(reference, scenario)
