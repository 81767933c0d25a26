"""Sends rows to peers that have a host's missing experts, and waits for the outputs.

The host of a block computes attention, router and shared experts, and keeps the KV cache. In the
middle of a forward, the torch thread requests the outputs of the missing experts
(:meth:`ExpertDispatcher.elsewhere`). One message to each peer carries the rows of all sessions in
that forward. Meanwhile the host computes its own experts; then its torch thread waits.

Experts keep nothing between two requests, so any peer with the same expert may answer:

1. Each row goes to as few peers as possible. Peers that are much slower than others with the same
   expert are left out (``routing/experts/dispatch.py``).
2. If a peer fails or leaves rows out, another peer replaces it at once.
3. If a peer is ``HEDGE_S`` late, another peer is asked too, and the first answer counts (hedged
   requests: Dean and Barroso 2013).
4. Rows with infinity or NaN go to no peer: their outputs are NaN, as an expert would compute them.
   If finite rows come back with outputs that are not finite, another peer computes them again. If
   those outputs are finite, the first peer is avoided for a while. Otherwise the rows are too large
   and no peer is at fault: their session ends with ``REASON_NOT_FINITE``.
5. If no peer has the expert, the host loads it if its memory has room. Otherwise the forward fails,
   and its sessions end with ``REASON_MISSING_EXPERTS``: no token skips an expert that its router
   chose.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmnet_node.experts.expert_link import ExpertLink
from swarmnet_node.experts.expert_links import ExpertLinks
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertBits, format_experts
from swarmnet_protocols.errors import SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel, start_on_loop
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.quantization.packed_experts import Elsewhere, Outputs
from swarmnet_protocols.routing.experts.dispatch import divide
from swarmnet_protocols.session.expert_rows import ExpertRows, split_rows
from swarmnet_protocols.wire import refusal_pb2

_log = logging.getLogger(__name__)

HEDGE_S = 0.15
"""Seconds before another peer is asked too, on top of ``HEDGE_FACTOR`` times the expected time. A
smaller value computes many rows twice; a larger one lets one slow peer delay the token."""
HEDGE_FACTOR = 3
SLOW_FACTOR, SLOW_S = 2.0, 0.002
"""A peer counts as slow if its answers take longer than ``SLOW_FACTOR`` times the fastest peer's
plus ``SLOW_S`` seconds. A slow peer is asked only for experts that no faster peer has."""
WORK_LEFT = 0.9
"""Factor that reduces the counted work of each peer from one forward to the next. Among equal
peers, the one with the least counted work is asked."""
MISSING_S = 3.0
"""Seconds that a forward waits for a peer with a missing expert."""

_LEAST_WAIT_S = 1e-3
"""Shortest wait for answers, longer than the rounding errors of timers."""

StartOnLoop = Callable[[asyncio.AbstractEventLoop, Coroutine[Any, Any, Any]], Callable[[], Any]]
Load = Callable[[int, Collection[int]], bool]
"""Loads experts of a block into the host's memory, on any thread. Returns False if there is no
room."""
Pair = tuple[int, int]
"""A row of a forward, and an expert that the router chose for this row."""


@dataclass
class DispatchCounters:
    """Counts since the start."""

    blocks: int = 0
    """Blocks of forwards that needed peers."""
    rows: int = 0
    """Rows requested from peers. A row counts once for each of its experts."""
    sent: int = 0
    """Rows sent to peers. A row counts once for each peer."""
    failed: int = 0
    """Requests that failed. Another peer took over, or the host loaded the experts."""
    hedged: int = 0
    """Requests that were so slow that another peer was asked too."""
    loaded: int = 0
    """Experts that the host loaded because no peer had them."""


@dataclass(eq=False)
class _Ask:
    """A request to one peer, split into as many messages as it needs."""

    link: ExpertLink
    pairs: frozenset[Pair]
    rows: Mapping[int, list[int]]
    """The rows of each expert, ascending."""
    answer: "asyncio.Task[Outputs]"
    late_at: float
    """Loop time when another peer is asked too."""
    is_hedged: bool = False


@dataclass(eq=False)
class _Needed:
    """A request of one forward to peers, for the experts of one block.

    ``hidden`` [T, D]: the inputs of all rows. ``rows``: the rows of each expert.
    """

    block: int
    hidden: torch.Tensor
    rows: dict[int, list[int]]
    left: set[Pair] = field(init=False)
    """Pairs without finite outputs so far. A pair may be asked for twice; the first finite answer
    removes it."""
    found: dict[int, list[tuple[Sequence[int], torch.Tensor]]] = field(init=False)
    """The answers for each expert: rows, and their outputs."""
    asks: list[_Ask] = field(default_factory=list)
    failed: set[PeerId] = field(default_factory=set)
    doubted: dict[Pair, list[ExpertLink]] = field(default_factory=dict)
    """Peers whose outputs for a pair were not finite. They do not get this pair again."""

    def __post_init__(self) -> None:
        self.left = {(row, expert) for expert, each in self.rows.items() for row in each}
        self.found = {expert: [] for expert in self.rows}

    def outputs(self) -> Outputs:
        """Return the outputs of each expert, in the order of its rows."""
        return {expert: _in_order(parts, self.rows[expert]) for expert, parts in self.found.items()}


@dataclass(eq=False)
class ExpertDispatcher:
    """Has peers compute a host's missing experts. Blocks are numbered as in the whole model."""

    links: ExpertLinks
    load: Load
    start_on_loop: StartOnLoop = start_on_loop
    counters: DispatchCounters = field(default_factory=DispatchCounters)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._computing: set[asyncio.Task[Any]] = set()
        self._work: dict[int, dict[PeerId, float]] = {}
        """Seconds of recent work of each peer, by block."""
        self._is_closed = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ExpertDispatcher"]:
        """Compute while the context is open. At the end, waiting forwards fail."""
        async with self.links.running():
            try:
                yield self
            finally:
                self._is_closed = True
                await cancel(*self._computing)

    @property
    def wanted(self) -> Mapping[int, ExpertBits]:
        """The experts that this host lacks, by block."""
        return self.links.wanted

    async def complete(self, notice: Callable[[str], None]) -> None:
        """Wait until no expert is missing.

        ``notice`` receives a description of the missing experts whenever they change.
        """
        told = ""
        while missing := self.links.missing():
            seen = self.links.changes
            text = f"waiting for peers with experts {self._describe(missing)}"
            if self.links.has_looked and text != told:
                told = text
                notice(text)
            await self.links.change(seen)

    def elsewhere(self, block: int) -> Elsewhere:
        """Return a function for the torch thread that starts a block's experts on peers, then
        waits."""

        def start(hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Callable[[], Outputs]:
            if torch.is_grad_enabled() and hidden.requires_grad:
                raise Refusal(
                    refusal_pb2.REASON_MISSING_EXPERTS,
                    "this host serves no training passes: other peers compute some of its experts",
                )
            values = hidden.detach().to("cpu").contiguous()
            indexes = {expert: each.to("cpu") for expert, each in rows.items()}
            sent, not_sent = finite_rows(values, indexes)
            wait = self.start_on_loop(self._loop, self._compute_here(block, values, sent))

            def outputs() -> Outputs:
                found = wait()
                if not_sent:
                    found = _with_nan(found, sent, indexes, values)
                return {expert: output.to(hidden.device) for expert, output in found.items()}

            return outputs

        return start

    async def _compute_here(
        self, block: int, hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]
    ) -> Outputs:
        """Run ``compute``. Raises ``Unreachable`` when the context ends first."""
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
        """Return the outputs of experts of a block.

        ``rows``: for each expert, the indexes of its rows in ``hidden`` [T, D]. If the host loads
        an expert in the meantime, that expert is left out, because the host computes it. Raises
        ``Refusal`` if no peer within reach has an expert and the host has no memory for it.
        """
        self.counters.blocks += 1
        # Work of the last forwards breaks ties between equal peers, so that each gets its share.
        self._work[block] = {
            peer: WORK_LEFT * seconds
            for peer, seconds in self._work.get(block, {}).items()
            if peer in self.links
        }
        needed = _Needed(block, hidden, {expert: each.tolist() for expert, each in rows.items()})
        give_up_at = math.inf
        try:
            # Each turn asks for whatever nobody computes, waits for news, and counts the answers.
            while needed.left:
                # Before the links are read: a change during ``_ask`` must end the wait below.
                seen = self.links.changes
                self._ask(needed)
                orphans = needed.left.difference(*(ask.pairs for ask in needed.asks))
                # All peers that can be asked returned outputs that are not finite. So the rows are
                # to blame, not the peers: a single host would compute NaN for them, too.
                if too_large := orphans & needed.doubted.keys():
                    for row, expert in too_large:
                        needed.found[expert].append(([row], torch.full_like(hidden[:1], math.nan)))
                    orphans -= too_large
                    needed.left -= too_large
                if orphans:
                    experts = {expert for _, expert in orphans}
                    if await self._loaded(block, experts):
                        # The host computes all rows of these experts, even rows that have arrived.
                        needed.left = {pair for pair in needed.left if pair[1] not in experts}
                        for expert in experts:
                            del needed.found[expert]
                        continue
                    # The time counts from the first gap, because peers come and go. Otherwise a
                    # series of short gaps could hold a forward forever.
                    give_up_at = min(give_up_at, self._loop.time() + MISSING_S)
                if needed.left:
                    await self._progress(needed.asks, give_up_at, seen)
                for ask in [ask for ask in needed.asks if ask.answer.done()]:
                    needed.asks.remove(ask)
                    if (outputs := self._outputs_of(ask)) is None:
                        needed.failed.add(ask.link.host.peer)
                    elif not needed.left.isdisjoint(ask.pairs):
                        self._sort_outputs(needed, ask, outputs)
                if orphans & needed.left and self._loop.time() >= give_up_at:
                    missing = {block: frozenset(expert for _, expert in orphans & needed.left)}
                    raise Refusal(
                        refusal_pb2.REASON_MISSING_EXPERTS,
                        f"no peer within reach has experts {self._describe(missing)}",
                    )
        finally:
            # Slower peers of hedged requests would go on computing for nobody.
            if needed.asks:
                await cancel(*(ask.answer for ask in needed.asks))
        return needed.outputs()

    def _sort_outputs(self, needed: _Needed, ask: _Ask, outputs: Outputs) -> None:
        """Add the finite outputs of an answer to ``needed.found``. Put other pairs into
        ``needed.doubted``."""
        taken = ask.pairs
        for expert in needed.found.keys() & outputs.keys():
            mine, output = ask.rows[expert], outputs[expert]
            if not torch.isfinite(output).all():
                good = torch.isfinite(output).all(1)
                bad = {(row, expert) for row, is_good in zip(mine, good.tolist(), strict=True) if not is_good}
                for pair in bad:
                    needed.doubted.setdefault(pair, []).append(ask.link)
                taken -= bad
                mine, output = [row for row in mine if (row, expert) not in bad], output[good]
            needed.found[expert].append((mine, output))
        now = self._loop.time()
        for link in {link for pair in taken & needed.doubted.keys() for link in needed.doubted[pair]}:
            link.avoid(now)
        needed.left -= taken

    def _ask(self, needed: _Needed) -> None:
        """Ask peers for rows in ``needed.left`` that nobody computes yet, or only late peers."""
        now = self._loop.time()
        usual: dict[int, list[PeerId]] = {}
        holders: dict[int, dict[int, list[PeerId]]] = {}
        late: set[_Ask] = set()
        for row, expert in sorted(needed.left):
            if expert not in usual:
                usual[expert] = self._holders(needed.block, expert, needed.failed)
            free, present = usual[expert], [ask for ask in needed.asks if (row, expert) in ask.pairs]
            if any(now < ask.late_at for ask in present):
                continue
            if present or (row, expert) in needed.doubted:
                asked = {ask.link.host.peer for ask in present}
                asked.update(link.host.peer for link in needed.doubted.get((row, expert), ()))
                free = self._holders(needed.block, expert, {*needed.failed, *asked})
            if free:
                holders.setdefault(row, {})[expert] = free
                late.update(present)
        for ask in late:
            if not ask.is_hedged:
                ask.is_hedged = True
                ask.link.avoid(now)
                self.counters.hedged += 1
        for peer, mine in self._divided(needed.block, holders).items():
            link = self.links[peer]
            indexes = {expert: torch.tensor(each) for expert, each in mine.items()}
            pairs = frozenset((row, expert) for expert, each in mine.items() for row in each)
            self.counters.rows += len(pairs)
            self.counters.sent += len({row for row, _ in pairs})
            late_at = now + HEDGE_S + HEDGE_FACTOR * link.seconds_for(len(pairs))
            answer = asyncio.create_task(_ask_all(link, split_rows(needed.block, needed.hidden, indexes)))
            needed.asks.append(_Ask(link, pairs, mine, answer, late_at))

    def _divided(
        self, block: int, holders: Mapping[int, Mapping[int, list[PeerId]]]
    ) -> dict[PeerId, dict[int, list[int]]]:
        """Return the rows of each expert to ask each peer for. ``holders``: by row and expert."""
        asked: dict[PeerId, dict[int, list[int]]] = {}
        for row, those in holders.items():
            shares = divide(those, self._work[block], lambda peer: self.links[peer].row_s)
            for peer, experts in shares.items():
                for expert in experts:
                    asked.setdefault(peer, {}).setdefault(expert, []).append(row)
        return asked

    async def _loaded(self, block: int, experts: set[int]) -> bool:
        """Have the host load experts that no peer has. Return False if there is no room or the
        fetch fails."""
        try:
            is_loaded = await self._loop.run_in_executor(None, self.load, block, sorted(experts))
        except SwarmnetError as error:
            _log.warning("experts cannot be loaded: %s", error)
            return False
        if is_loaded:
            self.counters.loaded += len(experts)
            self.links.wanted[block] -= experts
        return is_loaded

    async def _progress(self, asks: Sequence[_Ask], give_up_at: float, seen: int) -> None:
        """Wait until answers are complete, a request fails, a peer is late, or time is up.

        - If ``give_up_at`` is finite, some experts have no peer: return when a link changes after
          ``seen``, too.
        - In that case, and once a peer is late, return at the first answer.
        """
        now = self._loop.time()
        late = [ask.late_at for ask in asks if not ask.is_hedged and ask.late_at > now]
        until = min([give_up_at, *late])
        waited_for: list[asyncio.Task[Any]] = [ask.answer for ask in asks]
        change = None
        if not math.isinf(give_up_at):
            change = asyncio.create_task(self.links.change(seen))
            waited_for.append(change)
        is_any = change is not None or any(ask.is_hedged for ask in asks)
        # Usually all answers arrive almost together. Returning to the forward for each costs more
        # than waiting for the last.
        when = asyncio.FIRST_COMPLETED if is_any else asyncio.FIRST_EXCEPTION
        timeout_s = None if math.isinf(until) else max(_LEAST_WAIT_S, until - now)
        try:
            await asyncio.wait(waited_for, timeout=timeout_s, return_when=when)
        finally:
            await cancel(change)

    def _outputs_of(self, ask: _Ask) -> Outputs | None:
        """Return the outputs of a finished request, or None if it failed."""
        error = ask.answer.exception()
        if error is None:
            return ask.answer.result()
        if not isinstance(error, SwarmnetError):
            raise error
        self.counters.failed += 1
        _log.info("experts not computed", extra={"peer": ask.link.host.peer, "reason": str(error)[:200]})
        return None

    def _describe(self, missing: BlockExperts) -> str:
        """Describe the missing experts, and count the peers with experts that are too far away."""
        far = self.links.far_peers
        limit = f"{1000 * self.links.max_round_trip_s:.0f} ms"
        note = f"; {far} peers that have experts are farther than a round trip of {limit}" if far else ""
        return f"{format_experts(missing)[:200]} (block:experts){note}"

    def _holders(self, block: int, expert: int, without: Collection[PeerId] = ()) -> list[PeerId]:
        """Return the peers to ask for an expert. Late and much slower peers are left out if others
        have it."""
        links = [link for link in self.links.with_expert(block, expert) if link.host.peer not in without]
        if len(links) > 1:
            now = self._loop.time()
            links = [link for link in links if not link.is_avoided(now)] or links
            slow_s = SLOW_FACTOR * min(link.seconds_for(1) for link in links) + SLOW_S
            links = [link for link in links if link.seconds_for(1) <= slow_s]
        return [link.host.peer for link in links]


