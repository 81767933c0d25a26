"""One liar among three workers of a stage: other workers compute its answers again.

All runs have the share of audits that jobs have.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnet_node.training.pipeline import origin
from swarmnet_node.training.pipeline.audits import verdict
from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_node.training.pipeline.stage_passes import Boundary, KeptMicrobatch, StagePasses
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.training.codecs.boundary import codecs_by_size
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.pipeline import microbatches
from swarmnet_protocols.training.pipeline.audits import (
    AUDITED_ROUNDS,
    Accusations,
    AuditDraws,
    stretch,
)
from swarmnet_protocols.training.pipeline.microbatches import Microbatch, MicrobatchId, StageFailed
from swarmnet_protocols.training.pipeline.receipts import Receipt
from tests.defences import Patch, defence, replacing, yes
from tests.defences import nothing as ignore
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import train

WORKERS = {0: 1, 1: 3, 2: 1}
MICROBATCHES = 3
STAGE = {"1.0", "1.1", "1.2"}
LIAR = min(STAGE, key=lambda name: Identity.from_seed(name.encode()).peer_id)
"""The worker of the stage with the lowest peer id."""
HONEST = [name for name in names(WORKERS) if name != LIAR]
FIRST_LIE = 2
"""The round in which a liar begins."""
ROUNDS = FIRST_LIE + 2 * AUDITED_ROUNDS + 2
FEW_ROUNDS = 7
AFTER_S = 0.5
"""Virtual seconds from an honest answer to a false one of the same microbatch."""
LIES = 50
"""False answers of each kind that are judged apart from any run."""


def random_values(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(values.numel())
    return torch.randn(values.shape, generator=generator) * values.std()


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flip": lambda values: -values,
    "scaled": lambda values: 3 * values,
    "random": random_values,
    "constant": lambda values: torch.full_like(values, float(values.abs().mean())),
}


def lie_with(pipeline: Pipeline, kind: str) -> None:
    """Have a worker give false outputs and gradients from now on. It signs what it sends.

    As an auditor it finds nothing, so only its answers convict it.
    """
    passes, first = pipeline._passes, dict[str, Any]()
    boundary, trainer = passes.boundary, passes.trainer

    async def finds_nothing(*_: Any) -> None:
        return None

    pipeline._auditor._is_honest = finds_nothing  # type: ignore[method-assign, assignment]
    if kind == "stale":
        old, forward = trainer.parameters(), passes.forward

        def stale(*given: Any) -> None:
            flat, present = trainer._flat, trainer.parameters()
            version = flat.version
            trainer.load(old)
            flat.version = version
            forward(*given)
            trainer.load(present)
            flat.version = version

        passes.forward = stale  # type: ignore[method-assign, assignment]
        return
    for method in ("outputs", "gradient"):
        honest = getattr(boundary, method)

        def false(values: Tensor, *rest: Any, honest: Any = honest, method: str = method) -> Any:
            if kind == "replayed":
                return first.setdefault(method, honest(values, *rest))
            return honest(VALUES[kind](values.detach()), *rest)

        object.__setattr__(boundary, method, false)


class LiarLab(StageLab):
    """Trains while one worker of a stage lies. It ends when all others have ended."""

    def excluded(self) -> dict[str, set[str]]:
        """The workers that each worker has excluded, by name."""
        of = {self.peer(name): name for name in self.events}
        return {name: {of[peer] for peer in self.workers[name]._workers.excluded} for name in self.events}

    def train(self, lie: Callable[[], None]) -> int | None:
        """Return how many rounds the liar lived in the eyes of its stage and of the origin."""
        lived: list[int] = []

        def watch(name: str, event: dict[str, Any]) -> None:
            if name == LIAR and event["event"] == "round" and event["round"] == FIRST_LIE - 1:
                lie()
            if name == "0.0" and event["event"] == "round" and event["round"] >= FIRST_LIE:
                excluded = self.excluded()
                if all(LIAR in excluded[each] for each in ("0.0", *STAGE - {LIAR})):
                    lived.append(event["round"] - FIRST_LIE)
            if event["event"] == "done" and all(
                self.events[each] and self.events[each][-1]["event"] == "done" for each in HONEST
            ):
                self.crash(LIAR)

        self.wanted = watch
        run(train(self, *names(WORKERS), limit_s=400.0))
        return lived[0] if lived else None

    @property
    def last_loss(self) -> float:
        losses = self.losses()
        return sum(losses[number] for number in range(ROUNDS - 4, ROUNDS)) / 4


def liar_lab(folder: Path, rounds: int = ROUNDS) -> LiarLab:
    job = staged_job(folder, rounds=rounds, workers=3, least=1, stages=3, batch=2 * MICROBATCHES)
    return LiarLab(folder, job.replace("deadline_s = 15", 'deadline_s = 15\naggregate = "median"'))


def nothing() -> None:
    """Do not lie."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last losses without a lie."""
    lab = liar_lab(tmp_path_factory.mktemp("honest"))
    assert lab.train(nothing) is None
    assert not any(lab.excluded().values())
    return lab.last_loss


