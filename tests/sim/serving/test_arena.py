"""Hosts that compute as on an accelerator, with caches in an arena and recorded steps, in a swarm
with a fault."""

import asyncio
from dataclasses import replace

import torch

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from tests.support.network.deliveries import arrives_at
from tests.support.network.memory_network import Delivery
from tests.support.swarm.recording_backend import RecordingBackend
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

LAYOUT = {"a": (0, 2), "b": (2, 4), "b2": (2, 4), "c": (4, 6)}
PROMPTS = ([5, 6, 7], [9] * 70, list(range(20, 51)))
TOKENS = 12
ARENA_POSITIONS = 1024


def test_clients_get_the_right_tokens_when_a_host_with_an_arena_dies(
    reference: Reference,
) -> None:
    backends: list[RecordingBackend] = []

    def load(start: int, end: int) -> Stage:
        backends.append(RecordingBackend())
        stage = load_stage(
            reference.local,
            start,
            end,
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend=backends[-1],
        )
        stage.preallocate(ARENA_POSITIONS * stage.geometry.bytes_per_position)
        return stage

    async def answer(lab: Lab, name: str, prompt: list[int]) -> list[int]:
        async with lab.client(name) as swarm, lab.chain(swarm) as chain:
            return await lab.generate(chain, prompt, TOKENS)

    async def scenario(lab: Lab) -> None:
        def crash(delivery: Delivery) -> None:
            lab.network.crash(delivery.target)

        for name, blocks in LAYOUT.items():
            await lab.start(name, replace(lab.hosting(blocks), load=load))
        replicas = {lab.peer_id("b"), lab.peer_id("b2")}
        hit = lab.once(arrives_at(replicas, "step 6"), crash)
        answers = await asyncio.gather(
            *(answer(lab, f"client {number}", prompt) for number, prompt in enumerate(PROMPTS))
        )
        assert answers == [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]
        assert len(hit) == 1
        await asyncio.sleep(5.0)
        assert lab.cache_bytes() == {}

    simulate(reference, scenario)
    assert sum(backend.fake.replayed for backend in backends) > 3 * TOKENS
    assert all(backend.fake.recorded for backend in backends)
