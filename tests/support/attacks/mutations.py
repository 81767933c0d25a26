"""Mutations of signed data, and which of them a reader accepts.

Hypothesis would need ten times as long for each, and inputs this small need no shrinking.
"""

import random
from collections.abc import Callable, Iterable, Iterator

MAX_FLIPS = 3
MAX_BYTES = 8


def mutations(whole: bytes, count: int) -> Iterator[bytes]:
    """``whole`` with each one of its bits flipped, then ``count`` other mutations, the same in
    every run.

    Of those, half have two or three bits flipped; in the others up to 8 bytes are cut out, replaced
    or doubled.
    """
    for bit in range(8 * len(whole)):
        yield _flipped(whole, [bit])
    yield from mutated(whole, count)


def mutated(whole: bytes, count: int) -> Iterator[bytes]:
    """``count`` copies of ``whole`` with a few bits flipped or bytes replaced, the same in every
    run."""
    chance = random.Random(len(whole))
    while count > 0:
        changed = _mutated(whole, chance)
        if changed != whole:
            count -= 1
            yield changed


def taken(
    many: Iterable[bytes], read: Callable[[bytes], object], refusals: tuple[type[Exception], ...]
) -> list[bytes]:
    """The inputs among ``many`` that ``read`` does not refuse with one of ``refusals``.

    Any other error of ``read`` is raised, with the input in a note.
    """
    found = []
    for each in many:
        try:
            read(each)
        except refusals:
            continue
        except Exception as error:
            error.add_note(f"when reading {each.hex()}")
            raise
        found.append(each)
    return found


def _mutated(whole: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return _flipped(whole, chance.sample(range(8 * len(whole)), chance.randint(2, MAX_FLIPS)))
    start = chance.randint(0, len(whole))
    end = chance.randint(start, min(start + MAX_BYTES, len(whole)))
    put = chance.choice([b"", chance.randbytes(chance.randint(1, MAX_BYTES)), whole[start:end] * 2])
    return whole[:start] + put + whole[end:]


def _flipped(whole: bytes, bits: Iterable[int]) -> bytes:
    data = bytearray(whole)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)
