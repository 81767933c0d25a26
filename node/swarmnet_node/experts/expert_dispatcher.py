"""Sends rows to the peers that have the experts which a host lacks, and waits for their outputs.

The host of a block computes attention, router and shared experts, and keeps the KV cache. In the middle of a forward, the torch thread requests the
outputs of the other experts (:meth:`ExpertDispatcher.elsewhere`): the rows of all sessions in that forward travel in one message to each peer, while
the host computes its own experts. Its torch thread then waits for the outputs.

Experts keep nothing between two requests, so that any peer with the same expert may answer:

1. Each row goes to as few peers as possible, of those that are not much slower than others with the same expert (``routing/expert_dispatch.py``).
2. A peer that fails, or sends wrong outputs, is replaced by another one at once.
3. If a peer is ``HEDGE_S`` late, another one is asked too, and the first answer counts (hedged requests: Dean and Barroso 2013).
4. If no peer has the expert, the host loads it, if its memory has room. Otherwise the forward fails, and the sessions in it end with
   ``REASON_MISSING_EXPERTS``: no token is computed without an expert that its router has chosen.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from swarmnet_node.experts.expert_link import ExpertLink, ExpertModel
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.expert_announcements import (
    BlockExperts,
    ExpertHost,
    format_experts,
    read_expert_hosts,
)
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel, persist, start_on_loop
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.quantization.packed_experts import Elsewhere, Outputs
from swarmnet_protocols.routing.expert_dispatch import divide
from swarmnet_protocols.session.expert_rows import ExpertRows, split_rows
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

MAX_ROUND_TRIP_S = 0.02
"""Longest round trip to peers with experts in seconds, unless the owner allows more. Each block of a token waits for one."""
MAX_LINKS = 64
"""Most peers with experts to which a host has streams."""
REFRESH_S = 5.0
"""Seconds between two readings of the directory; while experts are missing, ``MISSING_REFRESH_S``."""
MISSING_REFRESH_S = 1.0
HEDGE_S = 0.15
"""Seconds, in addition to ``HEDGE_FACTOR`` times the expected time of an answer, after which another peer is asked too."""
HEDGE_FACTOR = 3
SLOW_FACTOR, SLOW_S = 2.0, 0.002
"""A peer whose answers take longer than this many times the fastest one's, and so many seconds more, is asked only for experts that no faster one has."""
WORK_LEFT = 0.9
"""Share of a peer's work for a block that counts in the next forward, when peers are chosen of which each would do."""
MISSING_S = 3.0
"""Seconds that a forward waits for a peer with a missing expert."""

StartOnLoop = Callable[[asyncio.AbstractEventLoop, Coroutine[Any, Any, Any]], Callable[[], Any]]
Load = Callable[[int, Collection[int]], bool]
"""Loads experts of a block into the host's own memory, on any thread; returns whether it had room."""
Pair = tuple[int, int]
"""A row of a forward, and an expert that its router has chosen for it."""


@dataclass
class DispatchCounters:
    """Numbers since the start."""

    blocks: int = 0
    """Blocks of forwards for which peers were asked."""
    rows: int = 0
    """Rows that peers were asked for; a row counts once for each of its experts."""
    sent: int = 0
    """Rows that were sent to peers; a row counts once for each peer."""
    failed: int = 0
    """Requests that failed: another peer was asked instead, or the host loaded the experts."""
    hedged: int = 0
    """Requests that were slow, so that another peer was asked, too."""
    loaded: int = 0
    """Experts that the host loaded because no peer had them."""


@dataclass(eq=False)
class _Ask:
    """A request to one peer, in as many messages as it needs."""

    link: ExpertLink
    pairs: frozenset[Pair]
    rows: Mapping[int, list[int]]
    """The rows of each expert, ascending."""
    answer: "asyncio.Task[Outputs]"
    late_at: float
    """Time of the loop from which on another peer is asked, too."""
    is_hedged: bool = False


