"""From the request of a caller to the generation of its choices, for requests of all kinds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.generation.requests import MAX_CHOICES, GenerationRequest
from swarmnet.gateway.generation.sequence_requests import prepare_prompts, sequence_requests
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet_client.batching.continuous_batching import BatchedModel


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
    async with Generation.run(
        served,
        [*zip(requests, each_prompt, strict=True)],
        wanted.stop,
        metrics,
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
    ) as generation:
        yield generation
