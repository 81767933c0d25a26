"""The local layers of a model, loaded, and its head at work: next tokens, and readers of prompts.

A request may have a reader (``batching/answers.py``). The reader gets the outputs of the prompt
piece by piece, in order, as they arrive. It has its result when the first token is there.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.sampling import Draw, Token, choose, with_logprobs
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.models import LocalModel

if TYPE_CHECKING:
    from swarmnet_client.model.drafts.draft_model import DraftModel

READ_POSITIONS = 16
"""Positions of a prompt that are read at a time. With more, the next tokens of other answers wait
longer; fewer take longer in all."""
T = TypeVar("T")


class Layers(Protocol):
    """Embeddings, final norm and lm_head of one model, for many answers at once."""

    @property
    def can_rewind(self) -> bool:
        """True if caches can go back to any position at no cost. Recurrent states cannot: they are
        computed again from a snapshot."""

    def embed(self, ids: Array) -> Array:
        """Return embeddings [P, D] of token ids [P]."""

    def logits(self, hidden: Array) -> Array:
        """Return logits [N, V], float32, of outputs [N, D] of the last block."""


class NormedLayers(Layers, Protocol):
    """Layers that give what is between norm and lm_head, too."""

    def normed(self, hidden: Array) -> Array:
        """Return outputs [N, D] of the last block after the final norm, float32."""


class PromptReader(Protocol):
    """Gets the outputs of the last block at positions of one prompt."""

    reads_all: bool
    """True if it gets all positions; otherwise only the last one."""

    def read(self, start: int, hidden: Array) -> None:
        """Take the outputs [N, D] at the positions from ``start``. A piece at position 0 begins
        anew: the prompt moved to another chain."""


class PromptScores:
    """The tokens of a prompt with the log probability that the model gave each of them."""

    reads_all = True

    def __init__(self, layers: Layers, ids: Sequence[int], top_logprobs: int) -> None:
        self.tokens: list[Token] = []
        """The tokens read so far. The first has no log probability, because nothing is before
        it."""
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


def open_layers(local: LocalModel, options: LoadOptions) -> NormedLayers:
    """Load the local layers of a model, without torch where this machine can."""
    if options.packed and options.device == "cpu":
        from swarmnet_client.model.native_layers import NativeLocalLayers

        if (native := NativeLocalLayers.load(local)) is not None:
            return native
    from swarmnet_protocols.machine.lean_imports import import_transformers

    import_transformers()
    from swarmnet_client.model.local_layers import LocalLayers

    return LocalLayers(local, options)


class LmHead:
    """Applies lm_head and samples next tokens, on the one thread that computes.

    ``draft_model`` drafts tokens on this thread, in addition to prompt lookup.
    """

    def __init__(self, layers: Layers, computing: Executor, draft_model: "DraftModel | None" = None) -> None:
        self._layers = layers
        self._computing = computing
        self.draft_model = draft_model

    def choose(self, hidden: Array, draws: list[Draw]) -> list[Token]:
        """Return the next token after each of the hidden states [N, D], chosen by its draw. Called
        on the thread that computes."""
        return choose(self._layers.logits(hidden), draws)

    async def read(self, reader: PromptReader, start: int, hidden: Array) -> None:
        """Give ``reader`` the outputs [N, D] of the last block at the positions from ``start``."""
        for at in range(0, len(hidden), READ_POSITIONS):
            piece = hidden[at : at + READ_POSITIONS]
            await self.compute(partial(reader.read, start + at, piece))

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin ``work`` on the thread that computes. It is done before what is begun later."""
        return asyncio.get_running_loop().run_in_executor(self._computing, work)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread that computes, and return its result."""
        return await self.begin(work)