@dataclass(eq=False)
class ExpertDispatcher:
    """Peers with the experts that a host lacks. Blocks are numbered as in the whole model."""

    transport: Transport
    directory: Directory
    model: ExpertModel
    wanted: dict[int, set[int]]
    """The experts that the host lacks, by block. Experts that it loads are removed."""
    load: Load
    timing: Timing
    rng: random.Random
    max_round_trip_s: float = MAX_ROUND_TRIP_S
    start_on_loop: StartOnLoop = start_on_loop
    counters: DispatchCounters = field(default_factory=DispatchCounters)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._links: dict[PeerId, ExpertLink] = {}
        self._keeping: dict[PeerId, asyncio.Task[None]] = {}
        self._computing: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._changes = 0
        self._work: dict[int, dict[PeerId, float]] = {}
        """Seconds of work that each peer has had lately, by block."""
        self._is_closed = False
        self._has_looked = False
        """Whether the directory has been read."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ExpertDispatcher"]:
        """Find peers, and keep streams to them, while the context is open. At its end, waiting forwards fail."""
        finding = asyncio.create_task(persist("the search for experts", self._find), name="find experts")
        try:
            yield self
        finally:
            self._is_closed = True
            await cancel(finding, *self._computing, *self._keeping.values())

    @property
    def links(self) -> Sequence[ExpertLink]:
        return tuple(self._links.values())

    @property
    def far(self) -> int:
        """The number of peers with some of the experts that are farther than the host allows."""
        return sum(link.is_far for link in self._links.values())

    def missing(self) -> BlockExperts:
        """The experts that neither the host nor a peer within reach has."""
        hosted = [link.host.experts for link in self._links.values() if link.is_open]
        found = {
            block: frozenset(experts).difference(*(each.get(block, ()) for each in hosted))
            for block, experts in self.wanted.items()
        }
        return {block: experts for block, experts in found.items() if experts}

    async def complete(self, notice: Callable[[str], None]) -> None:
        """Wait until no expert is missing. ``notice`` receives a description of the missing ones each time that it changes."""
        told = ""
        while missing := self.missing():
            seen = self._changes
            text = f"waiting for peers with experts {self._describe(missing)}"
            if self._has_looked and text != told:
                told = text
                notice(text)
            await self._change(seen)

    def elsewhere(self, block: int) -> Elsewhere:
        """A function with which the torch thread starts the computation of a block's experts by peers, and then waits for it."""

        def start(hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Callable[[], Outputs]:
            if torch.is_grad_enabled() and hidden.requires_grad:
                raise Refusal(
                    refusal_pb2.REASON_MISSING_EXPERTS,
                    "this host serves no training passes: other peers compute some of its experts",
                )
            values = hidden.detach().to("cpu").contiguous()
            indexes = {expert: each.to("cpu") for expert, each in rows.items()}
            wait = self.start_on_loop(self._loop, self._compute_here(block, values, indexes))
            return lambda: {expert: output.to(hidden.device) for expert, output in wait().items()}

        return start

    async def _compute_here(
        self, block: int, hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]
    ) -> Outputs:
        """``compute``, which ends with the context."""
        task = asyncio.current_task()
        if task is None or self._is_closed:
            raise Unreachable("this host has stopped")
        self._computing.add(task)
        try:
            return await self.compute(block, hidden, rows)
        except asyncio.CancelledError:
            raise Unreachable("this host has stopped") from None
        finally:
            self._computing.discard(task)

    async def compute(self, block: int, hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Outputs:
        """The outputs of experts of a block. ``rows``: for each expert, the indexes of its rows of ``hidden`` [T, D].

        Experts that the host loads in the meantime are omitted, because it computes them itself. Raises ``Refusal`` for an expert that no peer within
        reach has and the host has no memory for.
        """
        self.counters.blocks += 1
        self._work[block] = {
            peer: WORK_LEFT * seconds
            for peer, seconds in self._work.get(block, {}).items()
            if peer in self._links
        }
        found: dict[int, _Parts] = {expert: _Parts() for expert in rows}
        asks: list[_Ask] = []
        failed: set[PeerId] = set()
        left: set[Pair] = {(row, expert) for expert in rows for row in rows[expert].tolist()}
        give_up_at = math.inf
        try:
            while left:
                seen = self._changes
                self._ask(block, hidden, left, asks, failed)
                orphans = left.difference(*(ask.pairs for ask in asks))
                if orphans:
                    experts = {expert for _, expert in orphans}
                    if await self._loaded(block, experts):
                        left = {pair for pair in left if pair[1] not in experts}
                        for expert in experts:  # the host computes all of their rows
                            del found[expert]
                        continue
                    give_up_at = min(give_up_at, self._loop.time() + MISSING_S)
                await self._progress(asks, give_up_at, seen)
                for ask in [ask for ask in asks if ask.answer.done()]:
                    asks.remove(ask)
                    if (outputs := self._outputs_of(ask)) is None:
                        failed.add(ask.link.host.peer)
                    elif not left.isdisjoint(ask.pairs):
                        for expert in found.keys() & outputs.keys():
                            found[expert].add(ask.rows[expert], outputs[expert])
                        left -= ask.pairs
                if orphans & left and self._loop.time() >= give_up_at:
                    raise self._missing({block: frozenset(expert for _, expert in orphans & left)})
        finally:
            if asks:
                await cancel(*(ask.answer for ask in asks))
        return {expert: parts.outputs(rows[expert].tolist()) for expert, parts in found.items()}

    def _ask(
        self,
        block: int,
        hidden: torch.Tensor,
        left: Collection[Pair],
        asks: list[_Ask],
        failed: Collection[PeerId],
    ) -> None:
        """Ask peers for those rows of experts that none is asked for, or only peers that are late."""
        now = self._loop.time()
        usual: dict[int, list[PeerId]] = {}
        holders: dict[int, dict[int, list[PeerId]]] = {}
        late: set[_Ask] = set()
        for row, expert in sorted(left):
            if expert not in usual:
                usual[expert] = self._holders(block, expert, failed)
            free, present = usual[expert], [ask for ask in asks if (row, expert) in ask.pairs]
            if any(now < ask.late_at for ask in present):
                continue
            if present:
                free = self._holders(block, expert, {*failed, *(ask.link.host.peer for ask in present)})
            if free:
                holders.setdefault(row, {})[expert] = free
                late.update(present)
        for ask in late:
            if not ask.is_hedged:
                ask.is_hedged = True
                ask.link.note_late(now)
                self.counters.hedged += 1
        for peer, mine in self._divided(block, holders).items():
            link = self._links[peer]
            indexes = {expert: torch.tensor(each) for expert, each in mine.items()}
            pairs = frozenset((row, expert) for expert, each in mine.items() for row in each)
            self.counters.rows += len(pairs)
            self.counters.sent += len({row for row, _ in pairs})
            late_at = now + HEDGE_S + HEDGE_FACTOR * link.seconds_for(len(pairs))
            answer = asyncio.create_task(_ask_all(link, split_rows(block, hidden, indexes)))
            asks.append(_Ask(link, pairs, mine, answer, late_at))

    def _divided(
        self, block: int, holders: Mapping[int, Mapping[int, list[PeerId]]]
    ) -> dict[PeerId, dict[int, list[int]]]:
        """The rows of each expert that each peer is asked for. ``holders``: by row and expert."""
        work = self._work[block]
        asked: dict[PeerId, dict[int, list[int]]] = {}
        for row, those in holders.items():
            for peer, experts in divide(those, work, self._row_s).items():
                mine = asked.setdefault(peer, {})
                for expert in experts:
                    mine.setdefault(expert, []).append(row)
        return asked

    def _row_s(self, peer: PeerId) -> float:
        return self._links[peer].row_s

    async def _loaded(self, block: int, experts: set[int]) -> bool:
        """Have the host load experts that no peer has. False if it has no room, or cannot fetch them."""
        try:
            is_loaded = await self._loop.run_in_executor(None, self.load, block, sorted(experts))
        except SwarmnetError as error:
            _log.warning("experts cannot be loaded: %s", error)
            return False
        if is_loaded:
            self.counters.loaded += len(experts)
            self.wanted[block] -= experts
        return is_loaded

    async def _progress(self, asks: Sequence[_Ask], give_up_at: float, seen: int) -> None:
        """Wait until there is something to do: all answers are there or one of them is an error, a peer is late, or it is time to give up.

        If experts are waited for that no peer is asked for (``give_up_at`` is finite), also until a link has changed since ``seen``; if a peer is
        late, until any answer is there.
        """
        now = self._loop.time()
        late = [ask.late_at for ask in asks if not ask.is_hedged and ask.late_at > now]
        until = min([give_up_at, *late])
        waited_for: list[asyncio.Task[Any]] = [ask.answer for ask in asks]
        change = None
        if not math.isinf(give_up_at):
            change = asyncio.create_task(self._change(seen))
            waited_for.append(change)
        is_any = change is not None or any(ask.is_hedged for ask in asks)
        # Usually all answers come at nearly the same time: each return to the forward costs more than waiting for the last one.
        when = asyncio.FIRST_COMPLETED if is_any else asyncio.FIRST_EXCEPTION
        try:
            await asyncio.wait(
                waited_for, timeout=None if math.isinf(until) else max(0.0, until - now), return_when=when
            )
        finally:
            await cancel(change)

    def _outputs_of(self, ask: _Ask) -> Outputs | None:
        """The outputs of a request that has ended; None if it failed."""
        error = ask.answer.exception()
        if error is None:
            return ask.answer.result()
        if not isinstance(error, SwarmnetError):
            raise error
        self.counters.failed += 1
        _log.info("experts not computed", extra={"peer": ask.link.host.peer, "reason": str(error)[:200]})
        return None

    def _describe(self, missing: BlockExperts) -> str:
        """The missing experts as text, and the number of peers with experts that are too far."""
        far = self.far
        limit = f"{1000 * self.max_round_trip_s:.0f} ms"
        note = f"; {far} peers that have experts are farther than a round trip of {limit}" if far else ""
        return f"{format_experts(missing)[:200]} (block:experts){note}"

    def _missing(self, experts: BlockExperts) -> Refusal:
        return Refusal(
            refusal_pb2.REASON_MISSING_EXPERTS,
            f"no peer within reach has experts {self._describe(experts)}",
        )

    def _holders(self, block: int, expert: int, without: Collection[PeerId] = ()) -> list[PeerId]:
        """The peers of those within reach that may be asked for an expert: none that was late or is much slower, if there are others."""
        links = [
            link
            for peer, link in self._links.items()
            if link.is_open and link.has(block, expert) and peer not in without
        ]
        if len(links) > 1:
            now = self._loop.time()
            links = [link for link in links if not link.is_avoided(now)] or links
            slow_s = SLOW_FACTOR * min(link.seconds_for(1) for link in links) + SLOW_S
            links = [link for link in links if link.seconds_for(1) <= slow_s]
        return [link.host.peer for link in links]

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.set()

    async def _change(self, seen: int) -> None:
        """Wait until a link has opened or ended after the change number ``seen``."""
        while self._changes == seen:
            self._changed.clear()
            await self._changed.wait()

    async def _find(self) -> NoReturn:
        """Read the directory again and again, and keep a link to each peer that has experts which the host lacks."""
        while True:
            with contextlib.suppress(SwarmnetError):  # the links stay
                found = await read_expert_hosts(self.directory, self.model.manifest)
                hosts = {host.peer: host for host in found if host.peer != self.transport.peer_id}
                await self._update(hosts)
            every_s = MISSING_REFRESH_S if self.missing() else REFRESH_S
            await asyncio.sleep(every_s * self.rng.uniform(0.8, 1.2))

    async def _update(self, hosts: Mapping[PeerId, ExpertHost]) -> None:
        """Have links to ``hosts``, as they announced themselves, and to no others. A peer with a fault stays known."""
        for peer in [peer for peer, link in self._links.items() if peer not in hosts and not link.fault]:
            await cancel(self._keeping.pop(peer))
            del self._links[peer]
        self._has_looked = True
        for peer, host in hosts.items():
            if peer in self._links:
                self._links[peer].host = host
            elif len(self._links) < MAX_LINKS and self._is_wanted(host):
                self._links[peer] = link = ExpertLink(
                    host,
                    self.model,
                    self.transport,
                    self.timing,
                    max_round_trip_s=self.max_round_trip_s,
                    changed=self._note_change,
                )
                self._keeping[peer] = asyncio.create_task(
                    persist(f"the link to experts of {peer}", link.keep), name=f"experts of {peer}"
                )
        self._note_change()

    def _is_wanted(self, host: ExpertHost) -> bool:
        """Whether it has missing experts, with the weights that this host has: tokens must not depend on who computes."""
        has_same_weights = host.precision.partition("/")[0] == self.model.precision.partition("/")[0]
        return has_same_weights and any(
            experts & self.wanted.get(block, set()) for block, experts in host.experts.items()
        )


class _Parts:
    """The outputs of one expert, as its rows arrive from peers."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._outputs: list[torch.Tensor] = []

    def add(self, rows: Sequence[int], outputs: torch.Tensor) -> None:
        self._rows += rows
        self._outputs.append(outputs)

    def outputs(self, rows: Sequence[int]) -> torch.Tensor:
        """The outputs of ``rows``, in this order. If two peers have computed a row, the second answer counts."""
        together = self._outputs[0] if len(self._outputs) == 1 else torch.cat(self._outputs)
        if self._rows == rows:
            return together
        places = {row: place for place, row in enumerate(self._rows)}
        return together[[places[row] for row in rows]]


async def _ask_all(link: ExpertLink, requests: Iterable[ExpertRows]) -> Outputs:
    """The outputs of several requests to one peer, sent one after another, together."""
    found: dict[int, list[torch.Tensor]] = {}
    for request in requests:
        for expert, outputs in (await link.ask(request)).items():
            found.setdefault(expert, []).append(outputs)
    return {expert: torch.cat(parts) for expert, parts in found.items()}
