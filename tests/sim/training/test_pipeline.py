"""Workers of four stages train a tiny model that none of them holds, while some of them fail."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.training.pipeline.pipeline import Pipeline as WorkersPipeline
from swarmnet_protocols.net.protocol_ids import EXCHANGE, MICROBATCH, STEP
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.pipeline import microbatches
from swarmnet_protocols.training.pipeline.norms import UsualNorms
from swarmnet_protocols.wire import pipeline_pb2 as pb
from swarmnet_protocols.wire import training_pb2
from tests.bench.pipeline import Pipeline
from tests.defences import Patch, defence
from tests.support.network.memory_network import Delivery, LinkProfile
from tests.support.network.virtual_time import run
from tests.support.training.stages import LLAMA, MOE, StageLab, names, stage_of, staged_job, whole_losses
from tests.support.training.workers import train


def staged_lab(folder: Path, **changes: Any) -> StageLab:
    return StageLab(folder, staged_job(folder, **changes))


@pytest.mark.parametrize("family", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("workers", [1, 3])
def test_stages_train_like_one_process(workers: int, family: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, family=family, rounds=4, workers=workers)
    run(train(lab, *names(dict.fromkeys(range(4), workers))))

    job = lab.files.applied_to(open_job(lab.sealed).job)
    expected = whole_losses(job, tmp_path, workers, 4)
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


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("fault", ["kill", "stop", "cut", "slow"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_loses_no_microbatch(kind: str, fault: str, victim: str, tmp_path: Path) -> None:
    lab = staged_lab(tmp_path, rounds=4, workers=2, least=1, stages=3)
    everybody = names(dict.fromkeys(range(3), 2))
    peers = {lab.peer(name): name for name in everybody}
    hurt: list[str] = []

    def strike(delivery: Delivery) -> None:
        loop = asyncio.get_running_loop()
        from_origin = stage_of(peers[delivery.source]) == 0
        if hurt or not lab.rounds("0.0") or kind_of(delivery, from_origin) != kind:
            return
        name = peers[getattr(delivery, victim)]
        hurt.append(name)
        peer = lab.peer(name)
        match fault:
            case "kill":
                lab.crash(name)
            case "stop":
                lab.network.hang(peer)
                loop.call_later(8.0, lab.network.resume, peer)
            case "cut":
                lab.network.cut(delivery.source, delivery.target)
                loop.call_later(20.0, lab.network.heal, delivery.source, delivery.target)
            case "slow":
                slow = LinkProfile(delay_s=0.5, bytes_per_s=2e4)
                lab.network.set_link(delivery.source, delivery.target, slow)

    lab.network.observers.append(strike)
    run(train(lab, *everybody))

    lab.check_books()
    assert hurt
    for name in everybody:
        if fault != "kill" or name not in hurt:
            assert lab.events[name][-1]["event"] == "done"
            assert lab.events[name][-1]["round"] == 4


def give_all_a_place(patch: Patch) -> None:
    always = property(lambda _: lambda: True, lambda *_: None)
    patch.setattr(WorkersPipeline, "has_place", always, raising=False)


@defence("no step waits for a newcomer", off=give_all_a_place)
def test_no_step_waits_for_a_newcomer(tmp_path: Path) -> None:
    ended_s: list[float] = []

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "0.0" and event["event"] == "round":
            ended_s.append(asyncio.get_running_loop().time())
            if event["round"] == 4:
                lab.start("1.2")

    lab = staged_lab(tmp_path, rounds=10, workers=3, least=1, stages=3)
    lab.wanted = watch
    run(train(lab, *names(dict.fromkeys(range(3), 2))))

    lab.check_books()
    took_s = [after - before for before, after in pairwise(ended_s)]
    assert max(took_s[3:]) < 1.1 * min(took_s)
    assert lab.settled["1.2"]


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
            pipeline = lab.workers["1.0"]._pipeline
            assert pipeline is not None
            honest = pipeline._passes.boundary
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

    async def counted(next_part: Any, size_bytes: int) -> bytearray:
        arrived.append(len(data := await collected(next_part, size_bytes)))
        return data

    monkeypatch.setattr(microbatches, "collected", counted)
    codec, _, rank = row.partition(":k=")
    stages = f'cuts = [1, 2, 3]\ncodec = "{codec}"\n' + (f"subspace = {rank}" if rank else "")
    job = staged_job(tmp_path, family=LLAMA.replace("true", "false"), rounds=3)
    lab = StageLab(tmp_path, job.replace("cuts = [1, 2, 3]", stages))
    run(train(lab, *names(dict.fromkeys(range(4), 1))))

    pipeline = Pipeline(row, lab.files.applied_to(open_job(lab.sealed).job), tmp_path / "cache")
    steps = [pipeline.step(number) for number in range(3)]
    assert sum(arrived) == sum(sum(sizes) for sizes, _ in steps)
    events = [event for name in lab.events for event in lab.rounds(name).values()]
    assert sum(event["bytes_sent"] for event in events) == sum(arrived)
    assert sum(event["bytes_received"] for event in events) == sum(arrived)
    assert list(lab.losses().values()) == pytest.approx([loss for _, loss in steps], rel=near)
