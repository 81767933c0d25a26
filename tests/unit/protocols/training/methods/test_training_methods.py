"""Training methods against the published equations, and with discarded rounds, absent partners and
restarted workers."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.training.codecs import ErrorFeedback, get_codec
from swarmnet_protocols.training.methods import METHODS, OWN, Average, Method, get_method
from tests.support.models.rounding import UNIT, assert_near
from tests.support.training import reference
from tests.support.training.task import NAMES, ROUNDS, SIZE, WORKERS, Task, assert_agree

H = 4

SETTINGS: Mapping[str, dict[str, int | float | str]] = {
    "allreduce": {},
    "diloco": {"sync_every": H},
    "streaming": {"sync_every": 2 * H, "fragments": 2, "overlap_steps": 1},
    "eager": {"sync_every": H, "outer_lr": 0.7, "momentum": 0.9},
    "noloco": {"sync_every": H, "seed": 5, "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
    "sparseloco": {"sync_every": H, "outer_lr": 1.5},
    "co2": {"sync_every": H, "outer_lr": 1.0, "momentum": 0.5},
    "zo": {"sync_every": 2, "epsilon": 1e-2, "learning_rate": 1e-3, "seed": 1 << 40},
}
INNER_STEPPED = tuple(name for name in METHODS if name not in ("allreduce", "zo"))


class Swarm:
    """Workers that follow the protocol of ``Method`` over an exchange that loses nothing, or a
    whole round."""

    def __init__(self, name: str, *, discarded: Sequence[int] = ()) -> None:
        self._name = name
        self._discarded = discarded
        self._task = Task()
        self.methods = [get_method(name, SETTINGS[name]) for _ in NAMES]
        self.parameters = [torch.from_numpy(self._task.start).float() for _ in NAMES]
        for method, parameters in zip(self.methods, self.parameters, strict=True):
            method.begin(parameters.clone())
        codec, decay = get_codec(self.methods[0].codec), self.methods[0].feedback_decay
        self._codec = codec if codec.name == "topk" else get_codec("float32")
        self._feedback = [ErrorFeedback(self._codec, SIZE, decay) for _ in NAMES]
        self.onlookers: list[Method] = []
        self._under_way: tuple[int, list[Average | None]] | None = None
        self._steps = 0

    def round(self, round: int) -> np.ndarray:
        """Run one round; returns the workers' parameters [W, N] at its end."""
        steps, overlap = self.methods[0].steps_per_round, self.methods[0].overlap_steps
        for step in range(steps):
            if step == overlap:
                self._apply()
            self._train()
        contributions = [
            self._sent(round, worker, method.contribution(round, parameters))
            for worker, (method, parameters) in enumerate(zip(self.methods, self.parameters, strict=True))
        ]
        if overlap == steps:
            self._apply()
        self._under_way = (round, self._exchange(round, contributions))
        if overlap == 0:
            self._apply()
        return torch.stack(self.parameters).numpy()

    def restart(self) -> None:
        """Replace the method of every worker by a new one with the same agreed weights and outer
        state."""
        fresh = []
        for method in self.methods:
            restored = get_method(self._name, SETTINGS[self._name])
            restored.begin(method.agreed().clone())
            restored.restore({name: values.clone() for name, values in method.state().items()})
            fresh.append(restored)
        self.methods = fresh

    def _sent(self, round: int, worker: int, values: torch.Tensor) -> torch.Tensor:
        """The values that other workers decode of a contribution, with error feedback."""
        start, _ = self.methods[worker].range(round)
        wanted = self._feedback[worker].send(round, start, values)
        self._feedback[worker].acknowledge(round, () if round in self._discarded else [(0, len(wanted))])
        return self._codec.decode(self._codec.encode(wanted), len(wanted))

    def _train(self) -> None:
        for worker, parameters in enumerate(self.parameters):
            moved = self._task.inner(worker, self._steps, parameters.double().numpy())
            self.parameters[worker] = torch.from_numpy(moved).float()
        self._steps += 1

    def _exchange(self, round: int, contributions: list[torch.Tensor]) -> list[Average | None]:
        if round in self._discarded:
            return [None] * WORKERS
        averages: list[Average | None] = []
        for method, me in zip(self.methods, NAMES, strict=True):
            group = method.partners(round, NAMES, me)
            values = torch.stack([contributions[NAMES.index(peer)] for peer in group]).mean(dim=0)
            averages.append(Average(values, group))
        return averages

    def _apply(self) -> None:
        if self._under_way is None:
            return
        round, averages = self._under_way
        for worker, (method, average) in enumerate(zip(self.methods, averages, strict=True)):
            self.parameters[worker] = method.apply(round, self.parameters[worker], average)
        for onlooker in self.onlookers:
            onlooker.apply(round, onlooker.agreed(), averages[0])
        self._under_way = None


