"""Counts how many distinct clients there were, without keeping their names.

The count keeps the ``KEPT`` smallest hashes of names (Bar-Yossef et al., 2002, section 2.1). Up to
that many names it is exact. Beyond, the largest kept hash says how densely names fill the range of
hashes. The hashes are salted, so nobody can choose peer ids that inflate the estimate. They hide no
names: whoever has the file can check whether a known peer is one of the clients.
"""

import secrets
from bisect import bisect_left
from dataclasses import dataclass, field
from hashlib import blake2b

KEPT = 1024
"""Most hashes that are kept. With 1024, an estimate errs by about 3 %. Half the error costs four
times the bytes."""
SALT_BYTES = 16
_HASHES = 1 << 64


@dataclass
class DistinctNames:
    """A set of names. It keeps only the smallest of their hashes."""

    hashes: list[int] = field(default_factory=list)
    """In rising order."""
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for hashes or a salt that no count has."""
        if not all(type(each) is int and 0 <= each < _HASHES for each in self.hashes):
            raise ValueError("not the hashes of a count")
        if len(self.hashes) > KEPT or self.hashes != sorted({*self.hashes}):
            raise ValueError("not the order of a count")
        if len(self.salt) != SALT_BYTES:
            raise ValueError("not the salt of a count")

    def add(self, name: str) -> None:
        digest = int.from_bytes(blake2b(name.encode(), key=self.salt, digest_size=8).digest())
        place = bisect_left(self.hashes, digest)
        if self.hashes[place : place + 1] != [digest]:
            self.hashes.insert(place, digest)
            del self.hashes[KEPT:]

    def count(self) -> int:
        """Return the number of names, or an estimate if there are more than ``KEPT``."""
        if len(self.hashes) < KEPT:
            return len(self.hashes)
        return round((KEPT - 1) * _HASHES / self.hashes[-1])
