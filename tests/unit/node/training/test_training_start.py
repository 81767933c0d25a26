"""Before and after training: jobs are checked and stored, workers are stopped, models are
exported."""

import asyncio
import random
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from swarmnet.cli import execute
from swarmnet.cli.training import join
from swarmnet.cli.training.train_words import sentence
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.training import opening as opening_module
from swarmnet_node.training import start as start_module
from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint, export_model
from swarmnet_node.training.job_store import (
    LocalFiles,
    check_job,
    fetch_job,
    job_folder,
    store_job,
    store_local_files,
)
from swarmnet_node.training.model.checks import check_model
from swarmnet_node.training.opening import Opening, WorkerConfig, _available_bytes
from swarmnet_node.training.start import start
from swarmnet_node.training.steps.memory_options import AUTOMATIC
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols import timing
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources, SwarmnetError, Unreachable
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.job_records import _job_topic, job_announcement
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import SealedJob, open_job, parse_job, seal_job
from swarmnet_protocols.wire import workers_pb2
from tests.defences import defence, nothing, replacing
from tests.support.models.tiny_models import save_tiny
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.training.stages import staged_job
from tests.support.training.tiny_job import CONFIG, for_others, tiny_job, tiny_trainer
from tests.support.training.workers import SWARM, write_job
from tests.unit.protocols.training.test_training_jobs import hostile

OWNER = Identity.from_seed(b"owner")
TIMEOUT_S = 60.0


def quiet(description: str, done: int, total: int | None) -> None:
    pass


def kept(folder: Path, job: Job) -> SealedJob:
    sealed = seal_job(check_job(job, folder / "cache", quiet), OWNER)
    store_local_files(folder, open_job(sealed).id, LocalFiles.named_in(job))
    store_job(folder, open_job(sealed), sealed)
    return open_job(sealed)


@asynccontextmanager
async def memory_directory() -> AsyncIterator[Directory]:
    network = MemoryNetwork(random.Random(0), LinkProfile())
    async with network.transport(OWNER.peer_id):
        yield MemoryDirectory(MemoryBoard(network, lambda: 1e9), OWNER, SWARM)


class Stepping:
    """A worker in the first of a million inner steps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        job = parse_job(write_job(folder, "diloco", "sync_every = 1000000").encode()).job
        self.job = kept(folder, job)
        self.network = MemoryNetwork(random.Random(0), LinkProfile())
        self.board = MemoryBoard(self.network, wall_clock)
        self.steps: list[int] = []
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.config = WorkerConfig(
            self.job.id,
            Network(Rules(SWARM, Admission.OPEN), P2pdConfig(folder / "identity.key", listen=())),
            folder,
            folder / "cache",
            "cpu",
            files=LocalFiles.named_in(job),
            limits=OwnerLimits(**{"cores": 1} | limits),
        )
        monkeypatch.setattr(start_module, "connect", self._connected)

    @asynccontextmanager
    async def run(self) -> AsyncIterator["asyncio.Task[bool]"]:
        loop, stepping = asyncio.get_running_loop(), asyncio.Event()

        def progress(description: str, done: int, total: int | None) -> None:
            if description == "inner steps":
                self.steps.append(done)
                loop.call_soon_threadsafe(stepping.set)

        async with start(self.config, self.events.put_nowait, progress) as self.training:
            running = asyncio.create_task(self.training.run())
            await race(stepping.wait(), asyncio.wait([running]))
            yield running
            await cancel(running)

    @asynccontextmanager
    async def _connected(self, network: Network) -> AsyncIterator[tuple[MemoryTransport, Directory]]:
        self.link = network.peer.link
        async with self.network.transport(OWNER.peer_id) as transport:
            self.transport = transport
            yield transport, MemoryDirectory(self.board, OWNER, SWARM)


def test_a_duplicate_identity_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Timing", partial(Timing, identity_announce_s=0.05))
    worker = Stepping(tmp_path, monkeypatch)

    async def scenario() -> None:
        async with worker.run():
            directory = MemoryDirectory(worker.board, OWNER, SWARM)
            copy = DuplicateWatch(
                worker.transport, directory, random.Random(0), Timing(identity_announce_s=0.05)
            ).running()
            async with copy, asyncio.timeout(TIMEOUT_S):
                while (event := await worker.events.get())["event"] != "identity":
                    pass
            assert f"another process is on the network as {OWNER.peer_id}" in event["warning"]
            assert sentence(event) == event["warning"]

    asyncio.run(scenario())


def test_rate_limits_hold_on_the_link_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Stepping(tmp_path, monkeypatch, up_bytes_per_s=2.5e6, down_bytes_per_s=125_000.0)

    async def scenario() -> None:
        async with worker.run():
            assert (worker.link.up.bytes_per_s, worker.link.down.bytes_per_s) == (2.5e6, 125_000.0)

    asyncio.run(scenario())


def test_train_join_keeps_its_limits_as_join_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are given once, kept in the data directory, and replaced one by one."""
    started: list[WorkerConfig] = []

    async def work(config: WorkerConfig, *_: object) -> bool:
        started.append(config)
        return False

    monkeypatch.setattr(join, "_work", work)
    job = parse_job(write_job(tmp_path, "diloco", "sync_every = 10").encode()).job
    data_dir = tmp_path / "data"
    job_id = kept(data_dir, job).id
    assert execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path / "lab")]) == 0
    command = ["train", "join", job_id, "--swarm", str(tmp_path / "lab" / "swarm.toml"), "--yes"]
    command += ["--data-dir", str(data_dir), "--cache-dir", str(tmp_path / "cache")]
    for options in ([], ["--up", "20mbit", "--down", "1mbit"], [], ["--down", "8mbit"]):
        assert execute([*command, *options]) == 0
    assert [(config.limits.up_bytes_per_s, config.limits.down_bytes_per_s) for config in started] == [
        (None, None),
        (2.5e6, 125_000.0),
        (2.5e6, 125_000.0),
        (2.5e6, 1e6),
    ]


