"""Prompts are scored and embedded over whole nodes as transformers does it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnet_client.model.head import PromptReader, PromptScores, PromptVector
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_protocols.arrays import as_tensor
from tests.support.models.rounding import TINY_TERMS, assert_near
from tests.support.swarm.batching import answered, batcher, request
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
LONG = [2 + number * 7 % 90 for number in range(300)]
PROMPTS = {"a token": [5], "short": [5, 6, 7], "two steps": LONG}
TOKENS = 3


def read(reference: Reference, ids: list[int], reader: PromptReader) -> list[int]:
    """Read a prompt twice whose KV caches the hosts have already; return the answer to it."""

    async def scenario(lab: Lab) -> list[int]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            wanted = request(ids, TOKENS)
            await answered(running, wanted)
            await answered(running, replace(wanted, reader=reader))
            return await answered(running, replace(wanted, reader=reader))

    return simulate(reference, scenario)


@torch.inference_mode()
def whole(reference: Reference, ids: list[int]) -> Any:
    return reference.model(torch.tensor([ids]), output_hidden_states=True)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_has_the_log_probabilities_of_the_model(reference: Reference, name: str) -> None:
    ids = PROMPTS[name]
    scores = PromptScores(reference.layers, ids, 2)
    assert read(reference, ids, scores) == reference.greedy(ids, TOKENS)
    assert [token.id for token in scores.tokens] == ids
    assert scores.tokens[0].logprob is None
    expected = whole(reference, ids).logits[0].log_softmax(-1)
    for token, row in zip(scores.tokens[1:], expected, strict=False):
        found = torch.tensor([token.logprob or 0.0, *(value for _, value in token.top)])
        assert_near(found, torch.cat([row[token.id][None], row.topk(2).values]), TINY_TERMS + len(ids))


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("name", ["short", "two steps"])
def test_an_embedding_is_made_of_the_models_last_states(reference: Reference, name: str, mean: bool) -> None:
    ids = PROMPTS[name]
    reader = PromptVector(LocalLayers(reference.local, LoadOptions()), mean=mean)
    assert read(reference, ids, reader) == reference.greedy(ids, TOKENS)
    states = whole(reference, ids).hidden_states[-1][0]
    expected = states.mean(0) if mean else states[-1]
    found = as_tensor(reader.vector())
    assert_near(found, expected / expected.norm(), TINY_TERMS + len(ids))
    cut = found[:4] / found[:4].norm()
    assert_near(as_tensor(reader.vector(4)), cut)
