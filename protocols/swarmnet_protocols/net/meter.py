"""What one stream takes of its peer's scope: itself, every message while it is read and used, and how fast they come and go."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from swarmnet_protocols.errors import DeadlineExceeded, StreamEnded
from swarmnet_protocols.machine.aio import until
from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.resources import Rate, Resource, ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.timing import Timing

OPENING_FRAMES = 10
"""What it costs, in messages, to open a stream."""
VIOLATION_FRAMES = 100
"""What it costs to break a rule: who goes on with it is heard ever more slowly."""
MAX_OWED_S = 1.0
"""Streams of a peer that has used more than its share for so long are refused: there is no use in letting them wait."""


class Meter:
    """Made with the stream, by ``of_theirs`` or ``of_ours``; ``end`` gives back what its messages took, ``close`` everything."""

    def __init__(self, scope: Scope, resource: Resource, timing: Timing) -> None:
        """Raises ``ResourceLimitReached``."""
        self.scope = scope
        self.is_ours = resource is Resource.OUTBOUND_STREAMS
        """We opened the stream."""
        self.drop: Callable[[], None] = self.close
        """Ends the stream at once: somebody else needs the room."""
        self.on_close: Callable[[], None] = _nothing
        self.piece_s = timing.chunk_s
        """How long a MiB of a message that was begun may take."""
        self._clock = asyncio.get_running_loop().time
        self._opening_until: float | None = None
        self._receive_at = 0.0
        self._send_at = 0.0
        self._is_open = True
        self._is_read = False
        """A message is here whole, which lasts until the next one is asked for."""
        self._stream = scope.reserve(resource)
        self._message = scope.reserve(Resource.MEMORY, 0)
        self._heard = scope.reserve(Resource.ACTIVE_STREAMS, 0)

    @classmethod
    def of_theirs(cls, resources: ResourceManager, peer: PeerId, timing: Timing) -> Self:
        """Of a stream that ``peer`` opens. Raises ``ResourceLimitReached`` when it may not."""
        now = asyncio.get_running_loop().time()
        scope = resources.peer(peer, now)
        scope.check_rate(Rate.FRAMES, MAX_OWED_S, now)
        scope.charge(Rate.FRAMES, OPENING_FRAMES, now)
        meter = cls(scope, Resource.INBOUND_STREAMS, timing)
        # The machine of somebody who is at work with us may be busy; who has said nothing at all is not worth the wait.
        is_at_work = scope.used[Resource.ACTIVE_STREAMS] or not scope.is_unknown
        meter._opening_until = now + (timing.chunk_s if is_at_work else timing.first_message_s)
        return meter

    @classmethod
    def of_ours(cls, resources: ResourceManager, peer: PeerId, timing: Timing) -> Self:
        """Of a stream that we open to ``peer``."""
        scope = resources.peer(peer, asyncio.get_running_loop().time())
        return cls(scope, Resource.OUTBOUND_STREAMS, timing)

    async def receive(self, read: Callable[[], Awaitable[Message]]) -> Message:
        """The next message, which ``read`` gives, when its sender may send one. The one before it is done with.

        Raises ``DeadlineExceeded`` when whoever opened the stream leaves us without its first, and what ``read`` raises.
        """
        if self._is_read:
            self._message.release()
            self._is_read = False
        if (wait_s := self._receive_at - self._clock()) > 0:
            await asyncio.sleep(wait_s)
        if self._opening_until is None:
            message = await read()
        else:
            message = await self._first(read, self._opening_until)
        self._is_read = True
        size_bytes = len(message.header) + len(message.payload)
        now = self._clock()
        frames_s = self.scope.charge(Rate.FRAMES, 1, now)
        self._receive_at = now + max(frames_s, self.scope.charge(Rate.BYTES_IN, size_bytes, now))
        return message

    async def reserve(self, size_bytes: int) -> None:
        """Hold this much for the message that is about to be read, as soon as there is room.

        Raises ``ResourceLimitReached`` when there never is so much, ``DeadlineExceeded`` when it is too long in coming, ``StreamEnded`` on a closed stream.
        """
        try:
            self._message.resize(size_bytes)
        except ResourceLimitReached:
            try:
                async with asyncio.timeout(self.piece_s):
                    await self._message.grow(size_bytes)
            except TimeoutError as error:
                raise DeadlineExceeded("there has been no room for a message for long") from error
        if not self._is_open:
            self._message.release()
            raise StreamEnded("the stream was closed")

    async def send(self, size_bytes: int) -> None:
        """Wait until a message of this size may be sent."""
        if (wait_s := self._send_at - self._clock()) > 0:
            await asyncio.sleep(wait_s)
        now = self._clock()
        self._send_at = now + self.scope.charge(Rate.BYTES_OUT, size_bytes, now)

    def end(self) -> None:
        """No more is read. Idempotent."""
        self._is_open = False
        self._message.release()
        self._heard.release()

    def close(self) -> None:
        """Idempotent."""
        self.end()
        self._stream.release()
        on_close, self.on_close = self.on_close, _nothing
        on_close()

    async def _first(self, read: Callable[[], Awaitable[Message]], when: float) -> Message:
        try:
            message = await until(when, read)
        except TimeoutError as error:
            raise DeadlineExceeded("a stream was opened, and nothing came") from error
        self._opening_until = None
        if self._is_open:
            self._heard.resize(1)
        return message


def _nothing() -> None:
    pass
