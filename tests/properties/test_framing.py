"""Frames: what goes in comes out, and nothing a peer sends costs more memory than it sent."""

import asyncio
import itertools
import struct
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import Message, ProtocolSpec, framing
from swarmnet_protocols.net.framing import (
    ENDED,
    MAX_REFUSAL_BYTES,
    REFUSED,
    FrameReader,
    encode,
    encode_refusal,
)
from swarmnet_protocols.net.limits.flow_control import (
    CREDIT,
    LIMIT,
    NEEDS_CREDIT,
    LimitedReader,
    ReceiveWindow,
    SendWindow,
)
from swarmnet_protocols.net.limits.rate_limit import RateLimiter
from swarmnet_protocols.net.protocol_ids import ALL
from swarmnet_protocols.net.refusal import (
    MAX_DETAIL_CHARS,
    MAX_RETRY_S,
    Refusal,
    Refused,
    printable,
)
from swarmnet_protocols.wire import refusal_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.network.stream_scopes import new_scope

SMALL = ProtocolSpec("/test/1", max_header_bytes=50, max_payload_bytes=200)

messages = st.builds(Message, st.binary(max_size=50), st.binary(max_size=200))
LIMITS = (0, SMALL.max_header_bytes, SMALL.max_payload_bytes, MAX_REFUSAL_BYTES, NEEDS_CREDIT, REFUSED)
sizes = st.integers(0, 2**32 - 1) | st.sampled_from(
    [limit + by for limit in LIMITS for by in (-1, 0, 1) if 0 <= limit + by < 2**32]
)


WINDOWS = ("", "send", "receive")


def read_all(
    chunks: Sequence[bytes], protocol: ProtocolSpec, window: str = ""
) -> tuple[list[Message], Exception]:
    """The messages read from ``chunks``, and the error at the end. ``window``: the side of flow
    control that reads."""

    async def main() -> tuple[list[Message], Exception]:
        reader, limiter = asyncio.StreamReader(), RateLimiter()
        receiving = ReceiveWindow(limiter, nothing) if window == "receive" else None
        frames = FrameReader(
            LimitedReader(reader, limiter, receiving),
            protocol,
            new_scope(),
            send_window=SendWindow() if window == "send" else None,
            receive_window=receiving,
        )
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
def test_messages_cut_into_any_pieces_are_read_back(sent: list[Message], places: list[int]) -> None:
    received, end = read_all(cut(b"".join(map(encoded, sent)), places), SMALL)
    assert received == sent
    assert isinstance(end, StreamEnded)
    assert "within" not in str(end)


@given(messages, st.integers(min_value=1))
def test_every_truncation_is_detected(message: Message, short: int) -> None:
    data = encoded(message)
    received, end = read_all([data[: -(1 + short % len(data))]], SMALL)
    assert received == []
    assert isinstance(end, StreamEnded)


@given(sizes, sizes, st.binary(max_size=300))
def test_frames_with_any_announced_sizes_are_read_or_refused(first: int, second: int, rest: bytes) -> None:
    """Sizes over a limit are violations at once; within it, the bytes are a message, a refusal or
    the end."""
    received, end = read_all([struct.pack(">II", first, second) + rest], SMALL)
    if first == REFUSED:
        assert received == []
        if second > MAX_REFUSAL_BYTES:
            assert isinstance(end, ProtocolViolation)
        elif second > len(rest) or second == 0:  # cut short, or no refusal at all: a plain end
            assert type(end) is StreamEnded
        else:  # protobuf decides whether these bytes are a refusal
            assert isinstance(end, Refused | ProtocolViolation)
    elif first > SMALL.max_header_bytes or second > SMALL.max_payload_bytes:
        assert received == []
        assert isinstance(end, ProtocolViolation)
    elif first + second > len(rest):
        assert received == []
        assert type(end) is StreamEnded
    else:
        assert received[0] == Message(rest[:first], rest[first : first + second])


@given(sizes, sizes, st.binary(max_size=300))
def test_a_payload_before_its_credit_is_a_violation(first: int, second: int, rest: bytes) -> None:
    """So is a payload that needs credit at a reader that grants none. All of ``rest`` is there
    before any credit."""
    header_bytes = min(first, NEEDS_CREDIT - 4)  # larger values mark other frames
    frame = struct.pack(">II", NEEDS_CREDIT + header_bytes, second) + rest
    for window in ("", "send"):
        assert isinstance(read_all([frame], SMALL, window)[1], ProtocolViolation)
    received, end = read_all([frame], SMALL, "receive")
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
def test_only_a_send_window_handles_flow_control_frames(size: int, kind: int) -> None:
    frame = struct.pack(">II", kind, size) + encoded(Message(b"next"))
    for window in WINDOWS:
        received, end = read_all([frame], SMALL, window)
        is_handled = window == "send" and kind == LIMIT
        assert received == ([Message(b"next")] if is_handled else [])
        assert isinstance(end, StreamEnded if is_handled else ProtocolViolation)


