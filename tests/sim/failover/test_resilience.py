"""Swarms without a replica, swarms whose hosts leave or join, and the reproducibility of a
simulation from its seed."""

import asyncio
import logging
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from swarmnet_node.node import Node
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Stream
from swarmnet_protocols.session.steps import Row
from tests.defences import Patch, defence
from tests.sim.failover.churn import request
from tests.support.models.tiny import BLOCKS
from tests.support.network.deliveries import arrives_at
from tests.support.network.memory_network import LinkProfile
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.swarm_lab import Lab, Reference, load_reference, simulate

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LAYOUT = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_without_a_replica_the_error_names_the_blocks(reference: Reference, victim: str, fault: str) -> None:
    async def scenario(lab: Lab) -> tuple[NoRoute, float]:
        await lab.start_all(LAYOUT)
        loop = asyncio.get_running_loop()
        lost_at = 0.0

        def on_token(number: int) -> None:
            nonlocal lost_at
            if number == 2:
                lost_at = loop.time()
                getattr(lab.network, fault)(lab.peer_id(victim))

        async with lab.client() as swarm, lab.chain(swarm) as chain:
            with pytest.raises(NoRoute) as caught:
                await lab.generate(chain, PROMPT, 10, on_token)
            with pytest.raises(NoRoute):  # and it stays so
                await chain.forward((Row(0, chain.lengths[0], 1, 1, 0),), np.array([1]))
        return caught.value, loop.time() - lost_at

    error, took_s = simulate(reference, scenario)
    assert error.missing == (LAYOUT[victim],)
    assert took_s <= 15.0


def test_for_a_model_without_hosts_the_error_names_the_blocks(
    reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(lab: Lab) -> NoRoute:
        await lab.start_all({"a": (0, 2), "c": (4, 6)})
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            with pytest.raises(NoRoute) as caught:
                await lab.generate(chain, PROMPT, 1)
        return caught.value

    assert simulate(reference, scenario).missing == ((2, 4),)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert said == ["no host serves blocks 2:4: waiting up to 12 s for one"]


@pytest.mark.parametrize("away_s", [0.5, 4.0, 9.0])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_request_continues_when_the_missing_blocks_return(
    reference: Reference, victim: str, away_s: float
) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start_all(LAYOUT)

        async def come_back() -> None:
            await lab.stop(victim)
            await asyncio.sleep(away_s)
            await lab.start(victim, lab.hosting(LAYOUT[victim]))

        tasks = []

        def on_token(number: int) -> None:
            if number == 2:
                tasks.append(asyncio.create_task(come_back()))

        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 6, on_token)
        await asyncio.gather(*tasks)
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 6)


@pytest.mark.parametrize("leaver", ["a", "b", "c"])
def test_clients_leave_a_finishing_host_without_losing_a_token(reference: Reference, leaver: str) -> None:
    async def scenario(lab: Lab) -> tuple[list[list[int]], float]:
        await lab.start_all(LAYOUT)
        loop = asyncio.get_running_loop()
        finished_s = float("inf")

        async def leave() -> None:
            nonlocal finished_s
            await lab.start(leaver + "2", lab.hosting(LAYOUT[leaver]))
            await asyncio.sleep(lab.timing.refresh_s)
            began = loop.time()
            lab.nodes[leaver].finish(grace_s=60.0)
            await lab.nodes[leaver].finished()
            finished_s = loop.time() - began

        async def ask(name: str) -> list[int]:
            async with lab.client(name) as swarm, lab.chain(swarm) as chain:
                tokens = await lab.generate(chain, PROMPT, 4)
                await moved.wait()
                held = chain.lengths[0]
                for _ in range(4):
                    row = Row(0, held, 1, 1, 0)
                    tokens.append(
                        lab.reference.next_token(await chain.forward((row,), np.array(tokens[-1:])))
                    )
                    held += 1
                assert lab.peer_id(leaver) not in [peer for peer, _, _ in chain.report.route]
                return tokens

        moved = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(f"client{index}")) for index in range(2)]
            await leave()
            moved.set()
        return [task.result() for task in asking], finished_s

    answers, finished_s = simulate(reference, scenario)
    assert answers == [reference.greedy(PROMPT, 8)] * 2
    assert finished_s < 5.0


def test_a_finishing_host_without_a_replica_serves_out_its_grace(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start_all(LAYOUT)

        def on_token(number: int) -> None:
            if number == 1:
                lab.nodes["b"].finish(grace_s=60.0)

        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 6, on_token)
        await asyncio.wait_for(lab.nodes["b"].finished(), 5.0)
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 6)


# ---- placement ---------------------------------------------------------------------------------


def gaps(lab: Lab) -> Sequence[tuple[int, int]]:
    spans = [node.span for name, node in lab.nodes.items() if lab.network.is_online(lab.peer_id(name))]
    covered = {block for span in spans for block in range(*span)}
    return [(block, block + 1) for block in range(BLOCKS) if block not in covered]


