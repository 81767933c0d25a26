"""Every codec on any finite vector: what comes back is near, exact where it was promised, and
garbage is refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs import ALIGNMENT, get_codec
from swarmnet_protocols.training.codecs.payload import MAX_SCALE, MIN_SCALE

CODECS = ("float32", "bfloat16", "float16", "int8", "int4", "fp4", "topk")
FLOATS = CODECS[:3]
LOCAL_LAYERS = (0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097)
LARGEST = float(np.finfo(np.float32).max)
SCALE_ROUNDING = 1 + 2.0**-7
"""A scale is rounded up to eight significant bits."""

counts = st.sampled_from(LOCAL_LAYERS) | st.integers(0, 10_000)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Finite float32 [0 .. 10,000]: bell-shaped of any size, of mixed sizes, few distinct values,
    extremes, subnormals, zeros."""
    count = draw(counts)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponent = draw(st.integers(-38, 37))
    values: NDArray[np.floating]
    match draw(st.sampled_from(["bell", "mixed", "few", "extreme", "subnormal", "zero"])):
        case "bell":
            values = random.standard_normal(count) * 10.0**exponent
        case "mixed":
            values = random.standard_normal(count) * 10.0 ** random.uniform(-44, 37, count)
        case "few":
            values = random.integers(-2, 3, count) * 10.0**exponent
        case "extreme":
            values = random.choice(np.array([LARGEST, -LARGEST, 1.0, 0.0, 1e-45]), count)
        case "subnormal":
            values = random.uniform(-1e-38, 1e-38, count)
        case _:
            values = np.zeros(count)
    return torch.from_numpy(np.clip(values, -LARGEST, LARGEST).astype(np.float32))


def by_block(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each value's block, [n], float64."""
    largest = [
        part.abs().max().double().expand(len(part)) for part in torch.split(values, block) if len(part)
    ]
    return torch.cat(largest) if largest else torch.empty(0, dtype=torch.float64)


def allowed_error(name: str, values: torch.Tensor) -> torch.Tensor:
    """The largest error of each value, [n], float64, as the docstrings of the codecs promise it."""
    wide = values.double().abs()
    match name:
        case "float32":
            return torch.zeros_like(wide)
        case "bfloat16":
            return torch.maximum(wide * 2.0**-8, torch.tensor(2.0**-134))
        case "float16":
            rounding = torch.maximum(wide * 2.0**-11, torch.tensor(2.0**-25))
            return torch.maximum(rounding, wide - 65504)
    block, peak = {"int8": (256, 127.0), "int4": (64, 7.0), "fp4": (64, 64.0)}[name]
    largest = by_block(values, block)
    half_step = largest / peak * SCALE_ROUNDING / 2
    rounding = torch.maximum(half_step, wide / 3) if name == "fp4" else half_step
    flushed = torch.where(largest < peak * MIN_SCALE, wide, 0)
    clamped = torch.where(wide > peak * MAX_SCALE, wide - peak * MAX_SCALE, 0)
    return torch.maximum(rounding * (1 + 1e-6), torch.maximum(flushed, clamped * SCALE_ROUNDING))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40)
@given(values=vectors())
def test_a_payload_has_its_announced_size_and_finite_values(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    payload = codec.encode(values)
    assert len(payload) == codec.max_bytes(len(values))
    decoded = codec.decode(payload, len(values))
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("name", [name for name in CODECS if name != "topk"])
@settings(max_examples=40)
@given(values=vectors())
def test_no_value_is_further_off_than_promised(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    error = (codec.decode(codec.encode(values), len(values)).double() - values.double()).abs()
    excess = error - allowed_error(name, values)
    assert bool((excess <= 0).all()), f"{values[excess.argmax()]} is {error[excess.argmax()]} off"


@pytest.mark.parametrize("name", FLOATS)
@settings(max_examples=30)
@given(values=vectors())
def test_a_decoded_payload_of_floats_encodes_to_the_same_bytes(name: str, values: torch.Tensor) -> None:
    codec = get_codec(name)
    payload = codec.encode(values)
    assert codec.encode(codec.decode(payload, len(values))) == payload


@settings(max_examples=40)
@given(values=vectors())
def test_topk_keeps_the_largest_values_and_the_earlier_of_equal_ones(values: torch.Tensor) -> None:
    codec = get_codec("topk")
    decoded = codec.decode(codec.encode(values), len(values))
    for chunk, got in zip(torch.split(values, ALIGNMENT), torch.split(decoded, ALIGNMENT), strict=True):
        order = sorted(range(len(chunk)), key=lambda place: (-abs(float(chunk[place])), place))
        kept = order[:64]
        assert not got[order[64:]].any()
        if kept:
            # A bucket mean lies within its values; it is rounded to eight bits and bounded as a
            # scale is.
            low, high = float(chunk[kept].min()), float(chunk[kept].max())
            slack = 2.0**-8 * max(abs(low), abs(high)) + MIN_SCALE
            assert bool((got[kept].double() >= max(min(low, MAX_SCALE), -MAX_SCALE) - slack).all())
            assert bool((got[kept].double() <= min(max(high, -MAX_SCALE), MAX_SCALE) + slack).all())


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=15)
@given(values=vectors(), cuts=st.sets(st.integers(0, 2)))
def test_parts_cut_at_the_alignment_decode_as_the_whole_does(
    name: str, values: torch.Tensor, cuts: set[int]
) -> None:
    codec = get_codec(name)
    bounds = [0, *sorted(cut * ALIGNMENT for cut in cuts if cut * ALIGNMENT < len(values)), len(values)]
    parts = [values[start:end] for start, end in pairwise(bounds)]
    decoded = [codec.decode(codec.encode(part), len(part)) for part in parts]
    whole = codec.decode(codec.encode(values), len(values))
    assert torch.equal(torch.cat(decoded).view(torch.int32), whole.view(torch.int32))


@settings(max_examples=100)
@given(st.floats(-64, 64, width=32))
def test_fp4_takes_the_nearest_level_and_on_a_tie_the_even_code(value: float) -> None:
    codec = get_codec("fp4")
    levels = [0.0, *(2.0**power for power in range(7))]
    # A block whose largest is 64 has the scale 1.
    decoded = float(codec.decode(codec.encode(torch.tensor([value, 64.0])), 2)[0])
    nearest = min(range(8), key=lambda code: (abs(abs(value) - levels[code]), code % 2))
    assert decoded == math.copysign(levels[nearest], value)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40)
@given(payload=st.binary(max_size=300), count=st.integers(0, 300))
def test_garbage_is_refused_or_finite(name: str, payload: bytes, count: int) -> None:
    refused_or_finite(name, payload, count)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40)
@given(values=vectors(), data=st.data())
def test_a_corrupted_payload_is_refused_or_finite(
    name: str, values: torch.Tensor, data: st.DataObject
) -> None:
    payload = bytearray(get_codec(name).encode(values))
    if payload:
        for place in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
            payload[place] = data.draw(st.integers(0, 255))
    refused_or_finite(name, payload, len(values))


def refused_or_finite(name: str, payload: bytes | bytearray, count: int) -> None:
    try:
        decoded = get_codec(name).decode(payload, count)
    except ProtocolViolation:
        return
    assert decoded.shape == (count,)
    assert bool(decoded.isfinite().all())
