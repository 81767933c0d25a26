"""A host with a limited download rate: its clients together do not exceed the rate, and all of them
are served."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest
import torch

from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.flow_control import ReceiveWindow
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.limits.stream_scope import VIOLATION_FRAMES
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.steps import Row
from tests.defences import defence, nothing, replacing
from tests.support.attacks.raw_client import Stranger, a_step, assert_ends, link_reply
from tests.support.attacks.switched_off import overlooking
from tests.support.models.rounding import assert_near
from tests.support.network.memory_network import MemoryStream
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

RATE = 64_000.0
"""Bytes per second: the lowest limit that an owner can set."""
WINDOW_S = 5.0
TOLERANCE = 1.05
CLIENTS = 10
HIDDEN = 32
PROMPT = [5, 6, 7, 8] * 120  # 60 kB of activations, in two steps
TOKENS = 3
COUNTS = (200, 7, 256, 180, 60)
BATCHES = 6


class Arrivals:
    """The bytes that arrive at one peer."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.found: list[tuple[float, int]] = []
        self._target = lab.peer_id(name)
        self._carry = lab.network.carry
        lab.network.carry = self._note  # type: ignore[method-assign]

    def _note(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        def arrives() -> None:
            if target == self._target and size_bytes:
                self.found.append((asyncio.get_running_loop().time(), size_bytes))
            arrive()

        self._carry(source, target, size_bytes, arrives)

    @property
    def total_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.found)

    def windows(self) -> Iterator[int]:
        """Bytes within ``WINDOW_S`` from each arrival on."""
        for began, _ in self.found:
            yield sum(size_bytes for at, size_bytes in self.found if began <= at < began + WINDOW_S)

    def assert_kept(self) -> None:
        """Assert that the limit was kept, by traffic that was enough to exceed it."""
        assert self.total_bytes > 1.5 * WINDOW_S * RATE
        assert max(self.windows()) <= TOLERANCE * WINDOW_S * RATE


def limit(lab: Lab, name: str, rate: float = RATE) -> None:
    transport = lab.network.find(lab.peer_id(name))
    assert transport is not None
    transport.link.down.set_rate(rate)


def rows(start: int, count: int) -> tuple[Row, ...]:
    return (Row(0, start, count, 1, 0),)


async def generate(lab: Lab, name: str) -> None:
    async with lab.client(name) as swarm, lab.chain(swarm) as chain:
        assert await lab.generate(chain, PROMPT, TOKENS) == lab.reference.greedy(PROMPT, TOKENS)
        assert chain.report.failovers == 0


async def train(lab: Lab, name: str, adapter: Adapter | None = None) -> RemoteBatch:
    """Run a batch forward and backward. Results with an adapter are checked by other tests."""
    values = torch.randn(2, sum(COUNTS), HIDDEN, generator=torch.Generator().manual_seed(0))
    async with lab.client(name) as swarm:
        batch = RemoteBatch(swarm, ChainSpec(6, HIDDEN, 512, ElementType.FLOAT32, adapter=adapter), COUNTS)
        found = await batch.forward(values[0]), (await batch.backward(values[1]))[0]
    if adapter is None:
        for ours, theirs in zip(found, lab.reference.train(values[0], COUNTS, values[1]), strict=True):
            assert_near(ours, theirs)
    return batch


@defence(
    "a rate limit on a host limits its senders",
    off=replacing(ReceiveWindow, "_send_limit", nothing),
    layout={"limited": (0, 3), "other": (3, 6)},
)
@pytest.mark.parametrize(
    "layout",
    [{"limited": (0, 3), "other": (3, 6)}, {"other": (0, 3), "limited": (3, 6)}],
    ids=["fed by clients", "fed by a host"],
)
def test_many_prompts_arrive_at_the_limited_rate_and_are_answered(
    reference: Reference, layout: dict[str, tuple[int, int]]
) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(layout)
        limit(lab, "limited")
        arrivals = Arrivals(lab, "limited")
        await asyncio.gather(*(generate(lab, f"client {number}") for number in range(CLIENTS)))
        arrivals.assert_kept()

    simulate(reference, scenario)


