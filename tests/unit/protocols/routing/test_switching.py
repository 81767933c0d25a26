"""Hosts switch to a model that lacks hosts, or whose hosts are overloaded. As many switch as it
needs, and only where their own model can spare them."""

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import model_needs
from swarmnet_protocols.routing.model_needs import (
    CALM,
    OTHER_HOSTS,
    OVERLOADED,
    ServedModel,
    may_leave_model,
)
from swarmnet_protocols.routing.placement import choose_span
from swarmnet_protocols.routing.relocation import (
    LOOK_S,
    PAUSE_S,
    RETRY_S,
    SWITCH_CONFIRM_S,
    Kind,
    Lasting,
    Look,
    Relocation,
    Remembered,
    is_confirmed,
    should_relocate,
)
from swarmnet_protocols.routing.throughput import Claim, holders
from tests.defences import defence, replacing, yes

BLOCKS = 6
OWN = ServedModel(b"a", "alpha", BLOCKS, 1.0, ())
OTHER = ServedModel(b"b", "beta", BLOCKS, 1.0, (), length=BLOCKS)
LOAD_S = 120.0


def host(name: str, start: int = 0, end: int = BLOCKS, load: float = 0.0, **changes: object) -> Claim:
    return replace(Claim(PeerId(name), start, end, may_move=False, may_switch=True, load=load), **changes)  # type: ignore[arg-type]


def look_of(own: ServedModel, mine: Claim, *others: ServedModel) -> Look:
    return Look(own, mine, mine.end - mine.start, others)


def to_beta(end: int) -> Relocation:
    return Relocation(Kind.SWITCH, 0, end, "", manifest=b"b", model="beta")


NOTHING = Remembered()
THREE = (host("a"), host("b"), host("c"))
BUSY = (host("x", load=0.9), host("y", load=0.9))


def switches(
    own: tuple[Claim, ...],
    other: tuple[Claim, ...],
    memory: Remembered = NOTHING,
    seeds: int = 100,
    **changes: object,
) -> list[Relocation]:
    """The switches of the first host of ``own``, with many random sources: each at its second look,
    long enough after the first."""
    mine, alpha = own[0], replace(OWN, claims=own)
    look = look_of(alpha, mine, replace(OTHER, claims=other, **changes))
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        switch, seen = should_relocate(look, memory, now=0.0, rng=rng)
        assert switch is None, "at the first look"
        assert should_relocate(look, seen, now=SWITCH_CONFIRM_S - 1, rng=rng)[0] is None
        switch, _ = should_relocate(look, seen, now=SWITCH_CONFIRM_S, rng=rng)
        found += [] if switch is None else [switch]
    return found


def test_a_spare_host_switches_to_a_model_with_uncovered_blocks() -> None:
    found = switches(THREE, (host("x", 0, 3),), length=3)
    assert {(switch.model, switch.start, switch.end) for switch in found} == {("beta", 3, 6)}
    assert found[0].reason == "no host had 3 of its 6 blocks, and alpha has enough hosts"
    assert switches(THREE, ())[0].reason == "no host had any of its 6 blocks, and alpha has enough hosts"


def test_hosts_draw_so_that_as_many_switch_as_are_needed() -> None:
    many = tuple(host(f"h{number:02}") for number in range(20))
    assert 20 * len(switches(many, (host("x", 0, 3),), seeds=1000, length=3)) / 1000 == pytest.approx(
        1, abs=0.3
    )
    assert 20 * len(switches(many, (), seeds=1000, length=2)) / 1000 == pytest.approx(3, abs=0.5)
    four = tuple(host(f"x{number}", load=0.95) for number in range(4))
    assert 20 * len(switches(many, four, seeds=1000)) / 1000 == pytest.approx(4 * (0.95 / 0.625 - 1), abs=0.5)


