"""Rate limiters keep their rate over any ten seconds, never delay heartbeats, and starve no
message."""

import asyncio
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net.limits.flow_control import READ_AHEAD_BYTES, LimitedReader
from swarmnet_protocols.net.limits.rate_limit import (
    BURST_S,
    MESSAGE_BYTES,
    PIECE_BYTES,
    TINY_BYTES,
    WIRE_FACTOR,
    RateLimit,
    RateLimiter,
    TokenBucket,
    wire_bytes,
)
from tests.support.network.virtual_time import run

RATE = 100_000.0
WINDOW_S = 10.0
TOLERANCE = 1.05


def most_within(sent: Sequence[tuple[float, float]], window_s: float) -> float:
    """The most bytes within any ``window_s`` seconds, from (time, bytes) in order of time."""
    most = total = 0.0
    first = 0
    for at, size in sent:
        total += size
        while at - sent[first][0] >= window_s:
            total -= sent[first][1]
            first += 1
        most = max(most, total)
    return most


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, PIECE_BYTES)),
        min_size=1,
        max_size=300,
    )
)
def test_a_bucket_keeps_its_rate_over_any_ten_seconds(messages: list[tuple[float, int]]) -> None:
    bucket, now, sent = TokenBucket(RateLimit(RATE, RATE * BURST_S)), 0.0, []
    for pause_s, size in messages:
        now += pause_s
        now += bucket.wait_s(now)
        bucket.spend(size, now)
        sent.append((now, float(size)))
    assert most_within(sent, WINDOW_S) <= RATE * (WINDOW_S + BURST_S) + PIECE_BYTES


async def _send(limiter: RateLimiter, size: int, log: list[tuple[float, float]]) -> None:
    """One message, in pieces, as a stream sends it."""
    left = size
    while left:
        piece = min(PIECE_BYTES, left)
        await limiter.acquire(piece, message_bytes=size)
        log.append((asyncio.get_running_loop().time(), wire_bytes(piece)))
        left -= piece


