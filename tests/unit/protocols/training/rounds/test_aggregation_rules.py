"""Aggregation rules: the result stays near the honest mean with bad contributions, and does not
without each defence."""

import math

import pytest
import torch
from torch import Tensor

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.rounds import aggregation_rules as module
from swarmnet_protocols.training.rounds.aggregation_rules import (
    AGGREGATORS,
    AggregationRules,
    aggregate,
    centered_clip,
    clip_to_median_norm_,
    mix_neighbours,
    outliers,
)
from tests.defences import Patch, defence
from tests.support.models.rounding import assert_near
from tests.support.training.attacks import ATTACKS

WORKERS = 16
SIZE = 500


def contributions_under(attack: str, bad: int) -> tuple[Tensor, Tensor]:
    """Contributions of sixteen workers, each a common vector of norm 1 plus noise of norm 1, and
    the mean of the honest ones."""
    rng = torch.Generator().manual_seed(0)
    learned = torch.randn(SIZE, generator=rng)
    learned /= learned.norm()
    honest, earlier = (
        scale * learned + torch.randn(WORKERS, SIZE, generator=rng) / SIZE**0.5 for scale in (1.0, 2.0)
    )
    sent = torch.cat([ATTACKS[attack](honest, bad, [earlier]), honest[bad:]])
    return sent, honest[bad:].mean(0)


def error(aggregated: Tensor, honest_mean: Tensor) -> float:
    return float((aggregated - honest_mean).norm())


@pytest.mark.parametrize(("bad", "allowed"), [(3, 0.25), (7, 0.7)])
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "nan"])
def test_a_centered_clip_stays_near_what_the_honest_learned(attack: str, bad: int, allowed: float) -> None:
    sent, honest_mean = contributions_under(attack, bad)
    assert error(aggregate("centered-clip", sent, torch.ones(WORKERS)), honest_mean) <= allowed


@pytest.mark.parametrize("attack", ["sign-flip", "constant"])
def test_without_mixing_nearly_as_many_liars_pull_a_clip_away(attack: str) -> None:
    sent, honest_mean = contributions_under(attack, 7)
    weights = torch.ones(WORKERS)
    clipped = clip_to_median_norm_(sent, weights)
    assert error(centered_clip(clipped, weights), honest_mean) > 0.7
    assert error(aggregate("mean", clipped, weights), honest_mean) > 0.7
    assert error(aggregate("centered-clip", clipped, weights), honest_mean) < 0.05


def test_clipping_norms_protects_a_mean_from_scaled_contributions() -> None:
    sent, honest_mean = contributions_under("x1000", 7)
    weights = torch.ones(WORKERS)
    assert error(aggregate("mean", sent, weights), honest_mean) > 100
    assert error(aggregate("mean", clip_to_median_norm_(sent, weights), weights), honest_mean) < 0.3


def test_neighbours_are_the_nearest_with_more_than_half_of_the_weight() -> None:
    rows = torch.tensor([[0.0], [1.0], [3.0], [100.0]])
    expected = torch.tensor([[4 / 3], [4 / 3], [4 / 3], [104 / 3]])
    assert_near(mix_neighbours(rows, torch.ones(4)), expected, len(rows))
    heavy = torch.tensor([1.0, 1.0, 4.0, 1.0])
    assert_near(mix_neighbours(rows, heavy), torch.tensor([[13 / 6], [13 / 6], [3.0], [112 / 5]]), len(rows))


def test_without_clipping_centered_clip_is_the_mean() -> None:
    contributions, weights = random_contributions(), torch.arange(1.0, 17.0)
    everywhere = centered_clip(contributions, weights, radius=1e12)
    assert_near(everywhere, aggregate("mean", contributions, weights))
    assert (aggregate("centered-clip", contributions, weights) - everywhere).norm() > 0.1