def test_replays_for_a_replacement_arrive_at_the_limited_rate(reference: Reference) -> None:
    """Each replay is the whole prompt of a client, in steps of twice the size."""

    async def scenario(lab: Lab) -> None:
        await lab.start_all({"first": (0, 3), "dying": (3, 6)})
        under_way = asyncio.Semaphore(0)
        killed = asyncio.Event()

        async def talk(name: str) -> None:
            async with lab.client(name) as swarm, lab.chain(swarm) as chain:
                hidden = await chain.forward(rows(0, len(PROMPT)), np.array(PROMPT))
                under_way.release()
                await killed.wait()
                tokens = [reference.next_token(hidden)]
                for number in range(1, TOKENS):
                    hidden = await chain.forward(rows(len(PROMPT) + number - 1, 1), np.array(tokens[-1:]))
                    tokens.append(reference.next_token(hidden))
                assert tokens == reference.greedy(PROMPT, TOKENS)
                assert chain.report.failovers == 1

        async def fail() -> None:
            for _ in range(CLIENTS):
                await under_way.acquire()
            await lab.start("limited", lab.hosting((3, 6)))
            limit(lab, "limited")
            arrivals.append(Arrivals(lab, "limited"))
            await asyncio.sleep(2 * lab.timing.refresh_s)  # all clients know it
            await lab.stop("dying")
            killed.set()

        arrivals: list[Arrivals] = []
        await asyncio.gather(fail(), *(talk(f"client {number}") for number in range(CLIENTS)))
        arrivals[0].assert_kept()

    simulate(reference, scenario)


@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "with an adapter"])
def test_passes_and_adapters_arrive_at_the_limited_rate(reference: Reference, is_adapted: bool) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("limited", lab.hosting((0, 6)))
        limit(lab, "limited")
        arrivals = Arrivals(lab, "limited")
        config = reference.model.config
        width = config.num_attention_heads * config.head_dim
        tensors = {
            f"{block}.self_attn.q_proj.{name}": torch.zeros(shape)
            for block in range(6)
            for name, shape in {"down": (16, HIDDEN), "up": (width, 16)}.items()
        }
        adapter = Adapter(tensors) if is_adapted else None
        batches = await asyncio.gather(
            *(train(lab, f"client {number}", adapter) for number in range(BATCHES))
        )
        assert not any(batch.report.failovers for batch in batches)
        arrivals.assert_kept()

    simulate(reference, scenario)


async def answer(lab: Lab) -> int:
    """The number of repairs of a client's chain."""
    async with lab.client() as swarm, lab.chain(swarm) as chain:
        assert await lab.generate(chain, PROMPT, TOKENS) == lab.reference.greedy(PROMPT, TOKENS)
        return int(chain.report.failovers)


async def compute(lab: Lab) -> int:
    """The number of failures of a client's batch at hosts."""
    return (await train(lab, "client")).report.failovers


@defence(
    "a host that grants no credit is replaced",
    off=replacing(ChainSupervisor, "_drop_stuck_hop", nothing),
    use=answer,
)
@pytest.mark.parametrize("use", [answer, compute])
def test_a_host_that_grants_no_credit_is_replaced(
    reference: Reference, use: Callable[[Lab], Awaitable[int]]
) -> None:
    """A host that sends heartbeats but no credit is replaced as soon as a host that computes
    nothing."""

    async def scenario(lab: Lab) -> None:
        await lab.start("stingy", lab.hosting((0, 6)))
        limit(lab, "stingy", rate=1e-3)
        loop = asyncio.get_running_loop()

        async def relieve() -> None:
            await asyncio.sleep(lab.timing.stall_s / 2)
            await lab.start("good", lab.hosting((0, 6)))

        _, failovers = await asyncio.gather(relieve(), use(lab))
        assert failovers
        assert lab.timing.stall_s < loop.time() < 2 * lab.timing.stall_s

    simulate(reference, scenario)


@defence("a sender that does not wait for credit is disconnected", off=overlooking(ReceiveWindow, "start"))
def test_an_upstream_that_sends_without_credit_is_disconnected(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 2)))
        limit(lab, "a")
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            stranger = Stranger(lab, transport)
            session = await stranger.send_open(max_length=512)
            link = await stranger.link()
            assert (await link_reply(link)).HasField("linked")
            assert isinstance(link, MemoryStream)
            assert link._send_window is not None
            link._send_window.max_uncredited_bytes = 1e9
            host = lab.nodes["a"].dependencies.transport.resources.system
            before = host.spent[Rate.FRAMES]
            await stranger.step(link, a_step(1, 0, 256))
            await assert_ends(link)
            assert host.spent[Rate.FRAMES] >= before + VIOLATION_FRAMES
            session.close()

    simulate(reference, scenario)