@pytest.mark.parametrize("streams", [1, 64])
def test_the_link_is_used_fully_and_never_exceeded(streams: int) -> None:
    async def main() -> list[tuple[float, float]]:
        limiter, log = RateLimiter(), []
        limiter.set_rate(RATE)
        rng = random.Random(streams)

        async def pump() -> None:
            while True:
                await _send(limiter, rng.choice([3000, 12_000, 500_000]), log)

        tasks = [asyncio.create_task(pump()) for _ in range(streams)]
        await asyncio.sleep(60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return log

    log = run(main())
    assert most_within(log, WINDOW_S) <= RATE * WINDOW_S * TOLERANCE
    assert sum(size for _, size in log) >= 0.99 * RATE * 60


def test_heartbeats_do_not_wait_and_are_charged_to_later_messages() -> None:
    async def main() -> tuple[float, float]:
        limiter, loop = RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(RATE)
        bulk = asyncio.create_task(_send(limiter, 1_000_000, []))
        await asyncio.sleep(1)
        before = loop.time()
        for _ in range(1000):
            await limiter.acquire(TINY_BYTES, message_bytes=TINY_BYTES)
        waited = loop.time() - before
        await bulk
        return waited, loop.time()

    waited, took = run(main())
    assert waited == 0
    pieces = math.ceil(1_000_000 / PIECE_BYTES)
    charged_bytes = 1_000_000 * WIRE_FACTOR + pieces * MESSAGE_BYTES + 1000 * wire_bytes(TINY_BYTES)
    assert took == pytest.approx(charged_bytes / RATE, rel=0.02)


def test_decode_steps_go_before_prompts_and_prompts_continue() -> None:
    async def main() -> tuple[float, int]:
        limiter, loop = RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(RATE)
        pieces: list[tuple[float, float]] = []
        prompts = [asyncio.create_task(_send(limiter, 10_000_000, pieces)) for _ in range(32)]
        await asyncio.sleep(5)
        longest = 0.0
        for _ in range(50):
            before = loop.time()
            await _send(limiter, 3000, [])
            longest = max(longest, loop.time() - before)
        before_flood = len(pieces)

        async def decode() -> None:
            while True:
                await _send(limiter, 3000, [])

        flood = [asyncio.create_task(decode()) for _ in range(100)]
        await asyncio.sleep(10)
        for task in [*prompts, *flood]:
            task.cancel()
        await asyncio.gather(*prompts, *flood, return_exceptions=True)
        return longest, len(pieces) - before_flood

    longest, pieces = run(main())
    assert longest < 2 * PIECE_BYTES * WIRE_FACTOR / RATE
    assert pieces >= 10


def test_small_messages_go_while_the_bucket_is_overdrawn() -> None:
    async def main() -> tuple[float, float]:
        limiter, loop = RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(RATE)
        limiter.count(int(10 * RATE / WIRE_FACTOR))
        large = asyncio.create_task(_send(limiter, 2 * PIECE_BYTES, []))
        for _ in range(30):
            await _send(limiter, 3000, [])
        small_done = loop.time()
        await large
        return small_done, loop.time()

    small_s, large_s = run(main())
    assert small_s == pytest.approx(30 * 3000 * WIRE_FACTOR / (RATE / 2), rel=0.1)
    assert large_s >= 10


def test_a_cancelled_message_is_not_charged() -> None:
    async def main() -> float:
        limiter, loop = RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(RATE)
        await _send(limiter, 100_000, [])
        gone = [asyncio.create_task(_send(limiter, 100_000, [])) for _ in range(10)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        before = loop.time()
        await _send(limiter, 100_000, [])
        return loop.time() - before

    assert run(main()) == pytest.approx(100_000 * WIRE_FACTOR / RATE, rel=0.2)


@pytest.mark.parametrize(
    ("size_bytes", "measured_bytes"),
    [(40, 122), (1160, 1246), (4108, 4349), (16_397, 17_113), (1 << 20, 1_088_000)],
)
def test_headers_of_packets_count(size_bytes: int, measured_bytes: int) -> None:
    """Against bytes that the kernel counted for a p2pd: pings, token steps, and weights."""
    limiter = RateLimiter()

    async def main() -> None:
        limiter.count(size_bytes)

    run(main())
    assert limiter.total_bytes == pytest.approx(measured_bytes, rel=0.04)


def test_a_limit_is_set_and_lifted_while_messages_wait() -> None:
    async def main() -> float:
        limiter, loop = RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(1000.0)
        waiting = [asyncio.create_task(_send(limiter, 1_000_000, [])) for _ in range(3)]
        await asyncio.sleep(2)
        limiter.set_rate(None)
        await asyncio.gather(*waiting)
        return loop.time()

    assert run(main()) == 2


def test_the_senders_deadline_is_suspended_while_the_limiter_waits() -> None:
    """Reading an available message takes as long as the rate requires; waiting for a missing
    message times out."""

    async def main() -> tuple[float, float]:
        reader, limiter, loop = asyncio.StreamReader(), RateLimiter(), asyncio.get_running_loop()
        limiter.set_rate(PIECE_BYTES * WIRE_FACTOR)  # one piece a second
        limited = LimitedReader(reader, limiter)
        reader.feed_data(bytes(10 * PIECE_BYTES))
        async with asyncio.timeout(2.0) as deadline:
            await limited.readexactly(10 * PIECE_BYTES, deadline)
        read_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0) as deadline:
                await limited.readexactly(PIECE_BYTES, deadline)
        return read_s, loop.time()

    read_s, given_up_s = run(main())
    assert read_s == pytest.approx(9, abs=1)
    assert given_up_s == pytest.approx(read_s + 2.0, abs=1.01)


def test_without_a_limit_bytes_are_counted_and_nothing_waits() -> None:
    async def main() -> tuple[float, float]:
        limiter = RateLimiter()
        await _send(limiter, 1_000_000, [])
        return limiter.total_bytes, asyncio.get_running_loop().time()

    pieces = math.ceil(1_000_000 / PIECE_BYTES)
    assert run(main()) == (pytest.approx(1_000_000 * WIRE_FACTOR + pieces * MESSAGE_BYTES), 0)


def test_a_limited_reader_reads_at_the_rate() -> None:
    async def main() -> tuple[bytes, float]:
        reader, limiter = asyncio.StreamReader(), RateLimiter()
        limited = LimitedReader(reader, limiter)
        limiter.set_rate(RATE)
        data = random.Random(0).randbytes(300_000)
        reader.feed_data(data)
        read = asyncio.create_task(limited.readexactly(200_000))
        await asyncio.sleep(0.5)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        got = await limited.readexactly(200_000)
        got += await limited.readexactly(100_000)
        assert got == data
        return got, asyncio.get_running_loop().time()

    _, took = run(main())
    assert took == pytest.approx(300_000 * WIRE_FACTOR / RATE, rel=0.1)


def test_a_limited_reader_buffers_what_came_with_a_read() -> None:
    async def main() -> None:
        reader, limiter = asyncio.StreamReader(), RateLimiter()
        limited = LimitedReader(reader, limiter)
        reader.feed_data(bytes(range(100)))
        assert limited.buffered_bytes == 0
        assert await limited.readexactly(8) == bytes(range(8))
        assert limited.buffered_bytes == 92
        limiter.set_rate(RATE)  # buffered bytes have been counted
        counted = limiter.total_bytes
        assert await limited.readexactly(92) == bytes(range(8, 100))
        assert limiter.total_bytes == counted == wire_bytes(100)

    run(main())


@pytest.mark.parametrize("rate", [None, RATE])
@pytest.mark.parametrize("size", [10, 3000, READ_AHEAD_BYTES + 10, 100_000])
def test_a_limited_reader_raises_when_a_stream_ends_early(size: int, rate: float | None) -> None:
    async def main() -> None:
        reader, limiter = asyncio.StreamReader(), RateLimiter()
        limiter.set_rate(rate)
        limited = LimitedReader(reader, limiter)
        reader.feed_data(bytes(range(8)) + bytes(size - 1))
        reader.feed_eof()
        assert await limited.readexactly(8) == bytes(range(8))
        with pytest.raises(asyncio.IncompleteReadError):
            await limited.readexactly(size)

    run(main())
