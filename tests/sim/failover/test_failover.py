"""A node that serves fails, in every way, at every point of a request: the client sees a pause,
never an error."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.network.deliveries import arrives_at, request
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [5, 6, 7, 8, 9] * 60  # two chunks: steps 1 and 2
PREFILL_STEPS = 2
TOKENS = 10
LAST_STEP = PREFILL_STEPS + TOKENS - 1

ONE_REPLICA = {"a": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6)}
TWO_OF_EACH = {"a": (0, 2), "a2": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6), "c2": (4, 6)}

STEP_S = 0.1
"""More than a step or the replay of the prompt takes on these links, where computing takes no
time."""
CRASH_S = 0.5 + STEP_S
SILENT_S = 3.0 + STEP_S


@dataclass
class Outcome:
    """The tokens and waits of a client, and the sessions that it opened."""

    tokens: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    route: list[PeerId] = field(default_factory=list)
    opened: list[PeerId] = field(default_factory=list)
    failovers: int = 0

    @property
    def longest_s(self) -> float:
        return max(self.waits_s)


async def converse(lab: Lab, layout: Mapping[str, tuple[int, int]], prepare: Callable[[], object]) -> Outcome:
    """Send a prompt and read its answer on nodes of ``layout``. Afterwards no live node holds
    anything for it."""
    await lab.start_all(layout)
    await asyncio.sleep(1.0)  # the directory shows them all
    prepare()
    outcome = Outcome()
    loop = asyncio.get_running_loop()

    def on_open(delivery: Delivery) -> None:
        if request(delivery) == "open":
            outcome.opened.append(delivery.target)

    lab.network.observers.append(on_open)
    async with lab.client() as swarm:
        chain: Chain
        async with lab.chain(swarm) as chain:
            times = [loop.time()]
            outcome.tokens = await lab.generate(chain, PROMPT, TOKENS, lambda _: times.append(loop.time()))
            outcome.waits_s = [after - before for before, after in pairwise(times)]
            outcome.route = [peer for peer, _, _ in chain.report.route]
            outcome.failovers = chain.report.failovers
        await asyncio.sleep(1.0)
    client = lab.peer_id("client")
    alive = {name for name in layout if lab.network.passes(client, lab.peer_id(name))}
    assert not alive & lab.sessions().keys(), "a session outlived its client"
    assert not alive & lab.cache_bytes().keys(), "a cache outlived its session"
    return outcome


def hurt(lab: Lab, fault: str) -> Callable[[Delivery], None]:
    """Do ``fault`` to the receiver of a delivery."""
    network = lab.network
    return {
        "crash": lambda delivery: network.crash(delivery.target),
        "hang": lambda delivery: network.hang(delivery.target),
        "isolate": lambda delivery: network.isolate(delivery.target),
        "cut from client": lambda delivery: network.cut(delivery.target, lab.peer_id("client")),
    }[fault]


LIMIT_S = {"crash": CRASH_S, "hang": SILENT_S, "isolate": SILENT_S, "cut from client": SILENT_S}
PHASES = {
    "connect": "open",
    "link": "link",
    "prefill": "step 1",
    "first token": f"step {PREFILL_STEPS}",
    "middle": f"step {PREFILL_STEPS + TOKENS // 2}",
    "last token": f"step {LAST_STEP}",
}


def test_logs_of_client_and_hosts_name_a_session_alike(
    reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """Read side by side, they tell which host was replaced by which, over which link, and why."""

    async def scenario(lab: Lab) -> list[PeerId]:
        middle = {lab.peer_id("b"), lab.peer_id("b2")}
        arrives = arrives_at(middle, PHASES["middle"])
        await converse(lab, ONE_REPLICA, lambda: lab.once(arrives, hurt(lab, "crash")))
        return sorted(middle)

    with caplog.at_level("DEBUG", logger="swarmnet_client"), caplog.at_level("DEBUG", logger="swarmnet_node"):
        middle = simulate(reference, scenario)

    def told(text: str, package: str) -> list[dict[str, Any]]:
        return [
            vars(each) for each in caplog.records if each.message == text and each.name.startswith(package)
        ]

    (replaced,) = told("a host is replaced", "swarmnet_client")
    (new,) = [each for each in told("a session is open", "swarmnet_client") if each["role"] == "SUCCESSOR"]
    assert sorted((replaced["peer"], new["peer"])) == middle
    (choice,) = [each for each in told("a route is chosen", "swarmnet_client") if len(each["chosen"]) == 1]
    assert new["peer"] in choice["chosen"][0]
    assert [each for each in choice["others"] if replaced["peer"] in each and "failed 0 s ago" in each]
    hosted = told("a session is open", "swarmnet_node")
    assert {replaced["session"], new["session"]} < {each["session"] for each in hosted}
    links = {(each["session"], each["epoch"]) for each in told("a link is made", "swarmnet_node")}
    arrived = {(each["session"], each["epoch"]) for each in told("a session is linked", "swarmnet_node")}
    assert (new["session"], new["epoch"]) in links & arrived


@pytest.mark.matrix
@pytest.mark.parametrize("fault", LIMIT_S)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_replica_continues_when_a_hop_fails(
    reference: Reference, victim: str, phase: str, fault: str
) -> None:
    hit: list[Delivery] = []

    async def scenario(lab: Lab) -> Outcome:
        nonlocal hit
        candidates = {lab.peer_id(victim), lab.peer_id(victim + "2")}

        def prepare() -> None:
            nonlocal hit
            hit = lab.once(arrives_at(candidates, PHASES[phase]), hurt(lab, fault))

        outcome = await converse(lab, TWO_OF_EACH, prepare)
        survivors = [lab.nodes[name] for name in TWO_OF_EACH if lab.peer_id(name) in outcome.route]
        if phase in ("middle", "last token"):
            replacement = (candidates - {hit[0].target}).pop()
            for node in survivors:
                peer = node.status().peer_id
                if peer != replacement:
                    assert node.status().host.positions == len(PROMPT) + TOKENS - 1, (
                        "a survivor computed twice"
                    )
                    assert outcome.opened.count(PeerId(peer)) == 1, "a survivor was opened twice"
        return outcome

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert hit, "the fault was never injected"
    # A hop that is cut off from the client only continues to serve until the client misses its
    # heartbeats.
    assert fault == "cut from client" or hit[0].target not in outcome.route
    assert outcome.longest_s <= LIMIT_S[fault]


def run_with(
    reference: Reference, layout: Mapping[str, tuple[int, int]], plan: Callable[[Lab], list[list[Delivery]]]
) -> Outcome:
    """A conversation during which all faults of ``plan`` are injected."""
    hits: list[list[Delivery]] = []

    async def scenario(lab: Lab) -> Outcome:
        return await converse(lab, layout, lambda: hits.extend(plan(lab)))

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert all(hits), "a fault was never injected"
    return outcome


@pytest.mark.matrix
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_neighbours_continue_when_the_middle_of_four_nodes_fails(
    reference: Reference, fault: str, phase: str
) -> None:
    def plan(lab: Lab) -> list[list[Delivery]]:
        replicas = {lab.peer_id("b"), lab.peer_id("b2")}
        return [lab.once(arrives_at(replicas, PHASES[phase]), hurt(lab, fault))]

    assert run_with(reference, ONE_REPLICA, plan).longest_s <= LIMIT_S[fault]


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["link", "prefill", "first token", "middle", "last token"])
@pytest.mark.parametrize("victim", ["b", "c"])
def test_two_neighbours_that_cannot_reach_each_other_are_separated(
    reference: Reference, victim: str, phase: str
) -> None:
    def plan(lab: Lab) -> list[list[Delivery]]:
        downstream = {lab.peer_id(victim), lab.peer_id(victim + "2")}

        def part(delivery: Delivery) -> None:
            lab.network.cut(delivery.source, delivery.target)

        return [lab.once(arrives_at(downstream, PHASES[phase]), part)]

    assert run_with(reference, TWO_OF_EACH, plan).longest_s <= SILENT_S


def test_of_two_separated_neighbours_one_with_a_replica_is_replaced(reference: Reference) -> None:
    """The hop without a replica stays; the hop before it that cannot reach it is replaced."""

    def plan(lab: Lab) -> list[list[Delivery]]:
        def part(delivery: Delivery) -> None:
            lab.network.cut(delivery.source, delivery.target)
            other = ({lab.peer_id("b"), lab.peer_id("b2")} - {delivery.source}).pop()
            lab.network.set_link(lab.peer_id("client"), other, LinkProfile(delay_s=0.3))

        return [lab.once(arrives_at({lab.peer_id("c")}, PHASES["middle"]), part)]

    # The host that takes over is far away: opening a session there takes a while.
    assert run_with(reference, ONE_REPLICA, plan).longest_s <= SILENT_S + 1.2


@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("pair", [("a", "b"), ("b", "c"), ("a", "c")])
def test_an_answer_continues_when_two_nodes_fail_at_once(
    reference: Reference, pair: tuple[str, str], fault: str
) -> None:
    def plan(lab: Lab) -> list[list[Delivery]]:
        serving = [
            lab.once(arrives_at({lab.peer_id(name), lab.peer_id(name + "2")}, "step 1"), lambda _: None)
            for name in pair
        ]

        def both(delivery: Delivery) -> None:
            for seen in serving:
                hurt(lab, fault)(seen[0])

        return [lab.once(lambda delivery: request(delivery) == PHASES["middle"], both)]

    assert run_with(reference, TWO_OF_EACH, plan).longest_s <= LIMIT_S[fault] + STEP_S


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["crash", "hang"])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("when", ["open", "link", f"replay {PREFILL_STEPS + 2}", f"step {PREFILL_STEPS + 4}"])
def test_an_answer_continues_when_the_replacement_fails_too(
    reference: Reference, victim: str, when: str, fault: str
) -> None:
    layout = {**TWO_OF_EACH, "a3": (0, 2), "b3": (2, 4), "c3": (4, 6)}

    def plan(lab: Lab) -> list[list[Delivery]]:
        group = {lab.peer_id(victim + suffix) for suffix in ("", "2", "3")}

        def then(delivery: Delivery) -> None:
            hurt(lab, fault)(delivery)
            hits.append(lab.once(arrives_at(group - {delivery.target}, when), hurt(lab, fault)))

        hits: list[list[Delivery]] = []
        hits.append(lab.once(arrives_at(group, f"step {PREFILL_STEPS + 3}"), then))
        return hits

    # Two failures one after the other: the second is found during the recovery from the first.
    assert run_with(reference, layout, plan).longest_s <= 2 * LIMIT_S[fault]


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_an_answer_continues_when_a_neighbour_fails_during_replay(reference: Reference, fault: str) -> None:
    """b fails; while b's replacement takes its replay, the hop that feeds it fails as well."""

    def plan(lab: Lab) -> list[list[Delivery]]:
        group = {lab.peer_id("b"), lab.peer_id("b2")}
        hits: list[list[Delivery]] = []

        def feeding(delivery: Delivery) -> bool:
            return delivery.target in group and request(delivery).startswith("replay")

        def hurt_source(delivery: Delivery) -> None:
            (lab.network.crash if fault == "crash" else lab.network.hang)(delivery.source)

        def then(delivery: Delivery) -> None:
            hurt(lab, fault)(delivery)
            hits.append(lab.once(feeding, hurt_source))

        hits.append(lab.once(arrives_at(group, PHASES["middle"]), then))
        return hits

    assert run_with(reference, TWO_OF_EACH, plan).longest_s <= 2 * LIMIT_S[fault]


