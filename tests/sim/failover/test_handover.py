"""A hop is replaced by a standby that is ready: no step waits when a host leaves, and only for a
moment when one fails."""

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from swarmnet_client.chain import standby
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainReport, LiveHop
from swarmnet_node.hosting import host as host_module
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.session import HostedSession
from swarmnet_node.hosting.slots import IDLE_S
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.session.steps import Row, Step
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [5, 6, 7, 8, 9] * 60  # two chunks
TOKENS = 80
LEAVES_AT = 8
"""Tokens after which a host leaves or fails."""
ONE_OF_EACH = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
TWO_OF_EACH = {**ONE_OF_EACH, "a2": (0, 2), "b2": (2, 4), "c2": (4, 6)}
COMES_S = 30.0
"""Seconds within which a client knows of a host that came, and has its standby."""
STEP_S = 0.041
"""Seconds of a decode step: four links of 10 ms each; computing takes no time here."""


@dataclass
class Answer:
    """The tokens of one answer, the waits for each of them, and what was done by the chain."""

    tokens: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    report: ChainReport = field(default_factory=ChainReport)
    computed: dict[str, int] = field(default_factory=dict)
    """Positions that each node computed."""

    @property
    def longest_decode_s(self) -> float:
        return max(self.waits_s[1:])


def holder(lab: Lab, chain: Chain, block: int) -> str:
    """The node that serves a block to the chain."""
    peer = next(peer for peer, start, end in chain.report.route if start <= block < end)
    return next(name for name in lab.nodes if lab.peer_id(name) == peer)


async def answer(
    lab: Lab,
    layout: Mapping[str, tuple[int, int]],
    act: Callable[[Chain], object],
    *,
    standby: bool | None = None,
    at: int = LEAVES_AT,
) -> Answer:
    """Generate an answer on nodes of ``layout``, and call ``act`` after ``at`` tokens. Afterwards
    no live node holds anything for it."""
    await lab.start_all(layout)
    got = Answer()
    loop = asyncio.get_running_loop()
    async with lab.client() as swarm:
        chain: Chain
        async with lab.chain(swarm, standby=standby) as chain:
            times = [loop.time()]

            def on_token(number: int) -> None:
                times.append(loop.time())
                if number == at:
                    act(chain)

            got.tokens = await lab.generate(chain, PROMPT, TOKENS, on_token)
            got.waits_s = [after - before for before, after in pairwise(times)]
            got.report = chain.report
        await asyncio.sleep(1.0)
    got.computed = {name: node.status().host.positions for name, node in lab.nodes.items()}
    client = lab.peer_id("client")
    alive = {name for name in layout if lab.network.passes(client, lab.peer_id(name))}
    assert not alive & lab.sessions().keys(), "a session outlived its client"
    assert not alive & lab.cache_bytes().keys(), "a cache outlived its session"
    assert got.tokens == lab.reference.greedy(PROMPT, TOKENS)
    return got


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_host_that_leaves_hands_over_without_a_pause(reference: Reference, block: int) -> None:
    left: list[str] = []

    async def scenario(lab: Lab) -> Answer:
        def leave(chain: Chain) -> None:
            left.append(holder(lab, chain, block))
            lab.nodes[left[0]].finish(grace_s=30.0)

        got = await answer(lab, TWO_OF_EACH, leave)
        await asyncio.wait_for(lab.nodes[left[0]].finished(), 1.0)
        return got

    got = simulate(reference, scenario)
    assert (got.report.handovers, got.report.failovers) == (1, 1)
    assert got.longest_decode_s <= 2 * STEP_S
    whole = len(PROMPT) + TOKENS - 1
    others = [name for name in TWO_OF_EACH if TWO_OF_EACH[name] != TWO_OF_EACH[left[0]]]
    # other nodes have computed for audits
    survivors = sorted(got.computed[name] for name in others)[-2:]
    assert survivors == [whole, whole], "a survivor computed twice"


@pytest.mark.parametrize("others", [["b2"], []], ids=["another host", "no other host"])
def test_a_host_leaves_at_once_while_no_step_is_in_flight(reference: Reference, others: list[str]) -> None:
    """The chain opens the blocks on another host meanwhile, or when its next step comes. The answer
    goes on as before."""

    async def scenario(lab: Lab) -> tuple[list[int], float]:
        await lab.start_all({**ONE_OF_EACH, **dict.fromkeys(others, (2, 4))})
        clock = asyncio.get_running_loop().time
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 10)
            await asyncio.sleep(1.0)
            left, began = holder(lab, chain, 2), clock()
            lab.nodes[left].finish(grace_s=60.0)
            await lab.nodes[left].finished()
            took_s = clock() - began
            await lab.stop(left)
            await asyncio.sleep(60.0)  # the client has given up looking for hosts
            if not others:
                await lab.start("late", lab.hosting((2, 4)))
            ids = [*PROMPT, *tokens]
            row = Row(0, len(ids) - 1, 1, 1, 0)
            tokens.append(reference.next_token(await chain.forward((row,), np.array(ids[-1:]))))
        return tokens, took_s

    tokens, took_s = simulate(reference, scenario, limit_s=300.0)
    assert tokens == reference.greedy(PROMPT, 11)
    assert took_s <= 2.0