def expected_trace(name: str) -> list[reference.Vector]:
    run = Task().run()
    match name:
        case "diloco":
            return reference.diloco(run, H, 0.7, 0.9)
        case "streaming":
            return reference.streaming(run, 2 * H, 2, 1, 0.5, (0.4, 0.9))
        case "eager":
            return reference.eager(run, H, 0.7, 0.9)
        case "noloco":
            method = get_method(name, SETTINGS[name])
            groups = [
                sorted({tuple(NAMES.index(p) for p in method.partners(t, NAMES, me)) for me in NAMES})
                for t in range(ROUNDS)
            ]
            return reference.noloco(run, H, 0.5, 0.7, 0.7, groups=groups)
        case "sparseloco":
            codec = get_codec("topk")

            def quantise(e: reference.Vector) -> reference.Vector:
                values = torch.from_numpy(e).float()
                return codec.decode(codec.encode(values), len(e)).double().numpy()

            return reference.sparseloco(run, H, 0.95, 1.5, quantise=quantise)
        case _:
            return reference.co2(run, H, 1.0, 0.5, 1.0)


@pytest.mark.parametrize("name", INNER_STEPPED)
def test_ten_rounds_follow_the_published_equations(name: str) -> None:
    swarm = Swarm(name)
    assert_agree([swarm.round(t) for t in range(ROUNDS)], expected_trace(name))


def test_allreduce_gives_the_mean_gradient() -> None:
    task, method = Task(), get_method("allreduce", {})
    theta, trace = torch.from_numpy(task.start).float(), []
    for t in range(ROUNDS):
        gradients = [
            torch.from_numpy(task.gradient(i, t, theta.double().numpy())).float() for i in range(WORKERS)
        ]
        mean = torch.stack([method.contribution(t, gradient) for gradient in gradients]).mean(dim=0)
        theta = theta - 0.1 * method.apply(t, gradients[0], Average(mean, NAMES))
        trace.append(torch.stack([theta] * WORKERS).numpy())
    assert_agree(trace, reference.sgd(task.run(), task.gradient, 0.1))


def test_diloco_with_one_worker_is_torch_sgd_bit_for_bit() -> None:
    # Slow: the first step of an optimizer imports torch's compiler.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10_007, generator=generator)
    method = get_method("diloco", {"sync_every": 1, "outer_lr": 0.7, "momentum": 0.9})
    method.begin(start)
    outer = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    theta = start
    for t in range(ROUNDS):
        trained = theta + 0.1 * torch.randn(len(start), generator=generator)
        outer.grad = outer.detach() - trained
        sgd.step()
        theta = method.apply(t, trained, Average(method.contribution(t, trained), ("me",)))
        # Without fused multiply-add, torch rounds twice where this rounds once.
        assert torch.equal(theta, outer.detach()) or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        assert_near(theta, outer.detach(), 4 * (t + 1))


@pytest.mark.parametrize("name", INNER_STEPPED)
def test_workers_agree_bit_for_bit_after_every_round(name: str) -> None:
    swarm = Swarm(name)
    for t in range(ROUNDS):
        swarm.round(t)
        first, *others = swarm.methods
        if name != "noloco":
            assert all(torch.equal(first.agreed(), other.agreed()) for other in others)
        shared = shared_state(first)
        assert all(shared_state(other).keys() == shared.keys() for other in others)
        assert all(torch.equal(shared_state(other)[key], shared[key]) for other in others for key in shared)