def test_a_worker_pauses_at_once_and_loads_nothing_until_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Stepping(tmp_path, monkeypatch)

    async def scenario() -> None:
        async with worker.run() as running, asyncio.timeout(TIMEOUT_S):
            worker.training.peer.pause(3600.0)
            assert await running, "it ended for a pause"
            assert worker.training.peer.status().state == "paused"
        worker.steps.clear()
        resting = asyncio.create_task(resume_when_paused())
        async with worker.run():
            assert worker.training.peer.status().state == "online"
        paused = await resting
        assert paused["reason"] == "its owner paused it"
        assert paused["until"] > wall_clock()

    async def resume_when_paused() -> dict[str, Any]:
        while (event := await worker.events.get())["event"] != "paused":
            pass
        assert worker.steps == []
        worker.training.peer.resume()
        return event

    asyncio.run(scenario())


def test_a_worker_stops_before_the_round_that_the_month_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The month has bytes left, but not as many as a round of the job."""
    worker = Stepping(tmp_path, monkeypatch, monthly_bytes=1000)

    async def scenario() -> None:
        async with worker.run() as running, asyncio.timeout(TIMEOUT_S):
            assert await running
            assert "a round would exceed the bytes for" in worker.training.peer.status().reason
        assert worker.steps == []

    asyncio.run(scenario())


def test_a_job_whose_checkpoints_exceed_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Stepping(tmp_path, monkeypatch)
    worker.config = replace(worker.config, max_disk_bytes=50_000)

    async def scenario() -> None:
        async with worker.run() as running, asyncio.timeout(TIMEOUT_S):
            with pytest.raises(
                OutOfResources, match="checkpoints of this job and copies of its state take"
            ) as caught:
                await running
        assert "--max-disk" in caught.value.hint
        assert worker.steps == []

    asyncio.run(scenario())


def test_leaving_the_context_ends_inner_steps_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Stepping(tmp_path, monkeypatch)

    async def scenario() -> None:
        async with worker.run():
            pass

    asyncio.run(scenario())
    assert worker.steps[0] == 0
    assert len(worker.steps) < 10_000


def test_a_worker_whose_p2pd_dies_saves_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Stepping(tmp_path, monkeypatch)

    async def scenario() -> None:
        async with worker.run() as running:
            worker.network.crash(OWNER.peer_id)
            with pytest.raises(SwarmnetError, match="the network process stopped") as caught:
                await running
        assert "swarmnet train join" in caught.value.hint

    asyncio.run(scenario())
    assert len(worker.steps) < 10_000
    saved = CheckpointStore(job_folder(tmp_path, worker.job.id)).load_newest(worker.job.id)
    assert saved is not None
    assert saved.round == 0


def test_a_job_is_checked_with_its_data_and_model(tmp_path: Path) -> None:
    job = check_job(tiny_job(tmp_path), tmp_path / "cache", quiet)
    digest = job.data.sources[0].digest
    assert digest is not None
    assert job == tiny_job(tmp_path).about([(digest, (tmp_path / "text.txt").stat().st_size)], None)
    too_large = {"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_hidden_layers": 8}
    with pytest.raises(ConfigError, match=r"\[model\] has [\d,]+ parameters: training takes .* GiB"):
        check_job(tiny_job(tmp_path, model={"config": CONFIG | too_large}), tmp_path / "cache", quiet)


def test_a_model_of_too_many_layers_is_refused_before_it_is_counted(tmp_path: Path) -> None:
    endless = {"num_hidden_layers": 10**9}
    with pytest.raises(ConfigError, match="layers"):
        check_job(tiny_job(tmp_path, model={"config": CONFIG | endless}), tmp_path / "cache", quiet)


def test_a_job_from_the_swarm_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        sealed = seal_job(for_others(tiny_job(tmp_path)), OWNER)
        job_id = open_job(sealed).id
        async with memory_directory() as directory:
            with pytest.raises(Unreachable):
                await fetch_job(tmp_path, directory, job_id)
            await job_announcement(sealed).publish(directory)
            assert await fetch_job(tmp_path, directory, job_id) == sealed
        async with memory_directory() as another_swarm:
            assert await fetch_job(tmp_path, another_swarm, job_id) == sealed

    asyncio.run(scenario())


@defence("no path of a job is opened", off=replacing(Job, "check_published", nothing))
def test_no_file_named_by_another_peers_job_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signed job contains the path of a private key; without the path it would train."""
    secret = tmp_path / "secrets" / "id_ed25519"
    secret.parent.mkdir()
    secret.write_text("secret " * 500)
    sealed = hostile("data", "path", str(secret.parent / "*"))
    worker = Stepping(tmp_path, monkeypatch)
    path = tmp_path / "jobs" / f"{worker.job.id}.job"

    async def scenario() -> None:
        record = workers_pb2.JobRecord(sealed=sealed).SerializeToString()
        async with memory_directory() as directory:
            await directory.publish(_job_topic(worker.job.id), record, lifetime_s=60.0)
            path.unlink()
            with pytest.raises(ConfigError, match="names no files of this machine"):
                await fetch_job(tmp_path, directory, worker.job.id)
        path.write_bytes(sealed)
        with pytest.raises(ConfigError, match="names no files of this machine"):
            async with worker.run():
                pass

    heard: list[str] = []
    stop = hear_of_files(heard)
    asyncio.run(scenario())
    stop()
    assert heard
    assert not [each for each in heard if "secrets" in each]


