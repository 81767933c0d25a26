"""One liar among three workers of a stage: other workers compute its answers again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarmnet_node.training.pipeline import origin
from swarmnet_node.training.pipeline.pipeline import Pipeline
from swarmnet_protocols.training.pipeline.audits import Accusations
from tests.defences import Patch, defence
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import train

LIAR = "1.0"
FIRST_LIE = 2
"""The round in which a liar begins."""
ROUNDS = 7
WORKERS = {0: 2, 1: 3, 2: 2}


def random_values(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(values.numel())
    return torch.randn(values.shape, generator=generator) * values.std()


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flip": lambda values: -values,
    "scaled": lambda values: 3 * values,
    "random": random_values,
    "constant": lambda values: torch.full_like(values, float(values.abs().mean())),
}


def lie_with(pipeline: Pipeline, kind: str) -> None:
    """Have a worker give false outputs and gradients from now on. It signs what it sends.

    As an auditor it finds no liar: if it excluded its mates, it would get no more work.
    """
    passes, first = pipeline._passes, dict[str, Any]()
    boundary, trainer = passes.boundary, passes.trainer

    async def finds_nothing(*_: Any) -> bool:
        return False

    pipeline._auditor._is_false = finds_nothing  # type: ignore[method-assign]
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

        passes.forward = stale  # type: ignore[method-assign]
        return
    for method in ("outputs", "gradient"):
        honest = getattr(boundary, method)

        def false(values: Tensor, *rest: Any, honest: Any = honest, method: str = method) -> Any:
            if kind == "replayed":
                return first.setdefault(method, honest(values, *rest))
            return honest(LIES[kind](values.detach()), *rest)

        object.__setattr__(boundary, method, false)


class LiarLab(StageLab):
    """Trains while one worker of a stage lies, which ends when all others have ended."""

    def excluded(self) -> dict[str, set[str]]:
        """The workers that each worker has excluded, by name."""
        of = {self.peer(name): name for name in self.events}
        return {name: {of[peer] for peer in self.workers[name]._workers.excluded} for name in self.events}

    def train(self, lie: Callable[[Pipeline], None]) -> None:
        honest = [name for name in names(WORKERS) if name != LIAR]

        def watch(name: str, event: dict[str, Any]) -> None:
            if name == LIAR and event["event"] == "round" and event["round"] == FIRST_LIE - 1:
                lie(self.pipeline(name))
            if event["event"] == "done" and all(
                self.events[each] and self.events[each][-1]["event"] == "done" for each in honest
            ):
                self.crash(LIAR)

        self.wanted = watch
        run(train(self, *names(WORKERS)))


def liar_lab(folder: Path) -> LiarLab:
    job = staged_job(folder, rounds=ROUNDS, workers=3, least=2, stages=3, batch=6)
    return LiarLab(folder, job.replace("deadline_s = 15", 'deadline_s = 15\naggregate = "median"'))


@pytest.fixture(autouse=True)
def audits(monkeypatch: Patch) -> None:
    """Audits are frequent, so that short runs have some."""
    monkeypatch.setattr(origin, "audited_share", lambda *_: 0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss without a lie."""
    lab = liar_lab(tmp_path_factory.mktemp("honest"))
    lab.train(lambda _: None)
    assert not any(lab.excluded().values())
    return lab.losses()[ROUNDS - 1]


def audit_nothing(patch: Patch) -> None:
    patch.setattr(origin, "audited_share", lambda *_: 0.0)


@defence("answers of a liar are computed again", off=audit_nothing, kind="sign flip")
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
def test_a_liar_is_excluded_by_its_stage(kind: str, undisturbed: float, tmp_path: Path) -> None:
    lab = liar_lab(tmp_path)
    lab.train(lambda pipeline: lie_with(pipeline, kind))

    found = lab.excluded()
    assert not found.pop(LIAR)
    assert found == {name: {LIAR} if name[0] in "01" else set() for name in found}
    assert lab.losses()[ROUNDS - 1] <= 1.02 * undisturbed


def believe_one(patch: Patch) -> None:
    patch.setattr(Accusations, "accuse", lambda *_: True)


@defence("a worker is excluded only if most of its stage have found it to lie", off=believe_one)
def test_a_lying_auditor_excludes_nobody(tmp_path: Path) -> None:
    accused: list[bool] = []

    def slander(pipeline: Pipeline) -> None:
        async def lied(*_: Any) -> bool:
            accused.append(True)
            return True

        auditor = pipeline._auditor
        standing = replace(auditor._job.standing, exclude=lambda _: None)
        auditor._job = replace(auditor._job, standing=standing)
        auditor._is_false = lied  # type: ignore[method-assign]

    lab = liar_lab(tmp_path)
    lab.train(slander)
    assert accused
    assert not any(lab.excluded().values())
