"""Codecs of boundaries: activations and gradients [P, D] between two stages of a pipeline.

P positions (tokens of a microbatch, one sequence after another), D hidden size. The job fixes the
codec. A payload has no header: both sides know the codec, P and D. Activations are rounded to the
nearest level. Gradients are rounded at random, so that the error of a sum over microbatches has no
bias. The random bits come from a seed that both stages know. So a third worker can recompute the
bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType

import numpy as np
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.blockwise import BOUNDARY_INT4, BOUNDARY_INT8, BlockCodec
from swarmnet_protocols.training.codecs.floats import BFLOAT16, FLOAT32, FloatCodec

_ID_TYPES: Mapping[int, str] = MappingProxyType({1: "<u1", 2: "<u2", 4: "<u4"})


@dataclass(frozen=True)
class BoundaryCodec:
    """Encodes tensors [P, D] with a codec of vectors."""

    vectors: FloatCodec | BlockCodec

    def encode(self, values: torch.Tensor, seed: int | None = None) -> Buffer:
        """Encode ``values`` [P, D] of any float type. With ``seed``, round at random.

        Raises ``ValueError`` if one is not finite.
        """
        return self.vectors.encode(values.detach().to("cpu", torch.float32).flatten(), seed)

    def decode(self, payload: Buffer, positions: int, hidden_size: int) -> torch.Tensor:
        """Decode to float32 [P, D], all finite. Checks the size before it allocates memory.

        Raises ``ProtocolViolation`` for a payload that ``encode`` cannot have returned.
        """
        return self.vectors.decode(payload, positions * hidden_size).view(positions, hidden_size)

    @property
    def level(self) -> float:
        """The step between two levels, relative to the largest value; 0 for float32."""
        if isinstance(self.vectors, BlockCodec):
            return 1 / self.vectors.largest_code
        return 0.0 if self.vectors is FLOAT32 else 2.0**-8

    def size_bytes(self, positions: int, hidden_size: int) -> int:
        """Return the bytes of every payload of this shape."""
        return self.vectors.max_bytes(positions * hidden_size)


BOUNDARY_CODECS: Mapping[str, BoundaryCodec] = MappingProxyType(
    {codec.name: BoundaryCodec(codec) for codec in (FLOAT32, BFLOAT16, BOUNDARY_INT8, BOUNDARY_INT4)}
)
"""The codecs by their names in job files, the most exact first."""


def id_bytes(vocabulary: int) -> int:
    """Return the bytes of a token's id."""
    return next(size for size in _ID_TYPES if vocabulary <= 1 << 8 * size)


def encode_ids(ids: torch.Tensor, vocabulary: int) -> bytes:
    """Encode token ids of any shape, which a shared subspace needs with every activation."""
    return ids.flatten().cpu().numpy().astype(_ID_TYPES[id_bytes(vocabulary)]).tobytes()


def decode_ids(payload: Buffer, vocabulary: int) -> torch.Tensor:
    """Decode ids, int64 [n]. Raises ``ProtocolViolation`` for another size or an unknown token."""
    if len(payload) % id_bytes(vocabulary):
        raise ProtocolViolation(f"{len(payload)} bytes of ids")
    ids = torch.from_numpy(np.frombuffer(payload, _ID_TYPES[id_bytes(vocabulary)]).astype(np.int64))
    check_ids(ids, vocabulary)
    return ids


def check_ids(ids: torch.Tensor, vocabulary: int) -> None:
    """Raise ``ProtocolViolation`` for a token that the model does not have."""
    if (ids >= vocabulary).any():
        raise ProtocolViolation(f"a token outside the {vocabulary} of the model")


def rounding_seed(job_seed: int, microbatch: tuple[int, ...], boundary: int) -> int:
    """Return the seed, 64 bits, of the rounding of a microbatch's gradient at a boundary."""
    text = "/".join(map(str, (job_seed, *microbatch, boundary)))
    return int.from_bytes(sha256(text.encode()).digest()[:8])
