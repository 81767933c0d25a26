"""The number of cores of a thread's computations: one thread of a process uses several, all others
one.

A second thread with parallel operations would get its own OpenMP pool. libgomp would then have more
threads than cores and would hardly spin between operations. Decoding would take nearly twice as
long: 23 ms instead of 13 ms for ten blocks of SmolLM2-135M on 2 cores.

C code asks ``current``. Once torch is imported, its settings count. A setting that was made before
becomes torch's when its thread computes next.
"""

import asyncio
import ctypes
import os
import sys
import threading
from concurrent.futures import Executor
from typing import Any

import psutil

_of_thread = threading.local()


def current() -> int:
    """Return the cores that operations of this thread use."""
    torch: Any = sys.modules.get("torch")
    own: int = getattr(_of_thread, "cores", 0)
    if not hasattr(torch, "get_num_threads"):
        return own or _every_core()
    if own:
        use(own)
    return int(torch.get_num_threads())


def use(cores: int) -> None:
    """Make operations of this thread use ``cores``."""
    torch: Any = sys.modules.get("torch")
    has_torch = hasattr(torch, "set_num_threads")
    if has_torch:
        torch.set_num_threads(cores)
    _of_thread.cores = 0 if has_torch else cores


def stay_serial() -> int:
    """Make operations of this thread use one core. Returns the number of cores before."""
    # Also initializes torch's setting of this thread, which would overwrite it later.
    cores = current()
    use(1)
    return cores


async def compute_on(computing: Executor, *serial: Executor, threads: int | None) -> int:
    """Let the thread of ``computing`` use ``threads`` cores, by default all.

    This thread and the threads of ``serial`` use one core each. Returns the number of all cores.
    """
    loop = asyncio.get_running_loop()
    every_core = stay_serial()
    for executor in serial:
        await loop.run_in_executor(executor, stay_serial)
    # Set last: part of torch's setting is global.
    await loop.run_in_executor(computing, use, threads or every_core)
    return every_core


def use_cores(computing: Executor, threads: int) -> None:
    """Make the thread of ``computing`` use ``threads`` cores from its next operation on."""
    computing.submit(use, threads)


def _every_core() -> int:
    """Return the cores of this process, as torch counts them: without hyperthreads."""
    openmp: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    # libgomp knows OMP_NUM_THREADS. ``native_code`` has loaded it where there is C code.
    most = openmp.omp_get_max_threads() if hasattr(openmp, "omp_get_max_threads") else os.cpu_count() or 1
    return max(1, min(int(most), psutil.cpu_count(logical=False) or 1))
