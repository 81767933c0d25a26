"""Hosts that do not answer do not count, however many are announced; live hosts are found among
them with few calls."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import sightings
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.sightings import (
    DOUBTS,
    FIRST_PAUSE_S,
    LEAST_ASKS,
    LEAST_SEEN,
    MAX_CALLS,
    MAX_KNOWN,
    MAX_PAUSE_S,
    PATIENCE_S,
    PROVEN_S,
    RARER,
    REFUTED_S,
    SEEN_S,
    ModelClaims,
    Sightings,
    sharing,
)
from swarmnet_protocols.routing.throughput import Claim, holders
from tests.defences import Patch, defence, nothing, replacing

MODEL = b"alpha"
BLOCKS = 6


def claims(name: str, count: int, start: int = 0, end: int = 3) -> list[Claim]:
    return [Claim(PeerId(f"{name}-{number}"), start, end) for number in range(count)]


def of_model(found: Sequence[Claim], **subnets: str) -> ModelClaims:
    """``subnets``: of the hosts whose names begin so."""
    known = {claim.peer: subnets.get(claim.peer.partition("-")[0], "") for claim in found}
    return ModelClaims(MODEL, BLOCKS, found, known)


def answer(sightings: Sightings, found: Sequence[Claim], now: float = 0.0, place: str = "") -> None:
    for claim in found:
        sightings.answered(claim.peer, MODEL, (claim.start, claim.end), place, now=now)


def look(sightings: Sightings, found: Sequence[Claim], live: str, now: float, seed: int = 0) -> list[PeerId]:
    """Call hosts, of which those answer whose names begin with ``live``; returns those called."""
    called = sightings.to_call(of_model(found), now=now, rng=random.Random(seed), extra=MAX_CALLS)
    for claim in found:
        if claim.peer in called and claim.peer.startswith(live):
            answer(sightings, [claim], now)
        elif claim.peer in called:
            sightings.failed(claim.peer, now=now)
    return called


def counted(sightings: Sightings, found: Sequence[Claim], now: float = 0.0) -> dict[PeerId, bool]:
    """Whether each host that counts was seen."""
    return {claim.peer: claim.seen for claim in sightings.counted(of_model(found), now=now)}


def test_hosts_count_before_they_are_called_and_as_seen_afterwards() -> None:
    sightings, found = Sightings(), claims("live", 3)
    assert counted(sightings, found) == {claim.peer: False for claim in found}
    answer(sightings, found[:1])
    assert counted(sightings, found) == {"live-0": True, "live-1": False, "live-2": False}
    assert not counted(sightings, found, now=SEEN_S)[found[0].peer]


def test_a_host_that_does_not_answer_does_not_count_until_it_does() -> None:
    sightings, [host] = Sightings(), claims("host", 1)
    sightings.failed(host.peer, now=0.0)
    for now in (0.0, 1e6):
        assert counted(sightings, [host], now) == {}
    answer(sightings, [host], now=1e6)
    assert counted(sightings, [host], now=1e6) == {"host-0": True}


def test_one_lost_call_says_nothing_about_a_host_that_answered_before() -> None:
    sightings, [host] = Sightings(), claims("host", 1)
    answer(sightings, [host])
    sightings.failed(host.peer, now=10.0)
    assert counted(sightings, [host], now=10.0) == {"host-0": True}
    assert look(sightings, [host], "none", now=11.0) == [host.peer], "it is called again"
    assert counted(sightings, [host], now=11.0) == {}


def test_a_host_with_answers_for_other_blocks_or_models_is_not_seen() -> None:
    sightings, [host] = Sightings(), claims("host", 1)
    for manifest, span in ((MODEL, (0, 2)), (b"beta", (0, 3))):
        sightings.answered(host.peer, manifest, span, "", now=0.0)
        assert counted(sightings, [host]) == {"host-0": False}
        intent = replace(host, settled=False)
        assert counted(sightings, [intent]) == {"host-0": True}, "its intent needs a machine only"


def test_uncalled_hosts_do_not_count_where_most_are_silent() -> None:
    sightings, found = Sightings(), claims("invented", 100)
    others = claims("other", 2, 3, 6)
    for claim in found[:DOUBTS]:
        sightings.failed(claim.peer, now=0.0)
    assert len(counted(sightings, [*found, *others])) == 100 - DOUBTS + 2
    sightings.failed(found[DOUBTS].peer, now=0.0)
    assert counted(sightings, [*found, *others]) == {"other-0": False, "other-1": False}
    answer(sightings, claims("live", 1))
    assert len(counted(sightings, [*found, *others, *claims("live", 1)])) == 100 - DOUBTS - 1 + 3


@defence(
    "hosts that were not called do not count among invented ones", off=replacing(sightings, "DOUBTS", 1 << 20)
)
def test_many_identities_at_one_place_do_not_speak_for_others() -> None:
    sightings, found = Sightings(), claims("invented", 100)
    liars = claims("liar", 50)
    answer(sightings, liars, place="203.0.113.0/24")
    for claim in found[: DOUBTS + 2]:
        sightings.failed(claim.peer, now=0.0)
    assert set(counted(sightings, [*found, *liars])) == {claim.peer for claim in liars}


def test_hosts_of_one_place_are_one_host() -> None:
    place = "203.0.113.0/24"
    found = [replace(claim, place=place) for claim in [*claims("a", 5), *claims("b", 5, 2, 5)]]
    assert holders(found, BLOCKS) == [1, 1, 1, 1, 1, 0]
    assert holders([*found, *claims("c", 2)], BLOCKS) == [3, 3, 3, 1, 1, 0]


@defence(
    "many hosts of one place attract and repel no more hosts than one",
    off=replacing(__name__, "sharing", list),
)
def test_hosts_of_one_place_have_the_speed_of_one_host() -> None:
    found = [replace(claim, place="203.0.113.0/24") for claim in claims("a", 5)]
    counted = sharing([*found, *claims("b", 2)])
    assert [claim.blocks_per_s for claim in counted] == [0.2] * 5 + [1.0] * 2


@defence(
    "announcements cost a bounded number of calls",
    off=replacing(Sightings.to_call, "__kwdefaults__", {"most": 1 << 20, "extra": 1}),
    count=2000,
)
@pytest.mark.parametrize("count", [20, 2_000])
def test_the_number_of_calls_is_bounded_whatever_is_announced(count: int) -> None:
    sightings, found = Sightings(), claims("invented", count)
    calls = [len(look(sightings, found, "none", now=30.0 * number)) for number in range(20)]
    assert max(calls) <= MAX_CALLS


def test_in_a_swarm_of_live_hosts_few_are_called() -> None:
    sightings, found = Sightings(), [*claims("a", 500), *claims("b", 500, 3, 6)]
    first = sightings.to_call(of_model(found), now=0.0, rng=random.Random(0))
    assert len(first) == 2 * LEAST_SEEN + 1
    answer(sightings, [claim for claim in found if claim.peer in first])
    assert len(sightings.to_call(of_model(found), now=30.0, rng=random.Random(1))) == 1


def in_any_order(patch: Patch) -> None:
    patch.setattr(sightings, "in_turn", lambda claims, _, rng: rng.sample(list(claims), len(claims)))


@defence("hosts announced in one subnet do not hide one of another subnet", off=in_any_order, seed=0)
def test_a_live_host_is_called_at_once_among_hundreds_in_one_subnet(seed: int) -> None:
    found = [*claims("invented", 400), *claims("live", 1)]
    model = of_model(found, invented="203.0.113.0/24", live="198.51.100.0/24")
    called = Sightings().to_call(model, now=0.0, rng=random.Random(seed))
    assert "live-0" in called


def test_hosts_that_have_answered_before_are_called_first() -> None:
    sightings, live = Sightings(), claims("live", 2)
    answer(sightings, live)
    found = [*claims("invented", 1000), *live]
    assert {"live-0", "live-1"} <= set(look(sightings, found, "live", now=2 * SEEN_S))


def test_a_silent_host_is_called_again_after_growing_pauses() -> None:
    sightings, found = Sightings(), claims("host", 1)
    at = [now for now in range(0, 20_000, 10) if look(sightings, found, "none", now=float(now))]
    pauses = [after - before for before, after in pairwise(at)]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S


@defence("a host that computes something else does not count", off=replacing(Sightings, "refuted", nothing))
def test_a_host_with_wrong_outputs_does_not_count_even_if_it_answers() -> None:
    sightings, [host] = Sightings(), claims("host", 1)
    answer(sightings, [host])
    sightings.refuted(host.peer, now=0.0)
    answer(sightings, [host], now=10.0)
    assert counted(sightings, [host], now=10.0) == {}
    assert look(sightings, [host], "host", now=10.0) == []
    answer(sightings, [host], now=REFUTED_S)
    assert counted(sightings, [host], now=REFUTED_S) == {"host-0": True}


@defence("a peer remembers a bounded number of hosts", off=replacing(sightings, "MAX_KNOWN", 1 << 20))
def test_a_bounded_number_of_hosts_is_remembered() -> None:
    sightings = Sightings()
    for number in range(2 * MAX_KNOWN):
        sightings.failed(PeerId(f"invented-{number}"), now=0.0)
    assert len(sightings._known) == MAX_KNOWN


def tried(found: Sequence[Claim], mine: Claim, looks: int = 200) -> dict[int | None, int]:
    """The blocks that the host of ``mine`` asks others to compute, and in how many looks."""
    sightings, outlook = Sightings(), Outlook([mine, *found], blocks=BLOCKS)
    rng = random.Random(0)
    return Counter(sightings.block_to_try(outlook, mine, MODEL, rng) for _ in range(looks))


def test_a_spare_host_tries_a_block_that_nobody_has_computed() -> None:
    [mine], [other, lone] = claims("me", 1), [*claims("other", 1), *claims("lone", 1, 3, 6)]
    assert set(tried([other, lone], mine)) == {None, 3, 4, 5}
    assert tried([lone], mine) == {None: 200}, "nobody else has its own blocks"
    assert tried([other, replace(lone, proven=True)], mine) == {None: 200}
    assert tried([other], mine) == {None: 200}, "a gap needs no proof"
    shifted, behind = Claim(PeerId("me"), 1, 4), Claim(PeerId("lone"), 4, 6)
    assert set(tried([other, behind], shifted)) == {4, 5}, "it would have to shift"


def test_about_one_of_all_spare_hosts_tries_a_block_at_each_look() -> None:
    spare, lone = claims("spare", 10), claims("lone", 1, 3, 6)
    asks = [200 - tried([*spare[:at], *spare[at + 1 :], *lone], mine)[None] for at, mine in enumerate(spare)]
    assert sorted(asks)[-1] == 200, "the host that the plan names"
    assert all(asks)
    assert sum(asks) / 200 == pytest.approx(1.9, abs=0.3)


def test_blocks_that_several_places_claim_are_tried_rarely() -> None:
    [mine, *others], pair = claims("me", 2), claims("pair", 2, 3, 6)
    asks = 20_000 - tried([*others, *pair], mine, looks=20_000)[None]
    assert 0 < asks <= 2 * 20_000 / RARER
    together = [replace(claim, place="203.0.113.0/24") for claim in pair]
    assert tried([*others, *together], mine)[None] <= 130, "one place, whatever number of names"


def test_a_block_that_is_silent_for_long_has_no_host_under_any_name() -> None:
    sightings, found = Sightings(), claims("name", 30, 3, 6)

    def standing(now: float) -> int:
        return sum(sightings.stands(claim, MODEL, now=now) for claim in found)

    sightings.asked(MODEL, 4, [], now=0.0)
    assert standing(10 * PATIENCE_S) == 30, "one answer may get lost"
    for _ in range(LEAST_ASKS):
        sightings.asked(MODEL, 4, [], now=PATIENCE_S / 2)
    assert (standing(PATIENCE_S - 1), standing(PATIENCE_S)) == (30, 0)
    assert sightings.stands(Claim(found[0].peer, 0, 4), MODEL, now=PATIENCE_S), "other blocks"
    assert sightings.stands(found[0], b"beta", now=PATIENCE_S), "another model"
    sightings.asked(MODEL, 4, [found[0].peer], now=PATIENCE_S)
    assert standing(PATIENCE_S) == 30, "it has a host"


def test_a_host_is_proven_for_blocks_around_the_one_that_it_computed() -> None:
    sightings, [host] = Sightings(), claims("host", 1)
    answer(sightings, [host])
    sightings.asked(MODEL, 1, [host.peer], now=0.0)
    answer(sightings, [host], now=10.0)

    def is_proven(claim: Claim, now: float) -> bool:
        answer(sightings, [claim], now)
        return [each.proven for each in sightings.counted(of_model([claim]), now=now)] == [True]

    assert is_proven(host, 10.0)
    assert not is_proven(Claim(host.peer, 3, 6), 10.0)
    assert not is_proven(host, PROVEN_S)
