"""From the request of a caller to the generation of its choices, for requests of all kinds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.generation.requests import GenerationRequest
from swarmnet.gateway.generation.sequence_requests import prepare_prompts, sequence_requests
from swarmnet.gateway.generation.tokenization import PromptTokenizer
from swarmnet.gateway.metrics import ModelMetrics
from swarmnet_client.batching.continuous_batching import BatchedModel


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
