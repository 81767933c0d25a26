"""Resource accounting of one stream, and the supervision of its handler.

1. ``inbound`` or ``outbound`` checks the limits and reserves the stream.
2. ``receive`` reserves memory for each message and slows the peer down to its rates.
3. ``close`` releases everything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from swarmnet_protocols.errors import (
    DeadlineExceeded,
    NotAuthorised,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.machine.aio import loop_time, until
from swarmnet_protocols.net import Handler, Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.net.refusal import OUT_OF_RESOURCES, Refusal
from swarmnet_protocols.timing import Timing

_log = logging.getLogger(__name__)

OPEN_FRAMES = 10
"""Cost of opening a stream, in messages."""
VIOLATION_FRAMES = 100
"""Cost of a protocol violation, in messages. A peer that repeats it is read ever more slowly."""
MAX_WAIT_S = 1.0
"""Most seconds that a peer above its message rate has to wait. If it would have to wait longer, its
new streams are refused."""


class StreamScope:
    """The reservations of one stream in its peer's scope: the stream, the current message, and
    rates.

    Made with the stream, by ``inbound`` or ``outbound``.
    """

    def __init__(self, peer_scope: Scope, resource: Resource, timing: Timing) -> None:
        """Reserve the stream. Raises ``ResourceLimitReached``."""
        self.peer_scope = peer_scope
        self.is_outbound = resource is Resource.OUTBOUND_STREAMS
        self.evict: Callable[[], None] = self.close
        """Ends the stream at once, to make room for another. The stream sets it."""
        self.on_close: Callable[[], None] = _nothing
        self.on_first_message: Callable[[], None] = _nothing
        """Called at the first message of an inbound stream, or at its close without one."""
        self.mib_s = timing.chunk_s
        """Timeout in seconds for each MiB of a message. A slower sender loses the stream."""
        self._clock = asyncio.get_running_loop().time
        self._first_message_by: float | None = None
        self._receive_at = 0.0
        self._send_at = 0.0
        self._is_open = True
        self._has_message = False
        """True if a received message holds memory. The next ``receive`` releases it."""
        self._stream = peer_scope.reserve(resource)
        self._message = peer_scope.reserve(Resource.MEMORY, 0)
        self._active = peer_scope.reserve(Resource.ACTIVE_STREAMS, 0)

    @classmethod
    def inbound(cls, resources: ResourceManager, peer: PeerId, timing: Timing) -> Self:
        """Return the scope of a stream that ``peer`` opened. Raises ``ResourceLimitReached``."""
        now = loop_time()
        peer_scope = resources.peer(peer, now)
        peer_scope.check_rate(Rate.FRAMES, MAX_WAIT_S, now)
        peer_scope.charge(Rate.FRAMES, OPEN_FRAMES, now)
        scope = cls(peer_scope, Resource.INBOUND_STREAMS, timing)
        # A known peer, or one with an active stream, may have a busy machine. Others get less time.
        is_active = peer_scope.used[Resource.ACTIVE_STREAMS] or not peer_scope.is_unknown
        scope._first_message_by = now + (timing.chunk_s if is_active else timing.first_message_s)
        return scope

    @classmethod
    def outbound(cls, resources: ResourceManager, peer: PeerId, timing: Timing) -> Self:
        """Return the scope of a stream that this process opens to ``peer``."""
        peer_scope = resources.peer(peer, loop_time())
        return cls(peer_scope, Resource.OUTBOUND_STREAMS, timing)

    async def receive(self, read: Callable[[], Awaitable[Message]]) -> Message:
        """Return the next message from ``read``, as soon as the peer's rates allow it.

        Releases the memory of the message before. Raises ``DeadlineExceeded`` when the first
        message of an inbound stream does not come, and what ``read`` raises.
        """
        if self._has_message:
            self._message.release()
            self._has_message = False
        if (wait_s := self._receive_at - self._clock()) > 0:
            await asyncio.sleep(wait_s)
        if self._first_message_by is None:
            message = await read()
        else:
            message = await self._receive_first(read, self._first_message_by)
        self._has_message = True
        size_bytes = len(message.header) + len(message.payload)
        now = self._clock()
        frames_s = self.peer_scope.charge(Rate.FRAMES, 1, now)
        self._receive_at = now + max(frames_s, self.peer_scope.charge(Rate.BYTES_IN, size_bytes, now))
        return message

    @property
    def holds_memory(self) -> bool:
        """True if memory is reserved for the message being read."""
        return self._message.amount > 0

    @property
    def is_memory_awaited(self) -> bool:
        """True if a message, of any peer, waits until others release memory."""
        return self.peer_scope.is_awaited(Resource.MEMORY)

    def check_size(self, size_bytes: int) -> None:
        """Raise ``ResourceLimitReached`` for a message that would not fit even if all memory were
        free."""
        if not self.peer_scope.can_ever_reserve(Resource.MEMORY, size_bytes):
            self._message.resize(size_bytes)

    def reserve_now(self, size_bytes: int) -> None:
        """Reserve memory for the bytes of a message that have come. Raises
        ``ResourceLimitReached``.
        """
        self._message.resize(size_bytes)

    async def reserve(self, size_bytes: int) -> None:
        """Reserve memory for the message being read, and wait up to ``mib_s`` for it.

        Raises ``ResourceLimitReached`` if the limits never allow it, ``DeadlineExceeded`` after the
        wait, and ``StreamEnded`` on a closed stream.
        """
        try:
            self._message.resize(size_bytes)
        except ResourceLimitReached:
            try:
                async with asyncio.timeout(self.mib_s):
                    await self._message.grow(size_bytes)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"no memory for a message became available within {self.mib_s:g} s"
                ) from error
        if not self._is_open:
            self._message.release()
            raise StreamEnded("the stream was closed")

    async def wait_send(self, size_bytes: int) -> None:
        """Wait until the peer's rates allow a message of this size, and charge it."""
        if (wait_s := self._send_at - self._clock()) > 0:
            await asyncio.sleep(wait_s)
        now = self._clock()
        self._send_at = now + self.peer_scope.charge(Rate.BYTES_OUT, size_bytes, now)

    def stop_reading(self) -> None:
        """Release the memory for messages, since none is read any more. Idempotent."""
        self._is_open = False
        self._message.release()
        self._active.release()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.stop_reading()
        self._stream.release()
        self._end_silence()
        on_close, self.on_close = self.on_close, _nothing
        on_close()

    def _end_silence(self) -> None:
        on_first_message, self.on_first_message = self.on_first_message, _nothing
        on_first_message()

    async def _receive_first(self, read: Callable[[], Awaitable[Message]], when: float) -> Message:
        try:
            message = await until(when, read)
        except TimeoutError as error:
            raise DeadlineExceeded("no message came on a new stream") from error
        self._first_message_by = None
        self._end_silence()
        if self._is_open:
            self._active.resize(1)
        return message


