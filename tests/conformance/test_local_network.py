"""mDNS over real sockets, on loopback: peers find each other, notice who leaves and who moves, and
ignore other swarms."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from swarmnet_protocols.errors import NotAuthorised, Unreachable
from swarmnet_protocols.joining import local_network
from swarmnet_protocols.joining.local_network import LocalNetwork, find_addresses
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import LOOPBACK_NETWORKS
from tests.support.network.conversations import until

pytestmark = pytest.mark.slow

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
ALICE = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
BOB = PeerId("12D3KooWHK9BjDQBUqnavciRPhAYFvqKBe4ZiPPvde7vDaqgn5er")
WITHIN_S = 10.0


def at(port: int, peer: PeerId) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def peer(swarm: bytes, *addresses: str) -> LocalNetwork:
    return LocalNetwork(swarm, listen=LISTEN, own=lambda: addresses)


async def ignore(_: Sequence[str]) -> bool:
    return True


def test_peers_of_one_swarm_find_each_other_until_they_leave() -> None:
    async def main() -> None:
        alice, bob, stranger = peer(b"s" * 32, at(1, ALICE)), peer(b"s" * 32, at(2, BOB)), peer(b"o" * 32)
        async with alice.run(ignore), stranger.run(ignore):
            async with bob.run(ignore):
                await until(lambda: bool(alice.addresses() and bob.addresses()))
                assert (alice.addresses(), bob.addresses()) == ([at(2, BOB)], [at(1, ALICE)])
            await until(lambda: not alice.addresses())
            assert stranger.addresses() == []

    asyncio.run(main())


def test_a_peer_that_moves_is_announced_at_its_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        addresses = [at(1, ALICE)]
        alice = LocalNetwork(b"m" * 32, listen=LISTEN, own=lambda: addresses)
        bob = peer(b"m" * 32, at(2, BOB))
        async with alice.run(ignore), bob.run(ignore):
            await until(lambda: bob.addresses() == [at(1, ALICE)])
            addresses[0] = at(3, ALICE)
            await until(lambda: bob.addresses() == [at(3, ALICE)])
            await until(lambda: alice.addresses() == [at(2, BOB)])

    monkeypatch.setattr(local_network, "CHECK_S", 0.1)
    asyncio.run(main())


def test_a_found_peer_is_joined_through_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        alice, bob = peer(b"j" * 32, at(1, ALICE)), peer(b"j" * 32)
        tried: list[Sequence[str]] = []

        async def join(addresses: Sequence[str]) -> bool:
            tried.append(addresses)
            return len(tried) == 3

        async with alice.run(ignore), bob.run(join):
            await bob.wait_joined(WITHIN_S)
            await asyncio.sleep(0.3)
        assert tried == [(at(1, ALICE),)] * 3

    monkeypatch.setattr(local_network, "RETRY_S", 0.05)
    asyncio.run(main())


def test_addresses_of_a_swarm_are_found_without_being_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with peer(b"f" * 32, at(1, ALICE)).run(ignore):
            assert await find_addresses(b"f" * 32, within_s=WITHIN_S) == [at(1, ALICE)]
            assert await find_addresses(b"n" * 32, within_s=0.5) == []

    monkeypatch.setattr(local_network, "shared_networks", lambda *_: LOOPBACK_NETWORKS)
    asyncio.run(main())


class Directory:
    """A directory that knows no peer, and that a found peer refuses if there is a ``refusal``."""

    def __init__(self, refusal: NotAuthorised | None) -> None:
        self.refusal = refusal
        self.knows_peers = False

    async def join_through(self, _: Sequence[str]) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.knows_peers = True
        return True


@pytest.mark.parametrize(
    ("is_there", "refusal", "error"),
    [(True, None, None), (True, NotAuthorised("revoked"), NotAuthorised), (False, None, Unreachable)],
    ids=["joined", "refused", "alone"],
)
def test_a_client_joins_through_a_found_peer_or_is_told_why_not(
    is_there: bool,
    refusal: NotAuthorised | None,
    error: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        directory: Any = Directory(refusal)
        alice, client = peer(b"c" * 32, *([at(1, ALICE)] if is_there else [])), peer(b"c" * 32)
        async with alice.run(ignore):
            with pytest.raises(error) if error else contextlib.nullcontext():
                async with client.join(directory, needs_peers=True):
                    assert directory.knows_peers
            async with LocalNetwork(b"d" * 32, listen=LISTEN).join(directory, needs_peers=False):
                pass  # no error for a node: it may be the first peer of its swarm

    monkeypatch.setattr(local_network, "FIRST_S", 1.5)
    asyncio.run(main())


def test_a_machine_without_multicast_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with peer(b"w" * 32, at(1, ALICE)).run(ignore):
            await until(lambda: "mDNS does not work" in caplog.text)

    monkeypatch.setattr(local_network, "own_interfaces", lambda: [("127.0.0.1", "255.0.0.0")])
    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf.__init__", _fail)
    asyncio.run(main())


def _fail(*_: object, **__: object) -> None:
    raise OSError("no multicast")