def test_a_violation_is_raised_at_every_later_read() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack(">II", 51, 0) + encoded(Message(b"fine")))
        frames = FrameReader(LimitedReader(reader, RateLimiter()), SMALL, new_scope())
        for _ in range(3):
            with pytest.raises(ProtocolViolation):
                await frames.read()

    asyncio.run(main())


@defence(
    "messages have a size limit", off=replacing(framing, "check_sizes", nothing), message=Message(bytes(51))
)
@pytest.mark.parametrize(
    "message", [Message(bytes(51)), Message(b"", bytes(201)), Message(b"", memoryview(bytes(204)).cast("I"))]
)
def test_oversized_messages_are_not_encoded(message: Message) -> None:
    with pytest.raises(ProtocolViolation):
        encode(message, SMALL)


@given(st.text(), st.floats(0, 100), st.lists(st.integers(0, 2000), max_size=5), st.binary(max_size=50))
def test_a_refusal_arrives_in_any_pieces_and_ends_the_stream(
    reason: str, retry_s: float, places: list[int], rest: bytes
) -> None:
    frame = encode_refusal(Refusal(pb.REASON_INTERNAL, reason, retry_s)) + rest
    received, error = read_all(cut(encoded(Message(b"before")) + frame, places), SMALL)
    assert received == [Message(b"before")]
    assert isinstance(error, Refused)
    assert str(error).endswith(f" refused the stream: {printable(reason) or 'REASON_INTERNAL'}")
    assert error.retry_after_s == pytest.approx(min(retry_s, MAX_RETRY_S), abs=0.001)


@pytest.mark.parametrize("over", [0, 1])
def test_refusals_have_a_largest_size(over: int) -> None:
    encoded_refusal = pb.Refusal(detail="a" * 2000)
    encoded_refusal.detail += "a" * (MAX_REFUSAL_BYTES + over - encoded_refusal.ByteSize())
    assert encoded_refusal.ByteSize() == MAX_REFUSAL_BYTES + over
    frame = struct.pack(">II", REFUSED, encoded_refusal.ByteSize()) + encoded_refusal.SerializeToString()
    _, error = read_all([frame], SMALL)
    assert isinstance(error, ProtocolViolation if over else Refused)


def test_long_reasons_are_cut() -> None:
    longest = "\U0001f41d" * 1000  # four bytes each
    _, error = read_all([encode_refusal(Refusal(pb.REASON_INTERNAL, longest, 1e9))], SMALL)
    assert isinstance(error, Refused)
    assert str(error).endswith(f" refused the stream: {longest[:MAX_DETAIL_CHARS]}")


@given(st.lists(st.integers(0, 2000), max_size=5), st.binary(max_size=50))
def test_nothing_is_read_after_the_end_frame(places: list[int], rest: bytes) -> None:
    received, error = read_all(cut(encoded(Message(b"before")) + ENDED + rest, places), SMALL)
    assert received == [Message(b"before")]
    assert isinstance(error, StreamEnded)
    assert not isinstance(error, Refused)
    assert str(error) == "the stream ended"


@defence(
    "refusals have a size limit",
    off=replacing(framing, "MAX_REFUSAL_BYTES", 1 << 40),
    size_bytes=1 << 31,
    rest=b"",
)
@given(st.integers(MAX_REFUSAL_BYTES + 1, 2**32 - 1), st.binary(max_size=50))
def test_an_oversized_refusal_is_a_violation(size_bytes: int, rest: bytes) -> None:
    received, error = read_all([struct.pack(">II", REFUSED, size_bytes) + rest], SMALL)
    assert not received
    assert isinstance(error, ProtocolViolation)


LARGEST = max(ALL, key=lambda each: each.max_header_bytes + each.max_payload_bytes)
announced = st.tuples(
    st.integers(0, LARGEST.max_header_bytes), st.integers(0, LARGEST.max_payload_bytes)
).map(lambda sizes: struct.pack(">II", *sizes))


@given(announced=announced | st.just(b""), garbage=st.binary(max_size=4096), window=st.sampled_from(WINDOWS))
def test_garbage_takes_no_more_memory_than_its_size(announced: bytes, garbage: bytes, window: str) -> None:
    """Also if it begins like a message of a size that the protocol allows."""

    def peak_bytes() -> int:
        tracemalloc.start()
        try:
            _, end = read_all([announced + garbage], LARGEST, window)
            assert isinstance(end, ProtocolViolation | StreamEnded)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # Python's table of interned strings may happen to grow meanwhile, by megabytes. What garbage
    # costs, it costs each time.
    assert any(peak_bytes() < 1 << 20 for _ in range(2))
