"""How long a client does not use a host, or two hosts as neighbours."""

from swarmnet_client.swarm.exclusions import CONVICTED_S, PARTED_S, Exclusions
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import pair_of

ONE, OTHER = PeerId("one"), PeerId("other")


def test_a_pair_is_kept_apart_for_a_while_in_either_order() -> None:
    exclusions = Exclusions()
    exclusions.part(OTHER, ONE, now=5.0)
    assert exclusions.parted(5.0 + PARTED_S - 1) == {pair_of(ONE, OTHER)}
    assert not exclusions.parted(5.0 + PARTED_S)


def test_a_conviction_ends() -> None:
    exclusions = Exclusions()
    assert not exclusions.is_convicted(ONE, now=0.0)
    exclusions.convict(ONE, now=0.0)
    assert exclusions.is_convicted(ONE, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(OTHER, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(ONE, now=CONVICTED_S)


def test_a_conviction_outlasts_an_answer() -> None:
    exclusions = Exclusions()
    exclusions.bans.failed(ONE, 0.0)
    exclusions.convict(ONE, now=0.0)
    exclusions.bans.served(ONE)
    assert not exclusions.bans.at(0.0)
    assert exclusions.is_convicted(ONE, now=0.0)
