"""This member's own stream to one other member of a round.

It sends control messages before bulk data, and is reopened while the round lasts.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.net import Transport
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.rounds.transfers import Outgoing
from swarmnet_protocols.wire import training_pb2 as pb


class MemberLink:
    """Sends messages to one member: first ``hello`` on each stream, then the posted messages.

    ``on_change`` is called when the member becomes reachable (True) and when it is lost (False). A
    link that was drained opens another stream for messages that are posted later.
    """

    def __init__(
        self,
        transport: Transport,
        member: RoundMember,
        hello: pb.Hello,
        timing: RoundTiming,
        on_change: Callable[[bool], None],
    ) -> None:
        self.bytes_sent = 0
        self._transport = transport
        self._member = member
        self._hello = hello
        self._timing = timing
        self._on_change = on_change
        self._control: deque[pb.ExchangeRequest] = deque()
        self._bulk: dict[str, dict[Hashable, Iterator[Outgoing | float]]] = {}
        self._posted = asyncio.Event()
        self._draining = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open a stream in the background, unless there is one or the link is closed."""
        self._posted.set()
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the stream. Nothing is sent any more. Idempotent."""
        self._closed = True
        await cancel(self._task)

    def post(self, message: pb.ExchangeRequest) -> None:
        """Send a control message before any bulk data."""
        self._control.append(message)
        self.start()

    def post_bulk(self, queue: str, name: Hashable, messages: Iterator[Outgoing | float]) -> None:
        """Send ``messages`` when no control message waits, in order within a ``queue``.

        The iterator advances only when its next message can be sent. If it yields a float, it has
        no message until that loop time. Meanwhile other queues are served. A ``name`` that is
        already queued is not queued again.
        """
        self._bulk.setdefault(queue, {}).setdefault(name, messages)
        self.start()

    def drain(self) -> None:
        """End the stream once all posted messages have been sent."""
        self._draining = True
        self._posted.set()

    async def _run(self) -> None:
        """Keep a stream open until drained.

        When a stream breaks, the messages still posted are dropped. The state machine of the round
        posts them again.
        """
        while True:
            with contextlib.suppress(SwarmnetError):
                await self._use_one_stream()
                return
            self._control.clear()
            self._bulk.clear()
            self._on_change(False)
            if self._draining:
                return
            await asyncio.sleep(self._timing.streams.heartbeat_s)

    async def _use_one_stream(self) -> None:
        member = self._member
        stream = await EXCHANGE.open(
            self._transport, member.peer, self._timing.streams, addresses=member.addresses
        )
        with contextlib.closing(stream):
            await self._transmit(stream, (pb.ExchangeRequest(hello=self._hello), b""))
            self._on_change(True)
            await race(self._send(stream), self._watch(stream))

    async def _send(self, stream: "TypedStream[pb.ExchangeRequest, pb.ExchangeReply]") -> None:
        while True:
            next_one = self._next()
            if isinstance(next_one, tuple):
                await self._transmit(stream, next_one)
            elif next_one is None and self._draining:
                return
            else:
                self._posted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_one):
                        await self._posted.wait()

    def _next(self) -> Outgoing | float | None:
        """Return the message to send now, or the time when one is due; None without messages."""
        if self._control:
            return self._control.popleft(), b""
        due_s = []
        for queue in self._bulk.values():
            while queue:
                name, messages = next(iter(queue.items()))
                message = next(messages, None)
                if isinstance(message, tuple):
                    return message
                if message is not None:
                    due_s.append(message)
                    break
                del queue[name]
        return min(due_s, default=None)

    async def _transmit(
        self, stream: "TypedStream[pb.ExchangeRequest, pb.ExchangeReply]", outgoing: Outgoing
    ) -> None:
        message, payload = outgoing
        await stream.send(message, payload)
        self.bytes_sent += message.ByteSize() + len(payload)

    async def _watch(self, stream: "TypedStream[pb.ExchangeRequest, pb.ExchangeReply]") -> None:
        """Watch the member's side of the stream.

        Raises ``DeadlineExceeded`` when heartbeats stop. Raises ``Refused`` if the member is not in
        this round or disagrees on its terms.
        """
        await stream.receive()
        raise ProtocolViolation(f"{stream.peer} sends only heartbeats on this stream")