async def supervise(handler: Handler, stream: Stream, protocol: ProtocolSpec) -> None:
    """Run ``handler`` on an inbound ``stream``, then close it.

    Errors are logged and do not end other streams.
    """
    try:
        await handler(stream)
    except ResourceLimitReached as error:
        _log.debug("%s with %s: %s", protocol.id, stream.peer, error)
        stream.refuse(Refusal.out_of_resources(error, OUT_OF_RESOURCES))
    except Refusal as refusal:
        _log.debug("%s with %s: %s", protocol.id, stream.peer, refusal)
        stream.refuse(refusal)
    except StreamEnded as error:  # this stream, or another one that the handler opened
        if type(error) is not StreamEnded:  # the usual end of a stream says nothing
            _log.debug("%s with %s: %s", protocol.id, stream.peer, error)
    except (DeadlineExceeded, NotAuthorised) as error:
        # any peer can cause these at any rate: not worth a warning
        _log.debug("%s with %s: %s", protocol.id, stream.peer, error)
    except ProtocolViolation as error:
        stream.scope.charge(Rate.FRAMES, VIOLATION_FRAMES, loop_time())
        _log.warning("%s with %s: %s", protocol.id, stream.peer, error)
    except SwarmnetError as error:
        _log.warning("%s with %s: %s", protocol.id, stream.peer, error)
    except Exception:  # noqa: BLE001 - errors of a handler end its stream only
        _log.exception("%s with %s failed", protocol.id, stream.peer)
    finally:
        stream.close()


def _nothing() -> None:
    pass
