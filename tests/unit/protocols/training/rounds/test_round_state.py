"""The state machine of a round: machines whose messages are delayed and lost at random."""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.codecs import ALIGNMENT
from swarmnet_protocols.training.rounds import round_state, slice_plans, votes
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import (
    DISCARD,
    MAX_ATTEMPT,
    Accusation,
    Assignment,
    Decided,
    Effect,
    Finish,
    Hashes,
    Prepare,
    Proposal,
    Reduce,
    Refute,
    Report,
    Send,
    SendContribution,
    SendResult,
    SlicePlan,
    Vote,
)
from swarmnet_protocols.training.rounds.round_state import RoundState
from swarmnet_protocols.training.rounds.terms import MAX_FRACTION, partition
from swarmnet_protocols.training.rounds.votes import SLANDER, TWICE, UNSIGNED, UNVOTED, Electorate, Votes
from tests.defences import Patch, defence, replacing, yes

TIMING = RoundTiming(contribution_s=6.0, majority_s=12.0, deadline_s=18.0)
KEYS = [Identity.from_seed(f"member {number}".encode()) for number in range(8)]
TERMS = bytes(range(32))
ROUNDS_PER_SEED = 6


def electorate(me: int, members: int, terms: bytes = TERMS) -> Electorate:
    return Electorate(me, [key.public_key for key in KEYS[:members]], terms, KEYS[me].sign)


