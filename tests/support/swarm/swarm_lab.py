"""A whole swarm in one process: real nodes and clients over simulated links, faults on observed
events."""

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.model.head import Layers
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.expert_node import ExpertHosting, ExpertNode
from swarmnet_node.hosted_blocks import Hosting, Placed
from swarmnet_node.node import Node
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.relocating import Relocator
from swarmnet_node.running_node import Dependencies
from swarmnet_node.supervisor import Supervisor
from swarmnet_protocols.arrays import Array, as_tensor
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.membership.guarded_transport import GuardedTransport
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.roles import Role
from tests.support.models.rounding import TINY_TERMS, assert_near
from tests.support.network.deliveries import once
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryNetwork
from tests.support.network.private_swarm import PrivateSwarm, virtual_clock
from tests.support.network.virtual_time import run
from tests.support.swarm.fake_machine import FakeMachine
from tests.support.swarm.generation import greedy

T = TypeVar("T")
N = TypeVar("N", Node, ExpertNode)
SWARM = bytes(32)
EPOCH = 1_800_000_000.0


class Reference:
    """The whole model in this process: every answer must equal its own."""

    def __init__(self, local: LocalModel) -> None:
        self.local = local
        self._stages: dict[tuple[int, int], Stage] = {}
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    @cached_property
    def model(self) -> Any:
        """The model in transformers."""
        return self.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))

    @cached_property
    def layers(self) -> Layers:
        """The local layers of every client."""
        return LocalLayers(self.local, LoadOptions())

    def stage(self, start: int, end: int) -> Stage:
        """A stage for a node of the lab; nodes of one process may share its weights."""
        if (start, end) not in self._stages:
            self._stages[start, end] = load_stage(
                self.local, start, end, dtype=torch.float32, device=torch.device("cpu")
            )
        return self._stages[start, end]

    def train(
        self, inputs: torch.Tensor, counts: Sequence[int], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of sequences after all blocks, and the gradients at their inputs for
        ``gradients`` at the outputs: [P, D] each."""
        whole = self.stage(0, self.local.manifest.blocks)
        _, graph = whole.record_sequences(inputs, counts)
        return whole.run_sequences(inputs, counts), whole.gradients(graph, gradients)[0]

    def next_token(self, hidden: Array) -> int:
        """The greedy token after the last position of hidden states [n, D]."""
        return int(self.layers.logits(hidden[-1:]).argmax())

    def greedy(self, ids: list[int], count: int) -> list[int]:
        key = tuple(ids), count
        if key not in self._greedy:
            self._greedy[key] = self._answer(ids, count)
        return self._greedy[key]

    def _answer(self, ids: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            return greedy(self.model, [ids], count)[0]

    @torch.inference_mode()
    def check(self, tokens: list[int], outputs: Array) -> None:
        """Assert that ``outputs`` [n, D] are those of the last n positions of ``tokens``, as far
        as the logits after them show it."""
        expected = self.model(torch.tensor([tokens])).logits[0, -len(outputs) :]
        found = as_tensor(self.layers.logits(outputs))
        assert_near(found, expected, TINY_TERMS + self.local.manifest.blocks * len(tokens))


def peer(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32, b"."))


@dataclass
class Lab:
    """The simulated network with its nodes and clients."""

    reference: Reference
    seed: int = 0
    link: LinkProfile = field(default_factory=lambda: LinkProfile(delay_s=0.01))
    timing: Timing = field(default_factory=Timing)
    private: PrivateSwarm | None = None
    """The private swarm of all peers, each with its handshakes; None for an open swarm."""
    wire: ElementType | None = None
    """The element type in which activations travel; None: as the hosts compute them."""

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(random.Random(f"{self.seed}/network"), self.link)
        self.board = MemoryBoard(
            self.network, lambda: EPOCH + asyncio.get_running_loop().time(), delay_s=0.05
        )
        self.nodes: dict[str, Node] = {}
        self.memberships: dict[str, Membership] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._executors: dict[str, Executor] = {}

    def beside(self, reference: Reference) -> "Lab":
        """The same network with another model: its nodes and clients are those of that model."""
        other = copy.copy(self)
        other.reference = reference
        return other

    @property
    def manifest(self) -> bytes:
        return self.reference.local.manifest.hash

    def peer_id(self, name: str) -> PeerId:
        return peer(name).peer_id

    def hosting(self, blocks: tuple[int, int] | None = None, num_blocks: int = 0, **options: Any) -> Hosting:
        return Hosting(
            model="tiny",
            manifest=self.manifest,
            total_blocks=self.reference.local.manifest.blocks,
            load=self.reference.stage,
            placed=None if blocks is None else Placed(blocks, "named by the owner"),
            num_blocks=num_blocks,
            **options,
        )

    async def start(self, name: str, hosting: Hosting, executor: Executor | None = None) -> Node:
        """Start a node that runs until the lab ends or the network crashes it. Return when it
        serves and the directory shows it.

        ``executor`` is its torch thread, if its work takes time or waits for peers.
        """
        if executor is not None:
            self._executors[name] = executor
        self.nodes[name] = await self._start(name, partial(Node, hosting=hosting))
        return self.nodes[name]

    async def start_all(self, spans: Mapping[str, tuple[int, int]], **options: Any) -> None:
        """Start a node for the blocks of each name, one after another."""
        for name, blocks in spans.items():
            await self.start(name, self.hosting(blocks, **options))

    async def start_experts(self, name: str, hosting: ExpertHosting) -> ExpertNode:
        """Start a node with experts, as ``start``."""
        return await self._start(name, partial(ExpertNode, hosting=hosting))

    async def _start(self, name: str, node_of: Callable[[Dependencies], N]) -> N:
        serving: asyncio.Future[N] = asyncio.get_running_loop().create_future()
        self._tasks[name] = asyncio.create_task(self._live(name, node_of, serving))
        node = await serving
        await self.board.shown()
        return node

    async def stop(self, name: str) -> None:
        """End a node's process: the network sees its streams end, the directory learns nothing."""
        self.network.crash(self.peer_id(name))
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks.pop(name), return_exceptions=True)

    @asynccontextmanager
    async def _transport(self, name: str, identity: Identity, role: Role) -> AsyncIterator[Transport]:
        async with self.network.transport(identity.peer_id) as raw:
            if self.private is None:
                yield raw
                return
            membership = Membership(self.private.rules, identity.peer_id, virtual_clock)
            membership.replace_certificate(self.private.certify(identity.peer_id, role))
            self.memberships[name] = membership
            async with Handshakes(raw, membership, self.timing).running() as handshakes:
                yield GuardedTransport(raw, handshakes)

    @asynccontextmanager
    async def supervised(
        self,
        name: str,
        hosting: Hosting,
        machine: FakeMachine,
        limits: OwnerLimits,
        *,
        executor: Executor | None = None,
        is_loaded: bool = True,
        wake: Callable[[], Awaitable[Hosting]] | None = None,
    ) -> AsyncIterator[Supervisor]:
        """A node that runs within its owner's limits, on ``executor`` as in ``start``.
        ``is_loaded``: on entry it serves or is paused."""
        if executor is not None:
            self._executors[name] = executor
        async with (
            self._world(name) as world,
            Supervisor(world, hosting, machine, limits, wake).running() as supervisor,
        ):
            if is_loaded:
                await supervisor.started()
            yield supervisor

    @asynccontextmanager
    async def _world(self, name: str) -> AsyncIterator[Dependencies]:
        identity = peer(name)
        async with self._transport(name, identity, Role.HOST) as transport:
            directory = MemoryDirectory(self.board, identity, SWARM, self.memberships.get(name))
            rng = random.Random(f"{self.seed}/{name}")
            # Virtual time runs the calls of executors in place.
            stopwatch = asyncio.get_running_loop().time
            yield Dependencies(
                transport,
                directory,
                self._executors.get(name, ThreadPoolExecutor(1)),
                rng,
                self.timing,
                stopwatch,
                clock=self.board.clock,
            )

    async def _live(
        self,
        name: str,
        node_of: Callable[[Dependencies], N],
        serving: "asyncio.Future[N]",
    ) -> None:
        try:
            async with self._world(name) as world:
                node = node_of(world)
                async with node.running():
                    relocating = [Relocator(node).run()] if isinstance(node, Node) else []
                    async with in_background(*relocating):
                        serving.set_result(node)
                        await node.finished()
        except BaseException as error:
            if not serving.done():
                serving.set_exception(error)
            raise

    @asynccontextmanager
    async def client(self, name: str = "client") -> AsyncIterator[ModelHosts]:
        identity = peer(name)
        async with AsyncExitStack() as stack:
            transport = await stack.enter_async_context(self._transport(name, identity, Role.CLIENT))
            directory = MemoryDirectory(self.board, identity, SWARM, self.memberships.get(name))
            rng = random.Random(f"{self.seed}/{name}")
            blocks = self.reference.local.manifest.blocks
            hosts = ModelHosts(transport, directory, self.manifest, rng, self.timing, blocks=blocks)
            yield await stack.enter_async_context(hosts.watching())

    def chain(
        self,
        hosts: ModelHosts,
        *,
        max_length: int = 512,
        standby: bool | None = None,
        wait_s: float = 0.0,
        give_up_idle: Callable[[], Set[int]] = frozenset,
        adapter: Adapter | None = None,
    ) -> Any:
        blocks = self.reference.local.manifest.blocks
        spec = ChainSpec(
            blocks,
            32,
            max_length,
            ElementType.FLOAT32,
            self.wire,
            standby=standby,
            wait_s=wait_s,
            adapter=adapter,
        )
        layers = self.reference.layers
        return Chain(hosts, spec, layers.embed, layers.logits, give_up_idle).open()

    async def generate(
        self, chain: Chain, ids: list[int], count: int, on_token: Callable[[int], None] | None = None
    ) -> list[int]:
        """Greedy tokens through the chain, one step per token."""
        tokens: list[int] = []
        fed, new = 0, list(ids)
        for number in range(count):
            rows = (Row(0, fed, len(new), 1, 0),)
            hidden = await chain.forward(rows, np.array(new))
            fed += len(new)
            new = [self.reference.next_token(hidden)]
            tokens += new
            if on_token is not None:
                on_token(number)
        return tokens

    def once(self, matches: Callable[[Delivery], bool], action: Callable[[Delivery], None]) -> list[Delivery]:
        """Do ``action`` at the first delivery that ``matches``. Returns a list that holds that
        delivery afterwards."""
        return once(self.network, matches, action)

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of keys and values on each node that holds any."""
        held = {name: node.status().host.cache_bytes for name, node in self.nodes.items()}
        return {name: size for name, size in held.items() if size}

    def sessions(self) -> dict[str, int]:
        """Open sessions on each node that has any."""
        counts = {name: node.status().host.record.sessions for name, node in self.nodes.items()}
        return {name: number for name, number in counts.items() if number}

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def __aenter__(self) -> "Lab":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def load_reference(directory: Path, cache_dir: Path, **options: float) -> Reference:
    """Save and load the tiny Llama; ``options`` are those of ``save_tiny_llama``."""
    from swarmnet_protocols.models import resolve
    from tests.support.models.tiny import save_tiny_llama

    return Reference(resolve(str(save_tiny_llama(directory, **options)), cache_dir=cache_dir))


def load_family(family: str, folder: Path) -> Reference:
    """Save and load the tiny model of a family of ``hub_families``."""
    from swarmnet_protocols.models import resolve
    from tests.support.models.hub_families import FAMILIES

    return Reference(resolve(str(FAMILIES[family].save(folder / "model")), cache_dir=folder / "cache"))


def simulate(
    reference: Reference,
    scenario: Callable[[Lab], Awaitable[T]],
    *,
    seed: int = 0,
    limit_s: float = 120.0,
    **options: Any,
) -> T:
    """Run a scenario in a lab, in virtual time; errors name the virtual time and the seed.

    A scenario fails after ``limit_s`` virtual seconds: a stuck one would exchange heartbeats for
    ever.
    """

    async def within() -> T:
        loop = asyncio.get_running_loop()
        async with Lab(reference, seed=seed, **options) as lab:
            try:
                async with asyncio.timeout(limit_s):
                    return await scenario(lab)
            except BaseException as error:
                error.add_note(f"seed={seed} at t={loop.time():.3f} s, trace {lab.network.trace_hash()[:16]}")
                raise

    return run(within())
