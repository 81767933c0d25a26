"""Who trains on which sequence: a pure function of the job's seed, so that nobody hands samples out."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Sampler:
    """Divides the ``sequences`` of a corpus among slots, steps and rounds.

    Every (round, step, slot) has ``batch_size`` places in one long row; each pass over the corpus fills its part of the row
    with a permutation of its own. So no sequence comes twice in a pass, whoever is there, and a slot that nobody holds
    leaves its sequences for the next pass.
    """

    seed: int
    sequences: int
    batch_size: int
    steps_per_round: int
    slots: int

    def batch(self, round_number: int, step: int, slot: int) -> NDArray[np.int64]:
        """The sequence numbers of a slot's batch, ``[batch_size]``, each in [0, sequences)."""
        if not (round_number >= 0 and 0 <= step < self.steps_per_round and 0 <= slot < self.slots):
            raise ValueError(f"there is no batch for round {round_number}, step {step}, slot {slot}")
        first = ((round_number * self.steps_per_round + step) * self.slots + slot) * self.batch_size
        numbers = np.empty(self.batch_size, dtype=np.int64)
        done = 0
        while done < self.batch_size:  # once, but where a batch spans two passes
            epoch, start = divmod(first + done, self.sequences)
            count = min(self.batch_size - done, self.sequences - start)
            places = np.arange(start, start + count, dtype=np.uint64)
            numbers[done : done + count] = permute(places, self.sequences, self._key(epoch))
            done += count
        return numbers

    def _key(self, epoch: int) -> bytes:
        return hashlib.sha256(f"swarmnet-epoch-1 {self.seed} {epoch}".encode()).digest()


def permute(places: NDArray[np.uint64], size: int, key: bytes) -> NDArray[np.int64]:
    """The images of ``places`` under a bijection of [0, size) that ``key`` (32 bytes) chooses.

    A Feistel network permutes the next larger power of four; images outside are sent through it again until they are
    inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 4).
    """
    half_bits = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    keys = np.frombuffer(hashlib.shake_256(key).digest(8 * _FEISTEL_ROUNDS), dtype="<u8")
    images = _feistel(places, half_bits, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood, 2014): every bit of the input changes half the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
