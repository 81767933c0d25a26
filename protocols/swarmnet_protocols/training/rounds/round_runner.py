"""Runs one averaging round: connects ``round_state.RoundState`` to streams, slices and the clock.

Reports every observation to the state machine, and performs every effect that it returns
(``_perform``).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeVar

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.machine.aio import all_of, cancel, race
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.bandwidth import Arrival
from swarmnet_protocols.training.codecs.floats import FLOAT32
from swarmnet_protocols.training.codecs.payload import view
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.pacing import Wait
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.deadlines import Pace, RoundTiming, SendSchedule
from swarmnet_protocols.training.rounds.member_link import MemberLink
from swarmnet_protocols.training.rounds.messages import (
    DISCARD,
    Accusation,
    Decided,
    Effect,
    Finish,
    Prepare,
    Proposal,
    Reduce,
    Refute,
    Send,
    SendContribution,
    SendResult,
    Vote,
    below,
    decode_control,
    encode_control,
)
from swarmnet_protocols.training.rounds.reduction import (
    Contribution,
    GroupMean,
    Result,
    contributors,
    group_mean,
    read_result,
    read_summary,
    reduce_slice,
    result_of_groups,
    signed_bytes,
)
from swarmnet_protocols.training.rounds.round_state import RoundState
from swarmnet_protocols.training.rounds.terms import RoundTerms, Slice
from swarmnet_protocols.training.rounds.transfers import (
    Assembly,
    Outgoing,
    contribution_header,
    parts,
    result_header,
)
from swarmnet_protocols.training.rounds.votes import Electorate
from swarmnet_protocols.wire import training_pb2 as pb

_log = logging.getLogger(__name__)
_TRANSITIONS = (Prepare, Proposal, Vote, Decided, Accusation)
"""Control messages that are logged, because they change what a round may end with."""
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The end of a round at this member.

    - ``committed``: ``average`` [n] has the same bits at every member that committed.
    - ``behind``: ``average`` is None, but other members may have committed. So this worker has to
      compare its state with theirs.
    - Neither: the round was discarded. No member has an average, and ``average`` is None.
    """

    committed: bool
    behind: bool
    average: torch.Tensor | None
    slices: tuple[Slice, ...]
    contributors: tuple[tuple[PeerId, ...], ...]
    """The contributors to each slice, ordered by peer id."""
    excluded: tuple[tuple[PeerId, str], ...]
    """Peers whose contribution arrived but was left out of a slice, with the reason."""
    refuted: tuple[PeerId, ...]
    """Members proven dishonest by a false result, a decision without votes, or two votes."""
    reason: str
    bytes_sent: int
    bytes_received: int
    wait_s: float
    arrivals: tuple[Arrival, ...]
    """Transfer times of every member's last contribution and last result."""
    tokens: float = 0.0
    """Tokens behind the average, as its contributors claim them; each at most ``max_weight``."""
    waited: Wait | None = None
    """The slowest member, and the seconds that its payload took to arrive."""
    inside: Mapping[PeerId, int] = field(default_factory=dict)
    """Between groups: contributor → the members of its group that contributed, as bits."""

    def all_contributors(self) -> tuple[PeerId, ...]:
        """Return the members with a contribution in at least one slice of the average, sorted."""
        return tuple(sorted({peer for peers in self.contributors for peer in peers}))

    def slices_with(self, peer: PeerId) -> tuple[Slice, ...]:
        """Return the slices of the average that contain the contribution of ``peer``.

        Empty if nothing was committed.
        """
        if not self.committed:
            return ()
        pairs = zip(self.slices, self.contributors, strict=True)
        return tuple(part for part, peers in pairs if peer in peers)


@dataclass(frozen=True)
class RoundContext:
    """The parts of a worker that all rounds of a job share.

    - ``job``: the job's id, 32 bytes.
    - ``sign`` signs with the key of ``transport``'s peer id.
    - ``executor`` encodes, decodes and reduces; None for the loop's default executor.
    - ``on_proven`` is called with a member that is proven to be dishonest, also after its round.
    """

    transport: Transport
    job: bytes
    sign: Callable[[bytes], bytes]
    timing: RoundTiming = field(default_factory=RoundTiming)
    rules: AggregationRules = field(default_factory=AggregationRules)
    executor: Executor | None = None
    on_proven: Callable[[PeerId], None] = lambda _: None


