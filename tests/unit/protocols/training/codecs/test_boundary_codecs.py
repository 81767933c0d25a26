"""Codecs of boundaries: errors on activations with outliers, random rounding, hostile payloads, and
the choice for a link."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs import blockwise, boundary, get_codec
from swarmnet_protocols.training.codecs.boundary import (
    BOUNDARY_CODECS,
    codecs_by_size,
    fitting,
    rounding_seed,
)
from tests.defences import defence, replacing

SHAPE = (33, 100)
"""Positions and hidden size: the last block of every codec is cut short."""


def activations(positions: int, hidden_size: int, outlier: float = 100.0) -> torch.Tensor:
    """Normal values; one channel is ``outlier`` times larger."""
    values = torch.randn(positions, hidden_size, generator=torch.Generator().manual_seed(1))
    values[:, 3] *= outlier
    return values


def received(name: str, values: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    codec = BOUNDARY_CODECS[name]
    return codec.decode(codec.encode(values, seed), *values.shape)


@pytest.mark.parametrize("rounding", [None, 7])
@pytest.mark.parametrize("name", BOUNDARY_CODECS)
def test_a_payload_has_the_stated_bytes_and_small_errors(name: str, rounding: int | None) -> None:
    values = activations(*SHAPE)
    codec = BOUNDARY_CODECS[name]
    assert len(codec.encode(values, rounding)) == codec.size_bytes(*SHAPE)
    error = (received(name, values, rounding) - values).norm() / values.norm()
    assert error <= {"float32": 0, "bfloat16": 5e-3, "int8": 1.2e-2, "int4": 0.12}[name]


def test_eight_and_four_bits_take_a_quarter_and_an_eighth() -> None:
    """Scales take the rest: 2 bytes for 256 values, or for 64."""
    exact = BOUNDARY_CODECS["float32"].size_bytes(512, 576)
    shares = [BOUNDARY_CODECS[name].size_bytes(512, 576) / exact for name in ("int8", "int4")]
    assert shares == [0.251953125, 0.1328125]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rotation_keeps_small_values_next_to_an_outlier(name: str) -> None:
    values = activations(64, 256)
    plain = get_codec(name).decode(get_codec(name).encode(values.flatten()), values.numel())
    without = (plain.view_as(values) - values).square().mean()
    assert (received(name, values) - values).square().mean() < 0.5 * without


@pytest.mark.parametrize("name", ["bfloat16", "int8", "int4"])
def test_random_rounding_has_no_bias_and_follows_its_seed(name: str) -> None:
    values = activations(2, 128, 1.0)
    draws = torch.stack([received(name, values, seed) for seed in range(400)])
    assert torch.equal(draws[5], received(name, values, 5))
    bias, spread = draws.mean(0) - values, draws.std(0)
    assert bias.abs().max() <= 6 * spread.max() / 400**0.5
    assert bias.abs().mean() < 0.3 * (received(name, values) - values).abs().mean()


def test_seeds_of_rounding_differ_by_microbatch_and_boundary() -> None:
    seeds = {
        rounding_seed(*each) for each in [(1, (2, 3), 4), (1, (2, 3), 5), (1, (3, 2), 4), (2, (2, 3), 4)]
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_the_format_of_rotated_blocks_does_not_change_unnoticed() -> None:
    """A block with one value is rotated. All of its codes are then equal."""
    values = torch.zeros(1, 66)
    values[0, 0] = values[0, 65] = 8.0
    payload = bytes(BOUNDARY_CODECS["int4"].encode(values))
    assert payload[:4].hex() == "13be933f"
    assert payload[4:] == b"\x77" * 32 + b"\x70"
    digest = hashlib.sha256(bytes(BOUNDARY_CODECS["int8"].encode(activations(4, 100).round(), 3)))
    assert digest.hexdigest()[:16] == "e87904d439ef1fb4"


@defence(
    "a block that no encoder rotates is refused",
    off=replacing(blockwise, "check_rotated", lambda is_rotated, whole: None),
)
def test_a_rotated_block_that_is_not_whole_is_refused() -> None:
    codec = BOUNDARY_CODECS["int4"]
    payload = bytearray(codec.encode(torch.ones(1, 66)))
    payload[3] |= 0x80
    with pytest.raises(ProtocolViolation, match="not whole"):
        codec.decode(payload, 1, 66)


@pytest.mark.parametrize("name", BOUNDARY_CODECS)
@given(payload=st.binary(max_size=300), columns=st.integers(0, 150))
def test_hostile_payloads_are_refused_or_finite(name: str, payload: bytes, columns: int) -> None:
    try:
        decoded = BOUNDARY_CODECS[name].decode(payload, 2, columns)
    except ProtocolViolation:
        return
    assert decoded.shape == (2, columns)
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("name", BOUNDARY_CODECS)
def test_no_memory_is_allocated_for_a_shape_beyond_the_payload(name: str) -> None:
    with pytest.raises(ProtocolViolation, match="bytes for"):
        BOUNDARY_CODECS[name].decode(b"\0" * 120, 1 << 30, 1 << 20)


@pytest.mark.parametrize(("vocabulary", "size"), [(256, 1), (257, 2), (1 << 16, 2), (1 << 17, 4)])
def test_token_ids_take_the_fewest_bytes_and_return(vocabulary: int, size: int) -> None:
    ids = torch.tensor([[0, 7], [255, vocabulary - 1]])
    payload = boundary.encode_ids(ids, vocabulary)
    assert len(payload) == 4 * size == 4 * boundary.id_bytes(vocabulary)
    assert torch.equal(boundary.decode_ids(payload, vocabulary), ids.flatten())


@defence(
    "a token that the model does not have is refused",
    off=replacing(boundary, "check_ids", lambda ids, vocabulary: None),
)
def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="outside the 300"):
        boundary.decode_ids((300).to_bytes(2, "little"), 300)


def test_ids_of_another_size_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="bytes of ids"):
        boundary.decode_ids(b"123", 300)


@pytest.mark.parametrize(
    ("bytes_per_s", "before", "chosen"),
    [
        (0.0, None, "int8"),  # unmeasured
        (799.0, None, "bfloat16"),
        (800.0, None, "float32"),  # half of the time
        (399.0, None, "int8"),
        (100.0, None, "int8"),  # nothing hides
        (700.0, "float32", "float32"),
        (399.0, "float32", "bfloat16"),
        (300.0, "bfloat16", "bfloat16"),
        (300.0, "int8", "int8"),
        (199.0, "bfloat16", "int8"),
        (799.0, "int8", "bfloat16"),
    ],
)
def test_a_link_takes_the_most_exact_codec_that_hides(
    bytes_per_s: float, before: str | None, chosen: str
) -> None:
    """A microbatch takes a second, and a tensor 400, 200 or 100 bytes."""
    sizes = {"float32": 400, "bfloat16": 200, "int8": 100}
    found = fitting([*sizes.values()], bytes_per_s, 1.0, None if before is None else sizes[before])
    assert found == sizes[chosen]


def test_a_size_says_the_codec_of_a_tensor() -> None:
    for hidden_size in range(3, 300):
        names = [codec.vectors.name for codec in codecs_by_size("auto", 1, hidden_size).values()]
        assert names == ["float32", "bfloat16", "int8"]
    assert [codec.vectors.name for codec in codecs_by_size("int4", 8, 8).values()] == ["int4"]
