"""A batcher over the swarm of a lab, and requests to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.batching.continuous_batching import Batcher, BatchLimits
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.model.drafts.draft_model import DraftModel
from swarmnet_client.model.head import LmHead
from swarmnet_client.model.sampling import Sampling
from tests.support.swarm.swarm_lab import Lab, Reference


def head_of(reference: Reference, draft_model: DraftModel | None = None) -> LmHead:
    # virtual time runs the calls of executors in place
    return LmHead(reference.layers, ThreadPoolExecutor(1), draft_model)


@asynccontextmanager
async def batcher(
    lab: Lab, limits: BatchLimits | None = None, client: str = "client", draft_model: DraftModel | None = None
) -> AsyncIterator[tuple[Batcher, ModelHosts]]:
    async with (
        lab.client(client) as hosts,
        Batcher(
            head_of(lab.reference, draft_model),
            lambda adapter, give_up, _: lab.chain(hosts, give_up_idle=give_up, adapter=adapter),
            limits or BatchLimits(),
        ).running() as running,
    ):
        yield running, hosts


def request(ids: list[int], tokens: int, **sampling: Any) -> Request:
    return Request(tuple(ids), tokens, Sampling(**sampling))


async def answered(
    running: Batcher, wanted: Request, on_token: Callable[[Answer], object] | None = None
) -> list[int]:
    """All tokens of an answer."""
    tokens = []
    async with running.answer(wanted) as answer:
        async for token in answer:
            tokens.append(token.id)
            if on_token is not None:
                on_token(answer)
    return tokens


async def all_answered(running: Batcher, wanted: list[Request]) -> list[list[int]]:
    return list(await asyncio.gather(*(answered(running, each) for each in wanted)))