def _in_order(parts: Sequence[tuple[Sequence[int], torch.Tensor]], rows: Sequence[int]) -> torch.Tensor:
    """Return the outputs of ``rows``, in this order. If two peers computed a row, the later answer
    counts."""
    together = parts[0][1] if len(parts) == 1 else torch.cat([outputs for _, outputs in parts])
    found = [row for mine, _ in parts for row in mine]
    if found == rows:
        return together
    places = {row: place for place, row in enumerate(found)}
    return together[[places[row] for row in rows]]


async def _ask_all(link: ExpertLink, requests: Iterable[ExpertRows]) -> Outputs:
    """Send several requests to one peer, one after another, and join their outputs."""
    found: dict[int, list[torch.Tensor]] = {}
    for request in requests:
        for expert, outputs in (await link.ask(request)).items():
            found.setdefault(expert, []).append(outputs)
    return {expert: torch.cat(parts) for expert, parts in found.items()}


def finite_rows(
    values: torch.Tensor, rows: Mapping[int, torch.Tensor]
) -> tuple[Mapping[int, torch.Tensor], bool]:
    """Return the rows of each expert with finite ``values`` [T, D], and whether some rows are left
    out."""
    if bool(torch.isfinite(values).all()):
        return rows, False
    good = torch.isfinite(values).all(1)
    found = {expert: each[good[each]] for expert, each in rows.items()}
    return {expert: each for expert, each in found.items() if len(each)}, True


def _with_nan(
    found: Outputs, sent: Mapping[int, torch.Tensor], rows: Mapping[int, torch.Tensor], values: torch.Tensor
) -> Outputs:
    """Add NaN outputs for rows that were not sent. Leave out experts that the host computes
    itself."""
    every: dict[int, torch.Tensor] = {}
    for expert, each in rows.items():
        if expert in sent and expert not in found:
            continue
        outputs = torch.full((len(each), values.shape[1]), math.nan, dtype=values.dtype)
        if expert in sent:
            outputs[torch.isin(each, sent[expert])] = found[expert]
        every[expert] = outputs
    return every