def check_alone_excluded(lab: LiarLab) -> None:
    """Assert that its stage and the origin have excluded the liar, and nobody else."""
    found = lab.excluded()
    del found[LIAR]
    assert found == {name: {LIAR} if name[0] in "01" else set() for name in found}


def audit_nothing(patch: Patch) -> None:
    patch.setattr(AuditDraws, "draw", lambda *_: False)


def keep_lies(patch: Patch) -> None:
    patch.setattr(KeptMicrobatch, "knows", lambda kept, *_: kept.inputs is not None)


@defence("answers of a liar are computed again", off=audit_nothing, kind="sign flip")
@defence("workers forget what they computed from a lie", off=keep_lies, kind="sign flip")
@pytest.mark.parametrize(
    "kind",
    [
        "sign flip",
        "stale",
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("scaled", "random", "constant", "replayed")
        ),
    ],
)
def test_a_liar_is_excluded_within_16_rounds(kind: str, undisturbed: float, tmp_path: Path) -> None:
    assert stretch(3, MICROBATCHES) * 3 / MICROBATCHES <= AUDITED_ROUNDS
    lab = liar_lab(tmp_path)
    lived = lab.train(lambda: lie_with(lab.pipeline(LIAR), kind))

    check_alone_excluded(lab)
    assert lived is not None
    assert lived <= 2 * AUDITED_ROUNDS
    assert lab.last_loss <= 1.02 * undisturbed


@defence("only the origin chooses who sends a microbatch on", off=replacing(microbatches, "verify", yes))
def test_a_microbatch_is_not_sent_again_with_other_inputs(tmp_path: Path) -> None:
    """After each honest answer a worker of stage 1 sends false tensors for all microbatches of the
    round: its own, and those of its mates. Audits would not find them."""
    lab = liar_lab(tmp_path, FEW_ROUNDS)
    ends = Counter[tuple[str, bool]]()

    def attack() -> None:
        pipeline, before = lab.pipeline(LIAR), list[Buffer]()
        honest, boundary = pipeline._ask_next, pipeline._passes.boundary

        async def send_again(microbatch: Microbatch, false: Buffer) -> None:
            await asyncio.sleep(AFTER_S)
            for number in range(MICROBATCHES):
                own = number == microbatch.id.number
                forged = replace(microbatch, id=replace(microbatch.id, number=number), sent=9)
                try:
                    await honest(microbatch if own else forged, false)
                    ends["taken", own] += 1
                except StageFailed:
                    ends["refused", own] += 1

        async def ask(microbatch: Microbatch, outputs: Buffer) -> Any:
            answer = await honest(microbatch, outputs)
            values = boundary.decode(outputs)
            false = [boundary.outputs(VALUES[kind](values), None) for kind in ("constant", "random")]
            attacks.extend(
                asyncio.create_task(send_again(microbatch, each)) for each in (*false, *before[:1])
            )
            before.append(outputs)
            return answer

        pipeline._ask_next = ask  # type: ignore[method-assign]

    attacks: list[asyncio.Task[None]] = []
    lab.train(attack)
    assert ends["refused", True]
    assert ends["refused", False]
    assert set(ends) == {("refused", True), ("refused", False)}


@defence("a sending brings one tensor, and no earlier one", off=replacing(KeptMicrobatch, "_check", ignore))
@pytest.mark.parametrize(("inputs", "sent"), [(b"old", 1), (b"new", 1), (None, 1), (b"old", 2)])
def test_a_sending_that_was_replaced_changes_nothing(inputs: bytes | None, sent: int) -> None:
    kept = KeptMicrobatch()
    kept.take(b"old", b"", 1)
    kept.take(b"new", b"", 2)
    with pytest.raises(Refusal):
        kept.take(inputs, b"", sent)
    assert (kept.inputs, kept.sent) == (b"new", 2)


def test_inputs_without_a_hash_get_it_when_they_come_again() -> None:
    kept, name = KeptMicrobatch(), bytes(32)
    kept.take(b"same", b"", 1)
    assert not kept.knows(name, 2)
    kept.take(b"same", name, 2)
    kept.take(b"same", b"", 3)
    assert kept.knows(name, 4)


def forget_accusations(patch: Patch) -> None:
    patch.setattr(Receipt, "is_accused", lambda *_: False)