@defence("a host that its model needs does not switch", off=replacing(model_needs, "OTHER_HOSTS", 1))
def test_a_host_that_its_model_needs_stays() -> None:
    assert not switches(THREE[:2], ()), "two hosts of each block stay"
    assert not switches((THREE[0], host("b"), host("c", 0, 5)), ())
    assert not switches((*THREE[:2], host("c", 0, 3), host("d", 4, 6)), ()), (
        "block 3 has two other hosts at most"
    )
    moving = host("c", 0, 3, settled=False)
    assert not switches((*THREE, moving), ()), "a host that is about to move is not there"
    assert switches((*THREE, host("d"), moving), ())
    assert not switches((host("a", 0, 3), host("b", 0, 3), host("c", 0, 3)), ()), (
        "a model with gaps of its own"
    )


def test_a_host_of_a_model_with_work_stays() -> None:
    work = CALM * 2 / 3
    assert switches(tuple(replace(each, load=work - 0.01) for each in THREE), ())
    assert not switches(tuple(replace(each, load=work + 0.01) for each in THREE), ()), (
        "two would have more than half"
    )


def test_hosts_that_cannot_fill_a_gap_together_stay() -> None:
    assert not switches(THREE, (), length=5), "one may leave"
    five = (*THREE, host("d"), host("e"))
    assert switches(five, (), length=2), "three may leave"
    kept = tuple(replace(each, may_switch=False) for each in five[1:])
    assert not switches((five[0], *kept), (), length=2), "others may not switch"
    assert not switches(THREE, (), length=0), "a model that does not fit on this machine"


def test_a_host_switches_to_a_model_whose_hosts_are_overloaded() -> None:
    found = switches(THREE, BUSY)
    assert found[0].reason == "its hosts computed 90% of the time, those of alpha 0%"
    calm = tuple(replace(each, load=OVERLOADED - 0.01) for each in BUSY)
    assert not switches(THREE, calm)


@defence("few false loads draw no hosts to a model", off=replacing(model_needs, "median", max))
def test_few_false_loads_neither_draw_hosts_nor_keep_them() -> None:
    honest = tuple(host(f"x{number}", load=0.1) for number in range(5))
    liars = tuple(host(f"y{number}", load=1.0) for number in range(4))
    assert not switches(THREE, (*honest, *liars))
    idle = (*THREE, host("d", load=1.0))
    assert switches(idle, BUSY), "one that claims work"


def test_hosts_that_come_count_before_they_compute() -> None:
    coming = host("z", settled=False)
    assert not switches(THREE, (*BUSY, coming, host("w", settled=False)))
    assert not switches(THREE, (*BUSY, host("z"), host("w"))), "they have just come"
    assert not switches(THREE, (host("x", 0, 3), host("z", 3, 6, settled=False)))


def test_a_host_stays_an_hour_after_a_switch_and_longer_after_failure() -> None:
    assert not switches(THREE, (), Remembered().after_switch(SWITCH_CONFIRM_S + 1 - PAUSE_S))
    assert switches(THREE, (), Remembered().after_switch(-PAUSE_S))
    memory = Remembered().after_failure(b"b", 0.0)
    assert [memory.may_try(b"b", now) for now in (0.0, RETRY_S - 1, RETRY_S)] == [False, False, True]
    assert memory.may_try(b"c", 0.0)


def test_a_need_that_is_gone_at_the_second_look_is_forgotten() -> None:
    alpha, rng = replace(OWN, claims=THREE), random.Random(0)
    _, memory = should_relocate(
        look_of(alpha, THREE[0], replace(OTHER, claims=())), Remembered(), now=0.0, rng=rng
    )
    assert memory.need is not None
    assert memory.need.what == b"b"
    _, memory = should_relocate(
        look_of(alpha, THREE[0], replace(OTHER, claims=(host("x"),))), memory, now=60.0, rng=rng
    )
    assert memory == Remembered()


def test_a_host_whose_model_has_a_gap_or_loses_memory_does_not_switch() -> None:
    four = tuple(replace(host(name, 0, 3), may_move=True) for name in "abcd")
    beta, rng = replace(OTHER, claims=()), random.Random(0)
    memory = Remembered(need=Lasting(b"b", 0.0))

    def decide(own: tuple[Claim, ...], length: int) -> list[Relocation | None]:
        looks = [Look(replace(OWN, claims=own), mine, length, [beta]) for mine in own]
        return [should_relocate(look, memory, now=SWITCH_CONFIRM_S, rng=rng)[0] for look in looks]

    filled = [found for found in decide(four, 3) if found is not None]
    assert [(found.kind, found.span) for found in filled] == [(Kind.MOVE, (3, 6))]
    whole = tuple(replace(each, end=BLOCKS) for each in four)
    assert {found and found.kind for found in decide(whole, 5)} == {Kind.SHRINK}
    kinds = {found and found.kind for _ in range(20) for found in decide(whole, BLOCKS)}
    assert kinds == {None, Kind.SWITCH}


