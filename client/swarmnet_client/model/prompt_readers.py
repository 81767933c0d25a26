"""Readers of a prompt: its log probabilities, or its embedding, from the outputs of the last block.

1. A request has a reader (``batching/answers.py``).
2. The reader gets the outputs of the prompt piece by piece, in order, as they arrive.
3. It has its result when the request's first token is there.
"""

from collections.abc import Sequence

import numpy as np

from swarmnet_client.model.head import Layers, NormedLayers
from swarmnet_client.model.sampling import Token, with_logprobs
from swarmnet_protocols.arrays import Array


class PromptScores:
    """The tokens of a prompt with the log probability that the model gave each of them."""

    reads_all = True

    def __init__(self, layers: Layers, ids: Sequence[int], top_logprobs: int) -> None:
        self.tokens: list[Token] = []
        """The first token has no log probability: nothing is before it."""
        self._layers = layers
        self._ids = ids
        self._top_logprobs = top_logprobs

    def read(self, start: int, hidden: Array) -> None:
        self.tokens = [Token(self._ids[0]), *self.tokens[1 : start + 1]]
        following = self._ids[start + 1 : start + 1 + len(hidden)]
        if not following:
            return
        scores = self._layers.logits(hidden[: len(following)])
        self.tokens += [
            with_logprobs(row, token, self._top_logprobs)
            for row, token in zip(scores, following, strict=True)
        ]


class PromptVector:
    """The embedding of a prompt: normed outputs of the last block, of length 1.

    Their mean, or the last of them for models that were trained to sum up a text there.
    """

    def __init__(self, layers: NormedLayers, *, mean: bool) -> None:
        self._layers = layers
        self.reads_all = mean
        self._sum = np.zeros(0)

    def read(self, start: int, hidden: Array) -> None:
        found = self._layers.normed(hidden).sum(axis=0, dtype=np.float64)
        self._sum = self._sum + found if self.reads_all and start else found

    def vector(self, dimensions: int | None = None) -> Array:
        """Return the embedding, float32, or its first ``dimensions`` (Matryoshka Representation
        Learning, section 3)."""
        cut = self._sum[:dimensions]
        length = np.linalg.norm(cut)
        return (cut / length if length else cut).astype(np.float32)
