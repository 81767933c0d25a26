"""What waits for grants gets all of them, a little ahead of what came; who grants or sends against the rules is found out."""

import asyncio
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.flow_control import (
    AHEAD_S,
    GRANT,
    GRANT_S,
    LARGE_S,
    MAX_UNASKED_BYTES,
    MIN_BYTES,
    WAIT,
    ReceiveWindow,
    SendWindow,
    due_bytes,
)
from swarmnet_protocols.net.memory import LinkProfile, MemoryNetwork
from swarmnet_protocols.net.rate_limit import BURST_S, WIRE_FACTOR, RateLimiter
from tests.support.virtual_time import run

RATE = 5e5
HEADER_BYTES = 100
PAYLOAD_BYTES = 5 * MIN_BYTES + 7


@given(
    st.integers(0, 64 << 20),
    st.integers(0, 64 << 20),
    st.floats(1.0, 1e12) | st.just(math.inf),
    st.integers(1, 100),
)
def test_a_line_has_no_more_on_its_way_than_it_takes_in_a_moment(
    left_bytes: int, on_its_way_bytes: int, rate: float, sharing: int
) -> None:
    due = due_bytes(left_bytes, on_its_way_bytes, rate, sharing)
    least = min(left_bytes, MIN_BYTES)
    if due:
        assert least <= due <= max(least, rate * GRANT_S)
        assert on_its_way_bytes <= rate * AHEAD_S / sharing
    else:
        assert left_bytes == 0 or on_its_way_bytes > rate * AHEAD_S / sharing
    assert due <= left_bytes


@given(st.integers(1, 1 << 20), st.floats(64e3, 1e8), st.lists(st.integers(1, 1 << 20)))
def test_every_payload_is_granted_to_its_end_in_grants_that_its_sender_accepts(
    payload_bytes: int, rate: float, arrivals: list[int]
) -> None:
    async def main() -> None:
        line, allowance = RateLimiter(), SendWindow()
        line.set_rate(rate)
        grants = ReceiveWindow(line, allowance.hear)
        assert MIN_BYTES <= allowance.waits_over <= max(MIN_BYTES, rate * LARGE_S)
        allowance.begin(payload_bytes)
        grants.expect(HEADER_BYTES, payload_bytes, waits=True, here_bytes=0)
        grants.take(HEADER_BYTES)
        came_bytes = 0
        while grants.is_waited_for:
            if not await grants.go_on():
                size_bytes = await allowance.spend(arrivals.pop() if arrivals else payload_bytes)
                grants.take(size_bytes)
                came_bytes += size_bytes
        assert came_bytes == payload_bytes
        assert line.sharing == 0
        seconds = asyncio.get_running_loop().time()
        assert seconds >= (payload_bytes - MIN_BYTES) * WIRE_FACTOR / rate - BURST_S - GRANT_S

    run(main())


def test_without_a_limit_nobody_is_asked_to_wait_until_there_is_one() -> None:
    line, told = RateLimiter(), list[tuple[int, int]]()

    async def main() -> None:
        grants = ReceiveWindow(line, lambda word, size_bytes: told.append((word, size_bytes)))
        grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=False, here_bytes=0)
        assert not told
        line.set_rate(RATE)
        for _ in range(2):  # what was on its way when they were asked is no violation
            grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=False, here_bytes=0)
            assert told == [(WAIT, MIN_BYTES)]
        line.set_rate(None)
        grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=True, here_bytes=HEADER_BYTES)
        assert await grants.go_on() == PAYLOAD_BYTES
        assert told == [(WAIT, MIN_BYTES), (GRANT, PAYLOAD_BYTES)]

    run(main())


def test_who_was_asked_to_wait_and_does_not_is_found_out() -> None:
    async def main() -> None:
        line = RateLimiter()
        line.set_rate(RATE)
        grants = ReceiveWindow(line, lambda *_: None)
        grants.expect(HEADER_BYTES, MIN_BYTES, waits=False, here_bytes=0)
        with pytest.raises(ProtocolViolation, match="should have waited"):
            grants.expect(HEADER_BYTES, MIN_BYTES + 1, waits=False, here_bytes=0)

    run(main())


@pytest.mark.parametrize(
    ("rate", "waits_over"), [(64e3, MIN_BYTES), (10e6, 200_000), (1e15, MAX_UNASKED_BYTES)]
)
def test_what_a_line_takes_in_a_moment_need_not_wait(rate: float, waits_over: int) -> None:
    async def main() -> None:
        line, allowance = RateLimiter(), SendWindow()
        line.set_rate(rate)
        ReceiveWindow(line, allowance.hear)
        assert allowance.waits_over == waits_over

    run(main())


