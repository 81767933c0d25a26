"""The stream of a host to one peer with experts: it is opened again whenever it ends, and rows are computed over it."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertHost
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer, Transport
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.quantization.packed_experts import Outputs
from swarmnet_protocols.session.expert_rows import (
    ExpertRows,
    TrunkStream,
    decode_outputs,
    encode_experts,
    encode_rows,
)
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Longest pause between two attempts to reach a peer; each is twice as long as the one before."""
TRIALS = 5
"""Number of empty requests that measure the round trip to a peer; the fastest counts."""
ANSWER_S = 2.0
"""Timeout of a request in seconds, in addition to ``ANSWER_FACTOR`` times its expected time."""
ANSWER_FACTOR = 20
MAX_UNANSWERED = 2
"""Successive requests without an answer after which a peer is no longer asked."""
AVOID_S = 10.0
"""Seconds for which a late peer is asked only if no other has the expert; doubled each time, up to ``MAX_AVOID_S``."""
MAX_AVOID_S = 300.0
SMOOTHING = 0.1
"""Weight of the newest measurement in an exponential moving average."""


@dataclass(frozen=True)
class ExpertModel:
    """The swarm and the model of a peer."""

    swarm: bytes
    manifest: bytes
    hidden_size: int
    dtype: torch.dtype
    precision: str
    """The formats of weights and activations, as in ``HostRecord``."""


class ExpertLink:
    """A stream to ``host``. :meth:`keep` keeps it open; :meth:`ask` has rows computed while it :attr:`is_open`."""

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
        """``changed`` is called whenever the link opens or ends. A peer that is farther than ``max_round_trip_s`` is not used."""
        self.host = host
        """Its newest announcement."""
        self.round_trip_s = 0.0
        self.row_s = host.row_s
        """Seconds for one row through one expert beside the round trip, averaged."""
        self.fault = ""
        """The protocol violation for which the peer is no longer asked; empty if there was none."""
        self.is_far = False
        """Whether the round trip exceeds ``max_round_trip_s``."""
        self._unanswered = 0
        self._avoid_s = AVOID_S
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
        """Whether the peer can be asked now."""
        return self._stream is not None and not self.fault and not self.is_far

    def has(self, block: int, expert: int) -> bool:
        """Whether the peer announces an expert."""
        return expert in self.host.experts.get(block, ())

    def seconds_for(self, pairs: int) -> float:
        """Expected seconds until the answer to a request with ``pairs`` rows of all experts together."""
        return self.round_trip_s + pairs * self.row_s

    def is_avoided(self, now: float) -> bool:
        """Whether the peer was late, and is asked only if no other has the expert. ``now``: loop time."""
        return now < self._avoided_until

    def note_late(self, now: float) -> None:
        """Avoid the peer, the longer the more often it was late."""
        self._avoided_until = now + self._avoid_s
        self._avoid_s = min(2 * self._avoid_s, MAX_AVOID_S)

    async def keep(self) -> None:
        """Keep the stream open until the peer shows a fault, or until cancelled."""
        pause_s = FIRST_PAUSE_S
        while not self.fault:
            try:
                await self._run()
                pause_s = FIRST_PAUSE_S  # the stream ended because a better path was found
                continue
            except ProtocolViolation as error:
                self.blame(str(error))
                return
            except SwarmnetError as error:
                _log.info("experts out of reach", extra={"peer": self.host.peer, "reason": str(error)[:200]})
                if self._was_open:
                    pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def blame(self, fault: str) -> None:
        """Close the stream, and never ask this peer again."""
        self.fault = fault
        _log.warning("experts of a faulty peer are not used", extra={"peer": self.host.peer, "reason": fault})
        if self._stream is not None:
            self._stream.close()

    async def _run(self) -> None:
        """Keep one stream until a better path is found. Raises the error that ends the stream before."""
        self._was_open = False
        stream = await self._transport.open(
            self.host.peer, EXPERTS, addresses=self.host.addresses, deadline_s=self._timing.open_s
        )
        typed = TrunkStream(
            stream,
            pb.ExpertsRequest,
            pb.ExpertsReply,
            silence_s=self._timing.silence_s,
            send_s=self._timing.chunk_s,
        )
        with contextlib.closing(stream):
            attach = pb.Attach(swarm=self._model.swarm, manifest=self._model.manifest)
            await typed.send(pb.ExpertsRequest(attach=attach))
            reply, _ = await typed.receive()
            if not reply.HasField("attached"):
                raise ProtocolViolation("an answer before the stream was accepted")
            try:
                await race(self._receive(typed), self._open(typed), stream.path_improved())
            finally:
                self._stream = None
                for _, answer in self._waiting.values():
                    if not answer.done():
                        answer.set_exception(Unreachable(f"{self.host.peer} does not answer any more"))
                self._waiting.clear()
                self._changed()

    async def _open(self, stream: TrunkStream) -> NoReturn:
        """Measure the round trip; from then on the link is open."""
        clock = asyncio.get_running_loop().time
        empty = ExpertRows(0, torch.empty(0, self._model.hidden_size, dtype=self._model.dtype), {})
        fastest = math.inf
        for _ in range(TRIALS):
            sent_at = clock()
            await self._send(stream, empty)
            fastest = min(fastest, clock() - sent_at)
        self.round_trip_s = fastest
        self.is_far = fastest > self._max_round_trip_s
        self._stream, self._was_open = stream, True
        self._changed()
        await asyncio.Future()
        raise AssertionError

    async def _receive(self, stream: TrunkStream) -> NoReturn:
        while True:
            reply, payload = await stream.receive()
            if not reply.HasField("computed"):
                raise ProtocolViolation("an answer to no request")
            self._take(reply.computed, payload)

    def _take(self, computed: pb.Computed, payload: Buffer) -> None:
        """Take an answer. Raises ``ProtocolViolation`` for one without a request."""
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
        """The outputs of experts for rows.

        Raises ``Unreachable`` if the link ends first, ``DeadlineExceeded`` if the peer takes far longer than expected, and ``ProtocolViolation`` for
        wrong outputs.
        """
        if self._stream is None:
            raise Unreachable(f"{self.host.peer} does not answer")
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        stream = self._stream
        try:
            async with asyncio.timeout(ANSWER_S + ANSWER_FACTOR * self.seconds_for(request.pairs)):
                outputs = await self._send(stream, request)
        except TimeoutError:
            self._unanswered += 1
            if self._unanswered >= MAX_UNANSWERED:
                self.blame(f"{self._unanswered} requests were not answered, one after another")
            stream.close()
            raise DeadlineExceeded(f"{self.host.peer} has not computed experts in time") from None
        self._unanswered = 0
        if not self.is_avoided(clock()):
            self._avoid_s = AVOID_S
        row_s = max(0.0, clock() - sent_at - self.round_trip_s) / request.pairs
        self.row_s += SMOOTHING * (row_s - self.row_s)
        return outputs

    async def rearrange(self, loads: BlockExperts, drops: BlockExperts) -> None:
        """Ask the peer to hold other experts. Raises what sending raises."""
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
