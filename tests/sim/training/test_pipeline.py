"""Workers of four stages train a tiny model that none of them holds, while some of them fail."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.training.pipeline import pipeline
from swarmnet_node.training.pipeline.stage_passes import KeptMicrobatch, StagePasses
from swarmnet_node.training.pipeline.stage_workers import StageWorkers
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import EXCHANGE, MICROBATCH, STEP
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training import bandwidth
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.codecs.boundary import codecs_by_size
from swarmnet_protocols.training.job_records import worker_announcement
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.pipeline import microbatches
from swarmnet_protocols.training.pipeline.microbatches import Microbatch, MicrobatchClient, MicrobatchId
from swarmnet_protocols.training.pipeline.norms import UsualNorms
from swarmnet_protocols.training.pipeline.stages import stage_key
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import training_pb2
from tests.bench.pipeline import Pipeline
from tests.defences import Patch, defence, replacing
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.network.virtual_time import run
from tests.support.training.stages import LLAMA, MOE, StageLab, names, stage_of, staged_job, whole_losses
from tests.support.training.workers import SWARM, train

RESTART_S = 2.0
"""Virtual seconds in which a later stage begins a round, while microbatches arrive."""


def staged_lab(folder: Path, **changes: Any) -> StageLab:
    return StageLab(folder, staged_job(folder, **changes))


@pytest.mark.parametrize("family", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize(
    ("workers", "rounds"), [(1, 4), (3, 4), pytest.param(3, 200, marks=pytest.mark.thorough)]
)
def test_stages_train_like_one_process(workers: int, rounds: int, family: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, family=family, rounds=rounds, workers=workers)
    run(train(lab, *names(dict.fromkeys(range(4), workers))))

    job = lab.files.applied_to(open_job(lab.sealed).job)
    expected = whole_losses(job, tmp_path, workers, rounds)
    assert list(lab.losses().values()) == pytest.approx(expected, rel=1e-5)


KINDS = ("begin", "admitted", "output", "gradient", "listing", "listed", "end", "committed", "contribution")
"""Messages at which faults are injected, in the order of a round."""


def kind_of(delivery: Delivery, from_origin: bool) -> str:
    """The kind of a message of a pipeline or of a stage's exchange."""
    header = delivery.message.header
    kind: str | None = None
    if delivery.protocol.id == EXCHANGE.id:
        kind = training_pb2.ExchangeRequest.FromString(header).WhichOneof("kind")
    elif delivery.protocol.id == STEP.id:
        sent = pb.StepRequest.FromString(header) if from_origin else pb.StepReply.FromString(header)
        kind = sent.WhichOneof("kind")
    elif delivery.protocol.id == MICROBATCH.id:
        begun, answer = pb.MicrobatchRequest.FromString(header), pb.MicrobatchReply.FromString(header)
        if begun.begin.job:
            kind = "begin"
        elif answer.HasField("part"):
            kind = "gradient"
        elif answer.HasField("admitted"):
            kind = "output" if delivery.message.payload else "admitted"
    return kind or ""


