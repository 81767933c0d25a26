"""A machine that trains nothing collects a model in stages from its workers, in virtual time."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet_node.training.collecting import fetch_stages, write_collected
from swarmnet_node.training.shared_state import SharedState
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import worker_announcement
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking
from swarmnet_protocols.training.pipeline.stages import groups
from swarmnet_protocols.training.state_transfer import PackedState, StateServer
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.tiny_job import CONFIG, tiny_job, tiny_trainer
from tests.support.training.workers import EPOCH, SWARM

JOB = "ab" * 32
STAGES = 3


def collect(job: Job, stages: int, folder: Path) -> list[int]:
    """Collect the job from the workers of its first ``stages`` stages, which have added their
    number to all weights."""

    async def main() -> list[int]:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.01, bytes_per_s=1e7))
        board = MemoryBoard(network, lambda: EPOCH + asyncio.get_running_loop().time())
        async with AsyncExitStack() as stack:
            machine = TrainingMachine(folder / "cache", 1 << 30)
            for stage, group in enumerate(groups(JOB, job.stage_count)[:stages]):
                staged = job.stages is not None
                trainer = StageTrainer.open(job, stage, machine) if staged else Trainer.open(job, machine)
                identity = Identity.from_seed(str(stage).encode())
                transport = await stack.enter_async_context(network.transport(identity.peer_id))
                server = StateServer(transport, bytes.fromhex(group), Timing())
                await server.serve()
                state = SharedState(7 + stage, trainer.parameters() + stage, {}, {})
                position = WorkerPosition(7, server.offer(PackedState.of(state.pack())))
                meeting = Matchmaking(
                    transport, bytes.fromhex(group), max_members=4, timeout_s=9.0, timing=Timing()
                )
                await meeting.serve()
                await meeting.set_position(position)
                old = WorkerPosition(6, bytes(32))
                record = worker_announcement(group, transport.addresses(), old)
                await record.publish(MemoryDirectory(board, identity, SWARM))
            identity = Identity.from_seed(b"trains nothing")
            transport = await stack.enter_async_context(network.transport(identity.peer_id))
            return await fetch_stages(
                transport,
                MemoryDirectory(board, identity, SWARM),
                JOB,
                job,
                folder,
                cache_dir=folder / "cache",
                progress=lambda *_: None,
            )

    return run(main())


def test_a_model_without_stages_is_collected(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    assert collect(job, 1, tmp_path) == [7]
    write_collected(job, tmp_path, tmp_path / "model", tmp_path / "cache")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    expected = dict(tiny_trainer(tmp_path)._model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


def test_the_collected_model_is_that_of_all_stages(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "model": {"config": CONFIG | {"num_hidden_layers": 4}},
        "stages": {"count": STAGES, "cuts": [1, 2]},
    }
    job = tiny_job(tmp_path, **changes)
    assert collect(job, STAGES, tmp_path) == [7, 8, 9]
    write_collected(job, tmp_path, tmp_path / "model", tmp_path / "cache")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    expected = dict(tiny_trainer(tmp_path, **changes)._model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        added = 1 if "layers.1." in name else 2 if "layers.2." in name or "layers.3." in name else 0
        assert torch.equal(parameter, expected[name] + added), name
    with pytest.raises(Unreachable, match="stage 2 has no worker"):
        collect(job, 2, tmp_path)
