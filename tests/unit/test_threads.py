from concurrent.futures import ThreadPoolExecutor

import torch

from swarmnet_protocols.threads import stay_serial


def parallel_threads() -> int:
    return torch.get_num_threads()


def test_one_thread_stays_serial_while_the_other_computes_on_all_cores() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as moving, ThreadPoolExecutor(1) as computing:
        try:
            threads = moving.submit(stay_serial).result()
            computing.submit(torch.set_num_threads, threads + 1).result()
            assert computing.submit(parallel_threads).result() == threads + 1
            assert moving.submit(parallel_threads).result() == 1
            # Work does not undo it: torch takes its defaults in a thread at the first operation.
            moving.submit(torch.ones(1 << 20).sum).result()
            assert moving.submit(parallel_threads).result() == 1
        finally:
            torch.set_num_threads(before)
