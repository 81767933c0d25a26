"""Runs one averaging round: connects ``round_state.RoundState`` to streams, slices and the clock.

Reports every observation to the state machine, and performs every effect that it returns
(``_perform``).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.bandwidth import Arrival
from swarmnet_protocols.training.rounds.deadlines import RoundTiming, SendSchedule
from swarmnet_protocols.training.rounds.member_link import MemberLink
from swarmnet_protocols.training.rounds.messages import (
    DISCARD,
    HASH_BYTES,
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
    hash_of_size,
)
from swarmnet_protocols.training.rounds.reduction import (
    CONTRIBUTION_HASH_BYTES,
    AggregationRules,
    Contribution,
    Result,
    ResultReader,
    read_summary,
    reduce_slice,
)
from swarmnet_protocols.training.rounds.round_state import RoundState
from swarmnet_protocols.training.rounds.terms import RoundTerms, Slice
from swarmnet_protocols.training.rounds.transfers import (
    MAX_SUMMARY_BYTES,
    Outgoing,
    PartialPayload,
    contribution_messages,
    parts,
    result_messages,
)
from swarmnet_protocols.training.rounds.votes import Electorate
from swarmnet_protocols.wire import training_pb2 as pb

_log = logging.getLogger(__name__)
_TRANSITIONS = {each.__name__ for each in (Prepare, Proposal, Vote, Decided, Accusation)}
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

    def all_contributors(self) -> tuple[PeerId, ...]:
        """The members with a contribution in at least one slice of the average, sorted."""
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
    """The parts of an ``Averager`` that a round uses.

    - ``spawn`` starts a task that is cancelled when the averager closes.
    - ``on_proven`` is called with a member that is proven to be dishonest, also after the round.
    """

    transport: Transport
    timing: RoundTiming
    rules: AggregationRules
    executor: Executor | None
    sign: Callable[[bytes], bytes]
    on_proven: Callable[[PeerId], None]
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class RoundRunner:
    """One round at this member: ``prepare``, then ``run``. Serves other members until ``close``."""

    def __init__(self, terms: RoundTerms, context: RoundContext, spread_s: float) -> None:
        """``spread_s``: seconds over which transfers are spread.

        Raises ``ConfigError`` if this worker is not in the roster.
        """
        me = terms.find(context.transport.peer_id)
        if me is None:
            raise ConfigError("this worker is not in the roster of the round")
        self._terms = terms
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
        self._links: dict[int, MemberLink] = {}
        self._link_tasks: dict[int, asyncio.Task[None]] = {}
        self._incoming: dict[int, TypedStream[pb.ExchangeReply, pb.ExchangeRequest]] = {}
        self._own: list[Contribution] = []
        """This member's contribution to each slice; empty if it makes none."""
        self._withheld = ""
        """Why this member makes no contribution; empty if it makes one, or has weight 0."""
        self._contributions: list[dict[int, Contribution]] = [{} for _ in terms.slices]
        self._partial: dict[tuple[int, str], PartialPayload] = {}
        self._results: dict[tuple[int, bytes], Result] = {}
        self._reading: list[int] = []
        """Slices with an arrived result that is being verified. They are not requested again."""
        self._refuted: dict[PeerId, str] = {}
        self._proven: dict[PeerId, None] = {}
        self._average = torch.empty(terms.count)
        self._in_average: list[bytes] = [b""] * len(terms.slices)
        self._bytes_received = 0
        self._arrivals: dict[tuple[int, str], Arrival] = {}
        self._closed = False
        self._name = f"exchange {terms.exchange_number} {terms.agreement().hex()[:8]}"
        """The name of the round in logs, equal at all members."""

    @property
    def peers(self) -> frozenset[PeerId]:
        """The round's members."""
        return frozenset(member.peer for member in self._terms.members)

    async def prepare(self, values: torch.Tensor, weight: float) -> None:
        """Encode this member's contribution.

        It makes none if ``weight`` is 0 or a value is not finite.
        """
        try:
            self._own = await self._compute(lambda: self._encode(values, weight))
        except ValueError as error:
            self._withheld = str(error)
        for index, contribution in enumerate(self._own):
            self._contributions[index][self._me] = contribution

    async def run(self) -> Outcome:
        """Take part in the round until it ends at this member."""
        _log.debug("%s: begun with %d members", self._name, len(self._terms.members))
        try:
            for member in range(len(self._terms.members)):
                if member != self._me:
                    self._links[member] = self._link(member)
                    self._ensure_running(member)
            self._perform(self._round.tick(self._loop.time()))
            while not self._ended.done():
                await asyncio.wait([self._ended], timeout=self._context.timing.streams.heartbeat_s)
                for index in self._reading:
                    self._round.report_progress(index, self._loop.time())
                self._perform(self._round.tick(self._loop.time()))
            finish = self._ended.result()
            _log.debug("%s: ended: %s", self._name, finish.reason or "all agree")
            outcome = await self._compute(lambda: self._outcome(finish))
        except BaseException:
            self.close()
            raise
        for link in self._links.values():
            link.drain()
        self._own = []
        self._contributions = [{} for _ in self._terms.slices]
        self._partial.clear()
        return outcome

    async def serve(
        self, stream: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]", agreement: bytes
    ) -> None:
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
        raise ProtocolViolation(f"{stream.peer} {self._refuted[stream.peer]}")

    def close(self) -> None:
        """End all streams and free the results. Idempotent.

        Links refer to this object, so it lives until the garbage collector runs. Its results are
        large, so they are freed here.
        """
        self._closed = True
        for task in self._link_tasks.values():
            task.cancel()
        for stream in self._incoming.values():
            stream.close()
        self._results.clear()

    # ---- effects --------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        sent = {type(each.message).__name__ for each in effects if isinstance(each, Send)}
        if sent & _TRANSITIONS:
            _log.debug("%s: sends %s", self._name, ", ".join(sorted(sent & _TRANSITIONS)))
        for effect in effects:
            self._perform_one(effect)

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case Send(member, message):
                self._links[member].post(encode_control(message))
                self._ensure_running(member)
            case SendContribution(member, index):
                self._links[member].post_bulk("contribution", index, self._contribution(member, index))
            case SendResult(member, index, wanted) if result := self._results.get((index, wanted)):
                self._links[member].post_bulk("result", (index, wanted), self._result(member, index, result))
                self._ensure_running(member)
            case Reduce(index, members):
                arrived = self._contributions[index]
                contributions = [(member, arrived[member]) for member in members if member in arrived]
                self._contributions[index] = {}
                self._context.spawn(self._reduce(index, contributions)).add_done_callback(self._reduced)
            case Refute(member, reason, is_proven):
                peer = self._terms.members[member].peer
                self._refuted[peer] = reason
                _log.debug("%s: %s is excluded: it %s", self._name, peer, reason)
                if is_proven:
                    self._proven[peer] = None
                    self._context.on_proven(peer)
            case Finish():
                self._ended.set_result(effect)

    def _contribution(self, member: int, index: int) -> Iterator[Outgoing | float]:
        contribution = self._own[index] if self._own else Contribution.of(0.0, b"")
        clock = self._loop.time
        pace = self._schedule.contribution(member, len(contribution.data), clock())

        def wanted() -> bool:
            return self._round.wants_contribution(member, index, clock())

        return contribution_messages(index, contribution, parts(contribution.data, pace, clock), wanted)

    def _result(self, member: int, index: int, result: Result) -> Iterator[Outgoing | float]:
        clock = self._loop.time
        pace = self._schedule.result(member, len(result.payload), clock())
        return result_messages(index, result, parts(result.payload, pace, clock))

    async def _reduce(self, index: int, contributions: list[tuple[int, Contribution]]) -> None:
        terms, rules = self._terms.slice(index), self._context.rules
        reduced = await self._compute(lambda: reduce_slice(terms, rules, contributions))
        if reduced is not None:
            self._store(index, *reduced)

    def _reduced(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) and not self._ended.done():
            self._ended.set_exception(error)

    def _store(self, index: int, result: Result, values: torch.Tensor) -> None:
        if (index, result.hash) not in self._results:
            self._results[index, result.hash] = result
            self._write(index, result.hash, values)
            self._perform(self._round.hold(index, result.hash, self._loop.time()))

    def _write(self, index: int, result: bytes, values: torch.Tensor) -> None:
        if not self._ended.done():  # afterwards the average belongs to the caller
            start, end = self._terms.slices[index]
            self._average[start:end] = values
            self._in_average[index] = result

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
                if (kind := type(message).__name__) in _TRANSITIONS:
                    _log.debug("%s: %s from %s", self._name, kind, self._terms.members[member].peer)
                self._perform(self._round.receive(member, message, self._loop.time()))

    def _handle_contribution(self, member: int, header: pb.Contribution, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        if not self._round.reduces(index) or member in self._contributions[index]:
            return
        if not (math.isfinite(header.weight) and header.weight >= 0):
            raise ProtocolViolation(f"a contribution of weight {header.weight:g}")
        terms = self._terms.slice(index)
        data = self._add_part((member, "contribution"), header, part, terms.contribution_bytes)
        if data is not None:
            if header.weight > 0:
                self._contributions[index][member] = Contribution(
                    header.weight, data.data, data.hash, header.signature
                )
            self._perform(self._round.add_contribution(member, index, self._loop.time()))

    async def _handle_result(self, member: int, header: pb.Result, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        if self._ended.done() or not self._round.accepts_result(member, index, header.hash):
            return
        self._round.report_progress(index, self._loop.time())
        reader = self._reader(index)
        limit = reader.terms.result_bytes(len(self._terms.members))
        data = self._add_part((member, "result"), header, part, limit)
        if data is not None:
            result = Result(data.hash, data.summary, data.data)
            self._reading.append(index)
            try:
                self._store(index, result, await self._compute(lambda: reader.read(result)))
            except ProtocolViolation as error:
                # With signed contributions the sender is dishonest, because members forward only
                # results that they have verified. Without signatures an honest member may forward a
                # false result, because only the author of a contribution can detect it.
                if reader.terms.verification is not None:
                    reason = f"sent a false result: {error}"
                    self._perform(self._round.refute(member, reason, self._loop.time()))
                raise
            finally:
                self._reading.remove(index)

    def _add_part(
        self, key: tuple[int, str], header: pb.Contribution | pb.Result, part: Buffer, limit: int
    ) -> PartialPayload | None:
        """Add a part of a payload. Returns the payload with its last part, otherwise None.

        A member sends one payload of each kind at a time. Raises ``ProtocolViolation`` for a
        payload of more than ``limit`` bytes.
        """
        if header.offset == 0:
            summary, hash_bytes = b"", CONTRIBUTION_HASH_BYTES
            if isinstance(header, pb.Result):
                summary, hash_bytes = header.summary, HASH_BYTES
            if header.size_bytes > limit or len(summary) > MAX_SUMMARY_BYTES:
                raise ProtocolViolation(f"{header.size_bytes} bytes for a slice of at most {limit}")
            self._partial[key] = PartialPayload(
                header.size_bytes, hash_of_size(header.hash, hash_bytes), summary
            )
        partial = self._partial.get(key)
        if partial is None or partial.hash != header.hash:
            return None  # its first part was not wanted
        if not partial.add(header.offset, part, self._loop.time(), paced=header.paced):
            return None
        peer = self._terms.members[key[0]].peer
        self._arrivals[key] = Arrival(peer, partial.timed_bytes, partial.timed_s)
        return self._partial.pop(key)

    # ---- links and the outcome ------------------------------------------------------------------

    def _link(self, member: int) -> MemberLink:
        terms = self._terms
        hello = pb.Hello(exchange_number=terms.exchange_number, agreement=terms.agreement())

        def on_change(up: bool) -> None:
            report = self._round.link_up if up else self._round.link_down
            self._perform(report(member, self._loop.time()))

        context = self._context
        return MemberLink(context.transport, terms.members[member], hello, context.timing, on_change)

    def _ensure_running(self, member: int) -> None:
        task = self._link_tasks.get(member)
        if (task is None or task.done()) and not self._closed:
            self._link_tasks[member] = self._context.spawn(self._links[member].run())

    def _outcome(self, finish: Finish) -> Outcome:
        committed = bool(finish.hashes)
        summaries = [
            read_summary(
                self._terms.slice(index), len(self._terms.members), self._results[index, result].summary
            )
            for index, result in enumerate(finish.hashes or DISCARD)
        ]
        for index, result in enumerate(finish.hashes or DISCARD):
            if self._in_average[index] != result:
                start, end = self._terms.slices[index]
                self._average[start:end] = self._reader(index).read(self._results[index, result])
        peers = [member.peer for member in self._terms.members]
        excluded = {(peers[each.member], each.reason) for summary in summaries for each in summary.excluded}
        excluded |= {*self._refuted.items()}
        if self._withheld:
            excluded.add((peers[self._me], self._withheld))
        average, self._average = self._average, torch.empty(0)
        return Outcome(
            committed=committed,
            behind=finish.hashes is None,
            average=average if committed else None,
            slices=self._terms.slices,
            contributors=tuple(
                tuple(peers[each.member] for each in summary.contributors) for summary in summaries
            ),
            excluded=tuple(sorted(excluded)),
            refuted=tuple(self._proven),
            reason=finish.reason,
            bytes_sent=sum(link.bytes_sent for link in self._links.values()),
            bytes_received=self._bytes_received,
            wait_s=self._loop.time() - self._began_s,
            arrivals=tuple(self._arrivals.values()),
        )

    def _encode(self, values: torch.Tensor, weight: float) -> list[Contribution]:
        contributions = []
        for index, (start, end) in enumerate(self._terms.slices if weight > 0 else ()):
            contribution = Contribution.of(weight, self._terms.codec.encode(values[start:end]))
            if self._terms.verification is not None:
                signature = self._context.sign(self._terms.slice(index).signed_bytes(contribution))
                contribution = replace(contribution, signature=signature)
            contributions.append(contribution)
        return contributions

    def _reader(self, index: int) -> ResultReader:
        own = self._own[index] if self._own else None
        return ResultReader(
            self._terms.slice(index), self._context.rules, len(self._terms.members), self._me, own
        )

    async def _compute(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._context.executor, function)
