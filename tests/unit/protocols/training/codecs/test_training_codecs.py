"""Codecs: the format is pinned, malformed payloads are refused, and error feedback makes up for the
losses."""

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.training.codecs import ALIGNMENT, Codec, ErrorFeedback, get_codec
from tests.support.models.rounding import UNIT

CODECS = ("float32", "bfloat16", "float16", "int8", "int4", "fp4", "topk")
NAN, INFINITY = float("nan"), float("inf")


def fixed_vector(count: int) -> torch.Tensor:
    """Values of either sign over five orders of magnitude, the same everywhere: integers times
    powers of two."""
    places = np.arange(count, dtype=np.uint64)
    mixed = (places * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(1 << 32)
    signed = (mixed >> np.uint64(8)).astype(np.float64) - (1 << 23)
    return torch.from_numpy((signed * 2.0 ** -(23.0 + places % 17)).astype(np.float32))


def bfloat16_bytes(*values: float) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


GOLDEN = {
    "float32": ("414c9448323cd3c5", "414c9448323cd3c5"),
    "bfloat16": ("e17270e9069d0171", "0a2e780cef2346ff"),
    "float16": ("46de2b70701b013f", "603e6ee05833a482"),
    "int8": ("fe162e5d41467e83", "45ebaa56f2e85b70"),
    "int4": ("82379cda05b2c8f8", "4057510ef3190b24"),
    "fp4": ("df2998ffb9611d0a", "0bec1919ee8605fb"),
    "topk": ("322a3af646fe3fb7", "f235179481c93b9f"),
}
"""The first eight bytes of the SHA-256 of a payload, and of the bits it decodes to."""


@pytest.mark.parametrize("name", CODECS)
def test_the_format_does_not_change_unnoticed(name: str) -> None:
    values = fixed_vector(ALIGNMENT + 777)
    payload = get_codec(name).encode(values)
    decoded = get_codec(name).decode(payload, len(values)).numpy().tobytes()
    digests = hashlib.sha256(payload).hexdigest()[:16], hashlib.sha256(decoded).hexdigest()[:16]
    assert digests == GOLDEN[name]


@pytest.mark.parametrize("name", CODECS)
def test_a_long_vector_decodes_as_its_parts_do(name: str) -> None:
    """Long enough that encoder and decoder themselves work in parts, which these do not line up
    with."""
    codec, values = get_codec(name), fixed_vector((1 << 18) + 5 * ALIGNMENT + 77)
    parts = torch.split(values, 7 * ALIGNMENT)
    decoded = torch.cat([codec.decode(codec.encode(part), len(part)) for part in parts])
    assert torch.equal(codec.decode(codec.encode(values), len(values)), decoded)


def test_an_unknown_codec_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="int5"):
        get_codec("int5")


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_values_that_are_not_finite_are_not_encoded(name: str, bad: float) -> None:
    values = fixed_vector(ALIGNMENT + 3)
    for place in (0, ALIGNMENT + 2):
        broken = values.clone()
        broken[place] = bad
        with pytest.raises(ValueError, match="not finite"):
            get_codec(name).encode(broken)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 64, 257, 4097])
def test_a_payload_of_another_length_is_refused(name: str, count: int) -> None:
    codec = get_codec(name)
    payload = bytes(codec.encode(fixed_vector(count)))
    with pytest.raises(ProtocolViolation, match="bytes for"):
        codec.decode(payload + b"\0", count)
    if count:
        with pytest.raises(ProtocolViolation, match="bytes for"):
            codec.decode(payload[:-1], count)


@pytest.mark.parametrize("name", CODECS)
def test_no_memory_is_allocated_for_a_count_beyond_the_payload(name: str) -> None:
    with pytest.raises(ProtocolViolation, match="bytes for"):
        get_codec(name).decode(b"\0" * 120, 1 << 50)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "float32"])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_the_decoded_values_do_not_share_memory_with_the_payload(
    name: str, wrap: Callable[[bytes], bytes]
) -> None:
    codec, values = get_codec(name), fixed_vector(100)
    payload = wrap(codec.encode(values))
    before = bytes(payload)
    codec.decode(payload, 100).zero_()
    assert bytes(payload) == before


@pytest.mark.parametrize(("name", "form"), [("float32", "<f"), ("float16", "<e"), ("bfloat16", None)])
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_floats_that_are_not_finite_are_refused(name: str, form: str | None, bad: float) -> None:
    good = bytes(get_codec(name).encode(torch.ones(2)))
    payload = good + (struct.pack(form, bad) if form else bfloat16_bytes(bad))
    with pytest.raises(ProtocolViolation, match="not finite"):
        get_codec(name).decode(payload, 3)


BAD_SCALES = [NAN, INFINITY, 2.0**100, 2.0**-100, 1e-40]


