"""Candidate adapters on the hosts of a swarm: losses on a batch, and answers to prompts.

Hosts compute several candidates at a time, and apply each to its own rows. Only forward passes are
needed, so hosts may keep their weights packed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn import functional as F

from swarmnet_client.batching.answers import Request
from swarmnet_client.batching.continuous_batching import Batcher, BatchLimits
from swarmnet_client.model.head import LmHead
from swarmnet_client.model.sampling import Sampling
from swarmnet_client.tuning.batches import IGNORED, Batch
from swarmnet_protocols.arrays import as_array, as_tensor
from swarmnet_protocols.machine.aio import all_of
from swarmnet_protocols.session.adapters import Adapter

if TYPE_CHECKING:
    from swarmnet_client.model.model import SwarmModel

AT_ONCE = 4
"""Candidates on the hosts at a time. With fewer, hosts wait for each other. With more, a client
asks for more than its share of a host."""
WAIT_S = 600.0
"""Longest wait for overloaded hosts. With less, a busy swarm ends a run. With more, a run hangs
where an error would say why."""
A = TypeVar("A")
T = TypeVar("T")


@torch.no_grad()
def losses(model: "SwarmModel", batch: Batch, candidates: Sequence[Adapter | None]) -> list[float]:
    """Return the mean loss of each candidate on ``batch``, in nats a token. None: no adapter."""
    mask, labels = batch["attention_mask"].bool(), batch["labels"][:, 1:]
    predicts = torch.zeros_like(mask)
    predicts[:, :-1] = labels != IGNORED
    counts = mask.sum(dim=1).tolist()
    blocks = model.blocks
    hidden = as_tensor(blocks.embed(as_array(batch["input_ids"][mask])))

    async def loss(adapter: Adapter | None) -> float:
        outputs = await blocks.pass_forward(hidden, counts, adapter)
        chosen = outputs[predicts[mask]]
        scores = await asyncio.to_thread(blocks.logits, as_array(chosen))
        return float(F.cross_entropy(as_tensor(scores), labels[labels != IGNORED]))

    return blocks.run(_each(loss, candidates))


def answers(
    model: "SwarmModel", prompts: Sequence[Sequence[int]], candidates: Sequence[Adapter], max_tokens: int
) -> list[list[list[int]]]:
    """Return the likeliest answers of each candidate to each prompt, as token ids without the end
    token."""
    end_ids = frozenset(_listed(model.generation_config.eos_token_id))
    requests = [Request((*ids,), max_tokens, Sampling(temperature=0), end_ids) for ids in prompts]
    blocks = model.blocks
    limits = BatchLimits(active=len(prompts), waiting=len(prompts))

    async def answer(batcher: Batcher, request: Request) -> list[int]:
        async with batcher.answer(request) as found:
            return [token.id async for token in found if token.id not in end_ids]

    async def answer_all(adapter: Adapter) -> list[list[int]]:
        longest = max(len(request.ids) for request in requests) + max_tokens
        async with Batcher(
            head, lambda *_: blocks.open_chain(longest, adapter, wait_s=WAIT_S), limits
        ).running() as batcher:
            return await all_of(*(answer(batcher, request) for request in requests))

    with ThreadPoolExecutor(1, thread_name_prefix="head") as computing:
        head = LmHead(blocks, computing)
        return blocks.run(_each(answer_all, candidates))


async def _each(work: Callable[[A], Awaitable[T]], candidates: Sequence[A]) -> list[T]:
    """Return the result of ``work`` for each candidate, ``AT_ONCE`` at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(adapter: A) -> T:
        async with room:
            return await work(adapter)

    return await all_of(*map(one, candidates))


def _listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids
