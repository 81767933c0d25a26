"""Shared randomness: the same directions everywhere, in any parts, and slopes in one byte."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.randomness import normals, philox4x32
from tests.support import training_reference as reference

ONES = 0xFFFFFFFF
GOLDEN = ["bfae128b", "bf7b2637", "bf472ff7", "beddb446"]
"""Of seed 42, round 1, direction 0: machines that draw anything else cannot train together."""


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    words = philox4x32(np.array([counter, counter], dtype=np.uint64).T, key)
    assert [tuple(column) for column in words.T.tolist()] == [expected, expected]
    assert reference.philox(counter, key) == expected


def test_directions_are_those_of_the_definition() -> None:
    seed = 0x0123456789ABCDEF
    expected = reference.direction(seed, 7, 2, 1000)
    assert np.allclose(normals(seed, (7, 2), 0, 1000).numpy(), expected, rtol=1e-6, atol=0)


def test_any_part_is_the_same_bits_as_the_whole() -> None:
    end = 100_001
    whole = normals(1, (2, 3), 0, end)
    assert len(whole) == end
    for cuts in (
        [0, end],
        [0, 1, 2, 3, 4, 5, end],
        [0, 32_767, 32_769, 65_536, end],
        [0, 50_000, 50_000, end],
    ):
        parts = [normals(1, (2, 3), a, b) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_elements_beyond_the_32nd_bit_of_the_block_number_differ() -> None:
    far = 4 << 32
    assert not torch.equal(normals(1, (0, 0), far, far + 8), normals(1, (0, 0), 0, 8))


def test_a_known_direction_has_these_bits() -> None:
    bits = normals(42, (1, 0), 0, 4).view(torch.int32)
    assert [f"{word & ONES:08x}" for word in bits.tolist()] == GOLDEN


def test_mean_0_variance_1_and_no_correlation_between_streams() -> None:
    count = 1 << 18
    streams = torch.stack(
        [normals(s, (r, j), 0, count) for s, r, j in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    )
    correlation = (streams.double() @ streams.double().T / count).numpy()
    assert np.abs(streams.double().mean(dim=1).numpy()).max() < 5 / math.sqrt(count)
    assert np.abs(correlation - np.eye(4)).max() < 5 * math.sqrt(2 / count)
    kurtosis = float((streams.double() ** 4).mean()) - 3
    assert kurtosis == pytest.approx(-0.3, abs=0.03)
    assert streams.abs().max() <= 510 / math.sqrt(21845)


@pytest.mark.parametrize(
    ("number", "stream", "start", "end"),
    [
        (-1, (0, 0), 0, 1),
        (1 << 64, (0, 0), 0, 1),
        (0, (1 << 32, 0), 0, 1),
        (0, (0, -1), 0, 1),
        (0, (0, 0), 2, 1),
    ],
)
def test_what_would_wrap_around_is_refused(
    number: int, stream: tuple[int, int], start: int, end: int
) -> None:
    with pytest.raises(ValueError, match=r"out of range|no elements"):
        normals(number, stream, start, end)


class TestLog8:
    codec = Log8Codec()
    codes = torch.arange(-127, 128, dtype=torch.int8)

    def decoded(self) -> torch.Tensor:
        return self.codec.decode(self.codes.numpy().tobytes(), 255)

    def test_all_255_codes_decode_in_order_and_encode_back(self) -> None:
        values = self.decoded()
        assert (values.diff() > 0).all()
        assert self.codec.encode(values) == self.codes.numpy().tobytes()
        assert torch.equal(values, -values.flip(0))

    def test_zero_survives(self) -> None:
        payload = self.codec.encode(torch.tensor([0.0, -0.0, 1e-9, -1e-9]))
        assert payload == bytes(4)
        assert self.codec.decode(payload, 4).tolist() == [0.0] * 4

    def test_range_and_step_are_as_documented(self) -> None:
        positive = self.decoded()[128:].double()
        assert positive[0] == 2**-10
        assert positive[-1] == 2**11
        assert torch.allclose(positive, 2 ** (torch.arange(127).double() / 6 - 10), rtol=1e-7, atol=0)

    def test_within_the_range_a_value_is_at_most_6_percent_off(self) -> None:
        values = torch.logspace(-3, 3.3, 5000) * torch.tensor([1.0, -1.0]).repeat(2500)
        values = values[values.abs() >= 2**-10]
        error = self.codec.decode(self.codec.encode(values), len(values)) / values - 1
        assert 0.05 < error.abs().max() < 0.06

    def test_what_is_too_large_is_clipped(self) -> None:
        assert self.codec.decode(self.codec.encode(torch.tensor([1e30, -1e30])), 2).tolist() == [2048, -2048]

    def test_it_takes_one_byte_a_value(self) -> None:
        assert self.codec.max_bytes(100) == len(self.codec.encode(torch.ones(100))) == 100
        assert self.codec.decode(b"", 0).shape == (0,)

    def test_what_is_no_payload_is_refused(self) -> None:
        for payload, count in ((b"\x80", 1), (b"\x01\x01", 1), (b"", 1)):
            with pytest.raises(ProtocolViolation):
                self.codec.decode(payload, count)
        with pytest.raises(ValueError, match="finite"):
            self.codec.encode(torch.tensor([math.inf]))
