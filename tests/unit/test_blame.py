"""Of hosts that say it is the client's own fault: who may still be lying, all on its own."""

from swarmnet_client.chain.failures import Suspects
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import refusal_pb2

ONE, TWO, THREE = PeerId("one"), PeerId("two"), PeerId("three")
NOBODY: frozenset[PeerId] = frozenset()
REASON = refusal_pb2.REASON_NOT_FINITE


def hosts(*peers: PeerId) -> frozenset[PeerId]:
    return frozenset(peers)


def test_one_that_says_so_again_and_again_may_be_lying() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.narrow(REASON, hosts(ONE)) == (hosts(ONE), NOBODY)


def test_two_that_say_the_same_are_cleared() -> None:
    suspects = Suspects()
    suspects.narrow(REASON, hosts(ONE))
    assert suspects.narrow(REASON, hosts(TWO)) == (NOBODY, hosts(ONE, TWO))
    assert suspects.narrow(REASON, hosts(ONE)) == (NOBODY, hosts(ONE, TWO))


def test_who_was_there_each_time_may_be_behind_it() -> None:
    suspects = Suspects()
    assert suspects.narrow(REASON, hosts(ONE, TWO)) == (hosts(ONE, TWO), NOBODY)
    assert suspects.narrow(REASON, hosts(ONE, THREE)) == (hosts(ONE), hosts(TWO, THREE))
    assert suspects.narrow(REASON, hosts(TWO, THREE)) == (NOBODY, hosts(ONE, TWO, THREE))


def test_two_that_say_different_things_clear_nobody() -> None:
    suspects = Suspects()
    suspects.narrow(refusal_pb2.REASON_PROTOCOL, hosts(ONE))
    assert suspects.narrow(refusal_pb2.REASON_TOO_LONG, hosts(TWO)) == (hosts(TWO), NOBODY)