@pytest.mark.parametrize("name", [n for n in INNER_STEPPED if n != "noloco"])
def test_a_worker_that_only_applies_others_work_is_equal_to_them(name: str) -> None:
    swarm = Swarm(name, discarded=[4])
    onlooker = get_method(name, SETTINGS[name])
    onlooker.begin(swarm.parameters[0].clone())
    swarm.onlookers.append(onlooker)
    for t in range(ROUNDS):
        swarm.round(t)
        member = swarm.methods[0]
        assert torch.equal(member.agreed(), onlooker.agreed())
        if t > 0:
            shared = shared_state(onlooker)
            assert shared.keys() == shared_state(member).keys()
            assert all(torch.equal(values, shared_state(member)[key]) for key, values in shared.items())
    assert onlooker.contribution(ROUNDS, onlooker.agreed() + 1).isfinite().all()


def shared_state(method: Method) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in method.state().items() if not name.startswith("own.")}


@pytest.mark.parametrize("name", INNER_STEPPED)
def test_outer_state_restored_in_mid_run_goes_on_bit_for_bit(name: str) -> None:
    kept, restarted = Swarm(name), Swarm(name)
    for t in range(ROUNDS):
        if t in (1, 5):
            restarted.restart()
        assert np.array_equal(kept.round(t), restarted.round(t))


@pytest.mark.parametrize("name", [n for n in INNER_STEPPED if n != "noloco"])
def test_a_discarded_round_leaves_weights_and_momentum_as_they_were(name: str) -> None:
    swarm = Swarm(name, discarded=[3, 4])
    late = 0 if swarm.methods[0].overlap_steps == 0 else 1
    seen = []
    for t in range(8):
        swarm.round(t)
        state = swarm.methods[0].state()
        outer = [values for key, values in state.items() if key in ("momentum", "own.momentum")]
        seen.append(torch.cat([swarm.methods[0].agreed(), *outer]))
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert [t + 1 for t, change in enumerate(changed) if not change and t + 1 > late] == [3 + late, 4 + late]


def test_progress_of_a_discarded_round_is_in_the_next_contribution() -> None:
    method = get_method("diloco", {})
    method.begin(torch.zeros(3))
    kept = method.apply(0, torch.full((3,), 2.0), None)
    assert torch.equal(method.contribution(1, kept + 1), torch.full((3,), -3.0))


def test_a_discarded_fragment_falls_back_to_the_agreed_weights() -> None:
    method = get_method("streaming", SETTINGS["streaming"])
    start = torch.arange(7.0)
    method.begin(start)
    local = start + 1
    method.contribution(1, local)
    assert torch.equal(method.apply(1, local, None), torch.cat([local[:3], start[3:]]))


