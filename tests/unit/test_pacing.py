"""Lines keep their rate over any ten seconds, let beats through at once, and starve nobody."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net.rate_limit import (
    AHEAD_BYTES,
    BURST_S,
    PIECE_BYTES,
    TINY_BYTES,
    WIRE_FACTOR,
    LimitedReader,
    RateLimiter,
    TokenBucket,
)
from tests.support.virtual_time import run

RATE = 100_000.0
WINDOW_S = 10.0
TOLERANCE = 1.05


def most_within(sent: Sequence[tuple[float, float]], window_s: float) -> float:
    """The most that went within any ``window_s``, of (time, bytes) in order."""
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
def test_a_bucket_keeps_its_rate_over_any_ten_seconds(wishes: list[tuple[float, int]]) -> None:
    bucket, now, sent = TokenBucket(), 0.0, []
    bucket.set_rate(RATE, now)
    for pause_s, size in wishes:
        now += pause_s
        now += bucket.wait_s(now)
        bucket.charge(size, now)
        sent.append((now, float(size)))
    assert most_within(sent, WINDOW_S) <= RATE * (WINDOW_S + BURST_S) + PIECE_BYTES


async def _send(line: RateLimiter, size: int, log: list[tuple[float, float]]) -> None:
    """One message, in pieces, as a stream sends it."""
    left = size
    while left:
        piece = min(PIECE_BYTES, left)
        await line.turn(piece, of_bytes=size)
        log.append((asyncio.get_running_loop().time(), piece * WIRE_FACTOR))
        left -= piece


@pytest.mark.parametrize("streams", [1, 64])
def test_a_line_is_full_and_never_more(streams: int) -> None:
    async def main() -> list[tuple[float, float]]:
        line, log = RateLimiter(), []
        line.set_rate(RATE)
        rng = random.Random(streams)

        async def pump() -> None:
            while True:
                await _send(line, rng.choice([3000, 12_000, 500_000]), log)

        tasks = [asyncio.create_task(pump()) for _ in range(streams)]
        await asyncio.sleep(60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return log

    log = run(main())
    assert most_within(log, WINDOW_S) <= RATE * WINDOW_S * TOLERANCE
    assert sum(size for _, size in log) >= 0.99 * RATE * 60


def test_beats_do_not_wait_and_are_paid_for_by_what_follows() -> None:
    async def main() -> tuple[float, float]:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        bulk = asyncio.create_task(_send(line, 1_000_000, []))
        await asyncio.sleep(1)
        before = loop.time()
        for _ in range(1000):
            await line.turn(TINY_BYTES, of_bytes=TINY_BYTES)
        waited = loop.time() - before
        await bulk
        return waited, loop.time()

    waited, took = run(main())
    assert waited == 0
    assert took == pytest.approx((1_000_000 + 1000 * TINY_BYTES) * WIRE_FACTOR / RATE, rel=0.02)


def test_a_decode_step_overtakes_prompts_and_prompts_go_on() -> None:
    async def main() -> tuple[float, int]:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        pieces: list[tuple[float, float]] = []
        prompts = [asyncio.create_task(_send(line, 10_000_000, pieces)) for _ in range(32)]
        await asyncio.sleep(5)
        longest = 0.0
        for _ in range(50):
            before = loop.time()
            await _send(line, 3000, [])
            longest = max(longest, loop.time() - before)
        before_flood = len(pieces)

        async def decode() -> None:
            while True:
                await _send(line, 3000, [])

        flood = [asyncio.create_task(decode()) for _ in range(100)]
        await asyncio.sleep(10)
        for task in [*prompts, *flood]:
            task.cancel()
        await asyncio.gather(*prompts, *flood, return_exceptions=True)
        return longest, len(pieces) - before_flood

    longest, pieces = run(main())
    assert longest < 2 * PIECE_BYTES * WIRE_FACTOR / RATE
    assert pieces >= 10


def test_small_messages_go_on_while_a_burst_is_made_up_for() -> None:
    async def main() -> tuple[float, float]:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        line.settle(10 * RATE, sees_all=True)
        large = asyncio.create_task(_send(line, 2 * PIECE_BYTES, []))
        for _ in range(30):
            await _send(line, 3000, [])
        small_done = loop.time()
        await large
        return small_done, loop.time()

    small_s, large_s = run(main())
    assert small_s == pytest.approx(30 * 3000 * WIRE_FACTOR / (RATE / 2), rel=0.1)
    assert large_s >= 10


def test_who_gives_up_takes_nobody_elses_turn() -> None:
    async def main() -> float:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        await _send(line, 100_000, [])
        gone = [asyncio.create_task(_send(line, 100_000, [])) for _ in range(10)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        before = loop.time()
        await _send(line, 100_000, [])
        return loop.time() - before

    assert run(main()) == pytest.approx(100_000 * WIRE_FACTOR / RATE, rel=0.2)


@pytest.mark.parametrize("sees_all", [False, True])
def test_what_the_kernel_saw_beyond_our_own_is_charged(*, sees_all: bool) -> None:
    async def main() -> float:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        line.settle(5 * RATE, sees_all=sees_all)  # the directory, say
        assert line.total_bytes == 5 * RATE
        before = loop.time()
        await _send(line, 2 * PIECE_BYTES, [])
        return loop.time() - before

    assert run(main()) == pytest.approx(5.0, abs=2 * BURST_S)


def test_what_was_charged_and_is_seen_later_is_not_charged_twice() -> None:
    async def main() -> float:
        line = RateLimiter()
        line.set_rate(1e7)
        line.count(1000)
        line.settle(0, sees_all=False)
        line.settle(1000 * WIRE_FACTOR, sees_all=False)
        return line.total_bytes

    assert run(main()) == 1000 * WIRE_FACTOR


@pytest.mark.parametrize("sees_all", [True, False])
def test_what_came_before_it_was_read_is_read_at_the_rate_all_the_same(sees_all: bool) -> None:
    """Or many who send would be let go at once, to send as much again."""

    async def main() -> float:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)
        line.settle(5 * RATE, sees_all=sees_all)
        await asyncio.sleep(5)

        async def settle() -> None:
            while True:
                await asyncio.sleep(0.5)
                line.settle(0, sees_all=sees_all)

        settling = asyncio.create_task(settle())
        await _send(line, int(5 * RATE / WIRE_FACTOR), [])
        settling.cancel()
        return loop.time()

    assert run(main()) >= 10 - 2 * BURST_S


def test_where_the_kernel_sees_all_it_is_right() -> None:
    async def main() -> float:
        line = RateLimiter()
        line.set_rate(1e7)
        line.settle(5000, sees_all=True)  # came, and waits to be read
        line.count(5000)
        line.settle(0, sees_all=True)
        line.count(2000)
        line.settle(2500, sees_all=True)
        return line.total_bytes

    assert run(main()) == 7500


def test_where_it_does_not_what_it_never_sees_is_charged_all_the_same() -> None:
    async def main() -> float:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(RATE)

        async def settle() -> None:
            while True:
                await asyncio.sleep(0.5)
                line.settle(0, sees_all=False)

        settling = asyncio.create_task(settle())
        await _send(line, 1_000_000, [])
        settling.cancel()
        return loop.time()

    assert run(main()) >= 0.99 * 1_000_000 * WIRE_FACTOR / RATE - BURST_S


def test_a_rate_can_be_set_and_lifted_while_many_wait() -> None:
    async def main() -> float:
        line, loop = RateLimiter(), asyncio.get_running_loop()
        line.set_rate(1000.0)
        waiting = [asyncio.create_task(_send(line, 1_000_000, [])) for _ in range(3)]
        await asyncio.sleep(2)
        line.set_rate(None)
        await asyncio.gather(*waiting)
        return loop.time()

    assert run(main()) == 2


def test_who_sends_has_as_long_as_ever_when_it_is_us_who_read_slowly() -> None:
    """A message that is there takes as long as our rate says; one that is not is given up."""

    async def main() -> tuple[float, float]:
        reader, line, loop = asyncio.StreamReader(), RateLimiter(), asyncio.get_running_loop()
        line.set_rate(PIECE_BYTES * WIRE_FACTOR)  # a piece a second
        paced = LimitedReader(reader, line)
        reader.feed_data(bytes(10 * PIECE_BYTES))
        async with asyncio.timeout(2.0) as deadline:
            await paced.readexactly(10 * PIECE_BYTES, deadline)
        read_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0) as deadline:
                await paced.readexactly(PIECE_BYTES, deadline)
        return read_s, loop.time()

    read_s, given_up_s = run(main())
    assert read_s == pytest.approx(9, abs=1)
    assert given_up_s == pytest.approx(read_s + 2.0, abs=1.01)


def test_without_a_rate_everything_is_counted_and_nothing_waits() -> None:
    async def main() -> tuple[float, float]:
        line = RateLimiter()
        await _send(line, 1_000_000, [])
        return line.total_bytes, asyncio.get_running_loop().time()

    assert run(main()) == (pytest.approx(1_000_000 * WIRE_FACTOR), 0)


def test_a_paced_reader_reads_what_came_no_faster_than_its_line() -> None:
    async def main() -> tuple[bytes, float]:
        reader, line = asyncio.StreamReader(), RateLimiter()
        paced = LimitedReader(reader, line)
        line.set_rate(RATE)
        data = random.Random(0).randbytes(300_000)
        reader.feed_data(data)
        read = asyncio.create_task(paced.readexactly(200_000))
        await asyncio.sleep(0.5)
        read.cancel()  # loses nothing
        await asyncio.gather(read, return_exceptions=True)
        got = await paced.readexactly(200_000)
        got += await paced.readexactly(100_000)
        assert got == data
        return got, asyncio.get_running_loop().time()

    _, took = run(main())
    assert took == pytest.approx(300_000 * WIRE_FACTOR / RATE, rel=0.1)


def test_a_paced_reader_has_what_came_with_what_it_read() -> None:
    async def main() -> None:
        reader, line = asyncio.StreamReader(), RateLimiter()
        paced = LimitedReader(reader, line)
        reader.feed_data(bytes(range(100)))
        assert paced.kept_bytes == 0
        assert await paced.readexactly(8) == bytes(range(8))
        assert paced.kept_bytes == 92
        line.set_rate(RATE)  # what is here already has been counted
        counted = line.total_bytes
        assert await paced.readexactly(92) == bytes(range(8, 100))
        assert line.total_bytes == counted == 100 * WIRE_FACTOR

    run(main())


@pytest.mark.parametrize("rate", [None, RATE])
@pytest.mark.parametrize("size", [10, 3000, AHEAD_BYTES + 10, 100_000])
def test_a_paced_reader_says_when_a_stream_ends_too_early(size: int, rate: float | None) -> None:
    async def main() -> None:
        reader, line = asyncio.StreamReader(), RateLimiter()
        line.set_rate(rate)
        paced = LimitedReader(reader, line)
        reader.feed_data(bytes(range(8)) + bytes(size - 1))
        reader.feed_eof()
        assert await paced.readexactly(8) == bytes(range(8))
        with pytest.raises(asyncio.IncompleteReadError):
            await paced.readexactly(size)

    run(main())
