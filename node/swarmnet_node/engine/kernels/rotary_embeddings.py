"""Frequencies of rotary embeddings, computed the same way on every machine.

transformers computes them with torch, whose powers differ in the last bit between processors. Here
they are computed in float64 and rounded once to float32, from the same formulas. Powers and
logarithms are decimal numbers first: those of C libraries may differ in the last bit, too.
``decode.c`` turns frequencies into cosines and sines.
"""

import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache
from typing import Any

_DECIMAL = Context(prec=28)

Settings = Mapping[str, Any]
"""The settings of one rotary embedding: ``rope_parameters`` of a config."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """The rotary embedding of a layer (RoFormer, section 3.4.2). It turns the first components of a
    head, two for each frequency."""

    frequencies: tuple[float, ...]
    """Radians from one position to the next, for each pair of components. Numbers of float32."""
    scale: float
    """Factor of cosines and sines."""
    is_interleaved: bool
    """True if a pair is two neighbours. Otherwise component i is paired with component i plus the
    number of frequencies."""


def rotary_embedding(
    settings: Settings, head_size: int, positions: int, *, is_interleaved: bool
) -> RotaryEmbedding:
    """Return the embedding of a model that was trained with up to ``positions`` positions.

    Raises ``KeyError`` for settings of another kind, or if one is missing, and ``ValueError`` if
    they do not fit the size of heads.
    """
    kind = settings.get("rope_type", "default")
    if kind == "proportional":
        rotated = int(settings.get("partial_rotary_factor", 1.0) * head_size // 2)
        factor = settings.get("factor", 1.0)
        turning = [each / factor for each in _powers(settings["rope_theta"], head_size)[:rotated]]
        frequencies, scale = [*turning, *[0.0] * (head_size // 2 - rotated)], 1.0
    else:
        size = int(head_size * settings.get("partial_rotary_factor", 1.0))
        if not 0 < size <= head_size:
            raise ValueError(f"a rotary embedding of {size} of {head_size} components")
        frequencies, scale = _KINDS[kind](settings, _powers(settings["rope_theta"], size), positions)
    return RotaryEmbedding(tuple(map(_float32, frequencies)), float(scale), is_interleaved)


@cache
def logarithm(value: float) -> float:
    """Return the natural logarithm, the same on every machine. Raises ``ArithmeticError`` for a
    negative number."""
    return float(_DECIMAL.ln(Decimal(value)))


def _power(base: float, exponent: float) -> float:
    return float(_DECIMAL.power(Decimal(base), Decimal(exponent)))


def _float32(value: float) -> float:
    return c_float(value).value


def _powers(base: float, size: int) -> list[float]:
    """Return base ** (-2 i / size). Rounded to float32 as often as transformers does, so that
    almost all numbers are equal."""
    exponents = [_float32(2 * i / size) for i in range((size + 1) // 2)]
    return [_float32(1 / _float32(_power(_float32(base), exponent))) for exponent in exponents]


def _plain(_: Settings, powers: list[float], positions: int) -> tuple[list[float], float]:
    return powers, 1.0


def _linear(settings: Settings, powers: list[float], positions: int) -> tuple[list[float], float]:
    return [each / settings["factor"] for each in powers], 1.0


def _llama3(settings: Settings, powers: list[float], positions: int) -> tuple[list[float], float]:
    """Divide low frequencies by a factor, keep high ones, and blend between them."""
    factor, low, high = (settings[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = settings["original_max_position_embeddings"]

    def scaled(frequency: float) -> float:
        turns = trained * frequency / (2 * math.pi)
        if turns < low:
            return float(frequency / factor)
        if turns > high:
            return frequency
        kept = (turns - low) / (high - low)
        return float(frequency * ((1 - kept) / factor + kept))

    return [scaled(each) for each in powers], 1.0


def _yarn(settings: Settings, powers: list[float], positions: int) -> tuple[list[float], float]:
    """Return YaRN's frequencies (Peng et al. 2023, section 3.2), and the scale of section 3.4 or of
    DeepSeek V2."""
    trained, base, size = (
        settings["original_max_position_embeddings"],
        settings["rope_theta"],
        2 * len(powers),
    )
    factor = settings["factor"] or positions / trained

    def pair_that_turns(times: float) -> float:
        return size * logarithm(trained / (times * 2 * math.pi)) / (2 * logarithm(base))

    first = pair_that_turns(settings.get("beta_fast") or 32)
    last = pair_that_turns(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001
    slowed = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(len(powers))]
    frequencies = [each * (part / factor + 1 - part) for each, part in zip(powers, slowed, strict=True)]

    def attention(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * logarithm(factor) + 1

    if (given := settings.get("attention_factor")) is not None:
        return frequencies, given
    one, all_ = settings.get("mscale"), settings.get("mscale_all_dim")
    return frequencies, attention(one) / attention(all_) if one and all_ else attention(1)


def _longrope(settings: Settings, powers: list[float], positions: int) -> tuple[list[float], float]:
    """Return LongRoPE's frequencies and scale (Ding et al. 2024) up to the positions of the
    original training."""
    trained = settings["original_max_position_embeddings"]
    frequencies = [each / factor for each, factor in zip(powers, settings["short_factor"], strict=True)]
    scale, factor = settings.get("attention_factor"), settings.get("factor") or positions / trained
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + logarithm(factor) / logarithm(trained))
    return frequencies, scale


_KINDS: dict[str, Callable[[Settings, list[float], int], tuple[list[float], float]]] = {
    "default": _plain,
    "dynamic": _plain,  # up to the positions of the training; longer sequences are refused
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
