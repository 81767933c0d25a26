"""Codecs: how the values that workers exchange travel as bytes.

``decode`` of the same bytes gives the same bits on every machine, so workers that average decoded payloads stay
identical under every codec. All numbers on the wire are little endian.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs.base import Codec
from swarmnet_protocols.training.codecs.blockwise import FP4, INT4, INT8
from swarmnet_protocols.training.codecs.error_feedback import ErrorFeedback
from swarmnet_protocols.training.codecs.floats import FloatCodec
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.codecs.topk import CHUNK, TopKCodec

__all__ = ["ALIGNMENT", "Codec", "ErrorFeedback", "get_codec", "result_codec"]

ALIGNMENT = CHUNK
"""A vector cut at multiples of this many values decodes, part by part, to the same bits as when encoded whole."""

_CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            FloatCodec("float32", torch.float32, biased=False),
            FloatCodec("bfloat16", torch.bfloat16, biased=False),
            FloatCodec("float16", torch.float16, biased=True),
            INT8,
            INT4,
            FP4,
            TopKCodec(),
            Log8Codec(),
        )
    }
)


_RESULTS: Mapping[str, Codec] = MappingProxyType({"int4": INT8, "fp4": INT8})


def result_codec(codec: Codec) -> Codec:
    """How the mean of contributions in ``codec`` travels: the same, but for four bits.

    Fed back, the small values of a worker come as rare steps of a whole level. In a mean of workers they are fractions
    of a level, which four bits would round away again.
    """
    return _RESULTS.get(codec.name, codec)


def get_codec(name: str) -> Codec:
    """The codec of this name, or ``ConfigError``."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}", hint=f"one of: {', '.join(_CODECS)}")
    return codec
