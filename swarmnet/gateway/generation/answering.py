"""From the request of a caller to the generation of its choices, or to embeddings.

A text to embed travels through the blocks once, and its outputs are pooled here.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.generation.requests import MAX_CHOICES, GenerationRequest
from swarmnet.gateway.generation.sequence_requests import prepare_prompts, sequence_requests
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet_client.batching.answers import Request
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.head import PromptVector
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine.aio import all_of


def check_places(served: BatchedModel, choices: int) -> None:
    """Raise ``Overloaded`` if the batcher and its queue are full, ``ApiError`` if they can never
    hold this number of choices."""
    limits = served.batcher.limits
    most = min(MAX_CHOICES, limits.active + limits.waiting)
    if choices > most:
        message = f"a request may ask for {most} choices over all its prompts, not {choices}"
        raise ApiError(400, message, "invalid_value", param="n")
    served.batcher.check_room(choices)


@asynccontextmanager
async def generating(
    wanted: GenerationRequest,
    served: BatchedModel,
    tokenizer: PromptTokenizer,
    metrics: ModelMetrics,
    key: str,
) -> AsyncIterator[Generation]:
    """Tokenize the prompts of a request, and generate its choices while the context is open.

    ``key``: the name of the caller's key. Raises ``ApiError``.
    """
    prompts = await prepare_prompts(wanted, tokenizer)
    words = await tokenizer.encode_words(wanted.bad_words)
    wanted = replace(wanted, sampling=replace(wanted.sampling, bad_words=words))
    requests = sequence_requests(wanted, prompts, served, tokenizer, key)
    each_prompt = (prompt for prompt in prompts for _ in range(wanted.n))
    async with Generation(
        served,
        [*zip(requests, each_prompt, strict=True)],
        wanted.stop,
        metrics,
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
    ).running() as generation:
        yield generation


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
