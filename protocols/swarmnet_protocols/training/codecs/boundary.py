"""Codecs of boundaries: activations and gradients [P, D] between two stages of a pipeline.

P positions (tokens of a microbatch, one sequence after another), D hidden size. The job fixes the
codec, or lets each link choose one (``fitting``). A payload has no header: both sides know P and D,
and its size says which codec it has. Activations are rounded to the nearest level. Gradients are
rounded at random, so that the error of a sum over microbatches has no bias. The random bits come
from a seed that both stages know. So a third worker can recompute the bytes.
"""

from collections.abc import Mapping, Sequence
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

AUTO = ("float32", "bfloat16", "int8")
"""The codecs of a job whose links choose. With ``int4``, the loss could be 3 % worse, not 1 %."""
SPARE = 0.5
"""Part of the computing time that the tensors of a link may take when it changes to a more exact
codec. With more, a link that is nearly full changes back and forth. With less, fast links send
fewer bits than they could."""


def codecs_by_size(name: str, positions: int, hidden_size: int) -> dict[int, BoundaryCodec]:
    """Return the codecs of a job's boundaries by the bytes of a tensor, the most exact first.

    ``name``: the ``codec`` of the job's settings.
    """
    codecs = [BOUNDARY_CODECS[each] for each in (AUTO if name == "auto" else (name,))]
    return {each.size_bytes(positions, hidden_size): each for each in codecs}


def fitting(sizes: Sequence[int], bytes_per_s: float, compute_s: float, before: int | None) -> int:
    """Return the size of the most exact codec whose tensors cross a link while the sender computes.

    - ``sizes``: bytes of a tensor in each codec, the most exact first. The last if none fits.
    - ``bytes_per_s``: bandwidth of the link; 0 if unknown.
    - ``compute_s``: the sender's computing time of a microbatch, which has one tensor each way.
    - ``before``: the size in the last round. A larger one must take at most ``SPARE`` of the time.
    """
    for size in sizes:
        share = 1.0 if before is not None and size <= before else SPARE
        if size <= share * compute_s * bytes_per_s:
            return size
    return sizes[-1]


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