Between = Callable[[int, GroupMean], Awaitable[tuple[torch.Tensor, Mapping[PeerId, int]] | None]]
"""Averages a slice with the other groups.

Returns the mean and its contributors (``Outcome.inside``); None if there is none.
"""


_NOTHING = Contribution.of(0.0, b"")


class RoundRunner:
    """One round at this member: ``prepare``, then ``run``. Serves other members until ``close``."""

    def __init__(
        self, terms: RoundTerms, context: RoundContext, spread_s: float, between: Between | None = None
    ) -> None:
        """Make the runner of a round that has begun.

        - ``spread_s``: seconds over which transfers are spread.
        - ``between``: needed if the round has several groups.

        Raises ``ConfigError`` if this worker is not in the roster.
        """
        me = terms.find(context.transport.peer_id)
        if me is None:
            raise ConfigError("this worker is not in the roster of the round")
        self._terms = terms
        self._between = between
        self._averaging: set[asyncio.Task[None]] = set()
        """The slices that are being averaged with the other groups."""
        self._context = context
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        electorate = Electorate(me, terms.keys, terms.digest(), context.sign)
        self._round = RoundState(
            electorate, terms.coordinators(), terms.reducers, context.timing, self._began_s
        )
        self._schedule = SendSchedule(spread_s, terms.contribution_fraction, self._began_s, context.timing)
        self._ended: asyncio.Future[Finish] = self._loop.create_future()
        self._links = {member: self._link(member) for member in range(len(terms.members)) if member != me}
        self._incoming: dict[int, TypedStream[pb.ExchangeReply, pb.ExchangeRequest]] = {}
        self._own: list[Contribution | None] = [None for _ in terms.slices]
        """This member's contribution to each slice; None if it makes none."""
        self._withheld = ""
        """The reason why this member makes no contribution; empty if it makes one, or has weight
        0."""
        self._contributions: list[dict[int, Contribution]] = [{} for _ in terms.slices]
        self._to_reduce: asyncio.Queue[tuple[int, list[tuple[int, Contribution]]]] = asyncio.Queue()
        self._assembly = Assembly()
        self._results: dict[tuple[int, bytes], Result] = {}
        self._reading: list[int] = []
        """Slices with an arrived result that is being verified. They are not requested again."""
        self._refuted: dict[PeerId, Refute] = {}
        self._average = torch.empty(terms.count)
        self._in_average: list[bytes] = [b""] * len(terms.slices)
        """The hash of each slice's result in the average; empty without one."""
        self._arriving: dict[int, int] = {}
        """Slice → the member whose result arrives in the slice's part of the average."""
        self._reducing: int | None = None
        """The slice that is being reduced in its part of the average."""
        self._computing = asyncio.Lock()
        """Held while a slice is reduced, or a result is read and stored."""
        self._bytes_received = 0
        self._closed = False
        self._name = f"exchange {terms.exchange_number} {terms.agreement().hex()[:8]}"
        """The name of the round in logs, equal at all members."""

    @property
    def peers(self) -> frozenset[PeerId]:
        """The round's members."""
        return frozenset(member.peer for member in self._terms.members)

    async def prepare(self, values: Values, weight: float, inside: int = 0) -> None:
        """Encode this member's contribution.

        It makes none if ``weight`` is 0 or a value is not finite. ``inside``: between groups, the
        contributors of this member's group.
        """
        try:
            own = await self._compute(lambda: self._encode(values, weight, inside)) if weight else []
        except ValueError as error:
            self._withheld = str(error)
            return
        for index, contribution in enumerate(own):
            self._own[index] = self._contributions[index][self._me] = contribution

    async def run(self) -> Outcome:
        """Take part in the round until it ends at this member."""
        _log.debug("%s: begun with %d members", self._name, len(self._terms.members))
        try:
            for link in self._links.values():
                link.start()
            for index in self._terms.seconded(self._me):
                self._average_between(index, GroupMean())
            finish = await race(self._until_ended(), self._reduce_slices())
            _log.debug("%s: ended: %s", self._name, finish.reason or "all agree")
            outcome = await self._compute(lambda: self._outcome(finish))
        except BaseException:
            await self.close()
            raise
        await cancel(*self._averaging)
        for link in self._links.values():
            link.drain()
        self._own = [None for _ in self._own]
        self._contributions = [{} for _ in self._contributions]
        self._assembly.clear()
        in_time = self._loop.time() < self._began_s + self._context.timing.majority_s
        is_for_others = self._between is not None or self._terms.slice_number
        if in_time and self._round.is_whole and not is_for_others:
            self._results.clear()  # before majority_s, members commit only what all of them hold
        return outcome

    async def _until_ended(self) -> Finish:
        while not self._ended.done():
            for index in self._reading:
                self._round.report_progress(index, self._loop.time())
            self._perform(self._round.tick(self._loop.time()))
            await asyncio.wait([self._ended], timeout=self._context.timing.streams.heartbeat_s)
        return self._ended.result()

    async def serve(
        self, stream: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]", agreement: bytes
    ) -> NoReturn:
        """Receive from another member's stream until it ends.

        Raises ``ProtocolViolation`` if the peer is not a member, or its ``agreement`` differs from
        the hash of this round's terms.
        """
        member = self._terms.find(stream.peer)
        if member is None or member == self._me:
            raise ProtocolViolation(
                f"{stream.peer} is not in the roster of exchange {self._terms.exchange_number}"
            )
        if agreement != self._terms.agreement():
            raise ProtocolViolation(
                f"{stream.peer} has other terms of exchange {self._terms.exchange_number}: job, state, members, sizes or codecs differ"
            )
        if self._closed:
            raise ProtocolViolation(f"exchange {self._terms.exchange_number} is over here")
        if before := self._incoming.get(member):
            before.close()
        self._incoming[member] = stream
        _log.debug("%s: stream of %s", self._name, stream.peer)
        self._perform(self._round.begin(member, self._loop.time()))
        while stream.peer not in self._refuted:
            request, payload = await stream.receive()
            self._bytes_received += request.ByteSize() + len(payload)
            await self._handle(member, request, payload)
        raise ProtocolViolation(f"{stream.peer} {self._refuted[stream.peer].reason}")

    async def final(self, agreement: bytes) -> list[Outgoing]:
        """Return the committed results as messages, for a peer that is no member, once the round
        has ended.

        Raises ``ProtocolViolation`` if the peer does not know the terms, or nothing was committed.
        """
        if agreement != self._terms.agreement():
            raise ProtocolViolation("a peer that is no member must know the terms")
        await asyncio.wait([self._ended])
        finish = None if self._closed or self._ended.exception() else self._ended.result()
        if finish is None or not finish.hashes:
            raise ProtocolViolation(f"{self._name} has no result here")
        at_once = Pace(0.0, 0.0, 0)
        return [
            each
            for index, chosen in enumerate(finish.hashes)
            for result in [self._results[index, chosen]]
            for each in parts(result.payload, partial(result_header, index, result), at_once, self._loop.time)
            if isinstance(each, tuple)
        ]

    async def close(self) -> None:
        """End all streams and free the results. Idempotent.

        Links refer to this object, so it lives until the garbage collector runs. Its results are
        large, so they are freed here.
        """
        self._closed = True
        await cancel(*self._averaging)
        for stream in self._incoming.values():
            stream.close()
        self._results.clear()
        await all_of(*(link.close() for link in self._links.values()))

    # ---- effects --------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        messages = [each.message for each in effects if isinstance(each, Send)]
        if sent := {type(each).__name__ for each in messages if isinstance(each, _TRANSITIONS)}:
            _log.debug("%s: sends %s", self._name, ", ".join(sorted(sent)))
        for effect in effects:
            self._perform_one(effect)

    def _perform_one(self, effect: Effect) -> None:
        clock = self._loop.time
        match effect:
            case Send(member, message):
                self._links[member].post(encode_control(message))
            case SendContribution(member, index):
                own = self._own[index] or _NOTHING
                if self._between and member != self._terms.reducers[index]:
                    own = _NOTHING  # too late for the other groups: it only fetches the result
                pace = self._schedule.contribution(member, len(own.data), clock())
                header = partial(contribution_header, index, own)
                messages = parts(own.data, header, pace, clock, partial(self._is_wanted, member, index))
                self._links[member].post_bulk("contribution", index, messages)
            case SendResult(member, index, wanted) if result := self._results.get((index, wanted)):
                pace = self._schedule.result(member, len(result.payload), clock())
                messages = parts(result.payload, partial(result_header, index, result), pace, clock)
                self._links[member].post_bulk("result", (index, wanted), messages)
            case Reduce(index, members):
                arrived, self._contributions[index] = self._contributions[index], {}
                contributions = [(member, arrived[member]) for member in members if member in arrived]
                self._to_reduce.put_nowait((index, contributions))
            case Refute(member, reason, is_proven):
                peer = self._terms.members[member].peer
                self._refuted[peer] = effect
                _log.debug("%s: %s is excluded: it %s", self._name, peer, reason)
                if is_proven:
                    self._context.on_proven(peer)
            case Finish():
                self._ended.set_result(effect)

    def _is_wanted(self, member: int, index: int) -> bool:
        return self._round.wants_contribution(member, index, self._loop.time())

    async def _reduce_slices(self) -> NoReturn:
        while True:
            await self._reduce(*await self._to_reduce.get())

    async def _reduce(self, index: int, contributions: list[tuple[int, Contribution]]) -> None:
        if self._between is not None:
            mean = await self._compute(lambda: group_mean(self._terms, index, contributions))
            self._average_between(index, mean)
            return
        async with self._computing:
            out = None
            if not self._in_average[index]:
                self._reducing, out = index, self._part(index)
                self._drop_arriving(index)
            reduced = await self._compute(lambda: reduce_slice(self._terms, index, contributions, out))
            self._reducing = None
            if reduced is not None:
                self._store(index, *reduced)

    def _average_between(self, index: int, mean: GroupMean) -> None:
        """Average a slice with the other groups, in the background."""
        task = asyncio.create_task(self._finish_between(index, mean))
        self._averaging.add(task)
        task.add_done_callback(self._averaged_between)

    async def _finish_between(self, index: int, mean: GroupMean) -> None:
        if self._between is None or (found := await self._between(index, mean)) is None:
            return
        make = partial(result_of_groups, self._terms, index, *found, mean.reasons)
        async with self._computing:
            self._store(index, *await self._compute(make))

    def _averaged_between(self, task: asyncio.Task[None]) -> None:
        self._averaging.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _store(self, index: int, result: Result, values: torch.Tensor) -> None:
        if (index, result.hash) not in self._results:
            self._results[index, result.hash] = result
            # afterwards the average belongs to the caller
            if not self._ended.done() and not self._in_average[index]:
                self._put(index, result, values)
            self._perform(self._round.hold(index, result.hash, self._loop.time()))

    def _put(self, index: int, result: Result, values: torch.Tensor) -> None:
        """Write the values of a result into the average.

        A result in float32 then shares its memory with the average. The average changes later only
        if the members choose another result.
        """
        part = self._part(index)
        self._results.pop((index, self._in_average[index]), None)
        if values.data_ptr() != part.data_ptr():
            self._drop_arriving(index)
            part.copy_(values)
        self._in_average[index] = result.hash
        if self._is_plain:
            self._results[index, result.hash] = replace(result, payload=view(part))

    def _part(self, index: int) -> torch.Tensor:
        start, end = self._terms.slices[index]
        return self._average[start:end]

    @property
    def _is_plain(self) -> bool:
        """True if the payload of a result is its values in float32."""
        return not self._terms.is_bundled and self._terms.result_codec.name == FLOAT32.name

    def _place(self, index: int, member: int) -> memoryview | None:
        """Return the part of the average in which a result of ``member`` may arrive, or None."""
        is_free = not self._in_average[index] and index != self._reducing and index not in self._reading
        if self._is_plain and is_free and self._arriving.setdefault(index, member) == member:
            return memoryview(view(self._part(index)))
        return None

    def _drop_arriving(self, index: int) -> None:
        """Forget a result that arrives in a part of the average, which is needed now."""
        if (member := self._arriving.pop(index, None)) is not None:
            self._assembly.drop_result(member)

    # ---- received messages ----------------------------------------------------------------------

    async def _handle(self, member: int, request: pb.ExchangeRequest, payload: Buffer) -> None:
        match request.WhichOneof("kind"):
            case "contribution":
                self._handle_contribution(member, request.contribution, payload)
            case "result":
                await self._handle_result(member, request.result, payload)
            case _:
                message = decode_control(request, self._terms.shape)
                if message is None:
                    raise ProtocolViolation("not a message of a round")
                if isinstance(message, _TRANSITIONS):
                    peer = self._terms.members[member].peer
                    _log.debug("%s: %s from %s", self._name, type(message).__name__, peer)
                self._perform(self._round.receive(member, message, self._loop.time()))

    def _handle_contribution(self, member: int, header: pb.Contribution, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        if not self._round.reduces(index) or member in self._contributions[index]:
            return
        if not (math.isfinite(header.weight) and header.weight >= 0):
            raise ProtocolViolation(f"a contribution of weight {header.weight:g}")
        limit = self._terms.codec.max_bytes(self._terms.size(index))
        whole = self._assembly.add(member, header, part, limit, self._loop.time())
        if whole is not None:
            if header.weight > 0:
                contribution = Contribution(
                    header.weight, whole.data, header.hash, header.signature, header.inside
                )
                self._contributions[index][member] = contribution
            self._perform(self._round.add_contribution(member, index, self._loop.time()))

    async def _handle_result(self, member: int, header: pb.Result, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        if self._ended.done() or not self._round.accepts_result(member, index, header.hash):
            return
        self._round.report_progress(index, self._loop.time())
        limit = self._terms.result_bytes(self._terms.size(index), len(self._terms.members))
        place = None if header.offset else self._place(index, member)
        whole = self._assembly.add(member, header, part, limit, self._loop.time(), place)
        if whole is not None:
            result = Result(header.hash, whole.summary, whole.data)
            read = partial(read_result, self._terms, index, result, self._me, self._own[index])
            self._reading.append(index)
            try:
                async with self._computing:
                    self._store(index, result, await self._compute(read))
            except ProtocolViolation as error:
                # With signed contributions the sender is dishonest, because members forward only
                # results that they have verified. Without signatures an honest member may forward a
                # false result, because only the author of a contribution can detect it.
                if self._terms.rules.verifiable:
                    reason = f"sent a false result: {error}"
                    self._perform(self._round.refute(member, reason, self._loop.time()))
                raise
            finally:
                self._reading.remove(index)
                if self._arriving.get(index) == member:
                    del self._arriving[index]

    # ---- links and the outcome ------------------------------------------------------------------

    def _link(self, member: int) -> MemberLink:
        terms, context = self._terms, self._context
        hello = terms.hello()

        def on_change(up: bool) -> None:
            report = self._round.link_up if up else self._round.link_down
            self._perform(report(member, self._loop.time()))

        return MemberLink(context.transport, terms.members[member], hello, context.timing, on_change)

    def _outcome(self, finish: Finish) -> Outcome:
        committed = bool(finish.hashes)
        summaries = []
        for index, chosen in enumerate(finish.hashes or DISCARD):
            result = self._results[index, chosen]
            summaries.append(read_summary(self._terms, index, result.summary))
            if self._in_average[index] != chosen:
                self._put(index, result, read_result(self._terms, index, result, self._me, self._own[index]))
        peers = [member.peer for member in self._terms.members]
        named = tuple(contributors(self._terms, summary) for summary in summaries)
        weights = {each.peer: each.weight for group in self._terms.everybody for each in group}
        excluded = {(peers[each.member], each.reason) for summary in summaries for each in summary.excluded}
        excluded |= {(peer, refute.reason) for peer, refute in self._refuted.items()}
        if self._withheld:
            excluded.add((peers[self._me], self._withheld))
        average, self._average = self._average, torch.empty(0)
        slowest = max(self._assembly.timed.items(), key=lambda each: each[1][1], default=None)
        inside = {peer for each in named for peer in each}
        most = self._terms.rules.max_weight
        return Outcome(
            committed=committed,
            behind=finish.hashes is None,
            average=average if committed else None,
            slices=self._terms.slices,
            contributors=named,
            excluded=tuple(sorted(excluded)),
            refuted=tuple(peer for peer, refute in self._refuted.items() if refute.is_proven),
            reason=finish.reason,
            bytes_sent=sum(link.bytes_sent for link in self._links.values()),
            bytes_received=self._bytes_received,
            wait_s=self._loop.time() - self._began_s,
            arrivals=tuple(
                Arrival(peers[member], *timed) for (member, _), timed in self._assembly.timed.items()
            ),
            tokens=sum(min(weights[peer], most) for peer in inside),
            waited=slowest and Wait(peers[slowest[0][0]], "network", slowest[1][1]),
            inside={
                peers[each.member]: each.inside for summary in summaries for each in summary.contributors
            },
        )

    def _encode(self, values: Values, weight: float, inside: int) -> list[Contribution]:
        contributions = []
        for index, (start, end) in enumerate(self._terms.slices):
            contribution = Contribution.encoded(weight, self._terms.codec, values, start, end, inside)
            if self._terms.rules.verifiable:
                signature = self._context.sign(signed_bytes(self._terms, index, contribution))
                contribution = replace(contribution, signature=signature)
            contributions.append(contribution)
        return contributions

    async def _compute(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._context.executor, function)
