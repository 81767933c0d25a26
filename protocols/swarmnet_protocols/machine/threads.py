"""One thread of a process computes with torch on several cores; the thread of the event loop only moves tensors.

If both ever ran a parallel operation, each would have an OpenMP pool. libgomp then counts more threads than cores, hardly
spins between operations, and decoding takes nearly twice as long from then on (measured on 2 cores: 23 ms for ten blocks
of SmolLM2-135M, against 13 ms).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import torch

T = TypeVar("T")


def stay_serial() -> int:
    """Run the torch operations of this thread on it alone; returns how many threads they would have had."""
    threads = torch.get_num_threads()  # also makes this thread take its defaults now and not later
    torch.set_num_threads(1)
    return threads


async def compute_on(computing: Executor, *serial: Executor, threads: int | None) -> int:
    """Have the thread of ``computing`` compute on ``threads`` cores, default all; this one and ``serial`` stay serial.

    Returns how many all are.
    """
    loop = asyncio.get_running_loop()
    every_core = stay_serial()
    for executor in serial:
        await loop.run_in_executor(executor, stay_serial)
    # The last to be told: a part of the setting is the whole process's.
    await loop.run_in_executor(computing, torch.set_num_threads, threads or every_core)
    return every_core


def use_cores(computing: Executor, threads: int) -> None:
    """Have the thread of ``computing`` compute on so many cores from its next operation on."""
    computing.submit(torch.set_num_threads, threads)


def on_half_the_cores(work: Callable[[], T]) -> T:
    """Call ``work`` here, on half as many cores as this thread computes on otherwise; on one at least."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        return work()
    finally:
        torch.set_num_threads(threads)