def test_of_simultaneous_switches_the_hosts_of_lower_ids_make_theirs() -> None:
    switch = to_beta(BLOCKS)
    intents = tuple(replace(each, settled=False) for each in THREE)
    alpha, beta = replace(OWN, claims=THREE), replace(OTHER, claims=intents)
    assert [is_confirmed(look_of(alpha, mine, beta), switch, ()) for mine in THREE] == [True, False, False]
    gamma = replace(beta, manifest=b"c", claims=intents[:1])
    alone = replace(beta, claims=intents[1:2])
    assert not is_confirmed(look_of(alpha, THREE[1], alone, gamma), switch, ()), (
        "another leaves for a third model"
    )
    joining = replace(beta, claims=(host("z", settled=False), *intents[:1]))
    assert not is_confirmed(look_of(alpha, THREE[0], joining), switch, ()), "a newcomer does not give way"


@defence(
    "of hosts that would switch at once, enough stay", off=replacing(__name__, "is_confirmed", yes), seed=0
)
def test_of_hosts_that_leave_at_once_enough_stay(seed: int) -> None:
    rng = random.Random(seed)
    claims = tuple(host(f"h{each}", start := rng.randrange(4), start + 3) for each in range(16))
    alpha = replace(OWN, claims=claims)
    mine = [claim for claim in claims if may_leave_model(alpha, claim)]
    beta = replace(OTHER, claims=tuple(replace(claim, settled=False) for claim in mine), length=1, blocks=60)
    switch = to_beta(1)
    left = {claim.peer for claim in mine if is_confirmed(look_of(alpha, claim, beta), switch, ())}
    before = holders(claims, BLOCKS)
    after = holders((claim for claim in claims if claim.peer not in left), BLOCKS)
    assert all(count >= min(OTHER_HOSTS, most) for count, most in zip(after, before, strict=True))


# ---- many hosts, two models --------------------------------------------------------------------

SEEN_S = 15.0
"""Age of the records that hosts read, at most."""
LOADING_S = 90.0


@dataclass
class Simulated:
    """A host. ``intent``: the switch that it has announced. ``ready_at``: when it serves the model
    to which it has switched."""

    claim: Claim
    model: int
    look_at: float
    memory: Remembered = field(default_factory=Remembered)
    intent: Relocation | None = None
    ready_at: float = -math.inf
    switched: list[float] = field(default_factory=list)


