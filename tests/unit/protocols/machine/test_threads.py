"""How many threads torch computes with."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swarmnet_protocols.machine.threads import compute_on


@pytest.mark.parametrize(("wanted", "given"), [(5, 5), (None, 3)])
def test_one_thread_uses_the_cores_it_is_given_and_others_stay_serial(wanted: int | None, given: int) -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as computing, ThreadPoolExecutor(1) as moving:
        try:
            torch.set_num_threads(3)
            asyncio.run(compute_on(computing, moving, threads=wanted))
            assert computing.submit(torch.get_num_threads).result() == given
            # Work does not undo it: torch takes its defaults in a thread at the first operation.
            moving.submit(torch.ones(1 << 20).sum).result()
            assert moving.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)


_IMPORT_LATER = """
from concurrent.futures import ThreadPoolExecutor
from swarmnet_protocols.machine import threads
with ThreadPoolExecutor(1) as computing:
    wanted = 1 + computing.submit(threads.current).result()
    computing.submit(threads.use, wanted).result()
    import torch
    assert computing.submit(threads.current).result() == wanted
    assert computing.submit(torch.get_num_threads).result() == wanted
    computing.submit(torch.set_num_threads, 1).result()
    assert computing.submit(threads.current).result() == 1
"""


def test_a_thread_keeps_its_cores_when_torch_is_imported_later() -> None:
    subprocess.run([sys.executable, "-c", _IMPORT_LATER], check=True)
