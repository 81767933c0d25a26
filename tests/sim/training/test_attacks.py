"""Replicas that train together through real exchanges while some of them lie. The whole table is
``tests.bench.train_attacks``."""

from pathlib import Path

import pytest

from tests.support.training.attacks import ATTACKS, attack_job, sign_flip, train

ROUNDS, STEPS = 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture(scope="module")
def clean(folder: Path) -> float:
    return train(attack_job(folder, "mean", rounds=ROUNDS, steps=STEPS), folder, 0, sign_flip).loss


def test_seven_liars_of_sixteen_spoil_a_mean_and_not_a_centered_clip(folder: Path, clean: float) -> None:
    losses = {
        name: train(attack_job(folder, name, rounds=ROUNDS, steps=STEPS), folder, 7, sign_flip).loss
        for name in ("mean", "centered-clip")
    }
    assert losses["centered-clip"] <= 1.05 * clean
    assert losses["mean"] > 1.1 * clean


@pytest.mark.parametrize(
    ("attack", "reason"),
    [("nan", "a value is not finite"), ("x1000", "times the median"), ("constant", "times the median")],
)
def test_an_invalid_contribution_is_excluded_with_its_reason(attack: str, reason: str, folder: Path) -> None:
    trained = train(attack_job(folder, "mean", rounds=1, steps=1), folder, 3, ATTACKS[attack])
    (excluded,) = trained.excluded
    assert sorted(excluded) == sorted(trained.bad)
    assert all(reason in said for said in excluded.values())
