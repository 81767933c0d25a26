"""Thread settings of torch: one thread of a process computes on several cores, all others on one.

A second thread with parallel operations would get its own OpenMP pool. libgomp would then have more
threads than cores and would hardly spin between operations. Decoding would take nearly twice as
long: 23 ms instead of 13 ms for ten blocks of SmolLM2-135M on 2 cores.
"""

import asyncio
from concurrent.futures import Executor

import torch


def stay_serial() -> int:
    """Make torch operations of this thread use one core. Returns the number of threads before."""
    # Also initializes this thread's setting, which would overwrite it later.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads


async def compute_on(computing: Executor, *serial: Executor, threads: int | None) -> int:
    """Let the thread of ``computing`` use ``threads`` cores, by default all.

    This thread and the threads of ``serial`` use one core each. Returns the number of all cores.
    """
    loop = asyncio.get_running_loop()
    every_core = stay_serial()
    for executor in serial:
        await loop.run_in_executor(executor, stay_serial)
    # Set last: part of the setting is global.
    await loop.run_in_executor(computing, torch.set_num_threads, threads or every_core)
    return every_core


def use_cores(computing: Executor, threads: int) -> None:
    """Make the thread of ``computing`` use ``threads`` cores from its next operation on."""
    computing.submit(torch.set_num_threads, threads)
