"""The batcher's requests for one request of a caller: one for each choice of each prompt."""

import json
from collections.abc import Sequence
from dataclasses import replace

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.requests import ChatPrompt, GenerationRequest
from swarmnet.gateway.generation.tokenization import PreparedPrompt, PromptTokenizer
from swarmnet_client.batching import answers
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.head import PromptScores


async def prepare_prompts(wanted: GenerationRequest, tokenizer: PromptTokenizer) -> list[PreparedPrompt]:
    """Return each prompt with its token ids, and how its answers are written and read. Raises
    ``ApiError``."""
    if isinstance(wanted.prompt, ChatPrompt):
        return [await tokenizer.prepare(wanted.prompt, wanted.output)]
    found = [await tokenizer.prepare_text(prompt, wanted.output) for prompt in wanted.prompt]
    if not wanted.echo:
        return found
    texts = [
        prompt if isinstance(prompt, str) else await tokenizer.decode(prompt) for prompt in wanted.prompt
    ]
    return [
        replace(each, echo=text, is_empty=wanted.max_tokens == 0)
        for each, text in zip(found, texts, strict=True)
    ]


def sequence_requests(
    wanted: GenerationRequest,
    prompts: Sequence[PreparedPrompt],
    served: BatchedModel,
    tokenizer: PromptTokenizer,
    key: str,
) -> list[answers.Request]:
    """Return one request for each choice of each prompt. ``key``: the name of the caller's key.

    Raises ``ApiError`` for prompts that do not fit into the context.
    """
    requests: list[answers.Request] = []
    tokenizer.check_ids(dict(wanted.sampling.biases), "logit_bias")
    for prepared in prompts:
        prompt = prepared.ids
        tokenizer.check_ids(prompt, wanted.param)
        room = served.max_length - len(prompt)
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", "invalid_value", param=wanted.param)
        if room < 1:
            most = served.max_length
            who = "the model takes" if most == served.context else "the hosts have room for"
            message = f"the prompt has {len(prompt)} tokens; {who} 1 to {most - 1}"
            raise ApiError(400, message, "context_length_exceeded", param=wanted.param)
        most_new = room if wanted.max_tokens is None else min(room, max(1, wanted.max_tokens))
        for _ in range(wanted.n):
            reader = None
            if wanted.echo and wanted.sampling.top_logprobs is not None:
                reader = PromptScores(served.layers, prompt, wanted.sampling.top_logprobs)
            requests.append(
                answers.Request(
                    tuple(prompt),
                    most_new,
                    replace(wanted.sampling, seed=wanted.sampling.seed + len(requests)),
                    frozenset() if wanted.ignore_eos else served.end_ids,
                    owner=_owner(wanted, key),
                    adapter=served.adapter,
                    speculate=served.speculates,
                    reader=reader,
                    traced=wanted.traced,
                    grammar=prepared.grammar,
                )
            )
    return requests


def _owner(wanted: GenerationRequest, key: str) -> str:
    """Return the owner of the KV caches that a request may reuse.

    The time to the first token shows whether the caches had the prompt, so callers with different
    keys, users or salts share none.
    """
    return json.dumps([key, wanted.user, wanted.salt])
