"""The total cost of a training round: every message of every worker, framing included."""

import random
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from swarmnet_protocols.net import PeerId
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, train, write_job

ROUNDS = 3
"""The first round is not counted: in it workers join, and learn the addresses of the others."""


class CountingNetwork(MemoryNetwork):
    sent_bytes = 0

    def carry(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        self.sent_bytes += size_bytes
        super().carry(source, target, size_bytes, arrive)


def bytes_of_a_round(workers: int, steps: int, *, delay_s: float = 0.02) -> int:
    """The most bytes that all ``workers`` of a ``zo`` job send between the ends of two rounds of
    ``steps``.

    Matchmaking is included; newcomers and the first round are not.
    """
    network = CountingNetwork(random.Random(0), LinkProfile(delay_s=delay_s))
    names = [f"worker-{number}" for number in range(workers)]
    ends = []

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == names[0] and event["event"] == "round":
            ends.append(network.sent_bytes)

    with tempfile.TemporaryDirectory() as folder:
        toml = write_job(
            Path(folder), "zo", f"sync_every = {steps}", f"min_workers = {workers}", rounds=ROUNDS
        )
        run(train(WorkerLab(Path(folder), toml, network, watch), *names))
    return max(later - earlier for earlier, later in pairwise(ends))
