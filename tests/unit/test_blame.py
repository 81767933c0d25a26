"""Of hosts that say it is the client's own fault: who may still be lying, all on its own."""

from swarmnet_client.chain.failures import Suspects
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import refusal_pb2

ONE, TWO, THREE = PeerId("one"), PeerId("two"), PeerId("three")
NO_HOSTS: frozenset[PeerId] = frozenset()
REASON = refusal_pb2.REASON_NOT_FINITE


def hosts(*peers: PeerId) -> frozenset[PeerId]:
    return frozenset(peers)


def test_one_host_that_repeats_its_refusal_is_suspected() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.narrow(REASON, hosts(ONE)) == (hosts(ONE), NO_HOSTS)


def test_two_hosts_with_the_same_reason_are_cleared() -> None:
    suspects = Suspects()
    suspects.narrow(REASON, hosts(ONE))
    assert suspects.narrow(REASON, hosts(TWO)) == (NO_HOSTS, hosts(ONE, TWO))
    assert suspects.narrow(REASON, hosts(ONE)) == (NO_HOSTS, hosts(ONE, TWO))


def test_a_host_present_at_every_refusal_is_suspected() -> None:
    suspects = Suspects()
    assert suspects.narrow(REASON, hosts(ONE, TWO)) == (hosts(ONE, TWO), NO_HOSTS)
    assert suspects.narrow(REASON, hosts(ONE, THREE)) == (hosts(ONE), hosts(TWO, THREE))
    assert suspects.narrow(REASON, hosts(TWO, THREE)) == (NO_HOSTS, hosts(ONE, TWO, THREE))


def test_two_hosts_with_different_reasons_clear_no_host() -> None:
    suspects = Suspects()
    suspects.narrow(refusal_pb2.REASON_PROTOCOL, hosts(ONE))
    assert suspects.narrow(refusal_pb2.REASON_TOO_LONG, hosts(TWO)) == (hosts(TWO), NO_HOSTS)
