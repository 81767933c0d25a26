"""The choice of peers that the observer polls if there are more peers than slots; announcements of
other peers do not change it."""

import random

import pytest

from swarmnet.dashboard.observing import peer_selection
from swarmnet.dashboard.observing.peer_selection import UNKNOWN_SHARE, PollCandidate, select_peers, subnets_of
from swarmnet_protocols.net import PeerId
from tests.defences import defence, replacing

SALT = b"a secret salt"
SLOTS = 80


def candidate(name: str, address: str, since_s: float = 0.0, **more: object) -> PollCandidate:
    return PollCandidate(PeerId(name), (address,), since_s, **more)  # type: ignore[arg-type]


def honest(count: int = 40) -> list[PollCandidate]:
    """Hosts that answer, two in each subnet."""
    return [
        candidate(f"host-{n}", f"/ip4/10.{n // 2}.0.{n}/tcp/1", 5.0 + n, answers=True, polled=True)
        for n in range(count)
    ]


def names(selected: set[PeerId], prefix: str) -> set[PeerId]:
    return {peer for peer in selected if peer.startswith(prefix)}


def test_with_enough_slots_all_peers_are_selected() -> None:
    candidates = [*honest(), *(candidate(f"flood-{n}", "", failures=9) for n in range(SLOTS - 40))]
    assert select_peers(candidates, SLOTS, SALT) == {each.peer for each in candidates}


FLOODS = {
    "announced from many subnets, without answers": [
        candidate(f"flood-{n}", f"/ip4/{n % 250}.{n // 250}.0.1/tcp/1") for n in range(5000)
    ],
    "answering, from one subnet": [
        candidate(f"flood-{n}", "/ip4/66.6.0.1/tcp/1", answers=True, polled=True) for n in range(5000)
    ],
    "answering, with addresses in other subnets": [
        PollCandidate(
            PeerId(f"flood-{n}"),
            ("/ip4/66.6.0.1/tcp/1", f"/ip4/{n % 250}.{n // 250}.0.1/tcp/1", f"/dns4/{n}.example/tcp/1"),
            since_s=0.0,
            answers=True,
            polled=True,
        )
        for n in range(5000)
    ],
}


@defence(
    "a subnet has a share of a dashboard's slots",
    off=replacing(
        peer_selection, "_subnet_ranks", lambda candidates, _: {each.peer: 0 for each in candidates}
    ),
    kind="answering, from one subnet",
)
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_displaces_no_host_that_answers(kind: str) -> None:
    selected = select_peers([*FLOODS[kind], *honest()], SLOTS, SALT)
    assert len(selected) == SLOTS
    assert len(names(selected, "host")) == 40


def test_some_slots_are_reserved_for_peers_that_have_not_answered() -> None:
    answering = [candidate(f"flood-{n}", "/ip4/66.6.0.1/tcp/1", answers=True) for n in range(5000)]
    newcomers = [candidate(f"new-{n}", f"/ip4/77.{n}.0.1/tcp/1") for n in range(SLOTS)]
    assert len(names(select_peers([*answering, *newcomers], SLOTS, SALT), "new")) == SLOTS // UNKNOWN_SHARE


def test_peers_that_do_not_answer_make_room_for_peers_not_polled_yet() -> None:
    waiting = {PeerId(f"peer-{n}"): candidate(f"peer-{n}", f"/ip4/77.{n}.0.1/tcp/1") for n in range(200)}
    failures = dict.fromkeys(waiting, 0)
    seen: set[PeerId] = set()
    for _ in range(-(-len(waiting) // 10)):
        selected = select_peers(
            [candidate(peer, each.addresses[0], failures=failures[peer]) for peer, each in waiting.items()],
            10,
            SALT,
        )
        assert not selected & seen
        seen |= selected
        for peer in selected:
            failures[peer] += 1
    assert seen == set(waiting)


def test_a_peer_that_is_polled_keeps_its_slot_until_it_fails() -> None:
    asked = [candidate(f"asked-{n}", f"/ip4/77.{n}.0.1/tcp/1", polled=True) for n in range(10)]
    others = [candidate(f"other-{n}", f"/ip4/78.{n}.0.1/tcp/1") for n in range(200)]
    assert names(select_peers([*others, *asked], 10, SALT), "asked") == {each.peer for each in asked}


def test_the_selection_is_stable_and_depends_on_the_salt() -> None:
    flood = [candidate(f"peer-{n}", f"/ip4/77.{n % 100}.0.1/tcp/1") for n in range(300)]
    selected = select_peers(flood, 20, SALT)
    random.Random(1).shuffle(flood)
    assert select_peers(flood, 20, SALT) == selected
    assert select_peers(flood, 20, b"another salt") != selected


@pytest.mark.parametrize(
    ("address", "subnet"),
    [
        ("/ip4/10.1.2.3/tcp/4", "10.1.0.0/16"),
        ("/ip6/2001:db8:1:2::3/tcp/4", "2001:db8:1::/48"),
        ("/dns4/example.org/tcp/4", "example.org"),
        ("/ip4/10.1.2.3/tcp/4/p2p/relay/p2p-circuit", "10.1.0.0/16"),
        ("/ip4/10.1.2.3000/tcp/4", ""),
        ("nonsense", ""),
        ("", ""),
    ],
)
def test_an_address_belongs_to_its_subnet(address: str, subnet: str) -> None:
    assert subnets_of([address]) == {subnet}