class Net:
    """``members`` machines; those ``stuck`` never finish a reduction.

    A message arrives after a random delay, or is lost with probability ``loss``.
    """

    def __init__(self, members: int, rng: random.Random, loss: float = 0.0) -> None:
        order = list(range(members))
        rng.shuffle(order)
        self.rng = rng
        self.loss = loss
        self.now = 0.0
        self.order = order
        self.rounds = [
            RoundState(electorate(me, members), order, range(members), TIMING, 0.0) for me in range(members)
        ]
        self.finishes: dict[int, Finish] = {}
        self.votes: dict[int, set[Vote]] = {}
        self.asleep: set[int] = set()
        self.stuck: set[int] = set()
        self.dead: set[int] = set()
        self.up: set[tuple[int, int]] = set()
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._missed: dict[int, list[Callable[[], None]]] = {}
        """By member: the actions, in order, that it performs when it wakes."""
        self._arrival: dict[tuple[int, int], float] = {}
        for me in order:
            for other in order:
                if other != me:
                    self.later(me, rng.uniform(0.0, 0.2), partial(self.link, me, other, True))
            self.tick(me)

    def later(self, member: int, delay_s: float, action: Callable[[], None]) -> None:
        """Do ``action`` unless ``member`` is dead by then; not before it wakes."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), member, action))

    def tick(self, member: int) -> None:
        self.perform_all(member, self.rounds[member].tick(self.now))
        self.later(member, TIMING.streams.heartbeat_s, lambda: self.tick(member))

    def link(self, me: int, other: int, up: bool) -> None:
        up = up and other not in self.dead
        (self.up.add if up else self.up.discard)((me, other))
        report = self.rounds[me].link_up if up else self.rounds[me].link_down
        self.perform_all(me, report(other, self.now))
        if up:
            self.carry(me, other, lambda: self.perform_all(other, self.rounds[other].begin(me, self.now)))

    def perform_all(self, member: int, effects: list[Effect]) -> None:
        for effect in effects:
            self.perform(member, effect)

    def perform(self, me: int, effect: Effect) -> None:
        match effect:
            case Send(member, message):
                if isinstance(message, Vote):
                    self.votes.setdefault(me, set()).add(message)
                self.carry(
                    me,
                    member,
                    lambda: self.perform_all(member, self.rounds[member].receive(me, message, self.now)),
                )
            case SendContribution(member, index):
                self.carry(me, member, lambda: self.contribute(me, member, index))
            case SendResult(member, index, result):
                self.carry(me, member, lambda: self.offer(me, member, index, result))
            case Reduce() if me in self.stuck:
                pass
            case Reduce(index, members):
                result = hashlib.sha256(f"{index} {members} {me}".encode()).digest()
                self.later(
                    me,
                    self.rng.uniform(0.0, 0.05),
                    lambda: self.perform_all(me, self.rounds[me].hold(index, result, self.now)),
                )
            case Finish():
                assert me not in self.finishes
                self.finishes[me] = effect

    def carry(self, source: int, target: int, action: Callable[[], None]) -> None:
        if (source, target) in self.up and self.rng.random() >= self.loss:
            at_s = max(self._arrival.get((source, target), 0.0), self.now + self.rng.uniform(0.01, 0.3))
            self._arrival[source, target] = at_s
            self.later(target, at_s - self.now, action)

    def contribute(self, source: int, target: int, index: int) -> None:
        if self.rounds[target].reduces(index):
            self.perform_all(target, self.rounds[target].add_contribution(source, index, self.now))

    def offer(self, source: int, target: int, index: int, result: bytes) -> None:
        if self.rounds[target].accepts_result(source, index, result):
            self.perform_all(target, self.rounds[target].hold(index, result, self.now))

    def kill(self, victim: int) -> None:
        self.dead.add(victim)
        for member in range(len(self.rounds)):
            if member not in self.dead:
                self.link(member, victim, False)

    def sleep(self, victim: int, pause_s: float) -> None:
        """Suspend ``victim`` for ``pause_s``: it gets no message and no tick. The others lose their
        links to it."""
        others = [member for member in range(len(self.rounds)) if member not in {victim} | self.dead]
        self.asleep.add(victim)
        for member in others:
            self.later(member, TIMING.streams.silence_s, partial(self.silence, member, victim))

        def wake() -> None:
            self.wake(victim)
            for member in others:
                self.later(member, 0.1, partial(self.link, member, victim, True))

        self.later(-1, pause_s, wake)

    def wake(self, sleeper: int) -> None:
        self.asleep.discard(sleeper)
        for action in self._missed.pop(sleeper, ()):
            self.later(sleeper, 0.0, action)

    def silence(self, member: int, victim: int) -> None:
        if victim in self.asleep:
            self.link(member, victim, False)

    def run(self) -> None:
        """Run until all live members have finished."""
        while len(self.finishes.keys() | self.dead) < len(self.rounds):
            at, _, member, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            if member in self.asleep:
                self._missed.setdefault(member, []).append(action)
            elif member not in self.dead:
                action()

    def check(self) -> None:
        """Assert that there is one decision, and that no member has voted twice."""
        decided = {finish.hashes for finish in self.finishes.values() if finish.hashes is not None}
        decisions = decided | {each.decision for each in self.rounds if each.decision is not None}
        assert len(decisions) <= 1
        assert all(len(votes) == 1 for votes in self.votes.values())


def test_without_faults_all_members_commit_at_once() -> None:
    net = Net(5, random.Random(0))
    net.run()
    net.check()
    assert {finish.reason for finish in net.finishes.values()} == {"committed"}
    assert net.now < 2.0


@pytest.mark.parametrize("index", range(ROUNDS_PER_SEED))
def test_one_death_or_one_hang_leaves_a_committed_round(seed: int, index: int) -> None:
    rng = random.Random(f"{seed}/{index}")
    net = Net(rng.randint(3, 7), rng)
    victim = rng.randrange(len(net.rounds))
    at_s = rng.uniform(0.0, 1.2)
    if rng.random() < 0.5:
        net.later(-1, at_s, lambda: net.kill(victim))
    else:
        net.later(-1, at_s, lambda: net.sleep(victim, rng.uniform(0.5, 5.0)))
    net.run()
    net.check()
    assert all(finish.hashes for member, finish in net.finishes.items() if member != victim)


def test_a_live_reducer_that_does_not_deliver_is_replaced(seed: int) -> None:
    rng = random.Random(f"{seed}/stuck")
    net = Net(rng.randint(3, 7), rng)
    net.stuck = {rng.randrange(len(net.rounds))}
    net.run()
    net.check()
    assert all(finish.hashes for finish in net.finishes.values())
    assert net.now < TIMING.majority_s


def test_a_member_that_has_not_begun_is_awaited_until_contribution_s(seed: int) -> None:
    rng = random.Random(f"{seed}/absent")
    net = Net(rng.randint(3, 7), rng)
    absent = rng.randrange(len(net.rounds))
    # its links stay up, like those of a worker that still computes its inner steps
    net.asleep = {absent}
    early: list[int] = []

    def wake() -> None:
        early.extend(net.finishes)
        net.wake(absent)

    net.later(-1, TIMING.majority_s - 0.1, wake)
    net.run()
    net.check()
    assert len(early) == len(net.rounds) - 1
    assert all(finish.hashes for finish in net.finishes.values())


@pytest.mark.parametrize("index", range(ROUNDS_PER_SEED))
def test_there_is_one_decision_whatever_is_lost(seed: int, index: int) -> None:
    rng = random.Random(f"{seed}/{index}/storm")
    net = Net(rng.randint(2, 7), rng, loss=rng.choice([0.0, 0.1, 0.3, 0.6]))
    for _ in range(rng.randint(1, 8)):
        victim, other = rng.sample(range(len(net.rounds)), 2)
        at_s, pause_s = rng.uniform(0.0, 16.0), rng.uniform(0.1, 8.0)
        match rng.choice(["kill", "sleep", "sleep", "flap", "flap"]):
            case "kill":
                net.later(-1, at_s, partial(net.kill, victim))
            case "sleep":
                net.later(-1, at_s, partial(net.sleep, victim, pause_s))
            case "flap":
                net.later(victim, at_s, partial(net.link, victim, other, False))
                net.later(victim, at_s + pause_s, partial(net.link, victim, other, True))
    net.run()
    net.check()


def machine(me: int, members: int = 3) -> RoundState:
    """RoundMember ``me`` of a round of three slices, reduced by members 0 to 2."""
    machine = RoundState(electorate(me, members), range(members), range(3), TIMING, 0.0)
    for other in range(members):
        if other != me:
            machine.link_up(other, 0.0)
    return machine


HASHES = (b"a" * 32, b"b" * 32, b"c" * 32)
OTHER = (b"a" * 32, b"b" * 32, b"d" * 32)
NOTHING_HELD = ((), (), ())
LATE_S = TIMING.majority_s + 0.1


def vote(member: int, hashes: tuple[bytes, ...], terms: bytes = TERMS) -> Vote:
    return Votes(electorate(member, len(KEYS), terms)).cast(hashes)


def decided(hashes: tuple[bytes, ...], *voters: int, terms: bytes = TERMS) -> Decided:
    return Decided(hashes, tuple((voter, vote(voter, hashes, terms).signature) for voter in voters))


def hold_all(member: RoundState, hashes: tuple[bytes, ...] = HASHES) -> list[Effect]:
    return [effect for index, result in enumerate(hashes) for effect in member.hold(index, result, 0.1)]


def test_an_outcome_that_may_be_decided_is_proposed_again() -> None:
    coordinator = machine(1)
    coordinator.link_down(0, 1.0)  # the first coordinator is gone
    coordinator.receive(2, Report(NOTHING_HELD, vote(2, HASHES)), 1.0)
    effects = hold_all(coordinator, OTHER) + hold_all(coordinator)
    assert Send(2, Proposal(HASHES)) in effects
    assert Send(2, Proposal(OTHER)) not in effects


def votes_again(patch: Patch) -> None:
    """A member casts a vote for each proposal."""

    def cast(self: Votes, hashes: Hashes) -> Vote:
        return Vote(hashes, self._electorate.sign(self._signed(hashes)))

    patch.setattr(Votes, "cast", cast)
    patch.setattr(Votes, "own", None)


@defence("a member votes once", off=votes_again)
def test_a_member_votes_once_and_only_for_results_that_it_holds() -> None:
    member = machine(2)
    assert Send(0, vote(2, HASHES)) not in member.receive(0, Proposal(HASHES), 0.1)
    assert Send(0, vote(2, HASHES)) in hold_all(member)
    hold_all(member, OTHER)
    effects = member.receive(0, Proposal(OTHER), 0.2)
    assert effects == [Send(0, Report(((HASHES[0],), (HASHES[1],), (HASHES[2], OTHER[2])), vote(2, HASHES)))]


@defence(
    "the first coordinator alone discards no complete round", off=replacing(RoundTiming, "attempt_s", 1e-3)
)
def test_the_first_coordinator_alone_discards_no_complete_round() -> None:
    empty, complete = machine(2), machine(2)
    hold_all(complete)
    for member in (empty, complete):
        member.begin(0, 0.0)
        assert Send(0, vote(2, DISCARD)) not in member.receive(0, Proposal(DISCARD), 1.0), "it is too early"
    assert Send(0, vote(2, DISCARD)) in empty.tick(LATE_S)
    assert Send(0, vote(2, DISCARD)) not in complete.tick(LATE_S)


def test_a_proposal_from_another_than_the_coordinator_is_ignored() -> None:
    member = machine(2)
    hold_all(member)
    assert member.receive(1, Proposal(HASHES), 0.1) == []


def reported_to(effects: list[Effect]) -> list[int]:
    return [each.member for each in effects if isinstance(each, Send) and isinstance(each.message, Report)]


def at_once(patch: Patch) -> None:
    """A member follows any other to a later attempt."""
    patch.setattr(Electorate, "majority", property(lambda self: len(self.keys)))


@defence("no minority has a coordinator passed over", off=at_once)
def test_no_minority_has_a_coordinator_passed_over() -> None:
    member = machine(4, members=5)  # three of five are needed, so at least one is honest
    for liar in (1, 2):
        member.receive(liar, Prepare(MAX_ATTEMPT - 1), 0.1)
    assert reported_to(member.tick(0.2)) == []
    member.receive(3, Prepare(1), 0.3)
    assert reported_to(member.tick(0.4)) == [1]


def test_a_silent_coordinator_is_passed_over() -> None:
    member = machine(2)
    hold_all(member)
    for other in (0, 1):
        member.begin(other, 0.0)
    effects = member.tick(TIMING.majority_s + TIMING.attempt_s)
    assert reported_to(effects) == [1]


FALSE_DECISIONS = {
    "without votes": decided(DISCARD),
    "with one vote": decided(HASHES, 1),
    "with one vote twice": decided(HASHES, 1, 1),
    "with votes for another outcome": Decided(HASHES, decided(OTHER, 0, 1).votes),
    "with votes of a round with other terms": decided(HASHES, 0, 1, terms=bytes(32)),
    "with the vote of another member": Decided(
        HASHES, ((0, vote(1, HASHES).signature), decided(HASHES, 1).votes[0])
    ),
}


def refutes(effects: list[Effect]) -> list[Refute]:
    return [effect for effect in effects if isinstance(effect, Refute)]


def accusations(effects: list[Effect]) -> list[tuple[int, Accusation]]:
    """The accusations among ``effects``, each with the member to which it is sent."""
    return [
        (effect.member, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Accusation)
    ]


def counts_always(patch: Patch) -> None:
    patch.setattr(Votes, "_has_majority", yes)


def unsigned_votes_count(patch: Patch) -> None:
    patch.setattr(votes, "verify", yes)


@defence(
    "a decision counts only with the votes of a majority",
    off=counts_always,
    message=FALSE_DECISIONS["with one vote"],
)
@defence(
    "votes of another round do not count",
    off=unsigned_votes_count,
    message=FALSE_DECISIONS["with votes of a round with other terms"],
)
@pytest.mark.parametrize("message", FALSE_DECISIONS.values(), ids=FALSE_DECISIONS)
def test_a_decision_counts_only_with_the_votes_of_a_majority(message: Decided) -> None:
    member, other = machine(2), machine(0)
    effects = member.receive(1, Votes(electorate(1, 3)).signed(message), 0.1)
    assert refutes(effects) == [Refute(1, UNVOTED, is_proven=True)]
    assert member.decision is None
    ((target, proof),) = [each for each in accusations(effects) if each[0] != 1]
    assert target == 0
    assert refutes(other.receive(2, proof, 0.2)) == [Refute(1, UNVOTED, is_proven=True)], "from any member"
    assert not refutes(other.receive(2, proof, 0.3)), "once"
    assert not refutes(member.receive(0, decided(HASHES, 0, 1), 0.2))
    assert member.decision == HASHES


@defence("an accusation counts only with its proof", off=replacing(Votes, "_proves", yes))
def test_a_false_decision_that_its_sender_did_not_sign_is_no_proof() -> None:
    member, other = machine(2), machine(0)
    effects = member.receive(1, decided(DISCARD), 0.1)
    assert refutes(effects) == [Refute(1, UNVOTED, is_proven=False)]
    assert accusations(effects) == []
    slander = Accusation(1, replace(decided(DISCARD), signature=bytes(64)))
    assert refutes(other.receive(2, slander, 0.2)) == [Refute(2, SLANDER, is_proven=False)]


@defence("two votes of one member are noticed", off=replacing(Votes, "_count", lambda *_: []))
def test_a_member_with_two_votes_is_accused_with_both() -> None:
    coordinator, other = machine(0), machine(2)
    assert not coordinator.receive(1, Report(NOTHING_HELD, vote(1, HASHES)), 0.1)
    effects = coordinator.receive(1, vote(1, OTHER), 0.2)
    assert refutes(effects) == [Refute(1, TWICE, is_proven=True)]
    proof = dict(accusations(effects))[2]
    assert refutes(other.receive(0, proof, 0.3)) == [Refute(1, TWICE, is_proven=True)]
    same = Accusation(1, votes=(vote(1, HASHES), vote(1, HASHES)))
    assert not refutes(machine(2).receive(0, same, 0.3))[0].is_proven
    assert refutes(coordinator.receive(2, vote(1, HASHES), 0.2)) == [Refute(2, UNSIGNED, is_proven=False)]


def test_members_that_signed_two_decisions_of_one_round_are_refuted() -> None:
    member = machine(0, members=5)
    member.receive(1, decided(HASHES, 1, 2, 4), 0.1)
    assert refutes(member.receive(3, decided(OTHER, 0, 3, 4), 0.2)) == [Refute(4, TWICE, is_proven=True)]
    assert member.decision == HASHES


def plans(effects: list[Effect]) -> set[Assignment]:
    """What the plans among ``effects`` assign to the last slice."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return {message.assignments[2] for message in messages if isinstance(message, SlicePlan)}


