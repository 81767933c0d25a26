"""Whole nodes and clients of a private swarm."""

import asyncio

import pytest

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.net.protocol_ids import LINK
from tests.support.network.memory_network import Delivery
from tests.support.network.private_swarm import PrivateSwarm
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 12
SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}


def simulate_private(reference: Reference, scenario: object) -> None:
    simulate(reference, scenario, private=PrivateSwarm())  # type: ignore[arg-type]


def test_members_give_the_answers_of_the_whole_model(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            assert await lab.generate(chain, PROMPT, TOKENS) == reference.greedy(PROMPT, TOKENS)
            assert chain.report.failovers == 0

    simulate_private(reference, scenario)


def test_a_revoked_client_loses_its_sessions(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        assert lab.private is not None
        await lab.start_all(SPANS)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            revocation = lab.private.revocation(lab.peer_id("client"))
            loop = asyncio.get_running_loop()
            times: list[float] = []

            def revoke(number: int) -> None:
                if number == 5:
                    times.append(loop.time())
                    lab.memberships["b"].add_revocations([revocation])

            with pytest.raises(NotAuthorised, match="revoked"):
                await lab.generate(chain, PROMPT, TOKENS, revoke)
            assert loop.time() - times[0] < 30.0, "120 s are allowed"
            assert not lab.sessions()
            assert not lab.cache_bytes()

    simulate_private(reference, scenario)


def test_a_revoked_host_is_replaced(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        assert lab.private is not None
        await lab.start_all({**SPANS, "b2": (2, 4)})
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            revoked: list[str] = []

            def revoke(number: int) -> None:
                if number == 5:
                    assert lab.private is not None
                    (host,) = (peer for peer, first, _ in chain.report.route if first == 2)
                    revoked.append(host)
                    lab.memberships["client"].add_revocations([lab.private.revocation(host)])

            assert await lab.generate(chain, PROMPT, TOKENS, revoke) == reference.greedy(PROMPT, TOKENS)
            assert chain.report.failovers == 1
            assert revoked[0] not in {peer for peer, _, _ in chain.report.route}
            assert chain.report.longest_stall_s < 3.0

    simulate_private(reference, scenario)


def test_an_outsider_learns_why_it_is_refused(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            lab.memberships["client"].rules = PrivateSwarm().rules
            lab.memberships["client"].certificate = b""
            lab.memberships["client"]._own = None
            with pytest.raises(NotAuthorised, match="no certificate"):
                await lab.generate(chain, PROMPT, TOKENS)

    simulate_private(reference, scenario)


def test_a_step_takes_as_many_messages_as_in_an_open_swarm(
    reference: Reference,
) -> None:
    def cost(private: PrivateSwarm | None) -> tuple[int, float]:
        """The messages on links during the last ten tokens, and the virtual seconds that these
        took."""

        async def scenario(lab: Lab) -> tuple[int, float]:
            await lab.start_all(SPANS)
            links: list[Delivery] = []
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                await lab.generate(chain, PROMPT, 2)
                async with lab.chain(swarm) as second:
                    loop = asyncio.get_running_loop()
                    lab.network.observers.append(links.append)
                    started = loop.time()
                    await lab.generate(second, PROMPT, 10)
                    took_s = loop.time() - started
            steps = [each for each in links if each.protocol == LINK and each.message.payload]
            return len(steps), took_s

        return simulate(reference, scenario, private=private)

    open_steps, open_s = cost(None)
    private_steps, private_s = cost(PrivateSwarm())
    assert private_steps == open_steps
    assert private_s == pytest.approx(open_s, rel=1e-3)
