"""What members and owners of a private swarm do over months, over real connections: return, come
back after a revocation, rotate the key."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet import swarm_file
from swarmnet.swarm_file.entry import Entry, client_network, enter
from swarmnet.swarm_file.known_peers import read_known_peers
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.joining.network import LOOPBACK, Network, connect
from swarmnet_protocols.net import Transport
from tests.support.processes.commands import call

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
TOPIC = "a topic"


@dataclass
class Group:
    """A private swarm whose file names no address, and its issuer, which runs."""

    folder: Path
    stack: AsyncExitStack
    address: str = ""

    @property
    def swarm(self) -> str:
        return str(self.folder / "lab")

    async def command(self, *arguments: str) -> dict[str, Any]:
        return await asyncio.to_thread(call, "swarm", *arguments)

    async def invited(self, name: str) -> Entry:
        """The entry of a peer that redeems an invite with the issuer's address."""
        made = await self.command("invite", self.swarm, "--role", "host", "--bootstrap", self.address)
        return await asyncio.to_thread(enter, made["invite"], self.folder / name)

    async def runs(self, entry: Entry) -> tuple[Transport, Directory]:
        """A peer that runs until the end of the test."""
        return await self.stack.enter_async_context(connected(entry.network(LOOPBACK)))


@asynccontextmanager
async def connected(
    network: Network, *, client_mode: bool = False
) -> AsyncIterator[tuple[Transport, Directory]]:
    async with connect(network, client_mode=client_mode) as (transport, directory):
        yield transport, directory


@asynccontextmanager
async def group(folder: Path) -> AsyncIterator[Group]:
    async with AsyncExitStack() as stack:
        made = Group(folder, stack)
        await made.command("create", "lab", "--no-mdns", "--out", made.swarm)
        entry = enter(made.swarm, folder / "issuer")
        network = entry.network(LOOPBACK, issuer=folder / "lab" / "authority.key")
        issuer, directory = await stack.enter_async_context(connected(network))
        made.address = issuer.addresses()[0]
        await directory.publish(TOPIC, b"here", lifetime_s=600)
        yield made


def run(folder: Path, scenario: Callable[[Group], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), group(folder) as made:
            await scenario(made)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def reads(network: Network) -> bool:
    """Whether a client of ``network`` reads the directory."""
    async with connected(network, client_mode=True) as (_, directory):
        return [record.body for record in await directory.lookup(TOPIC)] == [b"here"]


def test_a_member_by_invite_returns_by_name_through_peers_that_it_met(tmp_path: Path) -> None:
    async def scenario(made: Group) -> None:
        carol, bob = await made.invited("carol"), await made.invited("bob")
        bobs, _ = await made.runs(bob)
        assert await reads(carol.network(LOOPBACK))
        known = read_known_peers(carol.folder or tmp_path)
        assert known.named == (made.address,)
        assert set(bobs.addresses()) & set(known.seen)
        # The address of the invite is of a machine that is gone: bob's is left.
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{made.address.rpartition('/')[2]}"
        (carol.folder / "peers").write_text(  # type: ignore[operator]
            f'{{"named": ["{gone}"], "seen": ["{bobs.addresses()[0]}"]}}'
        )
        again = await asyncio.to_thread(enter, "lab", tmp_path / "carol")
        assert again.addresses == (gone, bobs.addresses()[0])
        assert await reads(again.network(LOOPBACK))

    run(tmp_path, scenario)


def test_a_revoked_member_that_is_approved_again_is_a_member(tmp_path: Path) -> None:
    async def scenario(made: Group) -> None:
        carol = await made.invited("carol")
        async with connected(carol.network(LOOPBACK), client_mode=True) as (transport, _):
            peer = transport.peer_id
            await made.command("revoke", peer, made.swarm, "--bootstrap", made.address)
            with pytest.raises(NotAuthorised, match="revoked"):
                await transport.died()
        with pytest.raises(NotAuthorised, match="revoked"):
            await reads(carol.network(LOOPBACK))
        await asyncio.sleep(1.0)  # lists and certificates are dated in seconds
        approved = await made.command(
            "approve", peer, made.swarm, "--role", "host", "--bootstrap", made.address
        )
        again = await asyncio.to_thread(enter, approved["invite"], tmp_path / "carol")
        assert await reads(again.network(LOOPBACK))

    run(tmp_path, scenario)


def test_after_a_key_rotation_the_owner_enters_a_running_swarm(tmp_path: Path) -> None:
    """No process has been restarted with the new file: the owner's own command brings it."""

    async def scenario(made: Group) -> None:
        bob = await made.invited("bob")
        await made.runs(bob)
        before = swarm_file.load(tmp_path / "issuer" / "swarms" / bob.file.swarm_id.hex())
        await made.command("rotate-key", made.swarm)
        dashboard = enter(made.swarm, tmp_path / "dashboard", [made.address])
        assert await reads(dashboard.network(LOOPBACK))
        for name in "issuer", "bob":
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    stored = swarm_file.load(tmp_path / name / "swarms" / bob.file.swarm_id.hex())
                    if stored.serial > before.serial:
                        break
                    await asyncio.sleep(0.1)

    run(tmp_path, scenario)


def test_a_command_enters_the_swarm_of_the_local_node_by_its_name(tmp_path: Path) -> None:
    async def scenario(made: Group) -> None:
        carol = await made.invited("carol")
        with pytest.raises(NotAuthorised, match="another peer") as refused:
            client_network("lab", (), tmp_path / "carol")
        peer = refused.value.hint.rpartition(" ")[2]
        approved = await made.command("approve", peer, made.swarm, "--bootstrap", made.address)
        entered = await asyncio.to_thread(client_network, approved["invite"], (), tmp_path / "carol")
        assert await reads(entered)
        assert await reads(client_network("lab", (), tmp_path / "carol"))
        assert carol.identity_path != entered.peer.identity_path

    run(tmp_path, scenario)


def test_a_command_enters_an_open_swarm_with_an_authority_via_a_node(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        call("swarm", "create", "lab", "--no-mdns", "--out", "lab")
        path = tmp_path / "lab" / "swarm.toml"
        path.write_text(path.read_text().replace('admission = "certificate"', 'admission = "open"'))
        call("swarm", "sign", "lab")
        address = f"/ip4/127.0.0.1/tcp/4001/p2p/{'12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq'}"
        enter("lab", tmp_path / "data", [address])
        (tmp_path / "lab").rename(tmp_path / "elsewhere")
        network = client_network("lab", (), tmp_path / "data")
        assert address in network.known
