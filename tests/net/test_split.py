"""A network that splits into two parts, and heals: real processes, the real DHT, links that drop
what goes to the other part.

In less time, without a network: ``conformance/test_dht.py``, whose peers forget each other.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.timing import Timing
from tests.support.processes.commands import Place
from tests.support.processes.nodes import Swarm
from tests.support.processes.wan import Uplink, wan, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.net,
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
HALVES = ("0:15", "15:30")
SPLIT_S = Timing().record_s + 15.0
"""Long enough that each part forgets the announcements of the other."""
WAIT_S = 120.0
GOAL_S = 30.0
"""Goal for the seconds from the end of the split until both clients know all hosts."""


@dataclass
class Client:
    """A client that asks every second."""

    rows: Path

    @classmethod
    @contextmanager
    def running(cls, lab: Swarm, name: str, place: Place) -> Iterator["Client"]:
        rows = lab.directory / f"{name}.rows"
        command = [
            sys.executable,
            "-m",
            "tests.support.processes.asking_client",
            str(lab.file),
            str(lab.cache_dir),
            "1.0",
            "600",
        ]
        with rows.open("w") as out, rows.with_suffix(".log").open("w") as log:
            process = subprocess.Popen([*place.prefix, *command, *lab.bootstrap], stdout=out, stderr=log)
        try:
            yield cls(rows)
        finally:
            process.kill()
            process.wait()

    def since(self, when: float) -> list[dict[str, Any]]:
        """The answers that began after ``when`` on the machine's monotonic clock."""
        lines = self.rows.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row["ended"] - row["s"] >= when]


def wait_for(is_true: Callable[[], bool]) -> float:
    """Seconds until it is true."""
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() < began + WAIT_S, "it did not happen"
        time.sleep(0.2)
    return time.monotonic() - began


def test_each_part_of_a_split_network_serves_and_they_reunite(tmp_path: Path) -> None:
    lab = Swarm(tmp_path / "lab", default_cache_dir())
    with wan(*[Uplink(delay_s=0.005)] * 6) as hosts:
        try:
            for part in range(2):
                for host, blocks in zip(hosts[2 * part :], HALVES, strict=False):
                    node = lab.launch(
                        f"{blocks.replace(':', '-')}-{part}", "--blocks", blocks, place=host.place
                    )
                    _ = node.ready  # each knows those before it
            with (
                Client.running(lab, "here", hosts[4].place) as here,
                Client.running(lab, "there", hosts[5].place) as there,
            ):
                clients = (here, there)

                def all_know(count: int, since: float) -> bool:
                    return all(
                        any(row["hosts"] == count for row in client.since(since)) for client in clients
                    )

                wait_for(lambda: all_know(4, 0.0))
                expected = here.since(0.0)[0]["tokens"]

                split_at = time.monotonic()
                for host in (hosts[2], hosts[3], hosts[5]):
                    host.side = 1
                time.sleep(SPLIT_S)
                healed_at = time.monotonic()
                for client in clients:
                    rows = client.since(split_at)
                    assert rows
                    assert all(row.get("tokens") == expected for row in rows), [
                        row for row in rows if "error" in row
                    ]
                    assert rows[-1]["hosts"] == 2

                for host in hosts:
                    host.heal()
                took_s = wait_for(lambda: all_know(4, healed_at))
                assert all(
                    row.get("tokens") == expected for client in clients for row in client.since(split_at)
                )
                print(f"one view after {took_s:.1f} s, goal {GOAL_S:.0f} s")
        finally:
            lab.close()
