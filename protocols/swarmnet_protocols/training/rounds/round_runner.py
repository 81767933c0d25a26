"""One round as this member lives it: the state machine of ``rounds.py`` with streams, slices and time."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.net import Buffer, Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse
from swarmnet_protocols.training.bandwidth import Arrival
from swarmnet_protocols.training.rounds.deadlines import Spread
from swarmnet_protocols.training.rounds.events import (
    Began,
    Contributed,
    Effect,
    Event,
    Finish,
    Holds,
    LinkDown,
    LinkUp,
    Received,
    Receiving,
    Reduce,
    RoundTiming,
    Send,
    SendContribution,
    SendResult,
    Tick,
)
from swarmnet_protocols.training.rounds.member_link import Dial, MemberLink
from swarmnet_protocols.training.rounds.messages import (
    DISCARD,
    HASH_BYTES,
    below,
    decode_control,
    encode_control,
    hash_of_size,
)
from swarmnet_protocols.training.rounds.round_state import Round
from swarmnet_protocols.training.rounds.shares import Share
from swarmnet_protocols.training.rounds.terms import Terms
from swarmnet_protocols.training.rounds.transfers import (
    MAX_SUMMARY_BYTES,
    NAME_BYTES,
    Assembly,
    Payload,
    Reader,
    Result,
    Rules,
    contribution_messages,
    parts,
    read_summary,
    reduce_slice,
    result_messages,
)
from swarmnet_protocols.wire import training_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a round ended for this member.

    ``committed``: ``average`` [n] is what every member has that committed, bit for bit. Otherwise ``average`` is None, and unless ``behind``
    nobody has one. ``behind``: the others may have committed; compare parameters with them, or heal, before the next round.
    """

    committed: bool
    behind: bool
    average: torch.Tensor | None
    slices: tuple[Share, ...]
    contributors: tuple[tuple[PeerId, ...], ...]
    """Of every slice, in the order of peer ids."""
    excluded: tuple[tuple[PeerId, str], ...]
    """Whose contribution arrived and was left out of some slice, and why."""
    refuted: tuple[PeerId, ...]
    """Members that sent this one a result which is not what its slice's contributions make."""
    reason: str
    bytes_sent: int
    bytes_received: int
    wait_s: float
    arrivals: tuple[Arrival, ...]
    """The last contribution and the last result of every member, and how fast they came."""


