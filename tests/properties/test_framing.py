"""Frames: what goes in comes out, and nothing a peer sends costs more memory than it sent."""

import asyncio
import itertools
import struct
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded, StreamRefused
from swarmnet_protocols.net import Message, ProtocolSpec, Refusal
from swarmnet_protocols.net.flow_control import (
    CREDIT,
    LIMIT,
    NEEDS_CREDIT,
    LimitedReader,
    ReceiveWindow,
    SendWindow,
)
from swarmnet_protocols.net.framing import FrameReader, encode
from swarmnet_protocols.net.protocol_ids import ALL
from swarmnet_protocols.net.rate_limit import RateLimiter
from swarmnet_protocols.net.refusal import (
    ENDED,
    MAX_REASON_CHARS,
    MAX_REFUSAL_BYTES,
    MAX_RETRY_S,
    NO_REASON,
    REFUSED,
    encode_refusal,
    printable,
)
from swarmnet_protocols.wire import handshake_pb2 as pb
from tests.defences import nothing
from tests.support.meters import a_meter

SMALL = ProtocolSpec("/test/1", max_header_bytes=50, max_payload_bytes=200)

messages = st.builds(Message, st.binary(max_size=50), st.binary(max_size=200))
LOCAL_LAYERS = (0, SMALL.max_header_bytes, SMALL.max_payload_bytes, MAX_REFUSAL_BYTES, NEEDS_CREDIT, REFUSED)
sizes = st.integers(0, 2**32 - 1) | st.sampled_from(
    [edge + by for edge in LOCAL_LAYERS for by in (-1, 0, 1) if 0 <= edge + by < 2**32]
)


HALVES = ("", "waits", "grants")


def read_all(
    chunks: Sequence[bytes], protocol: ProtocolSpec, half: str = ""
) -> tuple[list[Message], Exception]:
    """What a reader makes of ``chunks``: messages, and how it ended. It may be one who waits for grants, or one who grants."""

    async def main() -> tuple[list[Message], Exception]:
        reader, line = asyncio.StreamReader(), RateLimiter()
        allowance = SendWindow() if half == "waits" else None
        grants = ReceiveWindow(line, nothing) if half == "grants" else None
        paced = LimitedReader(reader, line, grants)
        frames = FrameReader(paced, protocol, a_meter(), allowance=allowance, grants=grants)
        received: list[Message] = []

        async def read() -> Exception:
            while True:
                try:
                    received.append(await frames.read())
                except (ProtocolViolation, StreamEnded) as error:
                    return error

        task = asyncio.create_task(read())
        for chunk in chunks:
            if chunk:
                reader.feed_data(chunk)
            await asyncio.sleep(0)
        reader.feed_eof()
        return received, await task

    return asyncio.run(main())


def encoded(message: Message, protocol: ProtocolSpec = SMALL) -> bytes:
    head, payload = encode(message, protocol)
    return head + bytes(payload)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(borders)]


@given(st.lists(messages, max_size=5), st.lists(st.integers(min_value=0), max_size=10))
def test_round_trip_in_any_pieces(sent: list[Message], places: list[int]) -> None:
    received, end = read_all(cut(b"".join(map(encoded, sent)), places), SMALL)
    assert received == sent
    assert isinstance(end, StreamEnded)
    assert "within" not in str(end)


@given(messages, st.integers(min_value=1))
def test_every_truncation_is_seen(message: Message, short: int) -> None:
    data = encoded(message)
    received, end = read_all([data[: -(1 + short % len(data))]], SMALL)
    assert received == []
    assert isinstance(end, StreamEnded)


@given(sizes, sizes, st.binary(max_size=300))
def test_what_comes_of_two_sizes_whatever_follows(first: int, second: int, rest: bytes) -> None:
    """Over a limit they are refused at once. Within, they are waited for; and what came is the message, or the last word."""
    received, end = read_all([struct.pack(">II", first, second) + rest], SMALL)
    if first == REFUSED:
        assert received == []
        if second > MAX_REFUSAL_BYTES:
            assert isinstance(end, ProtocolViolation)
        elif second > len(rest) or second == 0:  # cut short, or no refusal at all: a plain end
            assert type(end) is StreamEnded
        else:  # whether these bytes say why is for protobuf to tell
            assert isinstance(end, StreamRefused | ProtocolViolation)
    elif first > SMALL.max_header_bytes or second > SMALL.max_payload_bytes:
        assert received == []
        assert isinstance(end, ProtocolViolation)
    elif first + second > len(rest):
        assert received == []
        assert type(end) is StreamEnded
    else:
        assert received[0] == Message(rest[:first], rest[first : first + second])