def hear_of_files(heard: list[str]) -> Callable[[], None]:
    """Record every file that is opened and every folder that is listed, until the returned function
    is called."""
    listening = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event in {"open", "os.listdir", "os.scandir", "glob.glob"}:
            heard.append(str(arguments[0]))

    def stop() -> None:
        nonlocal listening
        listening = False

    sys.addaudithook(hear)
    return stop


def test_a_changed_job_file_is_refused(tmp_path: Path) -> None:
    async def find(job_id: str) -> None:
        async with memory_directory() as directory:
            await fetch_job(tmp_path, directory, job_id)

    job = kept(tmp_path, tiny_job(tmp_path))
    path = tmp_path / "jobs" / f"{job.id}.job"
    foreign = seal_job(job.job, Identity.from_seed(b"another"))
    for content, words in (
        (path.read_bytes().replace(b'"seed":3', b'"seed":4'), "changed"),
        (foreign, "not the job of its name"),
    ):
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match=words) as caught:
            asyncio.run(find(job.id))
        assert str(path) in str(caught.value)


def trained(folder: Path, **changes: dict[str, Any]) -> str:
    """A job with one checkpoint in ``folder``; its id."""
    trainer = tiny_trainer(folder)
    job = kept(folder, tiny_job(folder, **changes))
    checkpoint = WorkerCheckpoint(job.id, 1, 1, trainer.parameters(), {}, {})
    CheckpointStore(job_folder(folder, job.id)).save(checkpoint, trainer.write)
    return job.id


