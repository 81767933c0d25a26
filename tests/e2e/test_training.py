"""Real training workers: processes, sockets, the DHT; one is killed in mid-run and one joins."""

import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swarmnet.cli import execute
from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.job_store import job_folder
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.protocol_ids import TRAINING
from tests.support.attacks.strangers import GROWTH_BYTES, run_stranger, send_garbage, send_oversized
from tests.support.house.doc_blocks import code_blocks
from tests.support.processes.commands import TIMEOUT_S, call
from tests.support.processes.nodes import Swarm
from tests.support.processes.worker_processes import WorkerProcess, bootstrap, create_job, workers
from tests.support.swarm.generation import greedy
from tests.support.swarm.tiny_swarm import load_tiny
from tests.support.training.stages import staged_job
from tests.support.training.tuning_rows import write_rows
from tests.support.training.workers import write_job

ROOT = Path(__file__).parents[2]
ROUNDS = 100_000
ADAPTER_JOB = """
[job]
name = "mine"
rounds = 2
[model]
checkpoint = "{model}"
train = "lora"
rank = 4
targets = ["q_proj", "v_proj"]
[data]
source = "own"
format = "jsonl"
tokenizer = "{model}"
sequence_length = 16
validation = 0.3
[training]
batch_size = 2
learning_rate = 0.05
[method]
name = "diloco"
sync_every = 2
[exchange]
min_workers = 2
deadline_s = 15
[eval]
every_rounds = 1
batches = 2
"""


