"""Estimates how many distinct clients there were, without keeping their names.

A HyperLogLog sketch (Flajolet et al., 2007, figure 3): the hash of a name chooses a register, which
keeps the longest run of leading zeros. The hash is salted, so nobody can choose peer ids that
inflate the estimate. The sketch hides no names: whoever has the file can check whether a known
peer is probably one of a few clients.
"""

import math
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

_BITS = 10
REGISTERS = 1 << _BITS
"""With 1024 registers, an estimate errs by about 3 %. Half the error costs four times the
bytes."""
SALT_BYTES = 16
_RANK_BITS = 64 - _BITS
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)


@dataclass
class DistinctNames:
    """The sketch of a set of names."""

    registers: bytearray = field(default_factory=lambda: bytearray(REGISTERS))
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for registers or a salt that no sketch has."""
        if len(self.registers) != REGISTERS or max(self.registers) > _RANK_BITS + 1:
            raise ValueError("not the registers of a sketch")
        if len(self.salt) != SALT_BYTES:
            raise ValueError("not the salt of a sketch")

    def add(self, name: str) -> None:
        digest = int.from_bytes(blake2b(name.encode(), key=self.salt, digest_size=8).digest())
        rank = _RANK_BITS - (digest >> _BITS).bit_length() + 1
        register = digest % REGISTERS
        self.registers[register] = max(self.registers[register], rank)

    def count(self) -> int:
        """Return the estimated number of names. Up to about a hundred it is rarely wrong."""
        empty = self.registers.count(0)
        estimate = _ALPHA * REGISTERS**2 / sum(2.0**-rank for rank in self.registers)
        if estimate <= 2.5 * REGISTERS and empty:
            estimate = REGISTERS * math.log(REGISTERS / empty)
        return round(estimate)