@defence("an auditor that lies convicts itself", off=forget_accusations)
def test_a_lying_auditor_is_excluded(tmp_path: Path) -> None:
    """The liar computes honestly, and calls every answer of its mates false."""
    lab = liar_lab(tmp_path)

    def slander() -> None:
        auditor = lab.pipeline(LIAR)._auditor

        async def lied(*_: Any) -> bool:
            return False

        auditor._is_honest = lied  # type: ignore[method-assign, assignment]
        standing = replace(auditor._job.standing, exclude=lambda _: None)
        auditor._job = replace(auditor._job, standing=standing)

    lab.train(slander)
    check_alone_excluded(lab)


def believe_one(patch: Patch) -> None:
    patch.setattr(Accusations, "accuse", lambda *_: True)


def sign_nothing(patch: Patch) -> None:
    patch.setattr(Receipt, "is_accused", lambda *_: True)


@defence("nobody is convicted by an accusation that it has not signed", off=sign_nothing)
def test_an_origin_convicts_nobody_by_false_accusations(tmp_path: Path, monkeypatch: Patch) -> None:
    lab = liar_lab(tmp_path, FEW_ROUNDS)
    accused: list[str] = []

    async def slander(self: Any, step: Any, microbatch: Microbatch, receipt: Receipt) -> None:
        mates = [lab.peer(name) for name in sorted(STAGE) if lab.peer(name) != microbatch.receiver]
        accused.append(mates[1])
        await verdict(self._job, microbatch, receipt, mates[0], (mates[1], bytes(64)))

    monkeypatch.setattr(origin.MicrobatchOrigin, "_audit", slander)
    lab.train(nothing)
    assert accused
    assert not any(lab.excluded().values())


@defence("an origin excludes a worker only if most of its stage do", off=believe_one)
def test_an_origin_does_not_believe_one_worker(tmp_path: Path) -> None:
    """A worker says that it has excluded its mates, without an accusation."""
    lab = liar_lab(tmp_path, FEW_ROUNDS)
    mates = [lab.peer(name) for name in STAGE - {LIAR}]

    def slander() -> None:
        pipeline = lab.pipeline(LIAR)
        standing = replace(pipeline.job.standing, excluded=dict.fromkeys(mates))
        pipeline.job = replace(pipeline.job, standing=standing)

    lab.train(slander)
    assert not any(lab.excluded().values())


@pytest.mark.parametrize("answers", [LIES, pytest.param(10_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("codec", ["float32", "auto"])
def test_no_honest_answer_is_false_and_every_lie_is(codec: str, answers: int, tmp_path: Path) -> None:
    """The other worker computes in double precision, so it rounds unlike any kernel of float32.

    With "auto", the links before and after the workers have codecs of their own.
    """
    lab = liar_lab(tmp_path)
    job = lab.files.applied_to(open_job(lab.sealed).job)
    assert job.stages is not None
    judge, other, stale = (
        StageTrainer.open(job, 1, TrainingMachine(tmp_path / "cache", 1 << 33)) for _ in range(3)
    )
    other._model.double()
    generator = torch.Generator().manual_seed(0)
    weights = stale.parameters()
    stale.load(weights + 3e-3 * torch.randn(weights.shape, generator=generator).sign())  # a step ago
    positions, state = 2 * job.data.sequence_length, bytes(32)
    boundary = Boundary(
        codecs_by_size(codec, positions, judge.width), 2, positions, judge.width, job.job.seed
    )
    codecs = list(boundary.codecs.values())
    workers = [StagePasses(trainer, boundary) for trainer in (judge, other, stale)]
    for each in workers:
        each.restart(state)

    def encoded(values: Iterable[Tensor]) -> list[bytes]:
        return [bytes(codec.encode(each)) for codec, each in zip(links, values, strict=True)]

    before: list[bytes] | None = None
    for number in range(answers):
        scale = torch.rand(2, generator=generator).exp2()
        links = [codecs[number % len(codecs)], codecs[number // 2 % len(codecs)]]
        asked = encoded(torch.randn(positions, judge.width, generator=generator) * each for each in scale)
        id, lies = MicrobatchId(0, lab.peer("0.0"), number), number < LIES
        found = (each.answer(state, asked[0], asked[1], id) for each in workers[: 3 if lies else 2])
        mine, honest, *old = [[*map(bytes, each or ())] for each in found]
        assert workers[0].agree(mine, honest, 24)
        if lies:
            values = [boundary.decode(each) for each in honest]
            links.reverse()  # outputs cross like the gradient that came
            false = [encoded(map(lie, values)) for lie in VALUES.values()]
            if codecs[0] not in links:  # a step changes less than a level
                old = []
            for lie in [*false, *old, *([before] if before else [])]:
                assert workers[0].agree(mine, lie, 24) is False
        before = honest
