"""An answer during which hosts fail: when a fault happens, to whom, and what the client saw."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from swarmnet_client.chain.chain import Chain
from swarmnet_protocols.net import PeerId
from tests.support.network.deliveries import request
from tests.support.network.memory_network import Delivery
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
