"""Tensors of other workers are refused when their norms are absurd, and honest ones are not."""

import math
import random
from collections.abc import Callable

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.pipeline import norms
from swarmnet_protocols.training.pipeline.norms import MOST_SENDERS, UsualNorms
from tests.defences import Patch, defence, replacing

LIAR, *HONEST = map(PeerId, "abc")


def student(rng: random.Random) -> float:
    """The size of a number of Student's distribution of three degrees of freedom: heavy tails."""
    return abs(rng.gauss(0, 1)) / math.sqrt(rng.gammavariate(1.5, 2 / 3))


TAILS: dict[str, Callable[[random.Random], float]] = {
    "student": student,
    "lognormal": lambda rng: rng.lognormvariate(0, 1),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_no_honest_norm_in_10000_is_absurd(senders: int, tail: str) -> None:
    """The usual norm also falls a thousandfold, as gradients do in a long training."""
    rng, usual = random.Random(1), UsualNorms()
    peers = [LIAR, *HONEST][:senders]
    refused = [
        number
        for number in range(10_000)
        if not usual.admit(rng.choice(peers), 10 ** (-3 * number / 10_000) * TAILS[tail](rng))
    ]
    assert not refused


def forget_others(patch: Patch) -> None:
    patch.setattr(norms, "_middle", lambda each: max([*each] or [0.0]))


@defence("one of several senders does not make absurd norms usual", off=forget_others, lie="creeping")
@pytest.mark.parametrize("senders", [2, 3])
@pytest.mark.parametrize("lie", ["scaled", "creeping", "not a number", "infinite"])
def test_absurd_norms_of_a_sender_are_refused(lie: str, senders: int) -> None:
    rng, usual, scale = random.Random(2), UsualNorms(), 1.0
    admitted: list[float] = []
    for number in range(3000):
        peer = [LIAR, *HONEST][number % senders]
        norm = rng.lognormvariate(0, 0.3)
        if peer != LIAR or number < 100:
            assert usual.admit(peer, norm)
            continue
        scale *= 1.1
        false = {"scaled": 1000.0, "creeping": scale, "not a number": math.nan, "infinite": math.inf}[lie]
        if usual.admit(peer, false * norm):
            admitted.append(false * norm)
    assert max(admitted, default=0.0) < 100 * math.exp(0.3)


@pytest.mark.parametrize("senders", [2, 3])
def test_another_worker_confirms_a_norm(senders: int) -> None:
    """A model has really changed: the workers of a stage compute the same microbatch in turn."""
    usual = UsualNorms()
    peers = [LIAR, *HONEST][:senders]
    for number in range(30):
        assert usual.admit(peers[number % senders], 1.0)
    assert [usual.admit(peer, 1e4) for peer in peers] == [False] * (senders - 1) + [True]
    assert all(usual.admit(peer, 1e4) for peer in peers)


@defence("few senders are remembered", off=replacing(norms, "MOST_SENDERS", 10**6))
def test_senders_that_come_and_go_fill_no_memory() -> None:
    usual = UsualNorms()
    for number in range(MOST_SENDERS + 1000):
        assert usual.admit(PeerId(str(number)), 1.0)
    assert len(usual._seen) == len(usual._latest) == 256
