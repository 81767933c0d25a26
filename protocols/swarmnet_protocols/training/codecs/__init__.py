"""Codecs: float32 vectors to bytes and back, with and without loss.

Decoding the same bytes gives the same bits on every machine. So workers that average decoded
contributions stay identical under every codec. All numbers on the wire are little endian.

| name | bits per value | |
|---|---|---|
| ``float32``, ``bfloat16``, ``float16`` | 32, 16, 16 | ``floats.py`` |
| ``int8``, ``int4``, ``fp4`` | 8.06, 4.25, 4.25 | ``blockwise.py`` |
| ``topk`` | 0.17 | ``topk.py``, sparse |
| ``log8`` | 8 | ``log8.py``, for the scalars of ``zo`` |
"""

from collections.abc import Mapping
from types import MappingProxyType

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs.base import Codec
from swarmnet_protocols.training.codecs.blockwise import FP4, INT4, INT8
from swarmnet_protocols.training.codecs.error_feedback import ErrorFeedback
from swarmnet_protocols.training.codecs.floats import BFLOAT16, FLOAT16, FLOAT32
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.codecs.topk import CHUNK, TopKCodec

__all__ = ["ALIGNMENT", "Codec", "ErrorFeedback", "get_codec", "result_codec"]

ALIGNMENT = CHUNK
"""Slices are cut at multiples of this many values.

So a vector that is encoded in parts decodes to the same bits as a vector encoded whole.
"""

_CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            FLOAT32,
            BFLOAT16,
            FLOAT16,
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
    """Return the codec for the mean of contributions in ``codec`` (docs/decisions/0031).

    It is the same codec, except int8 for four-bit codecs. Error feedback sends a small value as a
    whole level in few rounds. In a mean over workers this is a fraction of a level, which four bits
    would round to zero.
    """
    return _RESULTS.get(codec.name, codec)


def get_codec(name: str) -> Codec:
    """Return the codec with this name. Raises ``ConfigError`` for an unknown name."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}", hint=f"one of: {', '.join(_CODECS)}")
    return codec
