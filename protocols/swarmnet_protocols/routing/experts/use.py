"""Count the rows that choose each expert, and each pair of experts of a block. The counts have a
half-life.

A row is one position of one sequence in one block. Its router chooses k of the E experts of the
block.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_S = 60.0
"""Seconds until a count has half its weight. The most chosen experts change with the subject of the
text. A longer half-life notices the change late; a shorter one leaves few rows to count."""
MAX_COUNTS = 1 << 25
"""Most counts of one model (128 MiB). DeepSeek-V3 (58 blocks of 256 experts) has 3.8 million."""


class ExpertUse:
    """Counts of the rows of a model with ``blocks`` blocks of ``experts`` experts each."""

    def __init__(self, blocks: int, experts: int) -> None:
        """Start without counts. Raises ``ValueError`` without experts or above ``MAX_COUNTS``
        counts.
        """
        if not (blocks > 0 and experts > 0 and blocks * experts * experts <= MAX_COUNTS):
            raise ValueError(f"counts of {blocks} blocks of {experts} experts")
        self.blocks = blocks
        self.experts = experts
        self.rows = np.zeros((blocks, experts), np.float32)
        """Rows that chose the expert, ``[blocks, E]``."""
        self.together = np.zeros((blocks, experts, experts), np.float32)
        """Rows that chose both experts, ``[blocks, E, E]``; 0 on the diagonal."""

    def add(self, chosen: NDArray[np.integer], first_block: int = 0) -> None:
        """Count rows of consecutive blocks from ``first_block`` on.

        ``chosen`` is ``[rows, blocks of a span, k]``. No row may choose an expert of a block twice.
        Raises ``ValueError`` for blocks or experts that the model does not have.
        """
        if chosen.ndim != 3 or not 0 <= first_block <= first_block + chosen.shape[1] <= self.blocks:
            raise ValueError(f"{chosen.shape} choices from block {first_block} of {self.blocks}")
        if not chosen.size:
            return
        if chosen.min() < 0 or chosen.max() >= self.experts:
            raise ValueError(
                f"experts {chosen.min()} to {chosen.max()} are chosen, but a block has {self.experts}"
            )
        for place in range(chosen.shape[1]):
            block, of_block = first_block + place, chosen[:, place].astype(np.int64)
            self.rows[block] += np.bincount(of_block.ravel(), minlength=self.experts)
            self.together[block] += self._pairs(of_block)

    def part(self, blocks: Sequence[int]) -> "ExpertUse":
        """Copy the counts of some blocks, given in ascending order."""
        found = ExpertUse(len(blocks), self.experts)
        found.rows, found.together = self.rows[blocks], self.together[blocks]
        return found

    def decay(self, seconds: float) -> None:
        """Let ``seconds`` pass: counts halve every ``HALF_LIFE_S``."""
        left = 0.5 ** (seconds / HALF_LIFE_S)
        self.rows *= left
        self.together *= left

    def _pairs(self, chosen: NDArray[np.int64]) -> NDArray[np.float32]:
        """Count the rows of ``chosen`` ``[rows, k]`` with two experts: ``[E, E]``, 0 on the
        diagonal.
        """
        numbers = chosen[:, :, None] * self.experts + chosen[:, None, :]
        counted = np.bincount(numbers.ravel(), minlength=self.experts**2)
        pairs = counted.reshape(self.experts, self.experts).astype(np.float32)
        np.fill_diagonal(pairs, 0.0)
        return pairs
