"""Embeddings: each text travels through the blocks once, and its outputs are pooled here."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from swarmnet_client.batching.answers import Request
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.prompt_readers import PromptVector
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine.aio import all_of

AT_ONCE = 8
"""Texts of one request that are computed at a time. More would take the places of other callers'
answers; fewer leave hosts idle."""


async def embedded(served: BatchedModel, requests: Sequence[Request], dimensions: int | None) -> list[Array]:
    """Return the embedding of each prompt, cut to ``dimensions``. Raises ``SwarmnetError``."""
    room = asyncio.Semaphore(AT_ONCE)
    mean = not ends_texts(served)

    async def one(request: Request) -> Array:
        reader = PromptVector(served.layers, mean=mean)
        async with room, served.batcher.answer(replace(request, reader=reader)) as answer:
            async for _ in answer:
                pass  # the token after the prompt: by then the prompt was read
        return reader.vector(dimensions)

    return await all_of(*map(one, requests))


def ends_texts(served: BatchedModel) -> bool:
    """Return whether the tokenizer ends each text with a token of its own.

    Tokenizers of models that were trained to sum up a text at its last position do; their embedding
    is the output there. Other models' is the mean over all positions.
    """
    bare, whole = (served.tokenizer.encode("a", add_special_tokens=each) for each in (False, True))
    return bool(whole[-1] != bare[-1])