@given(sizes, sizes, st.binary(max_size=300))
def test_a_payload_that_waits_comes_after_it_was_granted_and_no_sooner(
    first: int, second: int, rest: bytes
) -> None:
    """Nor to anybody who grants nothing. All of ``rest`` is here before anything is granted."""
    header_bytes = min(first, NEEDS_CREDIT - 4)  # what is over is the word for something else
    frame = struct.pack(">II", NEEDS_CREDIT + header_bytes, second) + rest
    for half in ("", "waits"):
        assert isinstance(read_all([frame], SMALL, half)[1], ProtocolViolation)
    received, end = read_all([frame], SMALL, "grants")
    if (
        header_bytes > SMALL.max_header_bytes
        or second > SMALL.max_payload_bytes
        or (second and len(rest) > header_bytes)
    ):
        assert isinstance(end, ProtocolViolation)
    elif second or len(rest) < header_bytes:
        assert type(end) is StreamEnded
    else:
        assert received[0] == Message(rest[:header_bytes])
        return
    assert not received


@given(sizes, st.sampled_from([LIMIT, CREDIT]))
def test_what_is_said_of_grants_is_heard_by_those_who_wait_and_by_nobody_else(size: int, word: int) -> None:
    frame = struct.pack(">II", word, size) + encoded(Message(b"next"))
    for half in HALVES:
        received, end = read_all([frame], SMALL, half)
        is_heard = half == "waits" and word == LIMIT
        assert received == ([Message(b"next")] if is_heard else [])
        assert isinstance(end, StreamEnded if is_heard else ProtocolViolation)


def test_a_violation_stays_one() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack(">II", 51, 0) + encoded(Message(b"fine")))
        frames = FrameReader(LimitedReader(reader, RateLimiter()), SMALL, a_meter())
        for _ in range(3):
            with pytest.raises(ProtocolViolation):
                await frames.read()

    asyncio.run(main())


@pytest.mark.parametrize(
    "message", [Message(bytes(51)), Message(b"", bytes(201)), Message(b"", memoryview(bytes(204)).cast("I"))]
)
def test_oversized_messages_are_not_encoded(message: Message) -> None:
    with pytest.raises(ProtocolViolation):
        encode(message, SMALL)


@given(st.text(), st.floats(0, 100), st.lists(st.integers(0, 2000), max_size=5), st.binary(max_size=50))
def test_a_refusal_arrives_in_any_pieces_and_is_the_last_word(
    reason: str, retry_s: float, places: list[int], rest: bytes
) -> None:
    frame = encode_refusal(Refusal(reason, retry_s)) + rest
    received, error = read_all(cut(encoded(Message(b"before")) + frame, places), SMALL)
    assert received == [Message(b"before")]
    assert isinstance(error, StreamRefused)
    assert str(error).endswith(f" refuses us: {printable(reason or NO_REASON)}")
    assert error.retry_after_s == pytest.approx(min(retry_s, MAX_RETRY_S), abs=0.001)


@pytest.mark.parametrize("over", [0, 1])
def test_a_refusal_of_the_largest_size_is_heard_and_one_of_a_byte_more_is_not(over: int) -> None:
    said = pb.Refusal(reason="a" * 2000)
    said.reason += "a" * (MAX_REFUSAL_BYTES + over - said.ByteSize())
    assert said.ByteSize() == MAX_REFUSAL_BYTES + over
    frame = struct.pack(">II", REFUSED, said.ByteSize()) + said.SerializeToString()
    _, error = read_all([frame], SMALL)
    assert isinstance(error, ProtocolViolation if over else StreamRefused)


def test_the_longest_reason_is_cut_to_what_is_heard() -> None:
    longest = "\U0001f41d" * 1000  # four bytes each
    _, error = read_all([encode_refusal(Refusal(longest, 1e9))], SMALL)
    assert isinstance(error, StreamRefused)
    assert str(error).endswith(f" refuses us: {longest[:MAX_REASON_CHARS]}")


@given(st.lists(st.integers(0, 2000), max_size=5), st.binary(max_size=50))
def test_the_end_of_a_stream_is_the_last_word(places: list[int], rest: bytes) -> None:
    received, error = read_all(cut(encoded(Message(b"before")) + ENDED + rest, places), SMALL)
    assert received == [Message(b"before")]
    assert isinstance(error, StreamEnded)
    assert not isinstance(error, StreamRefused)
    assert str(error) == "the stream ended"


@given(st.integers(MAX_REFUSAL_BYTES + 1, 2**32 - 1), st.binary(max_size=50))
def test_an_oversized_refusal_is_a_violation(size_bytes: int, rest: bytes) -> None:
    received, error = read_all([struct.pack(">II", REFUSED, size_bytes) + rest], SMALL)
    assert not received
    assert isinstance(error, ProtocolViolation)


@pytest.mark.parametrize("protocol", ALL, ids=lambda protocol: protocol.id)
@given(garbage=st.binary(max_size=4096), half=st.sampled_from(HALVES))
def test_garbage_costs_no_more_than_it_weighs(protocol: ProtocolSpec, garbage: bytes, half: str) -> None:
    def peak_bytes() -> int:
        tracemalloc.start()
        try:
            _, end = read_all([garbage], protocol, half)
            assert isinstance(end, ProtocolViolation | StreamEnded)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # Python's table of interned strings may happen to grow meanwhile, by megabytes. What garbage costs, it costs each time.
    assert any(peak_bytes() < 1 << 20 for _ in range(2))