@pytest.mark.slow
@pytest.mark.alone
def test_workers_train_while_one_is_killed_and_another_joins(tmp_path: Path) -> None:
    job = create_job(
        tmp_path, write_job(tmp_path, "diloco", "sync_every = 20", "min_workers = 2", rounds=ROUNDS)
    )
    first = str(tmp_path / "anna")

    with workers(tmp_path, job, "anna", "boris", "clara") as running:
        running["anna"].wait("round", round=1)
        victim = running.pop("boris")
        victim.kill()
        # On a machine that has never seen the job, its name and its first digits find it.
        running["dora"] = WorkerProcess(tmp_path, "dora", "tiny", bootstrap(running))
        joined = running["dora"].wait("round")["round"]
        me = running["dora"].wait("ready")["peer_id"]
        later = running["anna"].wait("round", round=joined + 1)
        assert me in later["contributors"]
        swarm = ("--swarm", str(tmp_path / "swarm.toml"), "--bootstrap", bootstrap(running)[0])
        elsewhere = (*swarm, "--data-dir", str(tmp_path / "trains-nothing"))
        seen = call("train", "status", job[:8], *elsewhere)
        assert (seen["name"], seen["rounds"], seen["method"]) == ("tiny", ROUNDS, "diloco")
        found = {worker["peer_id"]: worker for worker in seen["workers"]}
        for name, worker in running.items():
            trains = found[worker.wait("ready")["peer_id"]]
            assert (trains["name"], trains["state"]) == (name, "training")
            assert trains["loss"] > 0
        (listed,) = call("train", "list", *elsewhere)["jobs"]
        assert (listed["job"], listed["name"], listed["model"]) == (job, "tiny", "a new llama")
        assert listed["workers"] >= len(running)
        assert listed["round"] > joined
        assert listed["loss"] > 0
        watched = call("status", "--data-dir", first)
        assert (watched["command"], watched["worker"]["name"]) == ("train join", "tiny")
        assert watched["worker"]["round"] > joined
        call("finish", "--data-dir", first)
        for worker in running.values():
            if worker is not running["anna"]:
                worker.process.send_signal(signal.SIGTERM)
        for worker in running.values():
            worker.wait("done")
            assert worker.process.wait(30) == 0
        everyone = [victim, *running.values()]

    hashes: dict[int, set[str]] = {}
    for worker in everyone:
        for number, value in worker.hashes().items():
            hashes.setdefault(number, set()).add(value)
    assert {len(values) for values in hashes.values()} == {1}
    assert set(running["anna"].hashes()) >= set(range(joined + 2)), "every round was committed"
    evaluations = [event["val_loss"] for event in running["anna"].events if event["event"] == "eval"]
    # Not the last one: with the outer optimizer's momentum, the loss of so small a model rises for
    # single rounds when it leaves its first plateau.
    assert statistics.median(evaluations[len(evaluations) // 2 :]) < evaluations[0]
    (here,) = call("train", "list", "--data-dir", first)["jobs"]
    assert here["job"] == job
    status = call("train", "status", str(tmp_path / "job.toml"), "--data-dir", first)
    assert (status["state"], status["running"]) == ("left", False)
    assert status["round"] >= joined + 2

    assert status["peers"][me]["rounds"] >= 1
    assert status["tokens"] > status["round"] > 0
    curves = call("train", "plot", "tiny", "--data-dir", first, "--out", str(tmp_path / "plots"))["paths"]
    assert all(Path(path).exists() for path in curves)

    exported = tmp_path / "exported"
    call("train", "export", job[:4], "--data-dir", first, "--out", str(exported))
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.isfinite(model(torch.tensor([[104, 105]])).logits).all()


@pytest.mark.slow
@pytest.mark.alone
def test_stages_train_on_while_a_worker_is_killed(tmp_path: Path) -> None:
    job = create_job(tmp_path, staged_job(tmp_path, rounds=ROUNDS, workers=4, least=1, stages=3, batch=8))
    stages = {"anna": 0, "boris": 1, "clara": 1, "dora": 2}
    running: dict[str, WorkerProcess] = {}
    try:
        for name, stage in stages.items():
            options = ("--stage", str(stage))
            running[name] = WorkerProcess(tmp_path, name, job, bootstrap(running), options=options)
        clara = running["clara"].wait("ready")["peer_id"]
        boris = running["boris"]
        while not any(clara in each["contributors"] for each in boris.rounds().values()):
            boris.wait_for_more(timeout_s=TIMEOUT_S)
        running.pop("clara").kill()
        killed_in = max(boris.rounds())

        def last_three() -> list[dict[str, Any]]:
            return [each for number, each in boris.rounds().items() if number > killed_in][-3:]

        while len(last_three()) < 3 or any(clara in each["contributors"] for each in last_three()):
            boris.wait_for_more(timeout_s=TIMEOUT_S)
        assert all(each["tokens"] > 0 for each in last_three())
        last = max(boris.rounds())
        for name in ("dora", "anna"):
            while max(running[name].rounds()) < last:
                running[name].wait_for_more(timeout_s=TIMEOUT_S)
    finally:
        for worker in running.values():
            worker.kill()


@pytest.mark.slow
@pytest.mark.alone
def test_an_adapter_of_own_data_answers_in_the_swarm(tmp_path: Path, cache_dir: Path) -> None:
    """Two workers with different files train an adapter of a hosted model."""
    reference = load_tiny(tmp_path)
    lab = Swarm(tmp_path / "lab", cache_dir, model=str(tmp_path / "model"))
    (tmp_path / "job.toml").write_text(ADAPTER_JOB.format(model=lab.model))
    out, made = tmp_path / "adapter", ("--data-dir", str(lab.directory / "anna"))
    running = []
    try:
        _ = lab.launch("host").ready
        where = (
            "--swarm",
            str(lab.file),
            *lab.bootstrap_options,
            "--cache-dir",
            str(lab.directory / "cache"),
        )
        job = call("train", "create", str(tmp_path / "job.toml"), *where, *made)["job"]
        for name, first in (("anna", 10), ("boris", 50)):
            rows = [
                {"prompt": f"w{first + n} w{n}", "completion": f" w{n + 1} w{first} w{n + 2}"}
                for n in range(40)
            ]
            data = write_rows(tmp_path / f"{name}.jsonl", rows)
            own = ("--data", str(data), "--model", lab.model)
            running.append(WorkerProcess(lab.directory, name, job, lab.bootstrap, options=own))
        for worker in running:
            evaluated = worker.wait("eval", round=1)
            assert evaluated["val_loss"] > 0
            assert evaluated["tokens"] > 0
            assert worker.wait("round", round=1)["workers"] == 2
            worker.wait("done")
            assert worker.process.wait(30) == 0
        call("train", "export", job, "--out", str(out), *made, *where[-2:])
        prompt = "w50 w7"
        answer = call("run", lab.model, prompt, "--raw", "-n", "6", "--adapter", str(out), *where)
    finally:
        for worker in running:
            worker.kill()
        lab.close()
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(lab.model), out)
    assert any(weights.any() for name, weights in plain.named_parameters() if "lora_B" in name)
    (expected,) = greedy(plain, [reference.local.tokenizer()(prompt).input_ids], 6)
    assert answer["token_ids"] == expected[: len(answer["token_ids"])]


@pytest.mark.slow
@pytest.mark.alone
def test_workers_train_by_a_method_from_outside(tmp_path: Path) -> None:
    """The example of the documentation, in a job of two rounds."""
    example = next(
        block for block in code_blocks(ROOT / "docs" / "training.md") if 'name = "half-way"' in block
    )
    file = tmp_path / "half_way.py"
    file.write_text(example)
    toml = write_job(tmp_path, "half-way", "sync_every = 5\nrate = 0.25", "min_workers = 2", rounds=2)
    options = ("--method-file", str(file))
    job = create_job(tmp_path, toml, *options)
    with workers(tmp_path, job, "anna", "boris", options=options) as running:
        for worker in running.values():
            assert worker.wait_for_end() == 0
        hashes = [worker.hashes() for worker in running.values()]
        assert all(len(event["contributors"]) == 2 for event in running["anna"].rounds().values())
    assert hashes[0] == hashes[1]
    assert sorted(hashes[0]) == [0, 1]


@pytest.fixture(scope="module")
def anna(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, WorkerProcess]]:
    """A job and its only worker, anna. The last test that uses the worker ends it."""
    folder = tmp_path_factory.mktemp("anna")
    toml = write_job(folder, "diloco", "sync_every = 20", rounds=ROUNDS)
    # The worker saves when it ends, and not before.
    job = create_job(folder, toml.replace("every_rounds = 2", "every_rounds = 100000"))
    with workers(folder, job, "anna") as running:
        yield job, running["anna"]


