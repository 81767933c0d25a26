"""A connection breaks or a better path to a host is found: sessions and links go on over another
one."""

from collections.abc import Callable

import pytest

from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.network.deliveries import arrives_at
from tests.support.network.memory_network import Delivery
from tests.support.swarm.interrupted import (
    ONE_REPLICA,
    PHASES,
    PROMPT,
    STEP_S,
    TOKENS,
    Outcome,
    converse,
    hurt,
)
from tests.support.swarm.swarm_lab import Lab, Reference, simulate


def check_unbroken(reference: Reference, plan: Callable[[Lab], list[Delivery]]) -> None:
    """Disturb a path of an answer by ``plan``: nothing is replaced, no position is lost or computed
    twice, and no step waits."""

    async def scenario(lab: Lab) -> Outcome:
        hits: list[list[Delivery]] = []
        outcome = await converse(lab, {"a": (0, 2), "b": (2, 4), "c": (4, 6)}, lambda: hits.append(plan(lab)))
        assert all(hits), "the path was never disturbed"
        assert {node.status().host.positions for node in lab.nodes.values()} == {len(PROMPT) + TOKENS - 1}
        return outcome

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.failovers == 0
    assert max(outcome.waits_s[1:]) <= STEP_S


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_reset_connection_is_opened_again(reference: Reference, victim: str) -> None:
    def plan(lab: Lab) -> list[Delivery]:
        def reset(delivery: Delivery) -> None:
            lab.network.reset(delivery.source, delivery.target, LINK)

        return lab.once(arrives_at({lab.peer_id(victim)}, PHASES["middle"]), reset)

    check_unbroken(reference, plan)


@pytest.mark.parametrize("host", ["a", "b", "c"])
@pytest.mark.parametrize("phase", ["opening", "prefill", "middle"])
def test_a_session_moves_to_a_better_path_between_two_steps(
    reference: Reference, host: str, phase: str
) -> None:
    """The stream over the other path ends."""
    requests: list[str | None] = []

    def plan(lab: Lab) -> list[Delivery]:
        client, peer = lab.peer_id("client"), lab.peer_id(host)

        def improve(_: Delivery) -> None:
            lab.network.improve(client, peer, SESSION)

        def watch(delivery: Delivery) -> None:
            if delivery.protocol.id == SESSION.id and delivery.target == peer:
                requests.append(pb.SessionRequest.FromString(delivery.message.header).WhichOneof("kind"))

        lab.network.observers.append(watch)
        return lab.once(arrives_at({peer}, {"opening": "link", **PHASES}[phase]), improve)

    check_unbroken(reference, plan)
    assert requests.count("open") == requests.count("resume") == 1


def test_an_answer_goes_on_when_a_host_fails_after_its_session_moved(reference: Reference) -> None:
    async def scenario(lab: Lab) -> Outcome:
        client, peers = lab.peer_id("client"), {lab.peer_id("b"), lab.peer_id("b2")}

        def prepare() -> None:
            lab.once(
                arrives_at(peers, "step 3"), lambda hit: lab.network.improve(client, hit.target, SESSION)
            )
            lab.once(arrives_at(peers, "step 6"), hurt(lab, "crash"))

        return await converse(lab, ONE_REPLICA, prepare)

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.failovers == 1


@pytest.mark.parametrize("receiver", ["a", "b", "c"])
def test_a_link_moves_to_a_better_path_between_two_steps(reference: Reference, receiver: str) -> None:
    links = 0

    def plan(lab: Lab) -> list[Delivery]:
        def improve(delivery: Delivery) -> None:
            lab.network.improve(delivery.source, delivery.target, LINK)

        def count(delivery: Delivery) -> None:
            nonlocal links
            is_first = delivery.protocol.id == LINK.id and delivery.target == lab.peer_id(receiver)
            links += is_first and pb.LinkRequest.FromString(delivery.message.header).HasField("link")

        lab.network.observers.append(count)
        return lab.once(arrives_at({lab.peer_id(receiver)}, PHASES["middle"]), improve)

    check_unbroken(reference, plan)
    assert links >= 2
