"""The dashboard's observer in a simulated swarm: hosts that join, crash, hang and leave, and edges
along which tokens flow."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from swarmnet.cli.commands.swarm.status import model_rows, peer_row, swarm_state
from swarmnet.dashboard.feed import Feed
from swarmnet.dashboard.history import History
from swarmnet.dashboard.observing import observer as observer_module
from swarmnet.dashboard.observing import polling
from swarmnet.dashboard.observing.observations import SwarmInfo
from swarmnet.dashboard.observing.observer import Observer
from swarmnet.dashboard.observing.polling import ObserverDependencies
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.trace import Trace
from swarmnet_node.engine.counters import cumulative_counts, total
from swarmnet_protocols.directory import catalog
from swarmnet_protocols.directory.host_announcements import PROTOCOL, hosts_topic
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.hop_times import Moment
from swarmnet_protocols.wire import records_pb2
from swarmnet_protocols.wire.roles import Role
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.memory_network import LinkProfile
from tests.support.network.private_swarm import PrivateSwarm, virtual_clock
from tests.support.swarm.expert_lab import LAN, ExpertLab, load_experts_reference
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, peer, simulate

PROMPT = [5, 6, 7, 8, 9]
SEEN_S = 10.0
"""Seconds within which a fault must be on the page."""


@asynccontextmanager
async def observing(lab: Lab) -> AsyncIterator[Observer]:
    identity = peer("observer")
    async with lab._transport("observer", identity, Role.OBSERVER) as transport:
        directory = MemoryDirectory(lab.board, identity, SWARM)
        dependencies = ObserverDependencies(
            transport, directory, virtual_clock, random.Random(f"{lab.seed}/observer"), lab.timing
        )
        info = SwarmInfo("lab", SWARM.hex(), "open", identity.peer_id)
        async with Observer(dependencies, info).running() as observer:
            yield observer


@asynccontextmanager
async def dashboard(lab: Lab, tmp_path: Any) -> AsyncIterator[Feed]:
    async with AsyncExitStack() as stack:
        observer = await stack.enter_async_context(observing(lab))
        history = stack.enter_context(History.open(tmp_path))
        yield await stack.enter_async_context(Feed(observer, history).running())


async def until(feed: Feed, holds: Callable[[dict[str, Any]], bool]) -> float:
    """Wait until ``holds`` is true of the state; the virtual seconds waited. The caller sets a time
    limit."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with feed.watching() as viewer:
        while not holds(feed.now.body):  # type: ignore[arg-type]
            await viewer.next(feed)
    return loop.time() - began_s


def states(body: dict[str, Any]) -> list[str]:
    return sorted(entry["state"] for entry in body["peers"].values())


def kinds(body: dict[str, Any]) -> list[str]:
    return [event["kind"] for event in reversed(body["events"])]


def online(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda body: (
        states(body) == ["online"] * count
        and all(entry["started_s"] is not None for entry in body["peers"].values())
    )


async def start(lab: Lab, **spans: tuple[int, int]) -> None:
    for name, span in spans.items():
        await lab.start(name, lab.hosting(span, public_name=name, version="0.1.0"))


@pytest.mark.parametrize("private", [False, True], ids=["open", "private"])
def test_a_generation_appears_as_edges(reference: Reference, tmp_path: Any, private: bool) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 2), b=(2, 4), c=(4, 6))
        async with dashboard(lab, tmp_path) as feed, lab.client() as swarm, lab.chain(swarm) as chain:
            await until(feed, online(3))
            model = feed.now.body["models"][lab.manifest.hex()]
            assert (model["name"], model["blocks"], model["replicas"]) == ("tiny", 6, [1] * 6)
            tokens = asyncio.create_task(lab.generate(chain, PROMPT, 120))
            await until(feed, lambda body: body["models"][lab.manifest.hex()]["tokens_per_s"] > 0)
            ids = ["client", *(lab.peer_id(name) for name in "abc"), "client"]
            flows = feed.now.body["flows"]
            assert set(flows) == {f"{one}>{other}" for one, other in pairwise(ids)}
            assert all(flow["sessions"] == 1 for flow in flows.values())
            assert feed.now.body["models"][lab.manifest.hex()]["sessions"] == 1
            assert await tokens == reference.greedy(PROMPT, 120)
            assert lab.peer_id("client") not in feed.now.text, "the state names no client"
        assert "joined" not in kinds(feed.now.body), "the hosts started before the observer"  # type: ignore[arg-type]

    simulate(reference, scenario, private=PrivateSwarm() if private else None)


