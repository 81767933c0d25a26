"""Placement: the weakest blocks first, the same answer for every node."""

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.placement import Claim, choose_start, resolve_claims

A, B, C = (PeerId(name) for name in "abc")


def test_the_first_host_starts_at_the_beginning() -> None:
    assert choose_start([], blocks=6, length=2) == 0


def test_a_gap_goes_before_a_weak_block_and_that_before_a_strong_one() -> None:
    claims = [Claim(A, 0, 2, 1.0), Claim(B, 2, 4, 5.0)]
    assert choose_start(claims, blocks=6, length=2) == 4
    claims.append(Claim(C, 4, 6, 3.0))
    assert choose_start(claims, blocks=6, length=2) == 0


@pytest.mark.parametrize("length", [0, 7, -1])
def test_a_window_that_does_not_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="window"):
        choose_start([], blocks=6, length=length)


def test_claims_beyond_the_model_count_only_within_it() -> None:
    assert choose_start([Claim(A, -5, 3), Claim(B, 5, 1 << 30)], blocks=6, length=2) == 3


def test_rivals_give_way_by_peer_id_and_all_to_the_settled() -> None:
    mine, rival = Claim(B, 0, 2, settled=False), Claim(A, 0, 2, settled=False)
    assert resolve_claims(mine, [rival], blocks=4).start == 2
    assert resolve_claims(rival, [mine], blocks=4).start == 0
    assert resolve_claims(rival, [Claim(C, 0, 2)], blocks=4).start == 2