@defence(
    "a client that does not answer does not keep a host from leaving",
    off=replacing(host_module, "IDLE_S", math.inf),
)
def test_a_leaving_host_ends_the_sessions_of_a_silent_client(reference: Reference) -> None:
    async def scenario(lab: Lab) -> float:
        node = await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, PROMPT, 4)
            lab.network.hang(lab.peer_id("client"))
            began = asyncio.get_running_loop().time()
            node.finish(grace_s=60.0)
            await node.finished()
            return asyncio.get_running_loop().time() - began

    assert simulate(reference, scenario, limit_s=100.0) <= IDLE_S + 3.0


def test_a_host_hands_over_to_two_that_share_its_blocks(reference: Reference) -> None:
    layout = {**ONE_OF_EACH, "left": (2, 3), "right": (3, 4)}

    async def scenario(lab: Lab) -> Answer:
        def leave(chain: Chain) -> None:
            assert holder(lab, chain, 2) == "b"  # it takes one hop less
            lab.nodes["b"].finish(grace_s=30.0)

        return await answer(lab, layout, leave)

    got = simulate(reference, scenario)
    assert (got.report.handovers, len(got.report.route)) == (1, 4)
    assert got.longest_decode_s <= 2 * STEP_S


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_standby_takes_over_within_two_steps_when_a_host_fails(reference: Reference, block: int) -> None:
    async def scenario(lab: Lab) -> Answer:
        def fail(chain: Chain) -> None:
            lab.network.crash(lab.peer_id(holder(lab, chain, block)))

        return await answer(lab, TWO_OF_EACH, fail, standby=True, at=TOKENS // 2)

    got = simulate(reference, scenario)
    assert (got.report.handovers, got.report.failovers) == (0, 1)
    assert got.longest_decode_s <= 3 * STEP_S


def spares(lab: Lab) -> list[str]:
    """The nodes with a session of a spare standby."""
    hosts = {name: node.host for name, node in lab.nodes.items()}
    return [name for name, host in hosts.items() if host and any(map(is_spare, host.sessions))]


def is_spare(session: HostedSession) -> bool:
    return session.slot.is_spare


@pytest.mark.parametrize(
    ("asked", "positions", "kept"), [(None, 200, 3), (None, 1000, 0), (False, 200, 0)], ids=str
)
def test_hops_of_a_long_session_have_spare_standbys(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, asked: bool | None, positions: int, kept: int
) -> None:
    monkeypatch.setattr(standby, "SPARE_POSITIONS", positions)
    found: list[str] = []

    async def scenario(lab: Lab) -> Answer:
        def fail(chain: Chain) -> None:
            found.extend(spares(lab))
            lab.network.crash(lab.peer_id(holder(lab, chain, 2)))

        return await answer(lab, TWO_OF_EACH, fail, standby=asked, at=TOKENS // 2)

    got = simulate(reference, scenario)
    assert len(found) == kept
    assert got.report.failovers == 1
    if kept:
        assert got.longest_decode_s <= 3 * STEP_S


@pytest.mark.parametrize("positions", [200, 1000])
def test_the_last_host_of_a_block_gets_a_standby_from_a_new_host(
    reference: Reference, positions: int
) -> None:
    """Sessions that are shorter than ``SPARE_POSITIONS`` are replayed instead."""

    async def scenario(lab: Lab) -> tuple[Answer, list[list[str]]]:
        await lab.start_all(ONE_OF_EACH)
        got, seen = Answer(), []
        clock = asyncio.get_running_loop().time
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            new, fed = list(PROMPT), 0
            for number in range(40):
                if number == 10:
                    seen.append(spares(lab))
                    await lab.start("b2", lab.hosting((2, 4)))
                if number == 30:
                    seen.append(spares(lab))
                    lab.network.crash(lab.peer_id("b"))
                began = clock()
                hidden = await chain.forward((Row(0, fed, len(new), 1, 0),), np.array(new))
                got.waits_s.append(clock() - began)
                fed += len(new)
                new = [reference.next_token(hidden)]
                got.tokens += new
                await asyncio.sleep(COMES_S / 20)
            got.report = chain.report
        return got, seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "SPARE_POSITIONS", positions)
        got, seen = simulate(reference, scenario)
    assert got.tokens == reference.greedy(PROMPT, 40)
    assert got.report.failovers == 1
    is_long = positions <= len(PROMPT)
    assert seen == [[], ["b2"] if is_long else []]
    assert (got.longest_decode_s <= 2 * STEP_S) == is_long


@defence("other work ends a spare standby", off=replacing(Host, "_end_spares", nothing))
@defence("a host with work takes no spare standby", off=replacing(Host, "_is_used", nothing))
def test_a_spare_standby_gives_way_to_other_work(reference: Reference) -> None:
    """A host with a client's work takes none, and ends those that it has."""
    seen: list[tuple[int, list[str]]] = []

    async def ask(lab: Lab, busy: str) -> None:
        async with lab.client("second") as swarm:
            swarm.failed(lab.peer_id(busy))
            async with lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, TOKENS, lambda number: seen.append((number, spares(lab))))

    async def scenario(lab: Lab) -> None:
        asking: list[asyncio.Task[None]] = []

        def begin(chain: Chain) -> None:
            seen.append((-1, spares(lab)))
            asking.append(asyncio.create_task(ask(lab, holder(lab, chain, 0))))

        await answer(lab, {"one": (0, 6), "other": (0, 6)}, begin)
        await asking[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "SPARE_POSITIONS", 200)
        simulate(reference, scenario)
    before, *during = seen
    assert len(before[1]) == 1
    assert [names for _, names in during] == [[]] * TOKENS


