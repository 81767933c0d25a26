"""The upload of one part of a client's adapter. The host stores it after checking hash and shapes.

1. The client announces a part with its SHA-256 and its size in bytes. If the store has the part,
   the host answers ``stored``.
2. Otherwise the host answers ``wanted``, and receives the part in chunks. It reserves memory as
   chunks arrive.
3. The host checks the hash, loads the part onto its device and answers ``stored``.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet_node.engine.engine import Engine
from swarmnet_node.hosting.adapter_store import HASH_BYTES, AdapterStore
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.protocol_ids import ADAPTER
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_node.engine.torch_layers.adapters import StageAdapter

AdapterStream = TypedStream[pb.AdapterReply, pb.AdapterRequest]


@dataclass(frozen=True)
class AdapterReceiver:
    """Receives one part of a client's adapter.

    ``start``: the block of the first layer of the loaded stage. The engine's stage may be a part of
    the loaded one.
    """

    upload: pb.Upload
    store: AdapterStore
    engine: Engine
    start: int
    stream: AdapterStream
    heartbeat_s: float

    async def run(self) -> None:
        """Receive and store the part unless the store has it. Send heartbeats meanwhile.

        Raises:

        - ``Refusal`` at a limit of the store.
        - ``ProtocolViolation`` if hash, size or shapes are wrong.
        - ``StreamEnded`` or ``DeadlineExceeded`` if the client has left or is too slow.
        """
        owner, scope, digest = self.stream.peer, self.stream.stream.scope, self.upload.adapter
        if len(digest) != HASH_BYTES or self.upload.size_bytes < 1:
            raise ProtocolViolation("an upload must name a hash of 32 bytes and a size of at least 1 byte")
        if not self.store.renew(owner, digest):
            with self.store.reserve(scope, self.upload.size_bytes) as grow:
                adapter = await race(
                    self._receive(grow),
                    self.stream.send_heartbeats(
                        self.heartbeat_s, lambda: pb.AdapterReply(heartbeat=pb.Heartbeat())
                    ),
                )
            self.store.put(owner, scope, digest, adapter)
        await self.stream.send(pb.AdapterReply(stored=pb.Stored()))

    async def _receive(self, grow: Callable[[int], None]) -> "StageAdapter":
        await self.stream.send(pb.AdapterReply(wanted=pb.Wanted()))
        chunks: list[Buffer] = []
        left = self.upload.size_bytes
        while left:
            request, payload = await self.stream.receive()
            wanted = min(left, ADAPTER.max_payload_bytes)
            if not request.HasField("chunk") or len(payload) != wanted:
                raise ProtocolViolation(f"expected a chunk of {wanted} bytes")
            left -= wanted
            grow(self.upload.size_bytes - left)
            chunks.append(payload)
        data = await asyncio.to_thread(self._checked, chunks)
        return await self.engine.run_on_torch_thread(lambda: self._adapt(data))

    def _checked(self, chunks: list[Buffer]) -> bytes:
        data = b"".join(chunks)
        chunks.clear()
        if hashlib.sha256(data).digest() != self.upload.adapter:
            raise ProtocolViolation("the bytes of an adapter do not have its hash")
        return data

    def _adapt(self, data: bytes) -> "StageAdapter":
        from swarmnet_protocols.session.adapters import read_part

        adapter = self.engine.stage.load_adapter(read_part(data), self.start)
        adapter.check_span(self.upload.span.start, self.upload.span.end)
        return adapter
