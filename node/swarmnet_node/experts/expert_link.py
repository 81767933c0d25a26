"""The stream of a host to one peer with experts. The link reopens the stream whenever it ends.

The life of a link:

1. **Opened.** The peer says which experts it has, and the host measures the round trip. The peer's
   announcement only told where to ask.
2. **Open.** The host asks for rows. The peer tells the host whenever its experts change.
3. **Resting.** The stream ended, or the peer broke the protocol in a way that no client's rows can
   cause, such as an answer of the wrong shape. The host tries again after a pause that doubles. Any
   client may send rows that overload a peer, so nothing excludes a peer for good.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from swarmnet_protocols.averages import averaged
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertHost
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import loop_time, race
from swarmnet_protocols.net import Buffer, Transport
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.quantization.packed_experts import Outputs
from swarmnet_protocols.session.expert_rows import (
    ExpertRows,
    TrunkStream,
    decode_experts,
    decode_outputs,
    encode_experts,
    encode_rows,
)
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Longest pause in seconds between two attempts to reach a peer. Pauses double from
``FIRST_PAUSE_S``."""
TRIALS = 5
"""Empty requests that measure the round trip to a peer. The fastest one counts."""
ANSWER_S = 2.0
"""Timeout of a request in seconds, on top of ``ANSWER_FACTOR`` times its expected time."""
ANSWER_FACTOR = 20
MAX_ANSWER_S = 60.0
"""Longest timeout of a request in seconds. The largest request takes a slow peer 40 s, so less
would cut it off. With more, all sessions of a host could wait longer for a dead peer that alone has
an expert."""
MAX_ROW_S = 0.1
"""Largest announced time of a row, in seconds, that is believed before the host measures it."""
FAULT_S = 60.0
MAX_FAULT_S = 3600.0
"""Longest pause in seconds after a violation of the protocol. Pauses double from ``FAULT_S``."""
AVOID_S = 10.0
"""Seconds to avoid a late or doubted peer, unless no other peer has the expert. The time doubles
with each fault, up to ``MAX_AVOID_S``."""
MAX_AVOID_S = 300.0
SMOOTHING = 0.1
"""Weight of the newest measurement in an exponential moving average."""


@dataclass
class Backoff:
    """Pauses that double, from ``first_s`` up to ``max_s`` seconds."""

    first_s: float
    max_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start at ``first_s`` again."""
        self._next_s = self.first_s

    def next_s(self) -> float:
        """Return the next pause."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self.max_s)
        return pause_s


@dataclass(frozen=True)
class ExpertModel:
    """The swarm and the model that a peer serves."""

    swarm: bytes
    manifest: bytes
    hidden_size: int
    dtype: torch.dtype
    precision: str
    """The formats of weights and activations, as in ``HostRecord``."""