@dataclass(frozen=True)
class Engagement:
    """What a round works with. ``own`` runs a task for as long as the exchange is open."""

    transport: Transport
    timing: RoundTiming
    rules: Rules
    executor: Executor | None
    sign: Callable[[bytes], bytes]
    own: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class RoundRunner:
    """``prepare``, then ``run``, which takes ``spread_s`` to send. It goes on to answer others until ``close``."""

    def __init__(self, terms: Terms, engagement: Engagement, spread_s: float) -> None:
        me = terms.find(engagement.transport.peer_id)
        if me is None:
            raise ConfigError("this worker is not in the roster of the round")
        self._terms = terms
        self._engagement = engagement
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._round = Round(me, terms.coordinators(), terms.owners, engagement.timing, self._began_s)
        self._spread = Spread(spread_s, terms.contributions, self._began_s, engagement.timing)
        self._ended: asyncio.Future[Finish] = self._loop.create_future()
        self._links: dict[int, MemberLink] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._incoming: dict[int, Stream] = {}
        self._own: list[Payload] = []
        self._withheld = ""
        self._contributions: list[dict[int, Payload]] = [{} for _ in terms.slices]
        self._assemblies: dict[tuple[int, str], Assembly] = {}
        self._results: dict[tuple[int, bytes], Result] = {}
        self._reading: list[int] = []
        """Slices whose result is here and being checked: it is not to be asked for again."""
        self._refuted: dict[PeerId, str] = {}
        self._average = torch.empty(terms.count)
        self._in_average: list[bytes] = [b""] * len(terms.slices)
        self._bytes_received = 0
        self._arrivals: dict[tuple[int, str], Arrival] = {}
        self._closed = False

    @property
    def peers(self) -> frozenset[PeerId]:
        """Its members."""
        return frozenset(member.peer for member in self._terms.members)

    async def prepare(self, values: torch.Tensor, weight: float) -> None:
        """Encode what this member contributes: nothing if ``weight`` is 0 or ``values`` are not finite."""
        try:
            self._own = await self._compute(lambda: self._encode(values, weight))
        except ValueError as error:
            self._withheld = str(error)
        for index, payload in enumerate(self._own):
            self._contributions[index][self._me] = payload

    async def run(self) -> Outcome:
        """Take part until the round ends here."""
        try:
            for member in range(len(self._terms.members)):
                if member != self._me:
                    self._links[member] = self._link(member)
                    self._keep_running(member)
            self._feed(Tick())
            while not self._ended.done():
                await asyncio.wait([self._ended], timeout=self._engagement.timing.heartbeat_s)
                for index in self._reading:
                    self._feed(Receiving(index))
                self._feed(Tick())
            finish = self._ended.result()
            outcome = await self._compute(lambda: self._outcome(finish))
        except BaseException:
            self.close()
            raise
        for link in self._links.values():
            link.drain()
        self._own = []
        self._contributions = [{} for _ in self._terms.slices]
        self._assemblies.clear()
        return outcome

    async def serve(self, stream: Stream, agreement: bytes) -> None:
        """Take in what another member sends on a stream of its own. Raises ``ProtocolViolation`` if it is not one, or means another round."""
        member = self._terms.find(stream.peer)
        if member is None or member == self._me:
            raise ProtocolViolation(f"{stream.peer} is not in the roster of round {self._terms.round}")
        if agreement != self._terms.digest():
            raise ProtocolViolation(
                f"{stream.peer} means another round {self._terms.round}: job, members, sizes or codecs differ"
            )
        if self._closed:
            raise ProtocolViolation(f"round {self._terms.round} is over here")
        if before := self._incoming.get(member):
            before.close()
        self._incoming[member] = stream
        self._feed(Began(member))
        while True:
            message = await stream.receive()
            self._bytes_received += len(message.header) + len(message.payload)
            await self._take(member, parse(pb.ExchangeRequest, message.header), message.payload)

    def close(self) -> None:
        """Say no more to anybody, and hold no results: links refer back to this, so it lives until garbage is collected. Idempotent."""
        self._closed = True
        for task in self._running.values():
            task.cancel()
        for stream in self._incoming.values():
            stream.close()
        self._results.clear()

    # what is to be done

    def _feed(self, event: Event) -> None:
        for effect in self._round.handle(event, self._loop.time()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(member, message):
                self._links[member].post(Message(encode_control(message).SerializeToString()))
                self._keep_running(member)
            case SendContribution(member, index):
                self._links[member].post_bulk("contribution", index, self._contribution(member, index))
            case SendResult(member, index, wanted) if result := self._results.get((index, wanted)):
                self._links[member].post_bulk("result", (index, wanted), self._result(member, index, result))
                self._keep_running(member)
            case Reduce(index, members):
                payloads = [
                    (m, self._contributions[index][m]) for m in members if m in self._contributions[index]
                ]
                self._contributions[index] = {}
                self._engagement.own(self._reduce(index, payloads)).add_done_callback(self._reduced)
            case Finish():
                self._ended.set_result(effect)

    def _contribution(self, member: int, index: int) -> Iterator[Message | float]:
        payload = self._own[index] if self._own else Payload.of(0.0, b"")
        clock = self._loop.time
        pace = self._spread.contribution(member, len(payload.data), clock())

        def wanted() -> bool:
            return self._round.wants_contribution(member, index, clock())

        return contribution_messages(index, payload, parts(payload.data, pace, clock), wanted)

    def _result(self, member: int, index: int, result: Result) -> Iterator[Message | float]:
        clock = self._loop.time
        pace = self._spread.result(member, len(result.payload), clock())
        return result_messages(index, result, parts(result.payload, pace, clock))

    async def _reduce(self, index: int, payloads: list[tuple[int, Payload]]) -> None:
        terms, rules = self._terms.slice(index), self._engagement.rules
        reduced = await self._compute(lambda: reduce_slice(terms, rules, payloads))
        if reduced is not None:
            self._keep(index, *reduced)

    def _reduced(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) and not self._ended.done():
            self._ended.set_exception(error)

    def _keep(self, index: int, result: Result, values: torch.Tensor) -> None:
        if (index, result.hash) not in self._results:
            self._results[index, result.hash] = result
            self._write(index, result.hash, values)
            self._feed(Holds(index, result.hash))

    def _write(self, index: int, result: bytes, values: torch.Tensor) -> None:
        if not self._ended.done():  # from then on the average is the caller's
            start, end = self._terms.slices[index]
            self._average[start:end] = values
            self._in_average[index] = result

    # what comes

    async def _take(self, member: int, request: pb.ExchangeRequest, payload: Buffer) -> None:
        match request.WhichOneof("kind"):
            case "contribution":
                self._take_contribution(member, request.contribution, payload)
            case "result":
                await self._take_result(member, request.result, payload)
            case _:
                message = decode_control(request, self._terms.shape)
                if message is None:
                    raise ProtocolViolation("not a message of a round")
                self._feed(Received(member, message))

    def _take_contribution(self, member: int, header: pb.Contribution, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        if not self._round.owns(index) or member in self._contributions[index]:
            return
        if not (math.isfinite(header.weight) and header.weight >= 0):
            raise ProtocolViolation(f"a contribution of weight {header.weight:g}")
        terms = self._terms.slice(index)
        data = self._assemble((member, "contribution"), header, part, terms.contribution_bytes)
        if data is not None:
            if header.weight > 0:
                self._contributions[index][member] = Payload(
                    header.weight, data.data, data.hash, header.signature
                )
            self._feed(Contributed(index, member))

    async def _take_result(self, member: int, header: pb.Result, part: Buffer) -> None:
        index = below(header.slice, len(self._terms.slices), "slice")
        is_refuted = self._terms.members[member].peer in self._refuted
        if is_refuted or self._ended.done() or not self._round.accepts_result(member, index, header.hash):
            return
        self._feed(Receiving(index))
        reader = self._reader(index)
        limit = reader.terms.result_bytes(len(self._terms.members))
        data = self._assemble((member, "result"), header, part, limit)
        if data is not None:
            result = Result(data.hash, data.summary, data.data)
            self._reading.append(index)
            try:
                self._keep(index, result, await self._compute(lambda: reader.read(result)))
            except ProtocolViolation as error:
                # Only the sender can have made it: a member passes on no result that it has not checked.
                self._refuted[self._terms.members[member].peer] = str(error)
                raise
            finally:
                self._reading.remove(index)

    def _assemble(
        self, key: tuple[int, str], header: pb.Contribution | pb.Result, part: Buffer, limit: int
    ) -> Assembly | None:
        """The whole payload, once all its parts are here. Of each kind one at a time from each member."""
        if header.offset == 0:
            summary, hash_bytes = b"", NAME_BYTES
            if isinstance(header, pb.Result):
                summary, hash_bytes = header.summary, HASH_BYTES
            if header.size_bytes > limit or len(summary) > MAX_SUMMARY_BYTES:
                raise ProtocolViolation(f"{header.size_bytes} bytes for a slice of at most {limit}")
            self._assemblies[key] = Assembly(
                header.size_bytes, hash_of_size(header.hash, hash_bytes), summary
            )
        assembly = self._assemblies.get(key)
        if assembly is None or assembly.hash != header.hash:
            return None  # its beginning was not wanted
        if not assembly.add(header.offset, part, self._loop.time(), paced=header.paced):
            return None
        peer = self._terms.members[key[0]].peer
        self._arrivals[key] = Arrival(peer, assembly.timed_bytes, assembly.timed_s)
        return self._assemblies.pop(key)

    # links and the end

    def _link(self, member: int) -> MemberLink:
        terms = self._terms
        hello = pb.Hello(round=terms.round, agreement=terms.digest())
        dial = Dial(
            self._engagement.transport,
            terms.members[member].peer,
            terms.members[member].addresses,
            Message(pb.ExchangeRequest(hello=hello).SerializeToString()),
            self._engagement.timing,
        )
        return MemberLink(dial, lambda up: self._feed(LinkUp(member) if up else LinkDown(member)))

    def _keep_running(self, member: int) -> None:
        task = self._running.get(member)
        if (task is None or task.done()) and not self._closed:
            self._running[member] = self._engagement.own(self._links[member].run())

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
        excluded |= {(peer, f"sent a false result: {why}") for peer, why in self._refuted.items()}
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
            refuted=tuple(self._refuted),
            reason=finish.reason,
            bytes_sent=sum(link.bytes_sent for link in self._links.values()),
            bytes_received=self._bytes_received,
            wait_s=self._loop.time() - self._began_s,
            arrivals=tuple(self._arrivals.values()),
        )

    def _encode(self, values: torch.Tensor, weight: float) -> list[Payload]:
        payloads = []
        for index, (start, end) in enumerate(self._terms.slices if weight > 0 else ()):
            payload = Payload.of(weight, self._terms.codec.encode(values[start:end]))
            if self._terms.verification is not None:
                signature = self._engagement.sign(self._terms.slice(index).signed_bytes(payload))
                payload = replace(payload, signature=signature)
            payloads.append(payload)
        return payloads

    def _reader(self, index: int) -> Reader:
        own = self._own[index] if self._own else None
        return Reader(
            self._terms.slice(index), self._engagement.rules, len(self._terms.members), self._me, own
        )

    async def _compute(self, function: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._engagement.executor, function)