@pytest.mark.parametrize("asked_after_s", [0.0, 1.0], ids=["links being made", "links made"])
def test_step_times_are_those_that_the_client_measures(
    reference: Reference, tmp_path: Any, asked_after_s: float
) -> None:
    """Three links of 30 ms each way: a token takes 4 of them round. The first one takes as long,
    unless its prompt is at the first hop before that has its link to the second."""

    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 2), b=(2, 4), c=(4, 6))
        trace = Trace()
        spec = ChainSpec(6, 32, 512, ElementType.FLOAT32, trace=trace.keep)
        async with (
            dashboard(lab, tmp_path) as feed,
            lab.client() as swarm,
            Chain(swarm, spec, reference.layers.embed, reference.layers.logits).open() as chain,
        ):
            await asyncio.sleep(asked_after_s)
            await lab.generate(chain, PROMPT, 60)
            await until(feed, lambda body: any(entry["positions"] for entry in body["peers"].values()))
            host = lab.nodes["a"].host
            assert host is not None
            times, firsts = host.counters.token_times, host.counters.first_tokens
            assert cumulative_counts(times)[-1] == 58
            assert total(times) / 58 == pytest.approx(0.12, abs=0.005)
            assert cumulative_counts(firsts)[-1] == 1
            measured = trace.steps[0].marked
            first_s = measured[Moment.ANSWERED] - measured[Moment.SENT]
            assert total(firsts) == pytest.approx(first_s, abs=0.01)
            assert first_s == pytest.approx(0.12 if asked_after_s else 0.18, abs=0.01)
            for other in "bc":
                host = lab.nodes[other].host
                assert host is not None
                assert cumulative_counts(host.counters.token_times)[-1] == 0, (
                    "only the first hop sees the client"
                )

    simulate(reference, scenario, link=LinkProfile(delay_s=0.03))


def test_a_swarm_says_at_once_what_it_serves_and_what_it_lacks(reference: Reference) -> None:
    """`swarmnet swarm status`: nobody has observed the swarm before."""

    async def scenario(lab: Lab) -> None:
        await start(lab, kitchen=(0, 2), cellar=(2, 6))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, PROMPT, 60)
        await asyncio.sleep(SEEN_S)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with observing(lab) as observer:
            await observer.settled(60.0)
            assert loop.time() - began_s < 1.0
            state = swarm_state(observer.snapshot(), ["a-relay"])
            (model,) = state["models"].values()
            rows = model_rows(model)
            assert rows["blocks"] == "6; each has 1 host or more"
            assert rows["speed"] == f"{1 / model['token_s']['p50']:.1f} tokens/s for one answer"
            assert rows["helps most"].startswith(
                "blocks 0:2 have only one host each: if one of them leaves, "
            )  # type: ignore[attr-defined]
            lines = [peer_row(each, state["models"]) for each in state["peers"].values()]
            assert {line.partition(", 0 s")[0] for line in lines} == {
                "online, blocks 0:2 of tiny",
                "online, blocks 2:6 of tiny",
            }
            assert state["relays"] == {"a-relay": 0}
        await lab.stop("cellar")  # its record stays in the directory
        async with observing(lab) as observer:
            await observer.settled(60.0)
            state = swarm_state(observer.snapshot(), [])
            (model,) = state["models"].values()
            assert model["missing_blocks"] == [[2, 6]]
            assert model_rows(model)["blocks"] == "6; nobody has 2:6"
            assert not model["healthy"]
            (silent,) = [each for each in state["peers"].values() if each["silent"]]
            assert peer_row(silent, {}).startswith("online, does not answer, ")

    simulate(reference, scenario, limit_s=300, link=LinkProfile(delay_s=0.03))