class ExpertLink:
    """A stream to ``host``. :meth:`keep_open` keeps it open; :meth:`ask` requests rows while
    :attr:`is_open`."""

    def __init__(
        self,
        host: ExpertHost,
        model: ExpertModel,
        transport: Transport,
        timing: Timing,
        *,
        max_round_trip_s: float,
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when the link opens or ends, or when the peer's experts change. The
        link does not use a peer beyond ``max_round_trip_s``."""
        self.host = host
        """The newest announcement of the peer."""
        self.round_trip_s = 0.0
        self.row_s = min(host.row_s, MAX_ROW_S)
        """Seconds for one row through one expert, without the round trip. A moving average."""
        self.fault = ""
        """The violation of the protocol that excludes the peer for now; empty if there was none."""
        self.is_far = False
        """True if the round trip exceeds ``max_round_trip_s``."""
        self.has_answered = False
        """True if the stream was ever open."""
        self.rests_until = -math.inf
        """Loop time when the ended stream is opened again; minus infinity while it is not
        resting."""
        self._open_since = math.inf
        self.subnet: str = host.peer
        """The subnet of the peer's address. Before the first connection, the peer's id."""
        self._told: BlockExperts | None = None
        """The experts that the peer named on the stream. None until then: the announcement
        counts."""
        self._is_leaving = False
        self._avoidance = Backoff(AVOID_S, MAX_AVOID_S)
        self._pauses = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._exclusions = Backoff(FAULT_S, MAX_FAULT_S)
        self._avoided_until = -math.inf
        self._model = model
        self._transport = transport
        self._timing = timing
        self._max_round_trip_s = max_round_trip_s
        self._changed = changed
        self._stream: TrunkStream | None = None
        self._number = 0
        self._waiting: dict[int, tuple[ExpertRows, asyncio.Future[Outputs]]] = {}

    @property
    def is_open(self) -> bool:
        """True if the host can ask the peer now."""
        return self._stream is not None and not (self.fault or self._is_leaving)

    @property
    def is_resting(self) -> bool:
        """True if the stream has ended and waits for its next attempt."""
        return self.rests_until > -math.inf

    @property
    def is_asked(self) -> bool:
        """True if a request to the peer is waiting for its answer."""
        return bool(self._waiting)

    @property
    def experts(self) -> BlockExperts:
        """The experts that the peer says it has."""
        return self.host.experts if self._told is None else self._told

    def has(self, block: int, expert: int) -> bool:
        """Return whether the peer says it has an expert."""
        return expert in self.experts.get(block, ())

    def seconds_for(self, pairs: int) -> float:
        """Return the expected seconds for a request with ``pairs`` rows, summed over experts."""
        return self.round_trip_s + pairs * self.row_s

    def is_avoided(self, now: float) -> bool:
        """Return whether the peer was late or doubted at loop time ``now``, so that others are
        asked first."""
        return now < self._avoided_until

    def avoid(self, now: float) -> None:
        """Ask other peers first for a while. Each call doubles the time."""
        self._avoided_until = now + self._avoidance.next_s()

    async def keep_open(self) -> NoReturn:
        """Keep the stream open until cancelled."""
        while True:
            self.fault, self.rests_until = "", -math.inf
            try:
                await self._run()
                continue  # the stream ended because a better path was found
            except ProtocolViolation as error:
                self.fault = str(error)
                fields = {"peer": self.host.peer, "reason": self.fault[:200]}
                _log.warning("experts of a faulty peer are not used for a while", extra=fields)
                pause_s = self._exclusions.next_s()
            except SwarmnetError as error:
                _log.info("experts out of reach", extra={"peer": self.host.peer, "reason": str(error)[:200]})
                if loop_time() - self._open_since > MAX_PAUSE_S:
                    self._pauses.reset()
                pause_s = self._pauses.next_s()
            except Exception:  # noqa: BLE001 - whatever an address or a message of a stranger causes, the link is tried again
                _log.exception("the link to %s failed", self.host.peer)
                pause_s = self._exclusions.next_s()
            self.rests_until = loop_time() + pause_s
            self._changed()
            await asyncio.sleep(pause_s)

    async def _run(self) -> None:
        """Keep one stream until a better path is found. Raises the error that ends the stream
        earlier."""
        self._told, self._is_leaving, self._open_since = None, False, math.inf
        host = self.host
        stream = await EXPERTS.open(self._transport, host.peer, self._timing, addresses=host.addresses)
        with contextlib.closing(stream):
            attach = pb.Attach(swarm=self._model.swarm, manifest=self._model.manifest)
            await stream.send(pb.ExpertsRequest(attach=attach))
            reply, _ = await stream.receive()
            if not reply.HasField("attached"):
                raise ProtocolViolation("an answer before the stream was accepted")
            self._listen(reply.attached)
            self.subnet = subnet_of(stream.stream.address) or host.peer
            try:
                await race(self._receive(stream), self._open(stream), stream.stream.path_improved())
            finally:
                self._stream = None
                for _, answer in self._waiting.values():
                    if not answer.done():
                        answer.set_exception(Unreachable(f"{self.host.peer} does not answer any more"))
                self._waiting.clear()
                self._changed()

    async def _open(self, stream: TrunkStream) -> NoReturn:
        """Measure the round trip, then mark the link as open."""
        empty = ExpertRows(0, torch.empty(0, self._model.hidden_size, dtype=self._model.dtype), {})
        fastest = math.inf
        for _ in range(TRIALS):
            sent_at = loop_time()
            await self._send(stream, empty)
            fastest = min(fastest, loop_time() - sent_at)
        self.round_trip_s = fastest
        self.is_far = fastest > self._max_round_trip_s
        if self.is_far:
            raise Unreachable(f"{self.host.peer} is farther than this host allows")
        self._stream, self.has_answered, self._open_since = stream, True, loop_time()
        self._changed()
        await asyncio.Future()
        raise AssertionError

    async def _receive(self, stream: TrunkStream) -> NoReturn:
        while True:
            if self._is_leaving and not self._waiting:
                raise Unreachable(f"{self.host.peer} is about to leave")
            reply, payload = await stream.receive()
            if reply.HasField("attached"):
                self._listen(reply.attached)
                self._changed()
            elif reply.HasField("computed"):
                self._accept_answer(reply.computed, payload)
            else:
                raise ProtocolViolation("an answer to no request")

    def _listen(self, attached: pb.Attached) -> None:
        """Note what the peer says about itself."""
        self._is_leaving = attached.leaving
        if attached.experts:
            self._told = decode_experts(attached.experts)

    def _accept_answer(self, computed: pb.Computed, payload: Buffer) -> None:
        """Take an answer. Raises ``ProtocolViolation`` if nothing waits for it."""
        if computed.id not in self._waiting:
            raise ProtocolViolation(f"outputs of request {computed.id}, which does not wait for any")
        request, answer = self._waiting.pop(computed.id)
        try:
            outputs = decode_outputs(computed, payload, request, computed.id)
        except ProtocolViolation as error:
            self.fault = str(error)
            if not answer.done():
                answer.set_exception(error)
            raise
        if not answer.done():
            answer.set_result(outputs)

    async def ask(self, request: ExpertRows) -> Outputs:
        """Return the outputs of experts for the rows of ``request``.

        Raises ``Unreachable`` if the link ends first, ``DeadlineExceeded`` if the peer takes far
        longer than expected, and ``ProtocolViolation`` for wrong outputs.
        """
        if self._stream is None:
            raise Unreachable(f"{self.host.peer} does not answer")
        sent_at = loop_time()
        stream = self._stream
        try:
            expected_s = self.seconds_for(request.pairs)
            async with asyncio.timeout(min(ANSWER_S + ANSWER_FACTOR * expected_s, MAX_ANSWER_S)):
                outputs = await self._send(stream, request)
        except TimeoutError:
            stream.close()
            raise DeadlineExceeded(f"{self.host.peer} has not computed experts in time") from None
        self._pauses.reset()
        if not self.is_avoided(loop_time()):
            self._avoidance.reset()
        row_s = max(0.0, loop_time() - sent_at - self.round_trip_s) / request.pairs
        self.row_s = averaged(self.row_s, row_s, SMOOTHING)
        return outputs

    async def rearrange(self, loads: BlockExperts, drops: BlockExperts) -> None:
        """Ask the peer to load and drop experts. Raises the errors of sending."""
        if self._stream is not None:
            message = pb.Rearrange(loads=encode_experts(loads), drops=encode_experts(drops))
            await self._stream.send(pb.ExpertsRequest(rearrange=message))

    async def _send(self, stream: TrunkStream, request: ExpertRows) -> Outputs:
        self._number += 1
        number = self._number
        answer: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self._waiting[number] = request, answer
        message, payload = encode_rows(request, number)
        await stream.send(pb.ExpertsRequest(rows=message), payload)
        return await answer