BACK_S = 6.0


def test_a_repair_does_not_wait_for_a_directory_that_does_not_answer(reference: Reference) -> None:
    """The replica of the directory may have failed with the host. A host that failed before is
    tried instead."""

    async def scenario(lab: Lab) -> float:
        await lab.start_all(ONE_REPLICA)
        await asyncio.sleep(1.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            clock = asyncio.get_running_loop().time
            times: list[float] = []

            async def silent() -> None:
                await asyncio.sleep(60.0)

            def on_token(_: int) -> None:
                times.append(clock())
                if len(times) == 3:
                    used, *_ = chain.report.route[1]
                    swarm.failed(lab.peer_id("b2" if used == lab.peer_id("b") else "b"))
                    swarm.refresh = silent  # type: ignore[method-assign]
                    lab.network.crash(used)

            assert await lab.generate(chain, PROMPT, TOKENS, on_token) == reference.greedy(PROMPT, TOKENS)
            return max(after - before for before, after in pairwise(times))

    assert simulate(reference, scenario) < CRASH_S


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_the_one_failed_host_that_returns_is_found(reference: Reference, fault: str) -> None:
    """One of two hosts hangs from the start; the other one fails while it serves and stays away.
    Then the first one answers again."""

    def plan(lab: Lab) -> list[list[Delivery]]:
        serving, away = lab.peer_id("b"), lab.peer_id("b2")
        lab.network.hang(away)

        def then(delivery: Delivery) -> None:
            hurt(lab, fault)(delivery)
            asyncio.get_running_loop().call_later(BACK_S, lab.network.resume, away)

        return [lab.once(arrives_at({serving}, PHASES["middle"]), then)]

    timing = Timing()
    outcome = run_with(reference, ONE_REPLICA, plan)
    # When the host is back, an attempt at each of the two may still have to time out.
    assert BACK_S < outcome.longest_s <= BACK_S + 2 * timing.open_s + STEP_S


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_reset_connection_is_opened_again(reference: Reference, victim: str) -> None:
    """Both ends are well: nothing is replaced, and no position is computed twice."""

    async def scenario(lab: Lab) -> Outcome:
        hits: list[list[Delivery]] = []

        def reset(delivery: Delivery) -> None:
            lab.network.reset(delivery.source, delivery.target, LINK)

        def prepare() -> None:
            hits.append(lab.once(arrives_at({lab.peer_id(victim)}, PHASES["middle"]), reset))

        outcome = await converse(lab, {"a": (0, 2), "b": (2, 4), "c": (4, 6)}, prepare)
        assert all(hits)
        assert {node.status().host.positions for node in lab.nodes.values()} == {len(PROMPT) + TOKENS - 1}
        return outcome

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.failovers == 0
    assert max(outcome.waits_s[1:]) <= STEP_S


@pytest.mark.parametrize("host", ["a", "b", "c"])
@pytest.mark.parametrize("phase", ["opening", "prefill", "middle"])
def test_a_session_moves_to_a_better_path_between_two_steps(
    reference: Reference, host: str, phase: str
) -> None:
    """Nothing is replaced, no position is lost or computed twice, and the stream over the other
    path ends."""

    async def scenario(lab: Lab) -> Outcome:
        hits: list[list[Delivery]] = []
        requests: list[str | None] = []
        client, peer = lab.peer_id("client"), lab.peer_id(host)

        def improve(_: Delivery) -> None:
            lab.network.improve(client, peer, SESSION)

        def watch(delivery: Delivery) -> None:
            if delivery.protocol.id == SESSION.id and delivery.target == peer:
                requests.append(pb.SessionRequest.FromString(delivery.message.header).WhichOneof("kind"))

        def prepare() -> None:
            lab.network.observers.append(watch)
            hits.append(lab.once(arrives_at({peer}, {"opening": "link", **PHASES}[phase]), improve))

        outcome = await converse(lab, {"a": (0, 2), "b": (2, 4), "c": (4, 6)}, prepare)
        assert all(hits)
        assert requests.count("open") == requests.count("resume") == 1
        assert {node.status().host.positions for node in lab.nodes.values()} == {len(PROMPT) + TOKENS - 1}
        return outcome

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.failovers == 0
    assert max(outcome.waits_s[1:]) <= STEP_S


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
    """Nothing is replaced, and no position is lost or computed twice."""

    async def scenario(lab: Lab) -> Outcome:
        hits: list[list[Delivery]] = []
        links = 0

        def improve(delivery: Delivery) -> None:
            lab.network.improve(delivery.source, delivery.target, LINK)

        def count(delivery: Delivery) -> None:
            nonlocal links
            is_first = delivery.protocol.id == LINK.id and delivery.target == lab.peer_id(receiver)
            links += is_first and pb.LinkRequest.FromString(delivery.message.header).HasField("link")

        def prepare() -> None:
            lab.network.observers.append(count)
            hits.append(lab.once(arrives_at({lab.peer_id(receiver)}, PHASES["middle"]), improve))

        outcome = await converse(lab, {"a": (0, 2), "b": (2, 4), "c": (4, 6)}, prepare)
        assert all(hits)
        assert links >= 2
        assert {node.status().host.positions for node in lab.nodes.values()} == {len(PROMPT) + TOKENS - 1}
        return outcome

    outcome = simulate(reference, scenario)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.failovers == 0
    assert max(outcome.waits_s[1:]) <= STEP_S


def test_a_host_that_sends_heartbeats_but_no_results_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(lab: Lab) -> Outcome:
        def stall(delivery: Delivery) -> None:
            node = next(node for node in lab.nodes.values() if node.status().peer_id == delivery.target)
            monkeypatch.setattr(node.engine, "compute", never)

        async def never(*_: object, **__: object) -> list[torch.Tensor]:
            await asyncio.Event().wait()
            return []

        replicas = {lab.peer_id("b"), lab.peer_id("b2")}
        return await converse(
            lab, ONE_REPLICA, lambda: lab.once(arrives_at(replicas, PHASES["middle"]), stall)
        )

    outcome = simulate(reference, scenario, limit_s=200.0)
    assert outcome.tokens == reference.greedy(PROMPT, TOKENS)
    assert outcome.longest_s <= 1.5 * Timing().stall_s


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_the_sessions_of_a_crashed_client_are_freed(reference: Reference, fault: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(ONE_REPLICA)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, PROMPT, 2)
            assert len(lab.sessions()) == 3
            getattr(lab.network, fault)(lab.peer_id("client"))
            await asyncio.sleep(lab.timing.client_silence_s + 1)
            assert lab.sessions() == {}
            assert lab.cache_bytes() == {}

    simulate(reference, scenario)
