"""The stages of a job's model: their blocks, their keys, and the stage that a newcomer takes. Pure.

Stages form a ring (docs/decisions/0158). Stage 0 has both ends of the model: embeddings, final norm
and output head. It may have the first blocks. Each later stage has blocks only.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from itertools import accumulate
from statistics import median

from swarmnet_protocols.net import PeerId

_KEY_DOMAIN = b"swarmnet-training-stage-1\0"
_NUMBER_BYTES = 4
_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def groups(job_id: str, stages: int | None) -> list[str]:
    """Return the ids under which the workers of a job meet, in hexadecimal digits.

    These are the job's own id, or one id for each stage.
    """
    if stages is None:
        return [job_id]
    return [stage_key(bytes.fromhex(job_id), stage).hex() for stage in range(stages)]


def block_of(name: str) -> int | None:
    """Return the block of a parameter of a model in blocks; None for the ends."""
    found = _BLOCK.search(name)
    return None if found is None else int(found[1])


def stage_key(job_id: bytes, stage: int) -> bytes:
    """Return the key under which the workers of a stage meet, average and share their state."""
    return hashlib.sha256(_KEY_DOMAIN + job_id + stage.to_bytes(_NUMBER_BYTES, "big")).digest()


def balanced_cuts(block_bytes: Sequence[int], ends_bytes: int, count: int) -> tuple[int, ...]:
    """Return the cuts into ``count`` stages whose largest stage has the fewest bytes.

    Only stage 0 may have no block. Raises ``ValueError`` if there are too few blocks.
    """
    if not 1 <= count <= len(block_bytes) + 1:
        raise ValueError(f"{len(block_bytes)} blocks make at most {len(block_bytes) + 1} stages")
    sums = [0, *accumulate(block_bytes)]
    low, high = max([ends_bytes, *block_bytes]), sums[-1] + ends_bytes
    while low < high:
        middle = (low + high) // 2
        if ends_bytes + sums[(_cuts_within(sums, middle, count) or (len(block_bytes),))[0]] <= middle:
            high = middle
        else:
            low = middle + 1
    return _cuts_within(sums, low, count)


def _cuts_within(sums: Sequence[int], most: int, count: int) -> tuple[int, ...]:
    """Return the cuts whose later stages take as many blocks as ``most`` bytes allow.

    The last stage takes its blocks first. Each stage leaves at least one block to every stage
    between it and stage 0.
    """
    cuts = [len(sums) - 1]
    for between in range(count - 2, -1, -1):
        end = start = cuts[0]
        while start > between and sums[end] - sums[start - 1] <= most:
            start -= 1
        cuts.insert(0, start)
    return tuple(cuts[:-1])


def neediest_stage(rates: Sequence[Sequence[float]]) -> int:
    """Return the first stage with the lowest sum of its workers' rates.

    ``rates``: for each stage, the rate of each of its workers, or 0 if it is unknown. A worker of
    unknown rate counts as a usual one.
    """
    known = [rate for stage in rates for rate in stage if rate > 0]
    usual = median(known) if known else 1.0
    sums = [sum(rate or usual for rate in stage) for stage in rates]
    return sums.index(min(sums))


def newcomers_stage(rates: Sequence[Sequence[float]], newcomers: Collection[PeerId], me: PeerId) -> int:
    """Return the stage of the newcomer ``me``.

    All newcomers that start together compute the same assignment: in the order of their ids, each
    takes the stage that needs workers most. ``rates``: as in ``neediest_stage``.
    """
    after = [list(stage) for stage in rates]
    for _ in (peer for peer in newcomers if peer < me):
        after[neediest_stage(after)].append(0.0)
    return neediest_stage(after)