class Swarm:
    """Hosts of two models, of which clients ask for ``demand`` tokens per second each."""

    def __init__(
        self, counts: tuple[int, int], demand: tuple[float, float], seed: int, length: int = 3
    ) -> None:
        self.rng = random.Random(seed)
        self.length, self.demand, self.now = length, demand, 0.0
        self.hosts: list[Simulated] = []
        self.fewest = [10**6, 10**6]
        """The fewest hosts that any block of each model has had, from the time at which all had
        one."""
        for model, count in enumerate(counts):
            for number in range(count):
                name = f"{self.rng.getrandbits(32):08x}{number}"
                self.hosts.append(
                    Simulated(self._placed(host(name), model), model, self.rng.uniform(0, LOOK_S))
                )
        self.seen = self.models()

    def _placed(self, claim: Claim, model: int) -> Claim:
        others = [each.claim for each in self.hosts if each.model == model]
        choice = choose_span(others, blocks=BLOCKS, length=self.length, rng=self.rng)
        return replace(claim, start=choice.start, end=choice.end)

    def models(self) -> list[ServedModel]:
        claims: tuple[list[Claim], list[Claim]] = ([], [])
        for each in self.hosts:
            claims[each.model].append(replace(each.claim, settled=each.ready_at <= self.now))
            if each.intent is not None:
                span = {"start": each.intent.start, "end": each.intent.end}
                claims[int(each.intent.manifest)].append(replace(each.claim, settled=False, **span))
        return [
            ServedModel(b"%d" % model, "ab"[model], BLOCKS, 1.0, tuple(found), length=self.length)
            for model, found in enumerate(claims)
        ]

    def serving(self, model: int) -> list[Simulated]:
        return [each for each in self.hosts if each.model == model and each.ready_at <= self.now]

    def load(self, model: int) -> float:
        """The share of their time that all hosts of a model compute; 0 while it cannot be run."""
        hosts = self.serving(model)
        if not all(holders([each.claim for each in hosts], BLOCKS)):
            return 0.0
        return min(1.0, self.demand[model] * BLOCKS / len(hosts))

    def run(self, until_s: float) -> None:
        while self.now < until_s:
            self.now += SEEN_S
            for model in (0, 1):
                load = self.load(model)
                for each in self.serving(model):
                    change = (load - each.claim.load) * -math.expm1(-SEEN_S / LOAD_S)
                    each.claim = replace(each.claim, load=each.claim.load + change)
            for each in self.rng.sample(self.hosts, len(self.hosts)):
                if self.now >= each.look_at and each.ready_at <= self.now:
                    each.look_at = self.now + LOOK_S * self.rng.uniform(0.8, 1.2)
                    self._look(each)
            self.seen = self.models()  # the others see what they did now at their next looks
            for model in (0, 1):
                fewest = min(holders([each.claim for each in self.serving(model)], BLOCKS))
                self.fewest[model] = min(self.fewest[model], fewest or 10**6)

    def _look(self, each: Simulated) -> None:
        look = look_of(self.seen[each.model], each.claim, self.seen[1 - each.model])
        if each.intent is None:
            each.intent, each.memory = should_relocate(look, each.memory, now=self.now, rng=self.rng)
            return
        if is_confirmed(look, each.intent, ()):
            each.model, each.ready_at = int(each.intent.manifest), self.now + LOADING_S
            each.claim = replace(self._placed(each.claim, each.model), load=0.0)
            each.memory = each.memory.after_switch(self.now)
            each.switched.append(self.now)
        each.intent = None

    @property
    def switched(self) -> list[float]:
        return sorted(time for each in self.hosts for time in each.switched)


HOUR = 3600.0


def test_a_model_without_hosts_gets_as_many_hosts_as_it_needs(seed: int) -> None:
    swarm = Swarm((20, 0), (0.5, 0.0), seed)
    swarm.run(HOUR)
    assert len(swarm.switched) >= 2
    assert all(holders([each.claim for each in swarm.serving(1)], BLOCKS))
    swarm.run(3 * HOUR)
    assert len(swarm.switched) <= 6, "two are needed"
    assert swarm.fewest[0] >= OTHER_HOSTS


def test_hosts_follow_a_change_of_demand_and_then_stay(seed: int) -> None:
    swarm = Swarm((30, 10), (1.0, 2.5), seed)
    swarm.run(2 * HOUR)
    assert max(swarm.load(0), swarm.load(1)) < OVERLOADED
    assert 10 <= len(swarm.switched) <= 20, "15 hosts would compute all of the time"
    swarm.run(3 * HOUR)
    followed = len(swarm.switched)
    swarm.demand = (3.5, 0.5)
    swarm.run(6 * HOUR)
    assert max(swarm.load(0), swarm.load(1)) < OVERLOADED
    assert followed + 7 <= len(swarm.switched) <= followed + 14
    for settled in (2 * HOUR, 5 * HOUR):
        assert not any(settled < time < settled + HOUR for time in swarm.switched), (
            "the third and the sixth hour"
        )
    assert min(swarm.fewest) >= OTHER_HOSTS
    for each in swarm.hosts:
        assert all(later >= earlier + PAUSE_S for earlier, later in pairwise(each.switched))


def test_models_that_have_work_for_all_hosts_exchange_none(seed: int) -> None:
    swarm = Swarm((10, 10), (1.0, 1.5), seed)
    swarm.run(2 * HOUR)
    assert not swarm.switched, "60 % and 90 % of the time"
