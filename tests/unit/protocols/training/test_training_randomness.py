"""Shared randomness: the same directions everywhere, in any parts, and slopes in one byte."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.shared_randomness import add_signs, philox4x32
from tests.support.models.rounding import UNIT
from tests.support.training import reference

ONES = 0xFFFFFFFF
GOLDEN = "02933769"
"""The first signs of seed 42, round 1, direction 0, with minus as 1 and the lowest bit first.
Machines that draw other signs cannot train together."""


def signs(seed: int, stream: tuple[int, int], start: int, end: int) -> torch.Tensor:
    drawn = torch.zeros(end - start)
    add_signs(drawn, 1.0, seed, stream, start)
    return drawn


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
    assert signs(seed, (7, 2), 0, 1000).tolist() == reference.direction(seed, 7, 2, 1000).tolist()


def test_a_known_direction_has_these_bits() -> None:
    minus = signs(42, (1, 0), 0, 32) < 0
    assert f"{sum(1 << bit for bit, is_minus in enumerate(minus.tolist()) if is_minus):08x}" == GOLDEN


def test_any_part_is_the_same_bits_as_the_whole() -> None:
    end = 1_200_001
    whole = signs(1, (2, 3), 0, end)
    assert (whole.abs() == 1).all()
    for cuts in (
        [0, 1, 2, 7, 8, 9, 127, 128, 129, end],
        [0, 524_287, 524_289, 1_048_576, end],
        [0, 50_000, 50_000, end],
    ):
        parts = [signs(1, (2, 3), a, b) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_the_scaled_direction_is_added_with_one_rounding() -> None:
    start = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    moved, scale = start.clone(), 0.1
    add_signs(moved, scale, 5, (6, 7), 3)
    exact = start.double() + float(np.float32(scale)) * signs(5, (6, 7), 3, 10_003).double()
    assert torch.equal(moved, exact.float())


def test_elements_beyond_the_32nd_bit_of_the_block_number_differ() -> None:
    far = 128 << 32
    assert not torch.equal(signs(1, (0, 0), far, far + 128), signs(1, (0, 0), 0, 128))


def test_signs_are_even_and_streams_do_not_correlate() -> None:
    count = 1 << 18
    streams = torch.stack(
        [signs(s, (r, j), 0, count) for s, r, j in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    ).double()
    correlation = (streams @ streams.T / count).numpy()
    assert np.abs(streams.mean(dim=1).numpy()).max() < 5 / math.sqrt(count)
    assert np.abs(correlation - np.eye(4)).max() < 5 / math.sqrt(count)
    by_bit = streams.view(4, -1, 128).mean(dim=1)
    assert by_bit.abs().max() < 6 / math.sqrt(count / 128)


@pytest.mark.parametrize(
    ("number", "stream", "start"),
    [
        (-1, (0, 0), 0),
        (1 << 64, (0, 0), 0),
        (0, (1 << 32, 0), 0),
        (0, (0, -1), 0),
        (0, (0, 0), -1),
        (0, (0, 0), 1 << 64),
    ],
)
def test_numbers_that_would_wrap_around_are_refused(number: int, stream: tuple[int, int], start: int) -> None:
    untouched = torch.zeros(1)
    with pytest.raises(ValueError, match=r"out of range|no elements"):
        add_signs(untouched, 1.0, number, stream, start)
    assert untouched.tolist() == [0.0]


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

    def test_zeros_and_tiny_values_decode_as_zero(self) -> None:
        payload = self.codec.encode(torch.tensor([0.0, -0.0, 1e-9, -1e-9]))
        assert payload == b"\x80\x04"
        assert self.codec.decode(payload, 4).tolist() == [0.0] * 4

    def test_places_of_other_workers_take_two_bytes(self) -> None:
        values = torch.zeros(3, 64)
        values[:, 7] = 1.0
        payload = self.codec.encode(values.flatten())
        assert len(payload) == 3 + 4 * 2
        assert torch.equal(self.codec.decode(payload, 192), values.flatten())

    def test_range_and_step_are_as_documented(self) -> None:
        positive = self.decoded()[128:].double()
        assert positive[0] == 2**-10
        assert positive[-1] == 2**11
        expected = 2 ** (torch.arange(127).double() / 6 - 10)
        assert ((positive - expected).abs() <= 2 * UNIT * expected).all()

    def test_within_the_range_a_value_is_at_most_6_percent_off(self) -> None:
        values = torch.logspace(-3, 3.3, 5000) * torch.tensor([1.0, -1.0]).repeat(2500)
        values = values[values.abs() >= 2**-10]
        error = self.codec.decode(self.codec.encode(values), len(values)) / values - 1
        assert 0.05 < error.abs().max() < 0.06

    def test_large_values_are_clipped(self) -> None:
        assert self.codec.decode(self.codec.encode(torch.tensor([1e30, -1e30])), 2).tolist() == [2048, -2048]

    def test_a_payload_has_one_byte_for_each_value(self) -> None:
        assert self.codec.max_bytes(100) == len(self.codec.encode(torch.ones(100))) == 100
        assert self.codec.decode(b"", 0).shape == (0,)

    def test_invalid_payloads_are_refused(self) -> None:
        wrong = (
            (b"\x80", 1),
            (b"\x80\x00", 0),
            (b"\x80\x80", 2),
            (b"\x80\x05", 4),
            (b"\x01\x01", 1),
            (b"", 1),
        )
        for payload, count in wrong:
            with pytest.raises(ProtocolViolation):
                self.codec.decode(payload, count)
        with pytest.raises(ValueError, match="finite"):
            self.codec.encode(torch.tensor([math.inf]))
