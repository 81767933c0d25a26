"""Routed experts on several peers give the tokens of one machine, whatever becomes of the peers."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_node.experts import expert_dispatcher, expert_link
from swarmnet_protocols.directory.expert_announcements import BlockExperts
from swarmnet_protocols.errors import MissingExperts, SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.routing.experts.moves import most_moves
from swarmnet_protocols.wire import session_pb2
from tests.defences import defence, replacing
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.swarm.expert_lab import (
    FAULTS,
    LAN,
    LONG,
    PROMPTS,
    ExpertLab,
    Told,
    load_experts_reference,
    spread,
    told,
)
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

TOKENS = 6
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_experts_reference(request.param, tmp_path_factory.mktemp(request.param))


async def answer(lab: Lab, swarm: ModelHosts, prompt: list[int]) -> list[int]:
    async with lab.chain(swarm) as chain:
        return await lab.generate(chain, prompt, TOKENS)


@pytest.mark.matrix
@pytest.mark.parametrize("peers", [1, 3, 5])
def test_experts_over_peers_give_the_tokens_of_one_machine(reference: Reference, peers: int) -> None:
    prompts = PROMPTS[:8]

    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        for number, own in enumerate(spread(peers)):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        trunk = await experts.trunk("trunk", own=())
        async with lab.client() as swarm:
            alone = [await answer(lab, swarm, prompt) for prompt in prompts]
            batched = await asyncio.gather(*(answer(lab, swarm, prompt) for prompt in prompts))
        assert alone == batched == [reference.greedy(prompt, TOKENS) for prompt in prompts]
        assert trunk.experts.dispatcher is not None
        assert trunk.experts.dispatcher.counters.rows > 0

    simulate(reference, scenario, link=LAN)


def test_replicas_answer_for_a_peer_that_has_rows_of_many_sessions(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        for number, own in enumerate([*spread(2), *spread(3)]):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        trunk = await experts.trunk("trunk", own=())
        peers = {lab.peer_id(f"peer{number}") for number in range(5)}
        hit = lab.once(rows_to(peers, 1), hurt(lab, "crash"))
        async with lab.client() as swarm:
            answers = await asyncio.gather(*(answer(lab, swarm, prompt) for prompt in PROMPTS))
        assert hit, "the fault was never injected"
        assert answers == [mixtral.greedy(prompt, TOKENS) for prompt in PROMPTS]
        assert trunk.experts.dispatcher is not None
        assert trunk.experts.dispatcher.counters.failed > 0

    simulate(mixtral, scenario, link=LAN)


STALL_S = {"crash": 0.5, "hang": 3.0, "isolate": 3.0, "slow": 0.6}
"""Longest wait for one token, by fault; computing takes no time here."""


def rows_to(peers: set[PeerId], block: int) -> Callable[[Delivery], bool]:
    """A request for rows of a block that arrives at one of ``peers``."""

    def matches(delivery: Delivery) -> bool:
        if delivery.protocol.id != EXPERTS.id or delivery.target not in peers:
            return False
        message = session_pb2.ExpertsRequest.FromString(delivery.message.header)
        return bool(message.rows.experts) and message.rows.block == block

    return matches


def hurt(lab: Lab, fault: str) -> Callable[[Delivery], None]:
    network = lab.network
    slow = LinkProfile(delay_s=5.0)
    return {
        "crash": lambda delivery: network.crash(delivery.target),
        "hang": lambda delivery: network.hang(delivery.target),
        "isolate": lambda delivery: network.isolate(delivery.target),
        "slow": lambda delivery: network.set_link(delivery.source, delivery.target, slow),
    }[fault]


@pytest.mark.parametrize("fault", STALL_S)
@pytest.mark.parametrize("block", [0, 3])
def test_a_replica_answers_for_a_peer_that_fails(mixtral: Reference, block: int, fault: str) -> None:
    async def scenario(lab: Lab) -> Told:
        experts = ExpertLab(lab)
        for number, own in enumerate([*spread(2), *spread(2)]):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        trunk = await experts.trunk("trunk", own=())
        peers = {lab.peer_id(f"peer{number}") for number in range(4)}
        hit = lab.once(rows_to(peers, block), hurt(lab, fault))
        answered = await told(lab)
        assert hit, "the fault was never injected"
        assert trunk.experts.dispatcher is not None
        counters = trunk.experts.dispatcher.counters
        assert counters.loaded == 0
        assert counters.hedged > 0 if fault != "crash" else counters.failed > 0
        return answered

    answered = simulate(mixtral, scenario, link=LAN)
    assert answered.tokens == mixtral.greedy(PROMPTS[3], LONG)
    assert answered.longest_s <= STALL_S[fault]


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_a_trunk_with_room_loads_experts_that_no_peer_has(mixtral: Reference, fault: str) -> None:
    async def scenario(lab: Lab) -> Told:
        experts = ExpertLab(lab)
        await experts.peer("peer", experts.everywhere(range(8)))
        trunk = await experts.trunk("trunk", own=(), has_room=True)
        assert lab.once(rows_to({lab.peer_id("peer")}, 2), hurt(lab, fault)) == []
        answered = await told(lab)
        assert trunk.experts.dispatcher is not None
        assert trunk.experts.dispatcher.counters.loaded > 0
        assert trunk.engine is not None
        assert trunk.engine.stage.weight_bytes > 0
        return answered

    answered = simulate(mixtral, scenario, link=LAN)
    assert answered.tokens == mixtral.greedy(PROMPTS[3], LONG)
    assert answered.longest_s <= 3.0


def test_an_answer_stops_with_the_experts_named_that_no_peer_has(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        await experts.peer("half", experts.everywhere(range(4)))
        await experts.peer("other", experts.everywhere(range(4, 8)))
        trunk = await experts.trunk("trunk", own=())
        lab.once(rows_to({lab.peer_id("half")}, 1), hurt(lab, "crash"))
        with pytest.raises(SwarmnetError, match=r"no peer within reach has experts \d:[0-3]") as raised:
            await told(lab)
        assert isinstance(raised.value, MissingExperts)
        assert "--experts" in raised.value.hint
        # Until a peer has them again, clients do not choose the trunk.
        async with lab.client("second") as swarm:
            await asyncio.sleep(20)
            assert not [host for host in swarm.known if host.peer == lab.peer_id("trunk")]
        await experts.peer("replacement", experts.everywhere(range(4)))
        await asyncio.sleep(20)
        assert trunk.experts.dispatcher is not None
        assert not trunk.experts.dispatcher.links.missing()
        assert (await told(lab)).tokens == mixtral.greedy(PROMPTS[3], LONG)

    simulate(mixtral, scenario, link=LAN)


@defence(
    "outputs of experts that are not finite reach no session if another peer has the expert",
    off=replacing(torch, "isfinite", torch.ones_like),
    fault="NaN",
)
@defence(
    "a peer whose outputs are wrong is not asked for a while",
    off=replacing(expert_link, "FAULT_S", 0.0),
    fault="unknown request",
)
@defence(
    "a peer that answers no request is not waited for alone",
    off=replacing(expert_dispatcher, "HEDGE_S", 1e9),
    fault="no reply",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_peer_changes_no_token(mixtral: Reference, fault: str) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        lab.network.set_link(lab.peer_id("trunk"), lab.peer_id("honest"), LinkProfile(delay_s=0.003))
        await experts.peer("honest", everything)
        trunk = await experts.trunk("trunk", own=())
        faulty = await experts.faulty_peer("faulty", everything, fault)
        await asyncio.sleep(10)
        answered = await told(lab)
        assert answered.tokens == mixtral.greedy(PROMPTS[3], LONG)
        assert answered.longest_s <= 0.6
        assert trunk.experts.dispatcher is not None
        [link] = [
            each for each in trunk.experts.dispatcher.links.every if each.host.peer == lab.peer_id("faulty")
        ]
        assert faulty.asked >= 1
        if fault == "NaN":
            assert link.is_avoided(asyncio.get_running_loop().time())
        elif fault not in ("no reply", "end"):
            assert link.fault
        if fault not in ("no reply", "end"):
            assert faulty.asked == 1, "a peer that is at fault was asked again"

    simulate(mixtral, scenario, link=LAN)


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_another_trunk_goes_on_when_a_trunk_fails_with_rows_under_way(mixtral: Reference, fault: str) -> None:
    async def scenario(lab: Lab) -> Told:
        experts = ExpertLab(lab)
        for number, own in enumerate(spread(2)):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        for name in ("trunk", "trunk2"):
            await experts.trunk(name, own=())
        peers = {lab.peer_id(f"peer{number}") for number in range(2)}

        def at_source(delivery: Delivery) -> None:
            {"crash": lab.network.crash, "hang": lab.network.hang}[fault](delivery.source)

        requests = 0

        def third(delivery: Delivery) -> bool:
            nonlocal requests
            requests += rows_to(peers, 1)(delivery)
            return requests == 3

        hit = lab.once(third, at_source)
        answered = await told(lab)
        assert hit
        return answered

    answered = simulate(mixtral, scenario, link=LAN)
    assert answered.tokens == mixtral.greedy(PROMPTS[3], LONG)
    assert answered.longest_s <= 3.1


@defence("experts that are far are not used", off=replacing(expert_link, "TRIALS", 0))
def test_experts_that_are_far_are_not_used(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        await experts.peer("far", everything)
        told_owner: list[str] = []
        starting = asyncio.create_task(experts.trunk("trunk", own=(), notice=told_owner.append))
        await asyncio.sleep(10)
        assert not starting.done()
        assert "20 ms" in told_owner[-1]
        await experts.peer("near", everything)
        lab.network.set_link(lab.peer_id("trunk"), lab.peer_id("near"), LAN)
        trunk = await starting
        assert (await told(lab)).tokens == mixtral.greedy(PROMPTS[3], LONG)
        assert trunk.experts.dispatcher is not None
        assert {each.host.peer for each in trunk.experts.dispatcher.links.every if each.is_open} == {
            lab.peer_id("near")
        }

    simulate(mixtral, scenario, link=LinkProfile(delay_s=0.05))


@pytest.mark.parametrize("spans", [pytest.param([(0, 4)], marks=pytest.mark.thorough), [(0, 2), (2, 4)]])
def test_experts_move_to_where_rows_need_them_and_are_never_missing(
    mixtral: Reference, spans: list[tuple[int, int]]
) -> None:
    """Peers whose owners let hosts choose follow a trunk, one of them each, and others stay;
    meanwhile answers go on."""

    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        counts = experts.model.expert_counts()
        for number in range(3):
            await experts.choosing_peer(f"peer{number}", capacity=4 * len(counts))
        trunks = [await experts.trunk(f"trunk{number}", (), span) for number, span in enumerate(spans)]
        dispatchers = [trunk.experts.dispatcher for trunk in trunks if trunk.experts.dispatcher is not None]
        assert len(dispatchers) == len(spans)
        chosen = await experts.peer("chosen", experts.everywhere({0}))
        await asyncio.sleep(6)

        def held() -> dict[PeerId, BlockExperts]:
            return {link.host.peer: link.experts for link in dispatchers[0].links.every}

        first = held()
        seen = [first]
        expected = mixtral.greedy(PROMPTS[3], 20)
        for number in range(20):
            assert not any(dispatcher.links.missing() for dispatcher in dispatchers)
            assert (await told(lab, PROMPTS[3], 20)).tokens == expected, number
            await asyncio.sleep(10)
            if held() != seen[-1]:
                seen.append(held())
        assert len(seen) > 3, "experts have not moved"
        failed = sum(dispatcher.counters.failed for dispatcher in dispatchers)
        assert failed == 0, "an expert was dropped while it was asked for"
        loaded = [
            len(after[peer].get(block, frozenset()) - before[peer].get(block, frozenset()))
            for before, after in pairwise(seen)
            for peer in after
            for block in counts
        ]
        assert sum(loaded) <= 11 * most_moves(sum(counts.values()))
        assert chosen.experts == experts.everywhere({0}), "its owner has chosen them"

    simulate(mixtral, scenario, link=LAN, limit_s=2000)


def test_a_host_with_few_experts_in_memory_gives_the_same_tokens(
    mixtral: Reference,
) -> None:
    async def scenario(lab: Lab) -> None:
        node = await ExpertLab(lab).trunk("trunk", own=(), in_memory=8)
        assert (await told(lab)).tokens == mixtral.greedy(PROMPTS[3], LONG)
        status = node.status()
        assert status.experts_needed > 0
        assert 0 < status.expert_hit_rate < 1
        assert status.expert_prediction_rate > 0

    simulate(mixtral, scenario, link=LAN)


def test_peers_that_have_chosen_the_same_experts_share_them_out(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        capacity = 5 * len(experts.model.expert_counts())
        peers = await asyncio.gather(
            *(experts.choosing_peer(f"peer{number}", capacity) for number in range(2))
        )
        assert peers[0].experts == peers[1].experts, "they chose before they saw each other"
        started = asyncio.get_running_loop().time()
        await experts.trunk("trunk", own=())  # it serves as soon as every expert is there
        assert asyncio.get_running_loop().time() - started < 300
        assert (await told(lab)).tokens == mixtral.greedy(PROMPTS[3], LONG)

    simulate(mixtral, scenario, link=LAN, limit_s=400)
