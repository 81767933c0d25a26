"""Hosts on different processors, in C without torch or with it, give the bits that one host gives.

That host computes each sequence alone, in plain C.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.chain import chain as chain_module
from swarmnet_client.chain.chain import Chain
from swarmnet_client.model.drafts.draft_model import DraftModel
from swarmnet_client.model.sampling import Token
from swarmnet_protocols.session.steps import Row
from tests.support.swarm.batching import batcher, request
from tests.support.swarm.mixed_targets import MixedTargets, load_mixed
from tests.support.swarm.swarm_lab import Lab, simulate

SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
REPLICAS = {f"{name}2": span for name, span in SPANS.items()}
SYSTEM = [2 + number * 7 % 90 for number in range(90)]
PROMPTS = [[*SYSTEM, *[2 + (user * 11 + number * 5) % 90 for number in range(8)]] for user in range(3)]
TOKENS = 24


@pytest.fixture(scope="module", params=["float32", "int8"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MixedTargets:
    return load_mixed(tmp_path_factory.mktemp("mixed"), request.param)


@pytest.fixture
def mixed(loaded: MixedTargets) -> MixedTargets:
    return loaded.from_the_first_turn()


def leave(lab: Lab, victim: str) -> None:
    lab.nodes[victim].finish(grace_s=30.0)


def crash(lab: Lab, victim: str) -> None:
    lab.network.crash(lab.peer_id(victim))


@pytest.mark.parametrize("fault", [leave, crash])
def test_answers_have_the_bits_of_one_host(mixed: MixedTargets, fault: Callable[[Lab, str], None]) -> None:
    """Each token and its probability: in a batch with a reused prompt and accepted drafts, while
    the middle host hands over or dies."""
    wanted = [
        replace(
            request(ids, TOKENS, temperature=number % 2, seed=number, top_logprobs=3), speculate=number != 1
        )
        for number, ids in enumerate(PROMPTS)
    ]
    whole = mixed.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    drafts = DraftModel(whole, clock=lambda: 0.0)

    async def scenario(lab: Lab) -> list[list[Token]]:
        await lab.start_all(SPANS | REPLICAS)
        struck: list[str] = []
        async with batcher(lab, draft_model=drafts) as (running, _):

            def strike(answer: Answer) -> None:
                if len(answer.ids) >= 4 and not struck:
                    middle, _, _ = answer.report.route[1]
                    struck.append(next(name for name in lab.nodes if lab.peer_id(name) == middle))
                    fault(lab, struck[0])

            async def ask(each: Request, act: Callable[[Answer], object]) -> list[Token]:
                async with running.answer(each) as answer:
                    tokens = []
                    async for token in answer:
                        tokens.append(token)
                        act(answer)
                    assert not each.speculate or answer.trips < TOKENS, "no draft was accepted"
                    assert each is wanted[0] or answer.reused >= len(SYSTEM)
                    return tokens

            first = await ask(wanted[0], lambda _: None)
            rest = await asyncio.gather(*(ask(each, strike) for each in wanted[1:]))
            assert running.failovers == 1
            return [first, *rest]

    found = simulate(mixed, scenario)
    drafts.close()
    assert found == [mixed.answer(each) for each in wanted]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_hidden_states_are_equal_in_chunks_of_any_size(
    mixed: MixedTargets, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_module, "CHUNK", chunk)
    count = len(PROMPTS[0])

    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with lab.client() as swarm:
            chain: Chain
            async with lab.chain(swarm) as chain:
                rows = tuple(Row(number, 0, count, count, number) for number in range(2))
                outputs = await chain.forward(rows, np.concatenate(PROMPTS[:2]))
        for ids, own in zip(PROMPTS, np.split(outputs, 2), strict=False):
            mixed.check(ids, own)

    simulate(mixed, scenario)
