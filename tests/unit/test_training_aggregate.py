"""Aggregation with bad workers: the honest ones still train, and every defence is seen to be what saves them."""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training import aggregate as module
from swarmnet_protocols.training.aggregate import (
    AGGREGATORS,
    aggregate,
    centered_clip,
    check_contribution,
    clip_to_median_norm,
)

WORKERS = 16
ROUNDS = 40
MAX_NORM = 1e9


class Problem:
    """Logistic regression whose labels are wrong once in ten; every worker draws fresh samples for every step."""

    def __init__(self, *, size: int = 10, seed: int = 0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.truth = torch.randn(size, generator=self.rng)
        self.held_out = self.samples(1, 8192)

    def samples(self, workers: int, count: int) -> tuple[Tensor, Tensor]:
        """Features [workers, count, n] and labels [workers, count], -1 or 1."""
        features = torch.randn(workers, count, len(self.truth), generator=self.rng)
        wrong = torch.rand(workers, count, generator=self.rng) < 0.1
        return features, torch.sign(features @ self.truth) * torch.where(wrong, -1.0, 1.0)

    def gradients(self, parameters: Tensor) -> Tensor:
        """[workers, n] at parameters [workers, n], each from 256 samples of its own."""
        features, labels = self.samples(len(parameters), 256)
        margins = labels * torch.einsum("wsn,wn->ws", features, parameters)
        return torch.einsum("ws,wsn->wn", -labels * torch.sigmoid(-margins), features) / labels.shape[1]

    def loss(self, parameters: Tensor) -> float:
        features, labels = self.held_out
        return torch.nn.functional.softplus(-labels * (features @ parameters)).mean().item()


Attack = Callable[[Tensor, int, list[Tensor]], Tensor]
"""From the honest contributions of everybody [workers, n], the number of bad workers, and all earlier rounds'."""


def sign_flip(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return -honest[:bad]


def flip_and_amplify(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return -1000 * honest[:bad]


def thousandfold(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return 1000 * honest[:bad]


def not_a_number(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return torch.full_like(honest[:bad], math.nan)


def constant(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return torch.full_like(honest[:bad], 100.0)


def stale_replay(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    return past[0][:bad]


def a_little_is_enough(honest: Tensor, bad: int, past: list[Tensor]) -> Tensor:
    """Baruch et al. 2019, "A Little Is Enough", section 3: as far from the mean as half of the honest still vouch for."""
    good = honest[bad:]
    needed = WORKERS // 2 + 1 - bad
    z = NormalDist().inv_cdf((WORKERS - bad - needed) / (WORKERS - bad))
    return (good.mean(0) - z * good.std(0)).expand(bad, -1)


LOUD = [flip_and_amplify, thousandfold, constant]
"""A mean diverges under any of them. Flipped signs alone only slow it down: seven of sixteen leave an eighth of each step."""

ATTACKS = [*LOUD, sign_flip, not_a_number, stale_replay, a_little_is_enough]


def train(aggregator: str, *, bad: int = 0, attack: Attack = sign_flip, clip: bool = False) -> float:
    """Final loss after rounds of five local steps and an outer step of SGD with Nesterov momentum (DiLoCo)."""
    task = Problem()
    parameters = momentum = torch.zeros_like(task.truth)
    past: list[Tensor] = []
    for _ in range(ROUNDS):
        local = parameters.expand(WORKERS, -1)
        for _ in range(5):
            local = local - 0.5 * task.gradients(local)
        honest = parameters - local
        past.append(honest)
        sent = torch.cat([attack(honest, bad, past), honest[bad:]])
        kept = torch.stack([row for row in sent if not check_contribution(row, MAX_NORM)])
        weights = torch.ones(len(kept))
        if clip:
            kept = clip_to_median_norm(kept, weights)
        outer = aggregate(aggregator, kept, weights)
        momentum = 0.9 * momentum + outer
        parameters = parameters - 0.7 * (outer + 0.9 * momentum)
    return task.loss(parameters)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clean() -> float:
    return train("mean")


@pytest.mark.parametrize(("bad", "allowed"), [(3, 1.05), (7, 1.15)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_with_centered_clip_bad_workers_cost_little(
    attack: Attack, bad: int, allowed: float, clean: float
) -> None:
    assert train("centered-clip", bad=bad, attack=attack) <= allowed * clean
    if attack in LOUD or (attack is stale_replay and bad == 7):
        assert train("mean", bad=bad, attack=attack) > 5 * clean


@pytest.mark.parametrize("bad", [3, 7])
@pytest.mark.parametrize("attack", LOUD)
def test_norms_brought_to_the_median_save_the_mean_from_loud_attacks(
    attack: Attack, bad: int, clean: float
) -> None:
    assert train("mean", bad=bad, attack=attack, clip=True) <= 1.15 * clean


def test_without_the_check_one_nan_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "check_contribution", lambda values, max_norm: "")
    assert math.isnan(train("mean", bad=3, attack=not_a_number))


def test_without_clipping_centered_clip_is_the_mean() -> None:
    contributions, weights = crowd(), torch.arange(1.0, 17.0)
    everywhere = centered_clip(contributions, weights, radius=1e12)
    torch.testing.assert_close(everywhere, aggregate("mean", contributions, weights))
    assert (aggregate("centered-clip", contributions, weights) - everywhere).norm() > 0.1


def crowd(size: int = 50) -> Tensor:
    rows = torch.randn(16, size, generator=torch.Generator().manual_seed(1))
    rows[0] *= 100
    return rows


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregates_do_not_depend_on_who_comes_first(name: str) -> None:
    contributions, weights = crowd(), torch.arange(1.0, 17.0)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    permuted = aggregate(name, contributions[order], weights[order])
    torch.testing.assert_close(permuted, aggregate(name, contributions, weights))
    ranks = order.argsort()
    assert torch.equal(
        aggregate(name, contributions[order][ranks], weights[order][ranks]),
        aggregate(name, contributions, weights),
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_columns_worked_on_at_a_time_change_no_bit_of_a_median_and_threads_none_at_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions, weights = crowd(5000), torch.ones(16)
    whole = aggregate(name, contributions, weights)
    torch.set_num_threads(2)
    try:
        assert torch.equal(aggregate(name, contributions, weights), whole)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(module, "COLUMNS", 7)
    torch.testing.assert_close(aggregate(name, contributions, weights), whole)
    if name != "centered-clip":
        assert torch.equal(aggregate(name, contributions, weights), whole)


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_aggregates_are_free_of_scale(name: str, scale: float) -> None:
    contributions, weights = crowd(), torch.ones(16)
    torch.testing.assert_close(
        aggregate(name, contributions * scale, weights) / scale, aggregate(name, contributions, weights)
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_equal_contributions_and_a_single_one_come_back(name: str) -> None:
    row = crowd()[1]
    torch.testing.assert_close(aggregate(name, row.expand(5, -1), torch.ones(5)), row, rtol=1e-6, atol=0)
    assert torch.equal(aggregate(name, row[None], torch.ones(1)), row)


def test_a_weighted_median_has_half_of_the_weight_on_either_side() -> None:
    column = torch.tensor([[5.0], [1.0], [3.0]])
    assert aggregate("median", column, torch.tensor([1.0, 1.0, 1.0])).item() == 3.0
    assert aggregate("median", column, torch.tensor([3.0, 1.0, 1.0])).item() == 5.0
    assert aggregate("median", column, torch.tensor([2.0, 1.0, 1.0])).item() == 4.0


def test_norms_above_the_median_are_brought_to_it() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [300.0, 400.0], [0.0, 0.0]])
    clipped = clip_to_median_norm(rows, torch.ones(4))
    torch.testing.assert_close(clipped, torch.tensor([[1.8, 2.4], [0.6, 0.8], [1.8, 2.4], [0.0, 0.0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(bad: float) -> None:
    values = torch.zeros(4)
    values[1] = bad
    assert check_contribution(values, 10.0) == "1 of 4 values are not finite"


def test_norm_and_weight_are_capped() -> None:
    values = torch.tensor([3.0, 4.0])
    assert check_contribution(values, 5.0, weight=2.0, max_weight=2.0) == ""
    assert check_contribution(values, 4.999) == "norm 5 is above 4.999"
    for weight in (2.1, 0.0, -1.0, math.nan, math.inf):
        assert "weight" in check_contribution(values, 5.0, weight=weight, max_weight=2.0)
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    assert "norm" in check_contribution(largest, 1e30)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="krum"):
        aggregate("krum", crowd(), torch.ones(16))
    for weights in (torch.ones(15), torch.zeros(16), torch.full((16,), math.nan)):
        with pytest.raises(ValueError, match="weight"):
            aggregate("mean", crowd(), weights)
