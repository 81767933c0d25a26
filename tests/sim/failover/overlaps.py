"""Random swarms whose hosts have overlapping blocks, and faults at any message of an answer, all
from a seed.

1. :func:`random_layout` gives two to eight hosts spans that overlap and together cover the model.
2. :class:`Faults` waits for a message, and then does something to its sender, its receiver, or
another host.
3. :func:`converse` asks for an answer meanwhile, and notes how long each token took.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.failures import PAUSE_S
from swarmnet_client.chain.supervisor import NOTICE_S
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resources import RETRY_S
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.routing.relocation import Kind, Relocation
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.models.tiny import BLOCKS
from tests.support.network.memory_network import Delivery
from tests.support.swarm.swarm_lab import Lab

Span = tuple[int, int]
PROMPT = [5, 6, 7, 8, 9] * 8
TOKENS = 24
MESSAGES = 110
"""The first fault comes at one of this many messages: while the chain is opened, in the prompt, or
in the first half of the answer."""
SOON = 25
"""The second fault comes at most this many messages after the first: most often during its
repair."""
SILENT = ("hang", "cut")
"""Faults that a peer notices only when heartbeats stay away."""
DELAY_S = 0.01
"""One-way delay of all links."""
NOTICED_S = Timing.silence_s + Timing.heartbeat_s + NOTICE_S
"""Longest time until such a fault is noticed."""
FAULTS = ("crash", "stop", "hang", "cut", "refuse", "shed", "move")


def random_layout(rng: random.Random) -> dict[str, Span]:
    """Spans of two to eight hosts that cover all blocks."""
    while True:
        count = rng.randint(2, 8)
        spans = []
        for _ in range(count):
            start, end = sorted(rng.sample(range(BLOCKS + 1), 2))
            spans.append((start, end))
        if covers(spans):
            return {f"host{index}": span for index, span in enumerate(spans)}


def covers(spans: list[Span]) -> bool:
    """Whether the spans have all blocks of the model."""
    return {block for start, end in spans for block in range(start, end)} == set(range(BLOCKS))


def kind_of(delivery: Delivery, client: PeerId) -> str:
    """The kind of a message of a session or link, or "" for heartbeats and other protocols."""
    header, kind = delivery.message.header, None
    if delivery.protocol.id == SESSION.id:
        message = pb.SessionRequest if delivery.source == client else pb.SessionReply
        kind = message.FromString(header).WhichOneof("kind")
    elif delivery.protocol.id == LINK.id:
        # Of a reply, only the first field is set: 1 is ``linked``, where a request has ``link``.
        kind = pb.LinkRequest.FromString(header).WhichOneof("kind")
        kind = None if kind == "step" and len(delivery.message.payload) == 0 else kind
    return "" if kind in (None, "heartbeat") else kind


@dataclass
class Faults:
    """Faults at messages that the seed chooses, one or two of them. Every block keeps a host that
    is well and that the client reaches."""

    lab: Lab
    rng: random.Random
    layout: dict[str, Span]
    left: int
    happened: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    _gone: set[str] = field(default_factory=set)
    _countdown: int = 0
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def begin(self) -> None:
        """Count messages from now on."""
        self._countdown = self.rng.randint(1, MESSAGES)
        self.lab.network.observers.append(self._observe)

    async def end(self) -> None:
        """No more faults; wait for those under way."""
        self.left = 0
        await asyncio.gather(*self._tasks)

    def _observe(self, delivery: Delivery) -> None:
        if self.left <= 0 or not (kind := kind_of(delivery, self.lab.peer_id("client"))):
            return
        self._countdown -= 1
        if self._countdown > 0:
            return
        names = {self.lab.peer_id(name): name for name in self.layout}
        near = [names[peer] for peer in (delivery.source, delivery.target) if peer in names]
        others = [name for name in self.layout if name not in self._gone]
        victim = self.rng.choice([*near, *near, self.rng.choice(others)])
        if victim in self._gone:
            return
        fault = self.rng.choice(FAULTS)
        span = self._free_span() if fault == "move" else (0, 0)
        rest = [each for name, each in self.layout.items() if name not in (*self._gone, victim)]
        if not covers([*rest, span] if fault == "move" else rest):
            return  # at another message, or of another kind
        self.left -= 1
        self._countdown = self.rng.randint(1, SOON)
        now = asyncio.get_running_loop().time()
        self.happened.append(f"{fault} {victim} {span if fault == 'move' else ''} at {kind} {now:.3f}")
        self.kinds.append(fault)
        if fault == "move":
            self.layout[victim] = span
        elif fault != "shed":
            self._gone.add(victim)
        getattr(self, f"_{fault}")(victim, delivery)

    def _free_span(self) -> Span:
        start, end = sorted(self.rng.sample(range(BLOCKS + 1), 2))
        return start, end

    def _crash(self, name: str, _: Delivery) -> None:
        self.lab.network.crash(self.lab.peer_id(name))

    def _stop(self, name: str, _: Delivery) -> None:
        self.lab.nodes[name].finish(grace_s=30.0)

    def _hang(self, name: str, _: Delivery) -> None:
        self.lab.network.hang(self.lab.peer_id(name))

    def _cut(self, name: str, delivery: Delivery) -> None:
        """Cut the path of this message, if it is one of the host's, else that between the host and
        the client."""
        peer = self.lab.peer_id(name)
        ends = {delivery.source, delivery.target} if peer in (delivery.source, delivery.target) else set()
        other = (ends - {peer} or {self.lab.peer_id("client")}).pop()
        self.lab.network.cut(peer, other)

    def _refuse(self, name: str, _: Delivery) -> None:
        """Take no new session, and go on with those that there are."""
        if (host := self.lab.nodes[name].host) is not None:
            host.limits = replace(host.limits, max_wait_s=-1.0)

    def _shed(self, name: str, _: Delivery) -> None:
        if (host := self.lab.nodes[name].host) is not None:
            host.shed()

    def _move(self, name: str, _: Delivery) -> None:
        self._tasks.append(asyncio.create_task(self._move_to(name, self.layout[name])))

    async def _move_to(self, name: str, span: Span) -> None:
        node = self.lab.nodes[name]
        node.relocation = Relocation(Kind.MOVE, *span, reason="the test says so")
        await node.move(node.hosting.load(*span), drain_s=8.0)


@dataclass
class Answer:
    """The tokens of one answer, the waits for each of them, and what was done by the chain."""

    layout: dict[str, Span]
    tokens: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    routes: list[list[tuple[PeerId, int, int]]] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        return max(self.waits_s)

    @property
    def bound_s(self) -> float:
        """Longest wait for a token that these faults explain, where computing takes no time.

        The chain is opened, or a step goes through it. For each fault: half a round trip until it
        is noticed, or ``NOTICED_S``; three round trips for another host; and the step once more.
        Of two silent faults, the second may be at the host that takes over, where a dial has to
        time out. A host that has moved is known once the directory shows it. Two hosts that shed
        their sessions ask for ``RETRY_S``, and no other host may have their blocks.
        """
        round_trip_s, trip_s = 2 * DELAY_S, (max(map(len, self.routes)) + 1) * DELAY_S
        silent = sum(kind in SILENT for kind in self.kinds)
        opening_s = 3 * round_trip_s + trip_s
        repairs_s = len(self.kinds) * (3.5 * round_trip_s + trip_s) + ("move" in self.kinds) * PAUSE_S
        shed_s = (self.kinds.count("shed") > 1) * RETRY_S
        return opening_s + repairs_s + silent * NOTICED_S + (silent > 1) * Timing.open_s + shed_s

    @property
    def repeats(self) -> bool:
        """Whether a host followed itself in some route."""
        return any(one[0] == other[0] for route in self.routes for one, other in pairwise(route))


async def converse(lab: Lab, *, faults: int) -> Answer:
    """Ask for an answer while faults happen. Every route that the chain had is noted."""
    rng = random.Random(f"{lab.seed}/overlaps")
    layout = random_layout(rng)
    await lab.start_all(layout)
    trouble = Faults(lab, rng, dict(layout), faults)
    answer = Answer(layout, faults=trouble.happened, kinds=trouble.kinds)
    standby = rng.choice([None, None, True, False])
    clock = asyncio.get_running_loop().time
    try:
        async with lab.client() as swarm:
            trouble.begin()
            chain: Chain
            async with lab.chain(swarm, standby=standby) as chain:
                times = [clock()]

                def on_token(_: int) -> None:
                    times.append(clock())
                    if not answer.routes or answer.routes[-1] != chain.report.route:
                        answer.routes.append(chain.report.route)

                answer.tokens = await lab.generate(chain, PROMPT, TOKENS, on_token)
                answer.waits_s = [after - before for before, after in pairwise(times)]
            await trouble.end()
            await asyncio.sleep(1.0)
    except BaseException as error:
        error.add_note(f"{layout} {standby=}: {'; '.join(trouble.happened)}")
        raise
    return answer