@pytest.mark.slow
@pytest.mark.alone
def test_strangers_end_their_own_streams_and_nothing_else(
    anna: tuple[str, WorkerProcess], tmp_path: Path
) -> None:
    _, worker = anna
    before = worker.wait("round", round=1)

    async def scenario(transport: P2pdTransport) -> None:
        peer = PeerId(worker.wait("ready")["peer_id"])
        for protocol in TRAINING:
            await send_garbage(transport, peer, protocol)
            await send_oversized(transport, peer, protocol)

    size = psutil.Process(worker.process.pid).memory_info().rss
    run_stranger(bootstrap({"anna": worker}), scenario, tmp_path)
    assert psutil.Process(worker.process.pid).memory_info().rss - size < GROWTH_BYTES
    now = max(worker.hashes())
    assert now > before["round"]
    assert worker.wait("round", round=now + 2)["committed"]


@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_whose_p2pd_dies_saves_and_raises(anna: tuple[str, WorkerProcess]) -> None:
    job, worker = anna
    worker.wait("round", round=2)
    worker.send_signal(signal.SIGKILL, python=False)
    assert worker.wait_for_end() == 1
    error = worker.wait("error")
    assert "the network process stopped" in error["message"]
    assert "start it again" in error["hint"]
    assert "Traceback" not in worker.log.read_text()
    saved = CheckpointStore(job_folder(worker.data_dir, job)).load_newest(job)
    assert saved is not None
    assert saved.round > max(worker.hashes())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("sync_every = 2", "sync_evry = 2"), "sync_evry"),
        (("sync_every = 2", "sync_every = 0"), "sync_every"),
        (("rounds = 5", "rounds = 0"), "rounds"),
        (("/data", "/nothing"), "path"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_its_line(
    change: tuple[str, str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2").replace(*change)
    file = tmp_path / "job.toml"
    file.write_text(toml)
    assert execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path)]) == 0
    capsys.readouterr()

    command = ["train", "create", str(file), "--swarm", str(tmp_path / "swarm.toml")]
    assert execute([*command, "--data-dir", str(tmp_path / "d"), "--json"]) == 3
    number = next(n for n, text in enumerate(toml.splitlines(), 1) if text.startswith(line))
    assert f"{file}:{number}:" in "".join(capsys.readouterr())
    assert not (tmp_path / "d" / "jobs").exists()
