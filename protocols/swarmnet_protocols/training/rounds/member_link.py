"""A stream of our own to one other member of a round: what is urgent first, opened again while the round lasts."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.training.rounds.events import RoundTiming
from swarmnet_protocols.wire import training_pb2 as pb


class TurnedAway(SwarmnetError):
    """The other member is not in this round, or means another by it."""


@dataclass(frozen=True)
class Dial:
    """How to reach a member, and the first message to it."""

    transport: Transport
    peer: PeerId
    addresses: tuple[str, ...]
    hello: Message
    timing: RoundTiming


class MemberLink:
    """Sends to one member. ``on_change`` hears, at once, that it can be reached (True) or is lost (False)."""

    def __init__(self, dial: Dial, on_change: Callable[[bool], None]) -> None:
        self.bytes_sent = 0
        self._dial = dial
        self._on_change = on_change
        self._urgent: deque[Message] = deque()
        self._bulk: dict[str, dict[Hashable, Iterator[Message | float]]] = {}
        self._news = asyncio.Event()
        self._draining = False

    def post(self, message: Message) -> None:
        """Send as soon as possible."""
        self._urgent.append(message)
        self._news.set()

    def post_bulk(self, sequence: str, name: Hashable, messages: Iterator[Message | float]) -> None:
        """Send while nothing is urgent, in order within a ``lane``. ``messages`` is asked for the next only when there is room for it.

        A number is the loop's time until which it has none: then it is asked again, and meanwhile other lanes have their
        turn. Nothing is sent again while what has the same name is still to be sent.
        """
        self._bulk.setdefault(sequence, {}).setdefault(name, messages)
        self._news.set()

    def drain(self) -> None:
        """End ``run`` when everything posted has been sent."""
        self._draining = True
        self._news.set()

    async def run(self) -> None:
        """Keep a stream open until drained; what was posted to a stream that broke is dropped."""
        while True:
            with contextlib.suppress(SwarmnetError):
                await self._converse()
                return
            self._urgent.clear()
            self._bulk.clear()
            self._on_change(False)
            if self._draining:
                return
            await asyncio.sleep(self._dial.timing.heartbeat_s)

    async def _converse(self) -> None:
        dial = self._dial
        stream = await dial.transport.open(
            dial.peer, EXCHANGE, addresses=dial.addresses, deadline_s=dial.timing.open_s
        )
        try:
            await self._transmit(stream, dial.hello)
            self._on_change(True)
            await race(self._send(stream), self._listen(stream))
        finally:
            stream.close()

    async def _send(self, stream: Stream) -> None:
        while True:
            turn = self._next()
            if isinstance(turn, Message):
                await self._transmit(stream, turn)
            elif turn is None and self._draining:
                return
            else:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(turn):
                        await self._news.wait()

    def _next(self) -> Message | float | None:
        """What is to be sent now, or when there will be something; None if nothing is posted."""
        if self._urgent:
            return self._urgent.popleft()
        due_s = []
        for sequence in self._bulk.values():
            while sequence:
                name, messages = next(iter(sequence.items()))
                turn = next(messages, None)
                if isinstance(turn, Message):
                    return turn
                if turn is not None:
                    due_s.append(turn)
                    break
                del sequence[name]
        return min(due_s, default=None)

    async def _transmit(self, stream: Stream, message: Message) -> None:
        await stream.send(message)
        self.bytes_sent += len(message.header) + len(message.payload)

    async def _listen(self, stream: Stream) -> None:
        while True:
            message = await receive_within(stream, self._dial.timing.silence_s)
            reply = parse(pb.ExchangeReply, message.header)
            if reply.HasField("refusal"):
                raise TurnedAway(f"{stream.peer}: {printable(reply.refusal.detail)}")
