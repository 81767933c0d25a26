"""The terms of a round: the slices of its vector and their reducers."""

from dataclasses import replace

from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from tests.defences import defence, replacing

COUNT = 100_000
NAMES = {Identity.from_seed(name.encode()).peer_id: name for name in ("anna", "boris", "clara")}
PEERS = {name: peer for peer, name in NAMES.items()}


def terms(**weights: float) -> RoundTerms:
    members = [RoundMember(PEERS[name], weight=weight) for name, weight in weights.items()]
    return RoundTerms.of(b"job", 1, members, COUNT, get_codec("float32"))


def test_a_newcomer_reduces_no_slice() -> None:
    ours = terms(anna=5.0, boris=0.0, clara=7.0)
    assert {NAMES[ours.members[reducer].peer] for reducer in ours.reducers} == {"anna", "clara"}
    assert ours.slices[0][0] == 0
    assert ours.slices[-1][1] == COUNT
    (reducer,) = (ours := terms(anna=0.0, boris=1.0)).reducers
    assert NAMES[ours.members[reducer].peer] == "boris"


def test_without_contributors_all_members_reduce() -> None:
    assert terms(anna=0.0, boris=0.0, clara=0.0).reducers == (0, 1, 2)


@defence(
    "members with different states do not average together",
    off=replacing(__name__, "replace", lambda terms, **_: terms),
)
def test_members_that_differ_on_newcomers_or_state_average_apart() -> None:
    ours = terms(anna=5.0, boris=0.0)
    assert ours.agreement() != terms(anna=5.0, boris=1.0).agreement()
    assert ours.agreement() != replace(ours, state=b"other parameters").agreement()
