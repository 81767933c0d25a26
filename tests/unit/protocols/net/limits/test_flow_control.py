"""Credit is granted for the whole payload, within a bound in flight; peers that violate flow
control are detected."""

import asyncio
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.limits.flow_control import (
    CREDIT,
    CREDIT_S,
    IN_FLIGHT_S,
    LIMIT,
    MAX_UNCREDITED_BYTES,
    MIN_BYTES,
    UNCREDITED_S,
    ReceiveWindow,
    SendWindow,
    due_bytes,
)
from swarmnet_protocols.net.limits.rate_limit import BURST_S, WIRE_FACTOR, RateLimiter
from tests.defences import defence
from tests.support.attacks.switched_off import overlooking
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run

RATE = 5e5
HEADER_BYTES = 100
PAYLOAD_BYTES = 5 * MIN_BYTES + 7


@given(
    st.integers(0, 64 << 20),
    st.integers(0, 64 << 20),
    st.floats(1.0, 1e12) | st.just(math.inf),
    st.integers(1, 100),
)
def test_credit_in_flight_is_bounded(
    left_bytes: int, in_flight_bytes: int, rate: float, open_windows: int
) -> None:
    due = due_bytes(left_bytes, in_flight_bytes, rate, open_windows)
    least = min(left_bytes, MIN_BYTES)
    if due:
        assert least <= due <= max(least, rate * CREDIT_S)
        assert in_flight_bytes <= rate * IN_FLIGHT_S / open_windows
    else:
        assert left_bytes == 0 or in_flight_bytes > rate * IN_FLIGHT_S / open_windows
    assert due <= left_bytes


@given(st.integers(1, 1 << 20), st.floats(64e3, 1e8), st.lists(st.integers(1, 1 << 20)))
def test_every_payload_gets_credit_for_all_of_it(
    payload_bytes: int, rate: float, arrivals: list[int]
) -> None:
    async def main() -> None:
        limiter, window = RateLimiter(), SendWindow()
        limiter.set_rate(rate)
        receiving = ReceiveWindow(limiter, window.on_control)
        assert MIN_BYTES <= window.max_uncredited_bytes <= max(MIN_BYTES, rate * UNCREDITED_S)
        window.start(payload_bytes)
        receiving.start(HEADER_BYTES, payload_bytes, needs_credit=True, received_bytes=0)
        receiving.received(HEADER_BYTES)
        came_bytes = 0
        while receiving.is_open:
            if not await receiving.grant():
                size_bytes = await window.acquire(arrivals.pop() if arrivals else payload_bytes)
                receiving.received(size_bytes)
                came_bytes += size_bytes
        assert came_bytes == payload_bytes
        assert limiter.open_windows == 0
        seconds = asyncio.get_running_loop().time()
        assert seconds >= (payload_bytes - MIN_BYTES) * WIRE_FACTOR / rate - BURST_S - CREDIT_S

    run(main())


def test_a_limit_is_sent_once_the_link_is_limited() -> None:
    limiter, sent = RateLimiter(), list[tuple[int, int]]()

    async def main() -> None:
        receiving = ReceiveWindow(limiter, lambda *control: sent.append(control))
        receiving.start(HEADER_BYTES, PAYLOAD_BYTES, needs_credit=False, received_bytes=0)
        assert not sent
        limiter.set_rate(RATE)
        for _ in range(2):  # a payload in flight when the limit is sent is no violation
            receiving.start(HEADER_BYTES, PAYLOAD_BYTES, needs_credit=False, received_bytes=0)
            assert sent == [(LIMIT, MIN_BYTES)]
        limiter.set_rate(None)
        receiving.start(HEADER_BYTES, PAYLOAD_BYTES, needs_credit=True, received_bytes=HEADER_BYTES)
        assert await receiving.grant() == PAYLOAD_BYTES
        assert sent == [(LIMIT, MIN_BYTES), (CREDIT, PAYLOAD_BYTES)]

    run(main())


def test_a_large_payload_without_credit_is_a_violation() -> None:
    async def main() -> None:
        limiter = RateLimiter()
        limiter.set_rate(RATE)
        receiving = ReceiveWindow(limiter, lambda *_: None)
        receiving.start(HEADER_BYTES, MIN_BYTES, needs_credit=False, received_bytes=0)
        with pytest.raises(ProtocolViolation, match="without credit"):
            receiving.start(HEADER_BYTES, MIN_BYTES + 1, needs_credit=False, received_bytes=0)

    run(main())


