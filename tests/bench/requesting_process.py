"""A client process that sends a swarm requests, several at once: prompts of random hidden states,
and then single positions.

It has no model, so that its own computation takes hardly any of the machine's time.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmnet.swarm_file.entry import enter
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.joining.network import client_listen, connect
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.timing import Timing
from tests.bench.answering_process import AnsweringProcess


def requesting(cache_dir: Path, swarm_file: Path, *bootstrap: str) -> AnsweringProcess:
    """A client. Its requests are the keyword arguments of ``load``."""
    return AnsweringProcess(__name__, str(cache_dir), str(swarm_file), *bootstrap)


def random_rows(count: int, hidden_size: int) -> Array:
    return np.random.default_rng().standard_normal((count, hidden_size), np.float32)


async def load(
    hosts: ModelHosts,
    spec: ChainSpec,
    *,
    streams: int,
    prompt: int,
    tokens: int,
    for_s: float,
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """``streams`` requests at once for ``for_s`` seconds, each followed by another one after a
    random pause below ``pause_s``.

    Returns, of each request that was complete by then, the seconds until its first token,
    ``first_s``, and until its last, ``request_s``.
    """
    done: list[tuple[float, float]] = []

    async def stream() -> None:
        while True:
            await asyncio.sleep(random.uniform(0, pause_s))
            began = time.perf_counter()
            async with Chain(hosts, spec, lambda values: values).open() as chain:
                await chain.forward((Row(0, 0, prompt, 1, 0),), random_rows(prompt, spec.hidden_size))
                first_s = time.perf_counter() - began
                for position in range(prompt, prompt + tokens - 1):
                    await chain.forward((Row(0, position, 1, 1, 0),), random_rows(1, spec.hidden_size))
                done.append((first_s, time.perf_counter() - began))

    tasks = [asyncio.create_task(stream()) for _ in range(streams)]
    ended, _ = await asyncio.wait(tasks, timeout=for_s)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in ended:
        task.result()
    return {"first_s": [first_s for first_s, _ in done], "request_s": [request_s for _, request_s in done]}


async def serve(cache_dir: Path, swarm_file: Path, bootstrap: list[str]) -> None:
    manifest = resolve(DEFAULT_MODEL, cache_dir=cache_dir).manifest
    spec = ChainSpec(manifest.blocks, manifest.hidden_size, 8192, ElementType.FLOAT32)
    with tempfile.TemporaryDirectory() as folder:
        entry = enter(str(swarm_file), Path(folder), bootstrap)
        async with connect(entry.network(client_listen(entry.bootstrap)), client_mode=True) as (
            transport,
            directory,
        ):
            timing = Timing(recover_s=60.0)
            hosts = ModelHosts(transport, directory, manifest.hash, random.Random(0), timing)
            async with hosts.watching():
                print("{}", flush=True)
                while question := await asyncio.to_thread(sys.stdin.readline):
                    print(json.dumps(await load(hosts, spec, **json.loads(question))), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))


if __name__ == "__main__":
    main()
