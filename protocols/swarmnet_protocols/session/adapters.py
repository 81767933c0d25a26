"""Adapters: a client's LoRA pairs and prefixes for the hosts' blocks.

An adapter is a set of named tensors. Blocks are numbered as in the whole model:

- ``{block}.{module}.down`` [rank, inputs] and ``{block}.{module}.up`` [outputs, rank] add ``x @
  down.T @ up.T`` to the output of the linear module for ``x`` (LoRA, arXiv:2106.09685, section
  4.1). ``up`` includes the scaling.
- ``{block}.prefix.key`` and ``{block}.prefix.value`` [key heads, n, head size] belong to n
  positions before the first token (P-tuning v2, arXiv:2110.07602, section 3.2). Tokens are numbered
  from n.

A *part* is a safetensors file with the tensors of one span of blocks, named by its SHA-256. Hosts
keep parts.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.session import MAX_RANK

MAX_PREFIX_POSITIONS = 512
MAX_HEADER_BYTES = 1 << 20
"""Most bytes of a part's safetensors header. Enough for the tensors of a few hundred blocks."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,4})\.(?:prefix\.(key|value)|([A-Za-z0-9_.]{1,200})\.(down|up))")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class BlockTensors:
    """An adapter's tensors for one block.

    ``pairs``: path of a linear module in the layer → (down, up). ``prefix``: (key, value).
    """

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class AdapterPart:
    """The safetensors file for one span of blocks, and its SHA-256."""

    data: bytes = field(repr=False)
    hash: bytes


class Adapter:
    """Copies of named tensors, in float32 on the CPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ``ConfigError`` for tensors that hosts would refuse."""
        copies = {
            name: tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        try:
            self.blocks: Mapping[int, BlockTensors] = by_block(copies)
            check_finite(copies)
        except ProtocolViolation as error:
            raise ConfigError(
                f"an adapter that hosts do not accept: {error}", hint="train it again, or smaller"
            ) from None
        self.tensors: Mapping[str, torch.Tensor] = copies
        self._parts: dict[tuple[int, int], AdapterPart | None] = {}

    @property
    def prefix_positions(self) -> int:
        """Number of positions of the prefix; 0 without a prefix."""
        return prefix_positions(self.blocks)

    def part(self, start: int, end: int) -> AdapterPart | None:
        """Return the part for blocks [start, end); None if the adapter has no tensors there.

        Each span is computed once. Raises ``ConfigError`` if the adapter has a prefix for only some
        of the blocks.
        """
        if (start, end) not in self._parts:
            lacking = [n for n in range(start, end) if n not in self.blocks or self.blocks[n].prefix is None]
            if self.prefix_positions and lacking:
                raise ConfigError(
                    f"an adapter with a prefix, but not for block {lacking[0]}", hint="give every block one"
                )
            chosen = {name: tensor for name, tensor in self.tensors.items() if start <= block_of(name) < end}
            data = save(chosen) if chosen else b""
            self._parts[start, end] = AdapterPart(data, hashlib.sha256(data).digest()) if chosen else None
        return self._parts[start, end]


def block_of(name: str) -> int:
    """Return the block of a tensor name.

    Raises ``ProtocolViolation`` if the name is not an adapter's.
    """
    return int(_match(name)[1])


def by_block(tensors: Mapping[str, torch.Tensor]) -> dict[int, BlockTensors]:
    """Group tensors by block and purpose. They may be part of an autograd graph.

    Raises ``ProtocolViolation`` for an unknown name, half a pair, shapes that do not match, or a
    rank or prefix that is too large. Does not check whether the model has such modules.
    """
    blocks: defaultdict[int, BlockTensors] = defaultdict(BlockTensors)
    for name, tensor in tensors.items():
        number, prefix, module, _ = _match(name).groups()
        block = blocks[int(number)]
        if prefix == "key":
            block.prefix = _prefix(name, tensor, _other(tensors, f"{number}.prefix.value"))
        elif prefix == "value":
            _other(tensors, f"{number}.prefix.key")
        else:
            down, up = (_other(tensors, f"{number}.{module}.{side}") for side in ("down", "up"))
            block.pairs[module] = _pair(name, down, up)
    prefix_positions(blocks)
    return dict(blocks)


def prefix_positions(blocks: Mapping[int, BlockTensors]) -> int:
    """Return the number of prefix positions. Raises ``ProtocolViolation`` if blocks differ."""
    lengths = {block.prefix[0].shape[1] for block in blocks.values() if block.prefix is not None}
    if len(lengths) > 1:
        raise ProtocolViolation(f"prefixes of {min(lengths)} and of {max(lengths)} positions")
    return max(lengths, default=0)


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ProtocolViolation`` if any value is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ProtocolViolation(f"{name} has values that are not finite")


def read_part(data: bytes) -> dict[str, torch.Tensor]:
    """Read a part from a peer, onto the CPU.

    Raises ``ProtocolViolation`` unless the tensors are finite and ``by_block`` accepts them.
    """
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:
        raise ProtocolViolation(f"an adapter whose header has more than {MAX_HEADER_BYTES} bytes")
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ProtocolViolation(f"an adapter that is not a safetensors file: {error}") from None
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in entries:
        _match(name)
        if entry["dtype"] not in _DTYPES or not entry["data"]:
            raise ProtocolViolation(f"{name} is empty or of type {entry['dtype']}")
        values = torch.frombuffer(entry["data"], dtype=_DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    by_block(tensors)
    check_finite(tensors)
    return tensors


def _match(name: str) -> re.Match[str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ProtocolViolation(f"an adapter with a tensor {name[:100]!r}")
    return match


def _other(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ProtocolViolation(f"an adapter without {name}")
    return tensors[name]


def _pair(name: str, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise ProtocolViolation(f"{name} belongs to a pair {list(down.shape)[:4]}, {list(up.shape)[:4]}")
    if not 1 <= len(down) <= MAX_RANK:
        raise ProtocolViolation(f"{name} has rank {len(down)}, {MAX_RANK} is the most")
    return down, up


def _prefix(name: str, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
        raise ProtocolViolation(f"{name} belongs to a prefix {list(key.shape)[:4]}, {list(value.shape)[:4]}")
    if not 1 <= key.shape[1] <= MAX_PREFIX_POSITIONS:
        raise ProtocolViolation(f"{name} has {key.shape[1]} positions, {MAX_PREFIX_POSITIONS} is the most")
    return key, value