@pytest.mark.parametrize(
    ("rate", "max_uncredited_bytes"), [(64e3, MIN_BYTES), (10e6, 200_000), (1e15, MAX_UNCREDITED_BYTES)]
)
def test_payloads_that_the_link_takes_at_once_need_no_credit(rate: float, max_uncredited_bytes: int) -> None:
    async def main() -> None:
        limiter, window = RateLimiter(), SendWindow()
        limiter.set_rate(rate)
        ReceiveWindow(limiter, window.on_control)
        assert window.max_uncredited_bytes == max_uncredited_bytes

    run(main())


@pytest.mark.parametrize("excess_bytes", [0, 1])
def test_exceeding_the_credit_is_a_violation(excess_bytes: int) -> None:
    async def main() -> None:
        limiter = RateLimiter()
        limiter.set_rate(RATE)
        receiving = ReceiveWindow(limiter, lambda *_: None)
        receiving.start(HEADER_BYTES, PAYLOAD_BYTES, needs_credit=True, received_bytes=HEADER_BYTES)
        granted_bytes = await receiving.grant()
        assert receiving.max_read_bytes == granted_bytes + 1
        if not excess_bytes:
            receiving.received(granted_bytes)
            return
        with pytest.raises(ProtocolViolation, match="more of a payload came"):
            receiving.received(receiving.max_read_bytes)
        receiving.close()
        assert limiter.open_windows == 0

    run(main())


def test_sending_before_the_first_credit_is_a_violation() -> None:
    async def main() -> None:
        limiter = RateLimiter()
        receiving = ReceiveWindow(limiter, lambda *_: None)
        for _ in range(2):
            with pytest.raises(ProtocolViolation, match="more of a payload came"):
                receiving.start(
                    HEADER_BYTES, PAYLOAD_BYTES, needs_credit=True, received_bytes=HEADER_BYTES + 1
                )
        receiving.close()
        assert limiter.open_windows == 0

    run(main())


def test_no_more_than_the_rest_of_the_payload_is_read() -> None:
    """The byte after it belongs to the next message."""

    async def main() -> None:
        receiving = ReceiveWindow(RateLimiter(), lambda *_: None)
        receiving.start(HEADER_BYTES, PAYLOAD_BYTES, needs_credit=True, received_bytes=0)
        await receiving.grant()
        assert receiving.max_read_bytes == HEADER_BYTES + PAYLOAD_BYTES
        receiving.received(HEADER_BYTES + PAYLOAD_BYTES)
        assert not receiving.is_open

    run(main())


@defence(
    "a receiver that grants too little or too much credit is disconnected",
    off=overlooking(SendWindow, "on_control"),
    credits=(MIN_BYTES - 1,),
)
@pytest.mark.parametrize(
    "credits",
    [
        (MIN_BYTES - 1,),
        (PAYLOAD_BYTES + 1,),
        (0xFFFF_FFFF,),
        (0,),
        (PAYLOAD_BYTES, 1),
        (PAYLOAD_BYTES - 1, 2),
    ],
)
def test_too_little_or_too_much_credit_is_a_violation(
    credits: tuple[int, ...],
) -> None:
    async def main() -> None:
        window = SendWindow()
        window.start(PAYLOAD_BYTES)
        for credit in credits[:-1]:
            window.on_control(CREDIT, credit)
        with pytest.raises(ProtocolViolation, match="credit of"):
            window.on_control(CREDIT, credits[-1])

    run(main())


def test_unexpected_credit_and_a_second_limit_are_violations() -> None:
    async def main() -> None:
        window = SendWindow()
        with pytest.raises(ProtocolViolation, match="credit of"):
            window.on_control(CREDIT, MIN_BYTES)
        window.on_control(LIMIT, 0)
        assert window.max_uncredited_bytes == MIN_BYTES, "a few tokens need no credit"
        with pytest.raises(ProtocolViolation, match="a second limit"):
            window.on_control(LIMIT, 1 << 20)

    run(main())


def test_closing_the_stream_ends_the_wait_for_credit() -> None:
    async def main() -> None:
        window = SendWindow()
        window.start(PAYLOAD_BYTES)
        waiting = asyncio.create_task(window.acquire(PAYLOAD_BYTES))
        await asyncio.sleep(1)
        assert not waiting.done()
        window.close()
        with pytest.raises(StreamEnded):
            await waiting

    run(main())


@pytest.mark.parametrize("streams", [1, 5])
def test_the_link_is_full_at_a_round_trip_of_a_fifth_of_a_second(streams: int) -> None:
    rate, size_bytes = 2.5e6, 5_000_000  # 20 mbit/s, two seconds
    protocol = ProtocolSpec("/test/limited/1", max_payload_bytes=size_bytes, has_flow_control=True)
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
            b.link.down.set_rate(rate)
            await b.serve(protocol, take)
            opened = [await a.open(reader, protocol, deadline_s=1.0) for _ in range(streams)]
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
