"""The cost of resource accounting for each message in microseconds: messages are read from a buffer
with it and without it, in turn.

    python -m tests.bench.frame_cost [--frames 2000] [--rounds 9]

Prints JSON.
"""

import argparse
import asyncio
import json
import statistics
import struct
import time
from collections.abc import Awaitable, Callable

import uvloop

from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.framing import FrameReader
from swarmnet_protocols.net.limits.flow_control import LimitedReader
from swarmnet_protocols.net.limits.rate_limit import RateLimit, RateLimiter
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.protocol_ids import LINK
from swarmnet_protocols.timing import Timing

FRAME = struct.pack(">II", 60, 2304) + bytes(60 + 2304)  # a step of one position of SmolLM2-135M


async def bare(reader: asyncio.StreamReader) -> Message:
    """Read one message without accounting: the same two reads, and nothing else."""
    header_bytes, payload_bytes = struct.unpack(">II", await reader.readexactly(8))
    body = memoryview(await reader.readexactly(header_bytes + payload_bytes))
    return Message(bytes(body[:header_bytes]), body[header_bytes:])


async def measure(frames: int, rounds: int) -> dict[str, float]:
    resources = ResourceManager()
    # No peer has to wait.
    resources.limit_rate(Rate.FRAMES, system=RateLimit(1e9, 1e9), per_peer=RateLimit(1e9, 1e9))
    scope = StreamScope.inbound(resources, PeerId("peer"), Timing())
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        for name, seconds in times.items():
            reader = asyncio.StreamReader(limit=1 << 30)
            reader.feed_data(FRAME * frames)
            framed = FrameReader(LimitedReader(reader, RateLimiter()), LINK, scope)

            async def receive(framed: FrameReader = framed) -> Message:
                return await scope.receive(framed.read)

            async def plain(reader: asyncio.StreamReader = reader) -> Message:
                return await bare(reader)

            read: Callable[[], Awaitable[Message]] = receive if name == "with" else plain
            started = time.perf_counter()
            for _ in range(frames):
                await read()
            seconds.append((time.perf_counter() - started) / frames)
    return {name: round(1e6 * statistics.median(seconds), 2) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        medians = runner.run(measure(arguments.frames, arguments.rounds))
    report = {"bench": "frame_cost", "us_a_message": medians}
    print(json.dumps(report | {"difference_us": round(medians["with"] - medians["without"], 2)}))


if __name__ == "__main__":
    main()