@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
def test_a_fault_is_seen_within_ten_seconds(reference: Reference, tmp_path: Any, fault: str) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 6), b=(3, 6), c=(0, 3))
        async with dashboard(lab, tmp_path) as feed:
            await until(feed, online(3))
            lost = lab.peer_id("b")
            if fault == "crash":
                await lab.stop("b")
            else:
                getattr(lab.network, fault)(lost)
            seen_s = await until(feed, lambda body: body["peers"][lost]["state"] == "gone")
            assert seen_s < SEEN_S
            assert kinds(feed.now.body) == ["lost", "weak"]  # type: ignore[arg-type]
            model = feed.now.body["models"][lab.manifest.hex()]
            assert model["replicas"] == [2] * 3 + [1] * 3
            assert model["weakest"] == {"block": 3, "replicas": 1}
            assert model["healthy"]
            assert model["advice"]["blocks"] == [3, 6]

    simulate(reference, scenario)


def test_joins_and_leaves_become_events(reference: Reference, tmp_path: Any) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 6))
        async with dashboard(lab, tmp_path) as feed:
            await until(feed, online(1))
            await start(lab, b=(0, 6))
            assert await until(feed, online(2)) < 2 * SEEN_S
            lab.nodes["b"].finish(5.0)
            await until(feed, lambda body: states(body) == ["gone", "online"])
            assert kinds(feed.now.body) == ["joined", "healed", "left", "weak"]  # type: ignore[arg-type]
            assert [event["peer_id"] for event in feed.now.body["events"] if event["kind"] == "left"] == [
                lab.peer_id("b")
            ]

    simulate(reference, scenario)


def test_a_failover_is_counted(reference: Reference, tmp_path: Any) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 2), b=(2, 4), b2=(2, 4), c=(4, 6))
        async with dashboard(lab, tmp_path) as feed, lab.client() as swarm, lab.chain(swarm) as chain:
            await until(feed, online(4))
            generating = asyncio.create_task(lab.generate(chain, PROMPT, 300))
            await until(
                feed, lambda body: any(flow["positions_per_s"] > 0 for flow in body["flows"].values())
            )
            (victim,) = (each for each, start, _ in chain.report.route if start == 2)
            await lab.stop("b" if victim == lab.peer_id("b") else "b2")
            assert await generating == reference.greedy(PROMPT, 300)
            await asyncio.sleep(2 * SEEN_S)
            counts = feed._source.snapshot().totals[lab.manifest]
            assert counts.recoveries == 1, "another host took over by replay"
            assert counts.failures >= 1
            assert feed.now.body["models"][lab.manifest.hex()]["token_s"]["p50"] > 0

    simulate(reference, scenario)


def test_experts_on_peers_are_seen_and_missing_ones_are_advised(tmp_path: Any) -> None:
    reference = load_experts_reference("mixtral", tmp_path)
    (tmp_path / "history").mkdir()

    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        starting = asyncio.create_task(experts.trunk("trunk", own=range(2)))
        async with dashboard(lab, tmp_path / "history") as feed:

            def model() -> Any:
                return feed.now.body["models"].get(lab.manifest.hex())

            await until(
                feed, lambda _: bool(model() and model()["experts"] and model()["experts"]["missing"])
            )
            first = min(experts.blocks)
            assert model()["experts"]["replicas"][str(first)] == "11xxxxxx"
            assert "--experts" in model()["advice"]["command"]
            assert not model()["healthy"]
            await experts.peer("peer", experts.everywhere(range(2, 8)))
            await starting
            await until(feed, lambda _: bool(model()["healthy"] and model()["experts"]["single"]))
            assert model()["experts"]["replicas"][str(first)] == "1" * 8
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, 60)
            peer_id = lab.peer_id("peer")
            await until(feed, lambda body: body["peers"][peer_id]["experts"]["streams"] > 0)
            entry = feed.now.body["peers"][peer_id]
            assert (entry["role"], entry["state"], entry["blocks"]) == ("experts", "online", None)
            trunk = feed.now.body["peers"][lab.peer_id("trunk")]["trunk"]
            assert (trunk["peers"], trunk["missing"]) == (1, 0)
            await lab.stop("peer")
            lost_s = await until(feed, lambda body: body["peers"][peer_id]["state"] == "gone")
            await until(feed, lambda _: bool(model()["experts"]["missing"]))
            assert lost_s < SEEN_S
            assert any("no peer has experts" in event["text"] for event in feed.now.body["events"])

    simulate(reference, scenario, link=LAN)