@pytest.mark.parametrize("early_bytes", [0, 1])
def test_who_sends_more_than_was_granted_is_found_out(early_bytes: int) -> None:
    async def main() -> None:
        line = RateLimiter()
        line.set_rate(RATE)
        grants = ReceiveWindow(line, lambda *_: None)
        grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=True, here_bytes=HEADER_BYTES)
        granted_bytes = await grants.go_on()
        assert grants.most_bytes == granted_bytes + 1
        if not early_bytes:
            grants.take(granted_bytes)
            return
        with pytest.raises(ProtocolViolation, match="more of a payload came"):
            grants.take(grants.most_bytes)
        grants.end()
        assert line.sharing == 0

    run(main())


def test_what_came_before_it_was_granted_is_found_out_too() -> None:
    async def main() -> None:
        line = RateLimiter()
        grants = ReceiveWindow(line, lambda *_: None)
        for _ in range(2):
            with pytest.raises(ProtocolViolation, match="more of a payload came"):
                grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=True, here_bytes=HEADER_BYTES + 1)
        grants.end()
        assert line.sharing == 0

    run(main())


def test_the_end_of_the_payload_is_the_most_that_may_come() -> None:
    """The byte after it belongs to the next message."""

    async def main() -> None:
        grants = ReceiveWindow(RateLimiter(), lambda *_: None)
        grants.expect(HEADER_BYTES, PAYLOAD_BYTES, waits=True, here_bytes=0)
        await grants.go_on()
        assert grants.most_bytes == HEADER_BYTES + PAYLOAD_BYTES
        grants.take(HEADER_BYTES + PAYLOAD_BYTES)
        assert not grants.is_waited_for

    run(main())


@pytest.mark.parametrize(
    "grants",
    [
        (MIN_BYTES - 1,),
        (PAYLOAD_BYTES + 1,),
        (0xFFFF_FFFF,),
        (0,),
        (PAYLOAD_BYTES, 1),
        (PAYLOAD_BYTES - 1, 2),
    ],
)
def test_grants_that_nobody_waits_for_or_that_are_not_worth_it_are_violations(
    grants: tuple[int, ...],
) -> None:
    async def main() -> None:
        allowance = SendWindow()
        allowance.begin(PAYLOAD_BYTES)
        for grant in grants[:-1]:
            allowance.hear(GRANT, grant)
        with pytest.raises(ProtocolViolation, match="a grant of"):
            allowance.hear(GRANT, grants[-1])

    run(main())


def test_so_are_those_where_nothing_is_sent_and_a_second_limit() -> None:
    async def main() -> None:
        allowance = SendWindow()
        with pytest.raises(ProtocolViolation, match="a grant of"):
            allowance.hear(GRANT, MIN_BYTES)
        allowance.hear(WAIT, 0)
        assert allowance.waits_over == MIN_BYTES, "a few tokens never wait"
        with pytest.raises(ProtocolViolation, match="another limit"):
            allowance.hear(WAIT, 1 << 20)

    run(main())


def test_who_waits_for_a_grant_is_told_when_the_stream_is_closed() -> None:
    async def main() -> None:
        allowance = SendWindow()
        allowance.begin(PAYLOAD_BYTES)
        waiting = asyncio.create_task(allowance.spend(PAYLOAD_BYTES))
        await asyncio.sleep(1)
        assert not waiting.done()
        allowance.end()
        with pytest.raises(StreamEnded):
            await waiting

    run(main())


@pytest.mark.parametrize("streams", [1, 5])
def test_a_line_is_full_although_a_grant_takes_a_fifth_of_a_second_there_and_back(streams: int) -> None:
    rate, size_bytes = 2.5e6, 5_000_000  # 20 mbit/s, two seconds
    granted = ProtocolSpec("/test/granted/1", max_payload_bytes=size_bytes, is_granted=True)
    sender, reader = PeerId("sender"), PeerId("reader")

    async def main() -> float:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.1, bytes_per_s=125e6))
        loop = asyncio.get_running_loop()
        read = asyncio.Semaphore(0)

        async def take(stream: Stream) -> None:
            await stream.send(Message(b"welcome"))
            assert len((await stream.receive()).payload) == size_bytes // streams
            read.release()

        async with network.transport(sender) as a, network.transport(reader) as b:
            b.pace.down.set_rate(rate)
            await b.serve(granted, take)
            opened = [await a.open(reader, granted, deadline_s=1.0) for _ in range(streams)]
            for stream in opened:
                await stream.receive()
            listening = [asyncio.create_task(stream.receive()) for stream in opened]
            began = loop.time()
            payload = bytes(size_bytes // streams)
            await asyncio.gather(*(stream.send(Message(b"", payload)) for stream in opened))
            for _ in opened:
                await read.acquire()
            took_s = loop.time() - began
        await asyncio.gather(*listening, return_exceptions=True)
        return took_s

    assert run(main()) == pytest.approx(0.2 + size_bytes * WIRE_FACTOR / rate, rel=0.1)
