"""Real workers of three stages behind routers: every microbatch crosses each of them."""

import time
from pathlib import Path

import pytest

from tests.support.processes.commands import RunningCommand
from tests.support.processes.nat_lab import nat_lab, why_not
from tests.support.processes.worker_processes import WorkerProcess, create_job
from tests.support.training.stages import staged_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.net,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
ROUNDS = 8
SEEN_S = 3.0
"""Seconds until the directory has the job of its first worker."""


def test_stages_behind_routers_train_through_relays(tmp_path: Path) -> None:
    """A cone and a symmetric router cannot punch a hole to each other, so a relay carries the
    microbatches between stages 1 and 2."""
    job = create_job(tmp_path, staged_job(tmp_path, rounds=ROUNDS, stages=3))
    running: list[RunningCommand] = []
    with nat_lab(["open", "open", "cone", "symmetric"]) as (public, *places):
        try:
            address = f"/ip4/{public.ip}/tcp/4001"
            data = ("--data-dir", str(tmp_path / "public"), "--listen", address)
            arguments = ("bootstrap", str(tmp_path / "swarm.toml"), *data)
            running.append(RunningCommand(arguments, tmp_path / "public.log", public))
            bootstrap = running[0].wait("ready")["addresses"][:1]
            for stage, (name, place) in enumerate(zip(("anna", "boris", "clara"), places, strict=True)):
                options = ("--stage", str(stage), "--listen", f"/ip4/{place.ip}/udp/0/quic-v1")
                running.append(WorkerProcess(tmp_path, name, job, bootstrap, place, options))
                if not stage:
                    running[-1].wait("ready")
                    time.sleep(SEEN_S)
            for worker in running[1:]:
                last = worker.wait("round", round=ROUNDS - 1, timeout_s=180.0)
                assert last["committed"]
                assert last["tokens"] > 0
        finally:
            for each in running:
                each.kill()