def test_a_spare_standby_becomes_a_hop_that_does_not_give_way(reference: Reference) -> None:
    """After a take-over, other work does not end the session."""

    async def scenario(lab: Lab) -> Answer:
        asking: list[asyncio.Task[None]] = []

        async def ask() -> None:
            async with lab.client("second") as swarm, lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, 4)

        def fail(chain: Chain) -> None:
            lab.network.crash(lab.peer_id(holder(lab, chain, 0)))
            asking.append(asyncio.create_task(ask()))

        got = await answer(lab, {"one": (0, 6), "other": (0, 6)}, fail, at=TOKENS // 2)
        await asking[0]
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "SPARE_POSITIONS", 200)
        got = simulate(reference, scenario)
    assert got.report.failovers == 1
    assert got.longest_decode_s <= 3 * STEP_S


def is_request(delivery: Delivery, kind: str) -> bool:
    """Whether a delivery is a request of this kind on a session."""
    if delivery.protocol.id != SESSION.id:
        return False
    return pb.SessionRequest.FromString(delivery.message.header).WhichOneof("kind") == kind


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("victim", ["leaver", "standby", "before", "behind"])
@pytest.mark.parametrize("stage", ["open", "tee", "relink", "link"])
def test_an_answer_continues_when_a_host_fails_during_a_handover(
    reference: Reference, stage: str, victim: str, fault: str
) -> None:
    layout = {**TWO_OF_EACH, "b3": (2, 4)}
    hits: list[Delivery] = []

    async def scenario(lab: Lab) -> Answer:
        def leave(chain: Chain) -> None:
            leaver = holder(lab, chain, 2)
            peers = {
                "leaver": lab.peer_id(leaver),
                "before": lab.peer_id(holder(lab, chain, 0)),
                "behind": lab.peer_id(holder(lab, chain, 4)),
            }
            replicas = {lab.peer_id(name) for name in ("b", "b2", "b3") if name != leaver}

            def arrives(delivery: Delivery) -> bool:
                if delivery.target in replicas and delivery.protocol.id == SESSION.id:
                    peers["standby"] = delivery.target
                if stage == "link":
                    return (
                        delivery.protocol.id == LINK.id
                        and delivery.source in replicas
                        and delivery.target == peers["behind"]
                    )
                wanted = {"open": replicas, "tee": {peers["before"]}, "relink": replicas}[stage]
                return delivery.target in wanted and is_request(delivery, stage)

            def hurt(delivery: Delivery) -> None:
                hits.append(delivery)
                getattr(lab.network, fault)(peers[victim])

            lab.once(arrives, hurt)
            lab.nodes[leaver].finish(grace_s=30.0)

        return await answer(lab, layout, leave)

    got = simulate(reference, scenario)
    assert hits, "the fault was never injected"
    # While a standby hangs, the hop that leaves goes on.
    assert got.report.failovers >= 1 or (victim, fault) == ("standby", "hang")


def stands_by_never(live: LiveHop, name: str) -> Any:
    caller = sys._getframe(1).f_code.co_name
    return (
        False if name == "stands_by" and caller == "_complete_step" else object.__getattribute__(live, name)
    )


@defence(
    "outputs of a standby are not answers",
    off=lambda patch: patch.setattr(LiveHop, "__getattribute__", stands_by_never),
)
def test_outputs_of_a_standby_are_not_answers(reference: Reference) -> None:
    """A host that answers while it stands by, before the hop whose place it may take, changes no
    token."""
    answer_step = HostedSession._answer
    began = HostedSession.__init__
    lied: list[HostedSession] = []

    def begin(session: HostedSession, parts: Any, blocks: Any, wanted: pb.Open, *others: Any) -> None:
        began(session, parts, blocks, wanted, *others)
        if wanted.standby:
            lied.append(session)
            session._is_last = True

    async def lie(session: HostedSession, step: Step) -> None:
        await answer_step(session, step.with_values(-step.values) if session in lied else step)

    async def scenario(lab: Lab) -> Answer:
        def slow_down(chain: Chain) -> None:
            hop = lab.peer_id(holder(lab, chain, 0))
            lab.network.set_link(hop, lab.peer_id("client"), LinkProfile(delay_s=0.1))

        return await answer(lab, {"one": (0, 6), "other": (0, 6)}, slow_down, standby=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostedSession, "__init__", begin)
        patch.setattr(HostedSession, "_answer", lie)
        simulate(reference, scenario)
    assert lied