def strike(lab: StageLab, kind: str, victim: str, fault: str, after: int = 1) -> list[str]:
    """Inject a fault at the first message of a kind after so many rounds. Returns the worker that
    it hurts, when it does."""
    hurt: list[str] = []

    def observe(delivery: Delivery) -> None:
        loop, network = asyncio.get_running_loop(), lab.network
        peers = {lab.peer(name): name for name in lab.events}
        from_origin = stage_of(peers[delivery.source]) == 0
        if hurt or len(lab.rounds("0.0")) < after or kind_of(delivery, from_origin) != kind:
            return
        peer = getattr(delivery, victim)
        hurt.append(peers[peer])
        link = delivery.source, delivery.target
        match fault:
            case "kill":
                lab.crash(peers[peer])
            case "stop" | "sleep":
                network.hang(peer)
                loop.call_later(8.0 if fault == "stop" else 60.0, network.resume, peer)
            case "cut":
                network.cut(*link)
                loop.call_later(20.0, network.heal, *link)
            case "slow":
                network.set_link(*link, LinkProfile(delay_s=0.5, bytes_per_s=2e4))

    lab.network.observers.append(observe)
    return hurt


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("fault", ["kill", "stop", "cut", "slow"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_loses_no_microbatch(kind: str, fault: str, victim: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, rounds=4, workers=2, least=1, stages=3)
    everybody = names(dict.fromkeys(range(3), 2))
    hurt = strike(lab, kind, victim, fault)
    run(train(lab, *everybody))

    lab.check_books()
    assert hurt
    for name in everybody:
        if fault != "kill" or name not in hurt:
            assert lab.events[name][-1]["event"] == "done"
            assert lab.events[name][-1]["round"] == 4


def test_microbatches_arrive_while_their_round_begins(tmp_path: Path, monkeypatch: Patch) -> None:
    """The computing thread has passed some forwards before a later stage's event loop learns that
    the round has begun. Nothing is computed twice."""
    began, passed = list[float](), Counter[bool]()
    restart, forward = StagePasses.restart, StagePasses.forward

    def slow_restart(passes: StagePasses, state: bytes | None = None) -> None:
        restart(passes, state)
        if state is not None and passes.trainer.stage:
            began.append(asyncio.get_running_loop().time())
            passes.trainer._executor.owed_s += RESTART_S  # type: ignore[attr-defined]

    def counted(passes: StagePasses, kept: KeptMicrobatch, *ends: PeerId) -> None:
        if ends:  # else it rehearses
            passed[asyncio.get_running_loop().time() < began[-1] + RESTART_S] += 1
        forward(passes, kept, *ends)

    monkeypatch.setattr(StagePasses, "restart", slow_restart)
    monkeypatch.setattr(StagePasses, "forward", counted)
    lab = staged_lab(tmp_path, rounds=3, stages=2, batch=8)
    run(train(lab, *names(dict.fromkeys(range(2), 1)), limit_s=300.0))

    lab.check_books()
    assert passed[True]
    assert passed.total() == 3 * 4


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_worker_that_missed_the_end_of_the_job_stops(victim: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, rounds=2, workers=2, least=1, stages=3)
    hurt = strike(lab, "gradient", victim, "sleep")
    run(train(lab, *names(dict.fromkeys(range(3), 2))))

    lab.check_books()
    *others, last = lab.events[hurt[0]]
    assert any("the job ended without this worker" in str(each.get("text")) for each in others)
    assert (last["event"], last["round"]) == ("done", 1)


async def ask_as_a_stranger(lab: StageLab, times: int, *, announced: bool, signed: bool) -> list[str]:
    """Ask worker 1.0 for gradients, as a worker of stage 0 that was ``announced`` would.

    Return the refusals within a second.

    ``signed``: name a hash of the inputs, and send them, for the present round instead of a later
    round.
    """
    identity = Identity.from_seed(b"stranger")
    job, chain = bytes.fromhex(open_job(lab.sealed).id), (lab.peer("1.0"), lab.peer("2.0"))
    async with lab.network.transport(identity.peer_id) as transport:
        if announced:
            position = WorkerPosition(1, bytes(32))
            record = worker_announcement(stage_key(job, 0).hex(), transport.addresses(), position)
            await record.publish(MemoryDirectory(lab.board, identity, SWARM))
        client = MicrobatchClient(transport, job, Timing(), signed=signed)
        inputs = bytes(max(lab.pipeline("1.0")._passes.boundary.inputs_sizes) if signed else 0)
        microbatch = Microbatch(MicrobatchId(1 if signed else 2, identity.peer_id, 0), 1, chain)
        signature = identity.sign(microbatch.signed_bytes(job))
        microbatch = replace(microbatch, signature=signature)
        asking = [asyncio.create_task(client.gradient(microbatch, (), inputs, {1})) for _ in range(times)]
        refused, _ = await asyncio.wait(asking, timeout=1.0)
        await cancel(*asking)
        return [str(each.exception()) for each in refused]


def refusals(folder: Path, times: int, *, announced: bool, signed: bool = False) -> list[str]:
    """Return the refusals of worker 1.0 to a stranger after its first round."""
    lab, found = staged_lab(folder, rounds=3, stages=3), list[asyncio.Task[list[str]]]()

    def ask(name: str, event: dict[str, Any]) -> None:
        if name == "1.0" and event["event"] == "round" and not found:
            asking = ask_as_a_stranger(lab, times, announced=announced, signed=signed)
            found.append(asyncio.create_task(asking))

    lab.wanted = ask
    run(train(lab, *names(dict.fromkeys(range(3), 1))))
    return found[0].result()


async def check_nobody(*_: object) -> None:
    pass


@defence("only announced workers send microbatches", off=replacing(StageWorkers, "check", check_nobody))
def test_a_microbatch_of_a_stranger_is_refused(tmp_path: Path) -> None:
    assert refusals(tmp_path, 1, announced=False) == ["stage 1: the other side closed the stream"]


@defence("a caller has at most 16 open microbatches", off=replacing(pipeline, "MAX_OPEN", 64))
def test_a_caller_has_a_limited_number_of_microbatches(tmp_path: Path) -> None:
    found = refusals(tmp_path, 17, announced=True)
    assert ["too many open microbatches" in each for each in found] == [True]


def same_hash(_: object) -> bytes:
    return bytes(32)


@defence("inputs have the hash that their sender names", off=replacing(pipeline, "tensor_hash", same_hash))
def test_inputs_with_another_hash_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(microbatches, "tensor_hash", same_hash)
    found = refusals(tmp_path, 1, announced=True, signed=True)
    assert found == ["stage 1: the other side closed the stream"]


def admit_all(patch: Patch) -> None:
    patch.setattr(UsualNorms, "admit", lambda *_: True)


@defence(
    "{what} of an absurd norm reach no optimizer",
    off=admit_all,
    cases=[{"what": "outputs"}, {"what": "gradients"}],
)
@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_an_absurd_tensor_reaches_no_optimizer(what: str, tmp_path: Path) -> None:
    """A worker of stage 1 multiplies what it sends by 10,000 from round 2 on."""

    def lie(name: str, event: dict[str, Any]) -> None:
        if name == "1.0" and event["event"] == "round" and event["round"] == 1:
            honest = lab.pipeline("1.0")._passes.boundary
            method = {"outputs": "outputs", "gradients": "gradient"}[what]
            tell = getattr(honest, method)
            object.__setattr__(honest, method, lambda values, *rest: tell(1e4 * values, *rest))

    lab = staged_lab(tmp_path, rounds=4, workers=2, stages=3, batch=8)
    lab.wanted = lie
    run(train(lab, *names(dict.fromkeys(range(3), 2))))

    lab.check_books()
    assert lab.settled["1.0"] == set()
    assert lab.settled["1.1"]


@pytest.mark.parametrize(
    ("row", "near"),
    [("float32", 1e-5), ("int8", 1e-2), ("int4", 3e-2), ("float32:k=6", 1e-5), ("int8:k=6", 1e-2)],
)
def test_real_boundaries_carry_the_bytes_of_the_yardstick(
    row: str, near: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of 8 and 4 bits are rounded with other random bits there."""
    arrived: list[int] = []
    collected = microbatches.collected

    async def counted(*given: Any) -> bytearray:
        arrived.append(len(data := await collected(*given)))
        return data

    monkeypatch.setattr(microbatches, "collected", counted)
    codec, _, rank = row.partition(":k=")
    stages = f'cuts = [1, 2, 3]\ncodec = "{codec}"\n' + (f"subspace = {rank}" if rank else "")
    job = staged_job(tmp_path, family=LLAMA.replace("true", "false"), rounds=3)
    lab = StageLab(tmp_path, job.replace("cuts = [1, 2, 3]", stages))
    run(train(lab, *names(dict.fromkeys(range(4), 1))))

    yardstick = Pipeline(row, lab.files.applied_to(open_job(lab.sealed).job), tmp_path / "cache")
    steps = [yardstick.step(number) for number in range(3)]
    assert sum(arrived) == sum(sum(sizes) for sizes, _ in steps)
    events = [event for name in lab.events for event in lab.rounds(name).values()]
    assert sum(event["bytes_sent"] for event in events) == sum(arrived)
    assert sum(event["bytes_received"] for event in events) == sum(arrived)
    assert list(lab.losses().values()) == pytest.approx([loss for _, loss in steps], rel=near)


def test_only_a_slow_link_sends_fewer_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 512 values are too small to measure in earnest."""
    monkeypatch.setattr(microbatches, "LEAST_PART_BYTES", 64)
    monkeypatch.setattr(bandwidth, "MIN_BYTES", 1)
    sent: dict[str, list[int]] = {}

    def trained(codec: str) -> StageLab:
        job = staged_job(tmp_path, rounds=6, workers=2, least=1, stages=2, batch=16)
        lab = StageLab(tmp_path / codec, job.replace("cuts = [1]", f'cuts = [1]\ncodec = "{codec}"'))
        lab.step_s = {"0.0": 0.1, "1.0": 0.1, "1.1": 0.1}
        for name, bytes_per_s in {"1.0": 1e6, "1.1": 2e3}.items():
            lab.network.set_link(lab.peer("0.0"), lab.peer(name), LinkProfile(0.01, 0.0, bytes_per_s))
        of = {lab.peer(name): name for name in ("1.0", "1.1")}

        def watch(delivery: Delivery) -> None:
            if delivery.protocol.id == MICROBATCH.id and delivery.message.payload and delivery.target in of:
                part = pb.MicrobatchRequest.FromString(delivery.message.header).part
                sent.setdefault(of[delivery.target], []).append(part.size_bytes)

        if codec == "auto":
            lab.network.observers.append(watch)
        run(train(lab, "0.0", "1.0", "1.1"))
        lab.check_books()
        return lab

    exact, auto = (trained(codec) for codec in ("float32", "auto"))
    assert list(auto.losses().values()) == pytest.approx(list(exact.losses().values()), rel=1e-2)
    float32, _, int8 = codecs_by_size("auto", 32, 16)
    assert set(filter(None, sent["1.1"])) == {int8}
    assert sent["1.0"][0] == int8
    assert [each for each in sent["1.0"] if each][-1] == float32