@pytest.mark.parametrize(("size", "fragments"), [(203, 2), (7, 5), (3, 4), (4096, 8)])
def test_fragments_cover_the_vector_once(size: int, fragments: int) -> None:
    method = get_method("streaming", {"sync_every": 8 * fragments, "fragments": fragments})
    method.begin(torch.zeros(size))
    ranges = [method.range(round) for round in range(fragments)]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == size
    assert max(end - start for start, end in ranges) <= -(-size // fragments)
    assert method.range(fragments) == ranges[0]


def test_co2_weighs_an_average_by_the_rounds_it_is_late() -> None:
    moved = []
    for late in (1, 2):
        method = get_method("co2", {"sync_every": 1, "outer_lr": 1.0, "momentum": 0.0})
        method.begin(torch.zeros(1))
        for t in range(late + 1):
            method.contribution(t, torch.zeros(1))
        moved.append(method.apply(0, torch.zeros(1), Average(torch.tensor([0.5]), ("me",))).item())
    assert moved == [-0.5, -0.25]


def test_co2_clips_its_momentum() -> None:
    method = get_method("co2", {"sync_every": 1, "outer_lr": 1.0, "clip": 0.125})
    method.begin(torch.zeros(2))
    method.contribution(0, torch.zeros(2))
    method.contribution(1, torch.zeros(2))
    moved = method.apply(0, torch.zeros(2), Average(torch.tensor([50.0, -0.0625]), ("me",)))
    assert moved.tolist() == [-0.125, 0.0625]
    assert method.state()["momentum"].tolist() == [0.125, -0.0625]


def test_eager_workers_do_not_drift_apart_when_their_number_changes() -> None:
    method = get_method("eager", {"sync_every": 1})
    method.begin(torch.zeros(20))
    place = torch.zeros(20)
    progress = torch.randn(200, 20, generator=torch.Generator().manual_seed(6))
    progress[4:] = 0
    for t in range(200):
        place = place + progress[t]
        method.contribution(t, place)
        if t > 0:
            place = method.apply(t - 1, place, Average(torch.zeros(20), NAMES[: 1 + t % 3]))
        if t == 3:
            assert (place - method.agreed()).abs().max() > 0.1
    # Two hundred steps add a number each, in float32.
    assert ((place - method.agreed()).abs() <= 200 * UNIT * progress.abs().sum(0)).all()


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("diloco", {"sync_every": 0}, "sync_every = 0"),
        ("diloco", {"sync_evry": 50}, "'sync_evry'"),
        ("diloco", {"outer_lr": math.nan}, "outer_lr"),
        ("diloco", {"momentum": "high"}, "momentum"),
        ("diloco", {"sync_every": 2.5}, "sync_every"),
        ("streaming", {"fragments": 3}, "fragments = 3 must divide sync_every = 100"),
        ("streaming", {"overlap_steps": 25}, "overlap_steps = 25 must be less"),
        ("streaming", {"mixing": 1.0}, "mixing"),
        ("allreduce", {"sync_every": 5}, "'sync_every'"),
        ("zo", {"sync_every": 0}, "sync_every"),
        ("dilocco", {}, "unknown method 'dilocco'"),
    ],
)
def test_a_wrong_setting_is_named(name: str, settings: dict[str, float | int | str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        get_method(name, settings)


@pytest.mark.parametrize(
    "change",
    [
        {"momentum": torch.full((5,), math.inf)},
        {"momentum": torch.zeros(4)},
        {"momentum": torch.zeros(5, dtype=torch.float64)},
        {"velocity": torch.zeros(5)},
        {"base.1": torch.zeros(6)},
        {f"base.{i}": torch.zeros(5) for i in range(9)},
    ],
)
def test_foreign_outer_state_is_refused(change: dict[str, torch.Tensor]) -> None:
    method = get_method("co2", {})
    method.begin(torch.zeros(5))
    good = method.state()
    method.restore(good)
    with pytest.raises(IntegrityError):
        method.restore(good | change)


def test_outer_state_without_what_is_another_workers_own_is_enough() -> None:
    method = get_method("eager", {})
    method.begin(torch.zeros(5))
    method.restore({"momentum": torch.ones(5)})
    assert method.state()["momentum"].tolist() == [1] * 5
    with pytest.raises(IntegrityError, match="lacks 'momentum'"):
        method.restore({})


@pytest.mark.parametrize("name", [name for name in METHODS if name != "zo"])
def test_only_apply_changes_the_state_of_a_method(name: str) -> None:
    """Newcomers download the state between two outer steps."""
    method = get_method(name, SETTINGS[name])
    start = torch.arange(8.0)
    method.begin(start.clone())
    local = start + 1
    count = method.range(0)[1] - method.range(0)[0]
    for round, kept in enumerate((True, True, False, True)):
        shared = {key: each for key, each in method.state().items() if not key.startswith(OWN)}
        shared["agreed"] = method.agreed()
        before = {key: each.clone() for key, each in shared.items()}
        method.contribution(round, local)
        assert all(torch.equal(shared[key], each) for key, each in before.items())
        average = torch.full((count,), round + 1.0)
        method.apply(round, local, Average(average, NAMES) if kept else None)
        assert torch.equal(local, start + 1)
        assert bool((average == round + 1).all())
    assert not torch.equal(method.agreed(), start) or name == "allreduce"


@pytest.mark.parametrize("name", INNER_STEPPED)
def test_a_method_keeps_nothing_of_a_view(name: str) -> None:
    """The parameters of a worker change under it with the next inner step."""
    trained, expected = (torch.arange(8.0) + 1 for _ in range(2))
    viewing, copying = get_method(name, SETTINGS[name]), get_method(name, SETTINGS[name])
    for method in (viewing, copying):
        method.begin(torch.arange(8.0))
    for round in range(3):
        average = Average(viewing.contribution(round, trained), NAMES)
        copying.contribution(round, expected.clone())
        trained.copy_(viewing.apply(round, trained, average))
        expected = copying.apply(round, expected.clone(), average).clone()
        assert torch.equal(trained, expected)
        trained += 1
        expected += 1
