"""Whom a client believes that says it is the client's own fault."""

import pytest

from swarmnet_client.patience import OURS, Blame, our_fault
from swarmnet_protocols.session.link import Refused
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import session_pb2 as pb

ONE, TWO = PeerId("one"), PeerId("two")


@pytest.mark.parametrize("reason", OURS)
def test_one_host_is_not_believed_while_there_is_another(reason: int) -> None:
    blame, refusal = Blame(), Refused(reason, "why")
    assert blame.settled(refusal, ONE, others=True) == set()
    assert blame.settled(refusal, ONE, others=True) == set()
    assert blame.settled(refusal, TWO, others=True) == {ONE, TWO}


@pytest.mark.parametrize("reason", OURS)
def test_the_only_host_is_believed(reason: int) -> None:
    refusal = Refused(reason, "why")
    assert Blame().settled(refusal, ONE, others=False) == {ONE}
    assert "why" in str(our_fault(refusal))
    assert our_fault(refusal).hint


def test_two_who_say_different_things_are_not_believed() -> None:
    blame = Blame()
    assert not blame.settled(Refused(pb.REASON_PROTOCOL, "this"), ONE, others=True)
    assert not blame.settled(Refused(pb.REASON_TOO_LONG, "that"), TWO, others=True)


@pytest.mark.parametrize("reason", sorted(set(pb.Reason.values()) - set(OURS)))
def test_what_another_host_may_do_is_not_our_fault(reason: int) -> None:
    assert not Blame().settled(Refused(reason, "why"), ONE, others=False)