def test_a_byte_model_is_exported_with_a_byte_tokenizer(tmp_path: Path) -> None:
    job, out = trained(tmp_path), tmp_path / "out"
    told = export_model(tmp_path, job, out, cache_dir=tmp_path / "cache", overwrite=False, progress=quiet)
    assert told.data.tokenizer == "bytes"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.isfinite(model(torch.tensor([[1, 2]])).logits).all()
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    every_character = "".join(map(chr, (*range(0x300), 0x20AC, 0x1F600))) + "  two  spaces\r\n\n"
    tokens = tokenizer(every_character).input_ids
    assert tokens == list(every_character.encode())
    assert tokenizer.decode(tokens) == every_character
    assert len(tokenizer) == 256


def test_a_model_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    checkpoint = save_tiny("llama-tied", tmp_path / "checkpoint")
    words = WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>").save_pretrained(checkpoint)
    of_files = {"config": None, "checkpoint": str(checkpoint)}
    job, out = (
        trained(tmp_path, model=of_files, data={"tokenizer": str(checkpoint), "sequence_length": 2}),
        tmp_path / "out",
    )
    told = export_model(tmp_path, job, out, cache_dir=tmp_path / "cache", overwrite=False, progress=quiet)
    assert told.data.tokenizer == str(checkpoint)
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids(["world", "hello"]) == [2, 1]
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"


def test_an_export_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    job = trained(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutOfResources):
            export_model(
                tmp_path,
                job,
                tmp_path / "out" / "model",
                cache_dir=tmp_path / "c",
                overwrite=False,
                progress=quiet,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "out").iterdir()) == []


def test_only_a_models_folder_is_overwritten_and_only_on_request(tmp_path: Path) -> None:
    def export(*, overwrite: bool) -> None:
        export_model(tmp_path, job, out, cache_dir=tmp_path / "c", overwrite=overwrite, progress=quiet)

    job, out = trained(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "letters.txt").touch()
    with pytest.raises(ConfigError, match="already exists") as caught:
        export(overwrite=False)
    assert "--force" in caught.value.hint
    with pytest.raises(ConfigError, match="not the folder of a model"):
        export(overwrite=True)
    assert (out / "letters.txt").exists()
    (out / "config.json").touch()
    export(overwrite=True)
    assert not (out / "letters.txt").exists()
    assert (out / "model.safetensors").exists()
    assert not list(tmp_path.glob(".export-*"))


def test_a_job_without_a_checkpoint_cannot_be_exported(tmp_path: Path) -> None:
    job = kept(tmp_path, tiny_job(tmp_path))
    with pytest.raises(ConfigError, match="no checkpoint"):
        export_model(tmp_path, job.id, tmp_path / "out", cache_dir=tmp_path, overwrite=False, progress=quiet)
    with pytest.raises(ConfigError, match="no job"):
        export_model(
            tmp_path, "0" * 64, tmp_path / "out", cache_dir=tmp_path, overwrite=False, progress=quiet
        )


def test_a_limit_on_memory_counts_what_the_worker_has() -> None:
    limits = OwnerLimits(max_ram_bytes=psutil.Process().memory_info().rss + (64 << 20))
    assert _available_bytes(limits) < 128 << 20 < _available_bytes(OwnerLimits())


def test_a_worker_takes_a_stage_if_it_has_the_memory_and_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of its present stage is free after a move."""
    job = parse_job(staged_job(tmp_path, stages=2).replace("cuts = [1]", "cuts = [3]").encode()).job
    sealed, files = seal_job(check_job(job, tmp_path / "cache", quiet), OWNER), LocalFiles.named_in(job)
    opening: Any = SimpleNamespace(
        config=SimpleNamespace(cache_dir=tmp_path / "cache", memory=AUTOMATIC, files=files),
        sealed=sealed,
        peer=SimpleNamespace(limits=OwnerLimits),
        _needs_bytes=1000,
    )
    machine = TrainingMachine(tmp_path / "cache", 1 << 33)
    opened = files.applied_to(open_job(sealed).job, 0)
    needs = check_model(opened, machine, vocab_size=0, stage=0).total_bytes

    def may_take(stage: int, free: int) -> bool:
        monkeypatch.setattr(opening_module, "_available_bytes", lambda _: free)
        return Opening._may_take(opening, stage)

    assert [may_take(0, needs - 1000 + more) for more in (-1, 0)] == [False, True]
    opening.config.files = LocalFiles()
    assert [may_take(stage, needs) for stage in (0, 1)] == [False, True]
