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
from swarmnet_protocols.protocol_ids import ALL
from swarmnet_protocols.transport import Message, ProtocolSpec, Refusal
from swarmnet_protocols.transport.framing import FrameReader, encode
from swarmnet_protocols.transport.pacing import Line, PacedReader
from swarmnet_protocols.transport.refusing import (
    MAX_REFUSAL_BYTES,
    MAX_RETRY_S,
    REFUSED,
    encode_refusal,
    printable,
)
from tests.support.meters import a_meter

SMALL = ProtocolSpec("/test/1", max_header_bytes=50, max_payload_bytes=200)

messages = st.builds(Message, st.binary(max_size=50), st.binary(max_size=200))


def read_all(chunks: Sequence[bytes], protocol: ProtocolSpec) -> tuple[list[Message], Exception]:
    """What a reader makes of ``chunks``: messages, and how it ended."""

    async def main() -> tuple[list[Message], Exception]:
        reader = asyncio.StreamReader()
        frames = FrameReader(PacedReader(reader, Line()), protocol, a_meter())
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


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_sizes_over_the_limit_are_refused_whatever_follows(header: int, payload: int, rest: bytes) -> None:
    _, end = read_all([struct.pack(">II", header, payload) + rest], SMALL)
    if header > SMALL.max_header_bytes or payload > SMALL.max_payload_bytes:
        assert isinstance(end, ProtocolViolation)


def test_a_violation_stays_one() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack(">II", 51, 0) + encoded(Message(b"fine")))
        frames = FrameReader(PacedReader(reader, Line()), SMALL, a_meter())
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
    assert str(error).endswith(f" refuses us: {printable(reason)}")
    assert error.retry_after_s == pytest.approx(min(retry_s, MAX_RETRY_S), abs=0.001)


@given(st.integers(MAX_REFUSAL_BYTES + 1, 2**32 - 1), st.binary(max_size=50))
def test_an_oversized_refusal_is_a_violation(size_bytes: int, rest: bytes) -> None:
    received, error = read_all([struct.pack(">II", REFUSED, size_bytes) + rest], SMALL)
    assert not received
    assert isinstance(error, ProtocolViolation)


@pytest.mark.parametrize("protocol", ALL, ids=lambda protocol: protocol.id)
@given(garbage=st.binary(max_size=4096))
def test_garbage_costs_no_more_than_it_weighs(protocol: ProtocolSpec, garbage: bytes) -> None:
    tracemalloc.start()
    try:
        _, end = read_all([garbage], protocol)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(end, ProtocolViolation | StreamEnded)
    assert peak_bytes < 1 << 20