def chooses_claims(patch: Patch) -> None:
    honest = slice_plans.plan

    def plan(assignments: Any, reports: Any, me: int, *args: Any, **options: Any) -> Any:
        claimed = max(reports.values(), key=lambda report: sum(map(len, report.held)))
        return honest(assignments, {**reports, me: claimed}, me, *args, **options)

    patch.setattr(round_state, "plan", plan)


@defence("a result that a member only claims to hold is not chosen", off=chooses_claims)
def test_a_result_that_one_member_claims_is_chosen_only_on_arrival() -> None:
    coordinator = machine(0)
    coordinator.receive(1, Report(((), (), (b"f" * 32,)), None), 0.1)
    assert plans(coordinator.tick(0.4)) == {Assignment(2)}


def test_a_minority_never_decides() -> None:
    member = machine(0)
    member.link_down(1, 1.0)
    member.link_down(2, 1.0)
    effects = member.tick(TIMING.majority_s + 0.1)
    effects += member.tick(1.0 + TIMING.give_up_s)
    (finish,) = [effect for effect in effects if isinstance(effect, Finish)]
    assert finish.hashes is None
    assert "1 of 3" in finish.reason


def test_a_slice_of_a_dead_reducer_moves_unless_its_result_is_held() -> None:
    result = b"r" * 32
    for held, planned in ((NOTHING_HELD, Assignment(0)), (((), (), (result,)), Assignment(2))):
        coordinator = machine(0)
        coordinator.receive(1, Report(held, None), 0.5)
        coordinator.link_down(2, 1.0)
        assert plans(coordinator.tick(1.0 + 2 * TIMING.streams.heartbeat_s)) == {planned}
    assert coordinator.accepts_result(1, 2, result)
    coordinator.hold(2, result, 2.0)
    assert plans(coordinator.tick(2.0)) == {Assignment(2, result, 0)}