def random_contributions(size: int = 50) -> Tensor:
    rows = torch.randn(16, size, generator=torch.Generator().manual_seed(1))
    rows[0] *= 100
    return rows


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregates_do_not_depend_on_the_order_of_contributors(name: str) -> None:
    contributions, weights = random_contributions(), torch.arange(1.0, 17.0)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    permuted = aggregate(name, contributions[order], weights[order])
    assert_near(permuted, aggregate(name, contributions, weights))
    ranks = order.argsort()
    assert torch.equal(
        aggregate(name, contributions[order][ranks], weights[order][ranks]),
        aggregate(name, contributions, weights),
    )


@pytest.mark.parametrize("name", AGGREGATORS)
def test_rules_give_the_same_bits_in_chunks_and_with_any_thread_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions, weights = random_contributions(500), torch.ones(16)
    whole = aggregate(name, contributions, weights)
    torch.set_num_threads(2)
    try:
        assert torch.equal(aggregate(name, contributions, weights), whole)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(module, "COORDINATES_AT_ONCE", 70)
    assert_near(aggregate(name, contributions, weights), whole)
    if name != "centered-clip":
        assert torch.equal(aggregate(name, contributions, weights), whole)


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_the_aggregate_of_scaled_contributions_is_scaled_alike(name: str, scale: float) -> None:
    contributions, weights = random_contributions(), torch.ones(16)
    found = aggregate(name, contributions * scale, weights) / scale
    assert_near(found, aggregate(name, contributions, weights))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_aggregate_of_equal_contributions_is_that_contribution(name: str) -> None:
    row = random_contributions()[1]
    assert_near(aggregate(name, row.expand(5, -1), torch.ones(5)), row, 5)
    assert torch.equal(aggregate(name, row[None], torch.ones(1)), row)


def test_a_weighted_median_has_half_of_the_weight_on_either_side() -> None:
    column = torch.tensor([[5.0], [1.0], [3.0]])
    assert aggregate("median", column, torch.tensor([1.0, 1.0, 1.0])).item() == 3.0
    assert aggregate("median", column, torch.tensor([3.0, 1.0, 1.0])).item() == 5.0
    assert aggregate("median", column, torch.tensor([2.0, 1.0, 1.0])).item() == 4.0


def believe_tokens(patch: Patch) -> None:
    patch.setattr(module, "_equally", lambda rule, rows, weights: rule(rows, weights))


@defence("under a robust rule, claimed tokens have no weight", off=believe_tokens, name="median")
@pytest.mark.parametrize("name", ["median", "centered-clip"])
def test_a_worker_that_claims_most_tokens_outweighs_nobody(name: str) -> None:
    """A liar among three workers announced sixteen times the speed of the others."""
    rules, weights = AggregationRules.named(name, 64.0), torch.tensor([16.0, 1.0, 1.0])
    for lie in (-1.0, 0.001):
        rows = torch.tensor([lie, 1.0, 1.0])[:, None].repeat(1, 8)
        assert rules.screen(list(rows), weights) == [""] * 3
        assert rules.aggregate(rows, weights).min() > 0.5


def test_norms_above_the_median_are_clipped_to_the_median() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [300.0, 400.0], [0.0, 0.0]])
    clipped = clip_to_median_norm_(rows, torch.ones(4))
    assert_near(clipped, torch.tensor([[1.8, 2.4], [0.6, 0.8], [1.8, 2.4], [0.0, 0.0]]), 4)


def test_a_row_far_longer_than_the_median_is_named() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [-3000.0, 4000.0], [0.0, 0.0], [30.0, 40.0]])
    reasons = outliers(rows, torch.ones(5))
    assert [bool(reason) for reason in reasons] == [False, False, True, False, False]
    assert reasons[2] == "norm 5000 is over 100 times the median of all"
    assert outliers(torch.eye(3)[:, :1], torch.ones(3)) == ["", "", ""], (
        "most are zero: nothing to compare with"
    )


def test_an_unknown_rule_and_invalid_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="krum"):
        aggregate("krum", random_contributions(), torch.ones(16))
    for weights in (torch.ones(15), torch.zeros(16), torch.full((16,), math.nan)):
        with pytest.raises(ValueError, match="weight"):
            aggregate("mean", random_contributions(), weights)
