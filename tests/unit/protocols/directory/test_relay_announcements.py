"""Invented relays neither silence real ones nor keep them from being found."""

import asyncio
import contextlib
import random
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from swarmnet_protocols.directory import relay_announcements
from swarmnet_protocols.directory.records import Publisher, Record
from swarmnet_protocols.directory.relay_announcements import (
    ENOUGH,
    MAX_FOUND,
    TOPIC,
    RelayFinder,
    choose,
    relay_announcer,
)
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.multiaddr import peer_in
from swarmnet_protocols.wire import records_pb2
from tests.defences import defence, replacing
from tests.support.network import virtual_time


def announced(number: int, address: str = "/ip4/25.0.0.1/tcp/4001") -> Record:
    """The announcement of a relay at ``address``."""
    identity = Identity.from_seed(number.to_bytes(4, "big"))
    addresses = [f"{address}/p2p/{identity.peer_id}"]
    body = records_pb2.RelayRecord(addresses=addresses).SerializeToString()
    return Publisher(identity, bytes(32), lambda: 1.0).seal(TOPIC, body, lifetime_s=10)[0]


@defence(
    "relays of one subnet are counted, and drawn, as one",
    off=replacing(relay_announcements, "subnet_of", str),
)
def test_relays_are_drawn_from_different_subnets() -> None:
    invented = [announced(number) for number in range(500)]
    real = [announced(1000 + number, f"/ip4/26.0.{number}.1/tcp/4001") for number in range(5)]
    for seed in range(10):
        drawn = choose([*invented, *real], random.Random(seed))
        assert sum("/ip4/26." in address for address in drawn) == 5


@defence(
    "relays that one network invents leave the others their share",
    off=replacing(relay_announcements, "SAMPLED", 4 * relay_announcements.SAMPLED),
    claimed="25.{}.0.1",
)
@pytest.mark.parametrize(
    ("claimed", "drawn"), [("25.0.0.1", 8), ("25.{}.0.1", 4)], ids=["one network", "a network each"]
)
@pytest.mark.parametrize("networks", [1, 3])
def test_relays_that_one_network_invents_leave_the_others_their_share(
    networks: int, claimed: str, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers that store the records count the networks that published them, whatever addresses the
    records claim."""
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht.storage import BoundedStorage, StorageLimits

    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: 1.0)
    invented = [announced(n, f"/ip4/{claimed.format(n)}/tcp/4001") for n in range(256)]
    real = [announced(1000 + n, f"/ip4/26.0.{n}.1/tcp/4001") for n in range(8)]
    by_body = {each.body: each for each in [*invented, *real]}
    scopes, key = ResourceManager(), cast(Any, 1)  # a storage only compares keys
    stores = [BoundedStorage(StorageLimits(), lambda: 1.0) for _ in range(2)]
    for store in stores:
        for number, record in enumerate([*invented, *real]):
            origin = f"25.0.{number % networks}.0/24" if record in invented else f"26.0.{number}.0/24"
            with store.stored_by(scopes.peer(PeerId(f"{number // 100}"), 0.0), origin):
                assert store.store_subkey(key, b"%d" % number, record.body, 10.0)

    class Stored(Announcements):
        async def sample(self, topics: Collection[str], most: int, *, copies: int) -> Sequence[Record]:
            found = [value for store in stores for value in store.draw(key, most, rng)]
            return [by_body[each] for each in dict.fromkeys(found)]

    rng, shares = random.Random(0), []
    for seed in range(20):
        finder = RelayFinder(cast(Any, Stored([])), random.Random(seed))
        found = virtual_time.run(finder.find())
        shares.append(sum("/ip4/26." in address for address in found))
    assert sum(shares) / len(shares) >= drawn
    assert min(shares) >= 2, "a peer behind a router always finds some of the real ones"


class Announcements:
    """A directory of announced relays."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.published = 0

    async def sample(self, topics: Collection[str], most: int, *, copies: int) -> Sequence[Record]:
        return self.records

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        self.published += 1


@defence(
    "a relay is silent only where others answer",
    off=replacing(relay_announcements, "CHECKED", 0),
    subnets=ENOUGH,
    answer=False,
    announces=True,
)
@pytest.mark.parametrize(
    ("subnets", "answer", "announces"),
    [(1, True, True), (ENOUGH, False, True), (ENOUGH, True, False)],
    ids=["invented in one subnet", "invented in many subnets", "real"],
)
def test_a_relay_is_silent_only_where_enough_others_answer(
    subnets: int, answer: bool, announces: bool
) -> None:
    records = [announced(number, f"/ip4/25.0.{number % subnets}.1/tcp/4001") for number in range(2 * ENOUGH)]
    called: list[str] = []

    async def answers(address: str) -> bool:
        called.append(address)
        return answer

    async def scenario() -> None:
        directory = Announcements(records)
        announcer = relay_announcer(
            directory,  # type: ignore[arg-type]
            random.Random(0),
            lambda: ("/ip4/27.0.0.1/tcp/1/p2p/12D3KooW",),
            answers,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await announcer.run()
        assert bool(directory.published) is announces
        assert len(called) <= relay_announcements.CHECKED

    virtual_time.run(scenario())


@defence(
    "relays that have held a reservation come first", off=replacing(relay_announcements, "MAX_ANSWERED", 0)
)
def test_relays_that_held_a_reservation_come_before_announced_ones() -> None:
    async def scenario() -> None:
        directory = Announcements([announced(0)])
        held: list[PeerId] = []
        finder = RelayFinder(directory, random.Random(0), lambda: held)  # type: ignore[arg-type]
        [known] = await finder.find()
        held.append(peer_in(known))
        await finder.find()
        held.clear()
        directory.records = [announced(number, f"/ip4/25.1.{number}.1/tcp/4001") for number in range(1, 200)]
        await asyncio.sleep(relay_announcements.FIND_S)
        found = await finder.find()
        assert found[0] == known
        assert len(found) == MAX_FOUND

    virtual_time.run(scenario())