@pytest.mark.parametrize(
    "timing",
    [{"contribution_s": 50.0}, {"majority_s": 60.0}, {"contribution_s": 0.0}],
)
def test_deadlines_that_contradict_each_other_are_refused(timing: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RoundTiming(**timing)


def test_slices_cover_the_vector_and_no_partition_is_much_better(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([1e5, 1e6, 1e7, 1e8]) * rng.uniform(0.5, 1.0) for _ in range(rng.randint(2, 64))]
    count = rng.randint(1, 1 << 26)
    bounds = partition(count, rates)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == count
    assert all(start <= end and (end % ALIGNMENT == 0 or end == count) for start, end in bounds)

    def busiest_s(sizes: list[float]) -> float:
        return max((count + (len(rates) - 2) * size) / rate for size, rate in zip(sizes, rates, strict=True))

    best_s = busiest_s([end - start for start, end in bounds])
    for _ in range(20):  # moving a piece from one member to another
        giver, taker = rng.sample(range(len(rates)), 2)
        sizes = [float(end - start) for start, end in bounds]
        moved = sizes[giver] * rng.random()
        sizes[giver] -= moved
        sizes[taker] += moved
        if sizes[taker] > MAX_FRACTION * count + ALIGNMENT:
            continue
        assert best_s <= busiest_s(sizes) + ALIGNMENT * len(rates) / min(rates)


def test_a_slow_member_reduces_nothing_and_equal_members_equal_slices() -> None:
    assert partition(64 * ALIGNMENT, [1e6] * 4) == tuple(
        (start, start + 16 * ALIGNMENT) for start in range(0, 64 * ALIGNMENT, 16 * ALIGNMENT)
    )
    assert [end - start for start, end in partition(ALIGNMENT * 100, [1e9, 1e9, 1e9, 1e3])][-1] == 0


@pytest.mark.parametrize("rates", [[], [0.0, 1.0], [float("inf"), 1.0], [float("nan"), 1.0]])
def test_impossible_bandwidths_are_refused(rates: list[float]) -> None:
    with pytest.raises(ConfigError):
        partition(1, rates)
