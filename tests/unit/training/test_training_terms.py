"""The terms of a round: the slices of its vector and their reducers."""

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms

COUNT = 100_000


def terms(**weights: float) -> RoundTerms:
    members = [RoundMember(PeerId(name), (), weight=weight) for name, weight in weights.items()]
    return RoundTerms.of(b"job", 1, members, COUNT, get_codec("float32"))


def test_a_newcomer_reduces_no_slice() -> None:
    ours = terms(anna=5.0, boris=0.0, clara=7.0)
    assert [ours.members[reducer].peer for reducer in ours.reducers] == ["anna", "clara"]
    assert ours.slices[0][0] == 0
    assert ours.slices[-1][1] == COUNT
    assert terms(anna=0.0, boris=1.0).reducers == (1,)


def test_without_contributors_all_members_reduce() -> None:
    assert terms(anna=0.0, boris=0.0, clara=0.0).reducers == (0, 1, 2)


def test_members_that_differ_on_who_is_new_do_not_average_together() -> None:
    assert terms(anna=5.0, boris=0.0).digest() != terms(anna=5.0, boris=1.0).digest()