@pytest.mark.matrix
@pytest.mark.parametrize("stagger_s", [0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 3.0])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3), (4, 2), (1, 2, 3), (1,) * 6])
def test_nodes_that_choose_their_blocks_cover_the_model(
    reference: Reference, sizes: tuple[int, ...], stagger_s: float
) -> None:
    async def scenario(lab: Lab) -> Sequence[tuple[int, int]]:
        rng = random.Random(f"{sizes}/{stagger_s}")
        order = rng.sample(range(len(sizes)), len(sizes))

        async def join(index: int) -> None:
            await asyncio.sleep(index * stagger_s)
            await lab.start(f"node{order[index]}", lab.hosting(num_blocks=sizes[index]))

        await asyncio.gather(*(join(index) for index in range(len(sizes))))
        return gaps(lab)

    assert simulate(reference, scenario) == []


def leave_pings_unanswered(patch: Patch) -> None:
    """Answer no ping before the blocks are loaded."""

    async def close(_: Node, stream: Stream) -> None:
        stream.close()

    patch.setattr(Node, "_answer_pings", close)


@defence("a node that loads its blocks counts", off=leave_pings_unanswered, name="n1")
@pytest.mark.parametrize("name", ["n1", "n2", "n3", "n4"])
def test_a_loading_node_counts_in_placement(reference: Reference, name: str) -> None:
    """A node that has chosen its blocks keeps them, however long its weights take to load."""

    async def scenario(lab: Lab) -> tuple[int, int]:
        loading = asyncio.create_task(lab.start("loading", lab.hosting((0, 2)), TimedExecutor(60.0)))
        await asyncio.sleep(1.0)
        span = (await lab.start(name, lab.hosting(num_blocks=4))).span
        assert not loading.done()
        await cancel(loading)
        return span

    assert simulate(reference, scenario) == (2, 6)


def test_a_restarted_node_fills_the_gap_it_left(reference: Reference) -> None:
    async def scenario(lab: Lab) -> Sequence[tuple[int, int]]:
        for name in ("x", "y", "z"):
            await lab.start(name, lab.hosting(num_blocks=2))
        await lab.stop("y")
        await lab.start("y", lab.hosting(num_blocks=2))
        return gaps(lab)

    assert simulate(reference, scenario) == []


def test_a_dead_host_leaves_the_routes_of_its_clients_and_then_of_all(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all({**LAYOUT, "b2": (2, 4)})
        dead = lab.peer_id("b")
        async with lab.client() as swarm:
            await asyncio.sleep(2.0)
            lab.network.hang(dead)
            await asyncio.sleep(5.0)
            routes = [swarm.route((0, BLOCKS)) for _ in range(50)]
            assert all(hop.peer != dead for route in routes for hop in route)
            await asyncio.sleep(lab.timing.record_s)
            assert dead not in [host.peer for host in swarm.known]

    simulate(reference, scenario)


# ---- one seed, one trace -----------------------------------------------------------------------

TRACE = """
import asyncio, random, sys
from pathlib import Path
import torch
from tests.support.swarm.swarm_lab import load_reference
from tests.sim.failover.test_resilience import trace
torch.set_num_threads(1)
print("trace", trace(load_reference(Path(sys.argv[1]), Path(sys.argv[2])), int(sys.argv[3])))
"""


def trace(reference: Reference, seed: int) -> str:
    """The digest of every message of a request during which a host crashes."""

    async def scenario(lab: Lab) -> str:
        await lab.start_all({**LAYOUT, "b2": (2, 4)})
        served = {lab.peer_id("b"), lab.peer_id("b2")}
        hit = lab.once(arrives_at(served, "step 2"), lambda d: lab.network.crash(d.target))
        error = await request(lab, "client", random.Random(seed), 3)
        assert error is None
        assert hit, "the fault was never injected"
        return lab.network.trace_hash()

    return simulate(reference, scenario, seed=seed, link=LinkProfile(0.01, jitter_s=0.01))


def test_one_seed_gives_one_trace_in_every_process(reference: Reference, tmp_path: Path) -> None:
    def in_a_process(seed: int, hash_seed: str) -> str:
        found = subprocess.run(
            [sys.executable, "-c", TRACE, str(tmp_path / "model"), str(tmp_path / "cache"), str(seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=140,
            check=True,
        )
        return found.stdout.split()[-1]

    here = trace(load_reference(tmp_path / "model", tmp_path / "cache"), 1)
    assert trace(reference, 1) == here
    assert in_a_process(1, "1") == here
    assert trace(reference, 2) != here


def test_a_host_announces_its_addresses_at_once_when_they_change(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a relay leaves, or a laptop changes networks: clients do not wait for the next
    periodic announcement."""

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        transport = lab.network.find(lab.peer_id("a"))
        assert transport is not None
        moved = f"/ip4/25.0.0.9/tcp/4001/p2p/{transport.peer_id}"
        async with lab.client() as swarm:
            monkeypatch.setattr(transport, "addresses", lambda: [moved])
            await asyncio.sleep(2 * lab.timing.address_check_s)
            await swarm.refresh()
            assert [host.addresses for host in swarm.known] == [(moved,)]

    simulate(reference, scenario)
