"""The jobs of a swarm as volunteers see them, without torch."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from swarmnet_protocols.directory.catalog import made_jobs
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import JOB_LIFETIME_S, job_announcement, worker_announcement
from swarmnet_protocols.training.jobs import open_job, seal_job
from swarmnet_protocols.training.open_jobs import JobOutline, OpenJob, outline_of, read_open_jobs
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.training.tiny_job import for_others, tiny_job
from tests.support.training.workers import SWARM

OWNER, WORKER = Identity.from_seed(b"owner"), Identity.from_seed(b"worker")


def test_the_outline_of_a_job_says_what_its_workers_need(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, exchange={"max_workers": 4, "min_workers": 2})
    sealed = seal_job(for_others(job), OWNER)
    outline, id = outline_of(sealed), open_job(sealed).id
    assert outline == JobOutline(id, "tiny", 10, 2, 4, needs_user=True, groups=(id,))
    public = tiny_job(tmp_path, data={"path": "python-stdlib"})
    assert not outline_of(seal_job(for_others(public), OWNER)).needs_user
    own = tiny_job(tmp_path, data={"source": "own", "path": None})
    assert outline_of(seal_job(own.about([None], None), OWNER)).needs_user


def test_workers_of_a_job_are_counted_until_it_is_done(tmp_path: Path) -> None:
    sealed = seal_job(for_others(tiny_job(tmp_path)), OWNER)
    outline, now = outline_of(sealed), [1e9]

    async def scenario() -> list[OpenJob]:
        network = MemoryNetwork(random.Random(0), LinkProfile())
        board = MemoryBoard(network, lambda: now[0])
        async with network.transport(OWNER.peer_id), network.transport(WORKER.peer_id):
            owner, worker = (MemoryDirectory(board, each, SWARM) for each in (OWNER, WORKER))
            await job_announcement(sealed).publish(owner)
            await made_jobs([outline.id], JOB_LIFETIME_S).publish(owner)
            seen = [await read_open_jobs(owner, {})]
            position = WorkerPosition(3, bytes(32))
            await worker_announcement(outline.id, ["/ip4/127.0.0.1/tcp/1"], position).publish(worker)
            seen.append(await read_open_jobs(owner, {}))
            end = WorkerPosition(outline.rounds, bytes(32))
            await worker_announcement(outline.id, (), end, is_done=True).publish(worker)
            now[0] += 3600.0
            seen.append(await read_open_jobs(owner, {}))
        return [job for (job,) in seen]

    assert asyncio.run(scenario()) == [
        OpenJob(outline, frozenset(), is_done=False),
        OpenJob(outline, frozenset({WORKER.peer_id}), is_done=False),
        OpenJob(outline, frozenset(), is_done=True),
    ]


def test_reading_the_jobs_of_a_swarm_does_not_import_torch() -> None:
    code = "import sys, swarmnet_node.volunteering.look; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
