"""Hostile frames at a given rate, from several identities in a process of its own.

    python -m tests.support.attacks.hostile SECONDS FRAMES_PER_S IDENTITIES ADDRESS

Most frames are pings. The others are garbage, announce 2 GiB, are nested 100,000 deep, or stop in
the middle of a message. Streams are closed and opened again as fast as the rate needs, however
slowly they are read. If less than a third of the frames could be sent in the given time, the
process goes on until a third was sent. Prints a JSON object that counts what was sent.
"""

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

import uvloop

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId, ProtocolSpec
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport, peer_of
from swarmnet_protocols.net.protocol_ids import LINK, PING, SESSION
from swarmnet_protocols.wire import session_pb2 as pb

NESTED = 100_000
BATCH = 100
BATCHES_A_STREAM = 10
PINGS_TO_ONE_OTHER = 1
LEAST_SHARE = 1 / 3
DEADLINE_S = 5.0


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">II", len(header), len(payload)) + header + payload


def nested(depth: int) -> bytes:
    """Nested protobuf groups, which any message may hold as an unknown field: two bytes for each
    level."""
    return b"\x0b" * depth + b"\x0c" * depth


class Attacker:
    """One identity that sends ``frames_per_s``."""

    def __init__(self, transport: P2pdTransport, peer: PeerId, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self._transport = transport
        self._peer = peer
        self._rng = random.Random(seed)

    async def run(self, seconds: float, frames_per_s: float) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        least = LEAST_SHARE * seconds * frames_per_s
        while (elapsed_s := loop.time() - started) < seconds or self.sent.total() < least:
            ahead_s = self.sent.total() / frames_per_s - elapsed_s
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
                continue
            for _ in range(PINGS_TO_ONE_OTHER):
                await self._send(PING, "ping", frame(pb.Ping(nonce=1).SerializeToString()) * BATCH, BATCH)
            await self._one_other()

    async def _one_other(self) -> None:
        kind, protocol, data = self._rng.choice(
            [
                ("garbage", SESSION, frame(b"\xff" + self._rng.randbytes(40))),
                ("2 GiB announced", LINK, struct.pack(">II", 10, 1 << 31)),
                ("nested", SESSION, frame(nested(20_000))),
                ("unfinished", LINK, struct.pack(">II", 100, 0) + b"x"),
            ]
        )
        await self._send(protocol, kind, data, 1)

    async def _send(self, protocol: ProtocolSpec, kind: str, data: bytes, frames: int) -> None:
        """Send batches on a new stream until it accepts no more."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                pipe = await self._transport._daemon.open_stream(
                    self._peer, protocol.id, deadline_s=DEADLINE_S
                )
        except (SwarmnetError, TimeoutError):
            self.sent["streams that could not be opened"] += 1
            return
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(BATCHES_A_STREAM if frames > 1 else 1):
                pipe.writer.write(data)
                async with asyncio.timeout(0.2):
                    await pipe.writer.drain()
                self.sent[kind] += frames
        if kind != "unfinished":
            pipe.writer.close()
        else:
            asyncio.get_running_loop().call_later(4 * DEADLINE_S, pipe.writer.close)


async def attack(seconds: float, frames_per_s: float, identities: int, address: str) -> Counter[str]:
    """The number of frames that all attackers sent, by kind."""
    os.nice(19)  # on a real network the attacker has a machine of its own
    sent: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        attackers = []
        for number in range(identities):
            config = P2pdConfig(
                folder / str(number), ("/ip4/127.0.0.1/tcp/0",), bootstrap=(address,), require_bootstrap=True
            )
            transport = await stack.enter_async_context(P2pdTransport.create(config))
            attackers.append(Attacker(transport, peer_of(address), number))
        print(json.dumps({"event": "attacking"}), flush=True)
        async with asyncio.TaskGroup() as group:
            for attacker in attackers:
                group.create_task(attacker.run(seconds, frames_per_s / identities))
        for attacker in attackers:
            sent += attacker.sent
    return sent


def main() -> None:
    seconds, frames_per_s, identities, address = sys.argv[1:]
    # As nodes do: asyncio's own loop warns when a p2pd that ended was already reaped by a poll.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sent = runner.run(attack(float(seconds), float(frames_per_s), int(identities), address))
    print(json.dumps({"event": "attacked", "sent": dict(sent)}), flush=True)


if __name__ == "__main__":
    main()
