"""NoLoCo: who is paired with whom, and how the variance between replicas shrinks."""

import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.methods import Average, get_method
from swarmnet_protocols.training.methods.noloco import NoLoCo, NoLoCoSettings, gamma_bound
from tests.support.models.rounding import assert_sum
from tests.support.training import reference


class TestPairs:
    def test_every_worker_is_in_one_pair_and_the_odd_one_alone(self) -> None:
        method = get_method("noloco", {"seed": 9})
        for count in (1, 2, 5, 8):
            roster = [f"peer-{i}" for i in range(count)]
            for round in range(20):
                groups = {method.partners(round, roster, me) for me in roster}
                assert sorted(peer for group in groups for peer in group) == sorted(roster)
                assert sorted(map(len, groups)) == [1] * (count % 2) + [2] * (count // 2)

    def test_the_order_of_a_roster_is_irrelevant_unlike_rounds_and_seeds(self) -> None:
        roster = [f"peer-{i}" for i in range(8)]
        method, other = get_method("noloco", {"seed": 1}), get_method("noloco", {"seed": 2})
        pairs = [method.partners(round, roster, "peer-0") for round in range(30)]
        assert pairs == [method.partners(round, roster[::-1], "peer-0") for round in range(30)]
        assert len(set(pairs)) == 7
        assert pairs != [other.partners(round, roster, "peer-0") for round in range(30)]

    def test_a_worker_whose_partner_is_gone_steps_alone(self) -> None:
        lost, alone = get_method("noloco", {"beta": 0.7}), get_method("noloco", {"beta": 0.7})
        trained = torch.randn(50, generator=torch.Generator().manual_seed(4))
        for method in (lost, alone):
            method.begin(torch.ones(50))
        got = lost.apply(0, trained, None)
        assert torch.equal(got, alone.apply(0, trained, Average(alone.contribution(0, trained), ("me",))))
        assert_sum(got, torch.stack([torch.ones(50), 0.7 * trained, torch.full((50,), -0.7)]), 3)


class TestVariance:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
    @pytest.mark.parametrize("replicas", [2, 8, 256, 10**9])
    def test_the_bound_is_where_the_second_moments_stop_shrinking(self, alpha: float, replicas: int) -> None:
        bound = gamma_bound(alpha, replicas)
        below, above = (
            np.abs(np.linalg.eigvals(reference.noloco_variance(alpha, gamma, replicas))).max()
            for gamma in (0.999 * bound, 1.001 * bound)
        )
        assert below < 1 < above

    def test_the_defaults_shrink_a_large_swarm_s_variance_by_0_70_a_round(self) -> None:
        factor = np.abs(np.linalg.eigvals(reference.noloco_variance(0.5, 0.7, 10**9))).max()
        assert round(float(factor), 2) == 0.70

    @pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 0.7), (0.2, 0.3), (0.9, 0.7)])
    def test_measured_variance_follows_the_prediction(self, alpha: float, gamma: float) -> None:
        replicas, rounds = 64, 8
        names = [f"peer-{i}" for i in range(replicas)]
        settings = NoLoCoSettings.model_construct(alpha=alpha, gamma=gamma)
        methods = {name: NoLoCo(settings) for name in names}
        starts = torch.randn(replicas, 200, generator=torch.Generator().manual_seed(8))
        for method, start in zip(methods.values(), starts, strict=True):
            method.begin(start.clone())
        for t in range(rounds):
            sent = {name: method.contribution(t, method.agreed()) for name, method in methods.items()}
            for name, method in methods.items():
                pair = method.partners(t, names, name)
                mean = torch.stack([sent[peer] for peer in pair]).mean(dim=0)
                method.apply(t, method.agreed(), Average(mean, pair))
        after = torch.stack([method.agreed() for method in methods.values()])
        predicted = np.linalg.matrix_power(reference.noloco_variance(alpha, gamma, replicas), rounds)[0, 0]
        measured = float(after.var(dim=0).mean() / starts.var(dim=0).mean())
        assert measured == pytest.approx(predicted, rel=0.15)

    def test_settings_that_diverge_are_refused_with_the_bound(self) -> None:
        with pytest.raises(ConfigError, match=r"gamma = 0\.4 must be less than 0\.38"):
            get_method("noloco", {"alpha": 0.9})
        get_method("noloco", {"alpha": 0.9, "gamma": 0.37})
