"""Who is watched where there are more peers than places, whatever strangers claim."""

import random

import pytest

from swarmnet.dashboard.observing.seats import UNKNOWN_SHARE, Candidate, networks_of, seated
from swarmnet_protocols.net import PeerId

SALT = b"nobody knows this"
SEATS = 80


def candidate(name: str, address: str, since_s: float = 0.0, **more: object) -> Candidate:
    return Candidate(PeerId(name), (address,), since_s, **more)  # type: ignore[arg-type]


def honest(count: int = 40) -> list[Candidate]:
    """Hosts that answer, two in each network."""
    return [
        candidate(f"host-{n}", f"/ip4/10.{n // 2}.0.{n}/tcp/1", 5.0 + n, answers=True, asked=True)
        for n in range(count)
    ]


def names(chosen: set[PeerId], prefix: str) -> set[PeerId]:
    return {peer for peer in chosen if peer.startswith(prefix)}


def test_where_there_is_room_everybody_is_watched() -> None:
    everybody = [*honest(), *(candidate(f"flood-{n}", "", failures=9) for n in range(SEATS - 40))]
    assert seated(everybody, SEATS, SALT) == {each.peer for each in everybody}


FLOODS = {
    "say to be everywhere and do not answer": [
        candidate(f"flood-{n}", f"/ip4/{n % 250}.{n // 250}.0.1/tcp/1") for n in range(5000)
    ],
    "answer, from one network": [
        candidate(f"flood-{n}", "/ip4/66.6.0.1/tcp/1", answers=True, asked=True) for n in range(5000)
    ],
    "answer, and name others": [
        Candidate(
            PeerId(f"flood-{n}"),
            ("/ip4/66.6.0.1/tcp/1", f"/ip4/{n % 250}.{n // 250}.0.1/tcp/1", f"/dns4/{n}.example/tcp/1"),
            since_s=0.0,
            answers=True,
            asked=True,
        )
        for n in range(5000)
    ],
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_takes_no_place_of_those_who_answer(kind: str) -> None:
    chosen = seated([*FLOODS[kind], *honest()], SEATS, SALT)
    assert len(chosen) == SEATS
    assert len(names(chosen, "host")) == 40


def test_some_places_are_for_those_who_were_not_asked_yet() -> None:
    answering = [candidate(f"flood-{n}", "/ip4/66.6.0.1/tcp/1", answers=True) for n in range(5000)]
    newcomers = [candidate(f"new-{n}", f"/ip4/77.{n}.0.1/tcp/1") for n in range(SEATS)]
    assert len(names(seated([*answering, *newcomers], SEATS, SALT), "new")) == SEATS // UNKNOWN_SHARE


def test_who_does_not_answer_makes_way_for_who_was_not_asked() -> None:
    waiting = {PeerId(f"peer-{n}"): candidate(f"peer-{n}", f"/ip4/77.{n}.0.1/tcp/1") for n in range(200)}
    failures = dict.fromkeys(waiting, 0)
    seen: set[PeerId] = set()
    for _ in range(-(-len(waiting) // 10)):
        chosen = seated(
            [candidate(peer, each.addresses[0], failures=failures[peer]) for peer, each in waiting.items()],
            10,
            SALT,
        )
        assert not chosen & seen
        seen |= chosen
        for peer in chosen:
            failures[peer] += 1
    assert seen == set(waiting)


def test_who_is_being_asked_stays_until_there_is_an_answer() -> None:
    asked = [candidate(f"asked-{n}", f"/ip4/77.{n}.0.1/tcp/1", asked=True) for n in range(10)]
    others = [candidate(f"other-{n}", f"/ip4/78.{n}.0.1/tcp/1") for n in range(200)]
    assert names(seated([*others, *asked], 10, SALT), "asked") == {each.peer for each in asked}


def test_the_choice_is_stable_and_only_who_knows_the_salt_can_tell_it() -> None:
    crowd = [candidate(f"peer-{n}", f"/ip4/77.{n % 100}.0.1/tcp/1") for n in range(300)]
    chosen = seated(crowd, 20, SALT)
    random.Random(1).shuffle(crowd)
    assert seated(crowd, 20, SALT) == chosen
    assert seated(crowd, 20, b"another salt") != chosen


@pytest.mark.parametrize(
    ("address", "network"),
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
def test_networks_of_addresses(address: str, network: str) -> None:
    assert networks_of([address]) == {network}