@pytest.mark.parametrize(("name", "block"), [("int8", 256), ("int4", 64), ("fp4", 64)])
@pytest.mark.parametrize("bad", [*BAD_SCALES, -1.0, -0.0])
def test_a_scale_that_is_negative_or_absurd_is_refused(name: str, block: int, bad: float) -> None:
    codec = get_codec(name)
    payload = codec.encode(fixed_vector(300))
    for place in (0, 300 // block * 2):
        broken = payload[:place] + bfloat16_bytes(bad) + payload[place + 2 :]
        with pytest.raises(ProtocolViolation, match="a scale"):
            codec.decode(broken, 300)


@pytest.mark.parametrize("bad", [*BAD_SCALES, -INFINITY, -(2.0**100)])
def test_a_bucket_mean_that_is_absurd_is_refused(bad: float) -> None:
    codec = get_codec("topk")
    payload = codec.encode(fixed_vector(4096))
    for place in (0, 6):
        with pytest.raises(ProtocolViolation, match="a scale"):
            codec.decode(payload[:place] + bfloat16_bytes(bad) + payload[place + 2 :], 4096)


def test_scales_and_means_at_their_bounds_are_taken() -> None:
    for scale in (0.0, 2.0**99, 2.0**-99):
        decoded = get_codec("int8").decode(bfloat16_bytes(scale) + b"\x7f\x81", 2)
        assert decoded.tolist() == [127 * scale, -127 * scale]
    payload = bfloat16_bytes(-(2.0**99), 2.0**-99, 0.0, 0.0) + bytes((0x40, 0, 0b11, 0b0100))
    assert get_codec("topk").decode(payload, 2).tolist() == [-(2.0**99), 2.0**-99]


@pytest.mark.parametrize(
    ("name", "largest", "tiny"),
    [
        ("bfloat16", 2.0**128 - 2.0**120, 1e-45),
        ("float16", 65504.0, 1e-45),
        ("int8", 127 * 2.0**99, 2.0**-100),
        ("int4", 7 * 2.0**99, 2.0**-100),
        ("fp4", 64 * 2.0**99, 2.0**-100),
        ("topk", 2.0**99, 2.0**-100),
    ],
)
def test_values_too_large_are_clamped_and_values_too_small_are_zero(
    name: str, largest: float, tiny: float
) -> None:
    codec = get_codec(name)
    assert codec.decode(codec.encode(torch.tensor([3.4028235e38])), 1).item() == largest
    assert codec.decode(codec.encode(torch.tensor([tiny])), 1).item() == 0


@pytest.mark.parametrize(
    ("name", "codes"),
    [("int8", b"\x80\x00"), ("int4", b"\x08"), ("int4", b"\x80"), ("fp4", b"\x08"), ("fp4", b"\x80")],
)
def test_a_code_that_no_encoder_writes_is_refused(name: str, codes: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="a code"):
        get_codec(name).decode(bfloat16_bytes(1.0) + codes, 2)


@pytest.mark.parametrize("name", ["int4", "fp4"])
@pytest.mark.parametrize("code", [1, 7, 8, 15])
def test_padding_after_an_odd_number_of_codes_must_be_zero(name: str, code: int) -> None:
    with pytest.raises(ProtocolViolation, match="padding"):
        get_codec(name).decode(bfloat16_bytes(1.0, 1.0) + b"\0" * 32 + bytes((code << 4,)), 65)


def topk_payload(low: int, bitmap: int = 0b111, buckets: int = 0) -> bytes:
    """The record of a chunk of three values: 3 x 6 bits, a bitmap of 3 and 3 x 2 bits."""
    return bfloat16_bytes(1.0, 2.0, 3.0, 4.0) + low.to_bytes(3, "little") + bytes((bitmap, buckets))


def places(*low: int) -> int:
    return sum(place << 6 * number for number, place in enumerate(low))


@pytest.mark.parametrize("low", [places(0, 0, 1), places(0, 2, 1), places(0, 1, 3), places(0, 2, 2)])
def test_indices_that_are_out_of_range_or_do_not_increase_are_refused(low: int) -> None:
    with pytest.raises(ProtocolViolation, match="indices"):
        get_codec("topk").decode(topk_payload(low), 3)


@pytest.mark.parametrize("bitmap", [0b011, 0b000, 0b101])
def test_a_bitmap_has_a_bit_for_every_kept_value(bitmap: int) -> None:
    with pytest.raises(ProtocolViolation, match="3 bits set"):
        get_codec("topk").decode(topk_payload(places(0, 1, 2), bitmap), 3)


def test_one_chunk_does_not_make_up_for_a_missing_bit_of_another() -> None:
    codec = get_codec("topk")
    payload = bytearray(codec.encode(fixed_vector(2 * ALIGNMENT)))
    first, second = 8 + 48, 88 + 8 + 48
    payload[first] &= payload[first] - 1  # the lowest bit set is cleared
    payload[second] |= payload[second] + 1  # the lowest bit clear is set
    with pytest.raises(ProtocolViolation, match="64 bits set"):
        codec.decode(payload, 2 * ALIGNMENT)


@pytest.mark.parametrize(
    ("low", "bitmap", "buckets"),
    [(1 << 18, 0b111, 0), (1 << 23, 0b111, 0), (0, 0b1111, 0), (0, 0x87, 0), (0, 7, 0x40), (0, 7, 0x80)],
)
def test_padding_of_places_and_buckets_must_be_zero(low: int, bitmap: int, buckets: int) -> None:
    with pytest.raises(ProtocolViolation, match="padding"):
        get_codec("topk").decode(topk_payload(places(0, 1, 2) | low, bitmap, buckets), 3)


def test_topk_reads_what_its_format_says() -> None:
    assert get_codec("topk").decode(topk_payload(places(0, 1, 2), buckets=0b110100), 3).tolist() == [
        1.0,
        2.0,
        4.0,
    ]


def test_integers_are_rounded_half_to_even() -> None:
    """The largest is 127 (7), so the scale is 1."""
    halves = [0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.5]
    for name, peak in (("int8", 127.0), ("int4", 7.0)):
        codec = get_codec(name)
        decoded = codec.decode(codec.encode(torch.tensor([peak, *halves])), 8)
        assert decoded.tolist() == [peak, 0, 0, 2, -2, 2, -2, 4]


def test_topk_sends_bucket_means_as_published() -> None:
    """Four buckets of 1.5 standard deviations around the mean of the 64 kept, each value sent as
    its bucket's mean."""
    values = (fixed_vector(4096).numpy() ** 9).astype(np.float64)
    places = np.sort(np.argsort(-np.abs(values), kind="stable")[:64])
    kept = values[places]
    buckets = np.digitize((kept - kept.mean()) / kept.std(), [-1.5, 0.0, 1.5])
    assert len(np.unique(buckets)) >= 3, "the vector does not exercise the buckets"
    expected = np.zeros(4096)
    for bucket in np.unique(buckets):
        expected[places[buckets == bucket]] = kept[buckets == bucket].mean()
    codec = get_codec("topk")
    decoded = codec.decode(codec.encode(torch.from_numpy(values).float()), 4096)
    errors = np.abs(decoded.numpy() - expected)
    assert (errors <= 2.0**-8 * np.abs(expected)).all(), "a mean is sent with 8 bits"


def drifting(name: str) -> torch.Tensor:
    """Values that the codec loses for good without error feedback: most are small compared with a
    few large ones."""
    if name == "float16":
        return torch.full((640,), 1e-8)
    if name == "topk":
        return 1 + fixed_vector(8192).abs()
    values = torch.full((640,), 1 / 300)
    values[::64] = 1.0
    return values


def delivered(feedback: ErrorFeedback, codec: Codec, round: int, values: torch.Tensor) -> torch.Tensor:
    """The values that other workers decode of a contribution that arrives whole."""
    wanted = feedback.send(round, 0, values)
    feedback.acknowledge(round, [(0, len(values))])
    return codec.decode(codec.encode(wanted), len(values))


@pytest.mark.parametrize(
    ("name", "step"),
    [("float16", 2.0**-24), ("int8", 1 / 127), ("int4", 1 / 7), ("fp4", 1 / 64), ("topk", 64 * 2.0)],
)
def test_error_feedback_transmits_what_the_codec_alone_loses(name: str, step: float) -> None:
    """The same values are sent in 200 rounds: the error of the sum received is that of one step,
    not of two hundred.

    A step is the distance between two levels. For top-k it is the sum that gathers in a place until
    that is sent: a round sends one value in 64, and no value is over 2.
    """
    rounds, values = 200, drifting(name)
    codec = get_codec(name)
    feedback = ErrorFeedback(codec, len(values))
    received = torch.zeros(len(values), dtype=torch.float64)
    for round in range(rounds):
        received += delivered(feedback, codec, round, values)
    sent = rounds * values.double()
    assert float((sent - received).abs().max()) <= step
    # Each round adds to the residual and subtracts from it, in float32.
    errors = sent - received - feedback.residual().double()
    assert (errors.abs() <= 2 * rounds * UNIT * (values.abs().max() + step)).all()
    alone = rounds * codec.decode(codec.encode(values), len(values)).double()
    lost = (alone == 0) & (values > 0)
    assert int(lost.sum()) >= 0.98 * len(values), "the values do not need the feedback"


def test_only_the_floats_with_the_range_of_float32_need_no_feedback() -> None:
    assert [name for name in CODECS if not get_codec(name).biased] == ["float32", "bfloat16"]