def announce(lab: Lab, name: str) -> None:
    """Publish a record of a host that does not exist."""
    identity = peer(name)
    address = f"/ip4/66.6.0.1/tcp/1/p2p/{identity.peer_id}"
    body = records_pb2.HostRecord(
        manifest=lab.manifest,
        protocol=PROTOCOL,
        end=6,
        state=records_pb2.HOST_STATE_ONLINE,
        addresses=[address],
    )
    topic = hosts_topic(lab.manifest, identity.peer_id)
    lab.board.post(
        *Publisher(identity, SWARM, virtual_clock).seal(topic, body.SerializeToString(), lifetime_s=600)
    )


def test_announced_peers_that_do_not_exist_displace_no_host(
    reference: Reference, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "MAX_PEERS", 5)

    async def scenario(lab: Lab) -> None:
        for number in range(40):
            announce(lab, f"absent-{number}")
        await start(lab, a=(0, 2), b=(2, 4), c=(4, 6))
        hosts = {lab.peer_id(name) for name in "abc"}
        async with dashboard(lab, tmp_path) as feed:

            def all_answer(body: dict[str, Any]) -> bool:
                return all(peer in body["peers"] and body["peers"][peer]["started_s"] for peer in hosts)

            await until(feed, all_answer)
            for _ in range(10):
                await asyncio.sleep(SEEN_S)
                assert all_answer(feed.now.body)  # type: ignore[arg-type]
                assert len(feed._source.snapshot().peers) <= 5

    simulate(reference, scenario, limit_s=600)


def test_topics_are_read_at_once_and_a_failed_one_delays_no_other(
    reference: Reference, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = most = 0

    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 6))
        lookup = MemoryDirectory.lookup
        absent = {f"hosts/{(bytes([number]) * 32).hex()}" for number in range(20)}
        for number in range(20):
            entry = records_pb2.CatalogModel(manifest=bytes([number]) * 32, name="none", blocks=6)
            body = records_pb2.CatalogRecord(model=entry).SerializeToString()
            publisher = Publisher(peer(f"liar-{number}"), SWARM, virtual_clock)
            lab.board.post(*publisher.seal(catalog.TOPIC, body, lifetime_s=600))
        await lab.board.shown()

        async def slow(directory: MemoryDirectory, topic: str) -> Any:
            nonlocal reading, most
            if topic.rpartition("/")[0] not in absent:
                return await lookup(directory, topic)
            reading += 1
            most = max(most, reading)
            await asyncio.sleep(1.0)
            reading -= 1
            raise Unreachable("no replica")

        monkeypatch.setattr(MemoryDirectory, "lookup", slow)
        async with dashboard(lab, tmp_path) as feed:
            await until(feed, online(1))
        assert most == observer_module.MAX_LOOKUPS

    simulate(reference, scenario)


def test_an_empty_directory_removes_no_peer_that_answers(reference: Reference, tmp_path: Any) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, a=(0, 6))
        async with dashboard(lab, tmp_path) as feed:
            await until(feed, online(1))
            lab.board._postings.clear()
            lab.board.post = lambda *_: None  # type: ignore[method-assign]
            await asyncio.sleep(60.0)
            assert states(feed.now.body) == ["online"], "it still answers"  # type: ignore[arg-type]
            assert feed.now.body["models"][lab.manifest.hex()]["healthy"]

    simulate(reference, scenario)
