"""Tensors on the wire: what comes back of them, the error of the 8-bit type, and hostile bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.arrays import as_array, as_float32, as_tensor
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.machine.devices import torch_dtype
from swarmnet_protocols.session import wire_tensors
from swarmnet_protocols.session.arrays import ElementType, are_finite, rounded
from swarmnet_protocols.session.wire_tensors import (
    BLOCK,
    as_received,
    decode_tensor,
    encode_tensor,
    is_slow,
    position_bytes,
)
from tests.defences import defence, replacing


def activations(positions: int, hidden_size: int, seed: int = 0) -> torch.Tensor:
    """Random values of which a few channels are a thousand times larger, as in residual streams."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(positions, hidden_size, generator=source)
    values[:, 0] *= 1000
    return values


def sent(values: torch.Tensor, wire: ElementType) -> torch.Tensor:
    """The values as the receiver decodes them."""
    header, payload = encode_tensor(values.numpy(), wire)
    positions, hidden_size = values.shape
    assert len(payload) == positions * position_bytes(wire, hidden_size)
    return as_tensor(decode_tensor(header, bytes(payload), positions=positions, hidden_size=hidden_size))


@pytest.mark.parametrize("wire", ElementType)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (256, 4), (0, 64)])
def test_as_received_gives_what_the_receiver_decodes(wire: ElementType, shape: tuple[int, int]) -> None:
    values = activations(*shape)
    received = sent(values, wire)
    assert received.dtype == torch_dtype(wire.decoded)
    assert torch.equal(received, as_tensor(as_received(values.numpy(), wire)))


@pytest.mark.parametrize("wire", [ElementType.BFLOAT16, ElementType.FLOAT16])
def test_numbers_are_rounded_as_torch_rounds_them(wire: ElementType) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    numbers = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, 65520, 3.4e38])])
    numbers = numbers[~np.isnan(numbers)]
    expected = torch.from_numpy(numbers).to(torch_dtype(wire))
    assert torch.equal(as_tensor(rounded(numbers, wire)), expected)
    assert np.array_equal(as_float32(as_array(expected)), expected.float().numpy())


@pytest.mark.parametrize("wire", [ElementType.BFLOAT16, ElementType.FLOAT16])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_when_it_is_rounded(wire: ElementType, number: float) -> None:
    numbers = np.array([number, -number], np.float32)
    numbers.view(np.uint32)[1] |= 0xFFFF  # a NaN with all bits
    assert not any(are_finite(rounded(each[None], wire)) for each in numbers)


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(0, 1000),
    st.floats(1e-30, 1e30),
    st.booleans(),
)
def test_the_error_of_eight_bits_is_bounded(
    positions: int, hidden_size: int, seed: int, size: float, has_zeros: bool
) -> None:
    values = activations(positions, hidden_size, seed) * size
    if has_zeros:
        values[:, ::2] = 0
    error = (sent(values, ElementType.INT8) - values).abs()
    outliers = values.abs().topk(-(-hidden_size // 128), dim=1).indices
    inner = values.scatter(1, outliers, 0.0).abs()
    for start in range(0, hidden_size, BLOCK):
        block = slice(start, start + BLOCK)
        largest = inner[:, block].amax(1, keepdim=True)
        bound = torch.maximum(largest.expand_as(inner[:, block]) / 252, values[:, block].abs() / 256)
        assert (error[:, block] <= bound).all()


def test_eight_bits_are_a_quarter_of_float32_and_keep_small_channels() -> None:
    values = activations(100, 4096)
    assert position_bytes(ElementType.INT8, 4096) <= 0.285 * position_bytes(ElementType.FLOAT32, 4096)
    error = (sent(values, ElementType.INT8) - values)[:, 1:]
    assert error.square().mean().sqrt() < 0.006 * values[:, 1:].square().mean().sqrt()


def test_the_bytes_of_a_position_do_not_depend_on_the_others() -> None:
    values = activations(9, 576)
    together = bytes(encode_tensor(values.numpy(), ElementType.INT8)[1])
    alone = b"".join(bytes(encode_tensor(position[None].numpy(), ElementType.INT8)[1]) for position in values)
    assert together == alone


def test_hostile_eight_bit_payloads_are_refused() -> None:
    values = activations(2, 64)
    header, payload = encode_tensor(values.numpy(), ElementType.INT8)
    with pytest.raises(ProtocolViolation, match="bytes for a tensor"):
        decode_tensor(header, bytes(payload)[:-1], positions=2, hidden_size=64)
    for channel in (-1, 64):
        hostile = bytearray(payload)
        hostile[-6:-2] = channel.to_bytes(4, "little", signed=True)
        with pytest.raises(ProtocolViolation, match="outlier outside"):
            decode_tensor(header, hostile, positions=2, hidden_size=64)


@pytest.mark.parametrize(
    ("wire", "slow"), [(ElementType.INT8, [False, True]), (ElementType.FLOAT32, [False, False])]
)
def test_long_prompts_with_eight_bits_are_encoded_off_the_event_loop(
    wire: ElementType, slow: list[bool]
) -> None:
    assert [is_slow(wire, positions, 4096) for positions in (8, 256)] == slow


@defence(
    "finite values of 8 bits arrive finite, so that no honest sender is blamed for them",
    off=replacing(wire_tensors, "LARGEST", math.inf),
)
def test_finite_values_of_eight_bits_arrive_finite() -> None:
    """Otherwise the receiver would take the sender for one that sends infinity."""
    largest = torch.finfo(torch.float32).max
    for values in (torch.full((1, 64), largest), -largest * torch.eye(1, 64)):
        assert torch.isfinite(sent(values, ElementType.INT8)).all()
