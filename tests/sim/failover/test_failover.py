"""A node that serves fails, in every way, at every point of a request: the client sees a pause,
never an error."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.timing import Timing
from tests.support.network.deliveries import arrives_at, request
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.swarm.interrupted import (
    CRASH_S,
    LIMIT_S,
    ONE_REPLICA,
    PHASES,
    PREFILL_STEPS,
    PROMPT,
    SILENT_S,
    STEP_S,
    TOKENS,
    TWO_OF_EACH,
    Outcome,
    converse,
    hurt,
    run_with,
)
from tests.support.swarm.swarm_lab import Lab, Reference, simulate


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
