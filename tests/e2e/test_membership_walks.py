"""What members and owners of a private swarm do over months, over real connections: return, come
back after a revocation, rotate the key."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet import swarm_file
from swarmnet.swarm_file.entry import Entry, client_network, enter
from swarmnet.swarm_file.known_peers import read_known_peers
from swarmnet.swarm_file.local_peer import LocalPeer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import NotAuthorised, Unreachable
from swarmnet_protocols.joining import own_key
from swarmnet_protocols.joining.network import LOOPBACK, Network, connect
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net import Transport
from swarmnet_protocols.net.identity import Identity
from tests.defences import patience_s
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
    directory: Directory | None = None
    """The directory as the issuer sees it."""

    @property
    def swarm(self) -> str:
        return str(self.folder / "lab")

    async def publish(self) -> None:
        assert self.directory is not None
        await self.directory.publish(TOPIC, b"here", lifetime_s=600)

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
        if not made.folder.joinpath("lab").exists():
            await made.command("create", "lab", "--no-mdns", "--out", made.swarm)
        entry = enter(made.swarm, folder / "issuer")
        network = entry.network(LOOPBACK, issuer=folder / "lab" / "authority.key")
        issuer, directory = await stack.enter_async_context(connected(network))
        made.address = issuer.addresses()[0]
        made.directory = directory
        await made.publish()
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


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something has happened. Refusals are answers, too: not yet."""
    async with asyncio.timeout(patience_s(DEADLINE_S)):
        while True:
            with contextlib.suppress(NotAuthorised, Unreachable):
                if await happened():
                    return
            await asyncio.sleep(0.1)


async def serial_is(folder: Path, serial: int) -> bool:
    """Whether the stored swarm file of a peer has this serial."""
    (path,) = (folder / "swarms").glob("*/swarm.toml")
    return swarm_file.load(path).serial == serial


def set_clocks(patch: pytest.MonkeyPatch, *, days: int) -> None:
    """Set the clock of every peer of this process some days later."""

    def later() -> float:
        return wall_clock() + days * 24 * 3600

    for module in list(sys.modules.values()):
        if module.__name__ != __name__ and vars(module).get("wall_clock") is wall_clock:
            patch.setattr(module, "wall_clock", later)


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
    """The invite has one use, and the role host alone."""

    async def scenario(made: Group) -> None:
        carol = await made.invited("carol")
        client = await asyncio.to_thread(client_network, "lab", (), tmp_path / "carol")
        assert await reads(client)
        assert carol.peer.identity_path != client.peer.identity_path
        (member,) = (await made.command("members", made.swarm, "--data-dir", str(tmp_path / "issuer")))[
            "members"
        ]
        assert member["client"] == Identity.load_or_create(client.peer.identity_path).peer_id

    run(tmp_path, scenario)


def test_a_node_enters_by_the_invite_that_a_command_redeemed(tmp_path: Path) -> None:
    async def scenario(made: Group) -> None:
        invite = (await made.command("invite", made.swarm, "--role", "host", "--bootstrap", made.address))[
            "invite"
        ]
        client = await asyncio.to_thread(client_network, invite, (), tmp_path / "carol")
        assert await reads(client)
        for again in (invite, "lab"):
            node = await asyncio.to_thread(enter, again, tmp_path / "carol")
            assert await reads(node.network(LOOPBACK))

    run(tmp_path, scenario)


def test_a_member_on_a_list_that_is_approved_again_is_a_member(tmp_path: Path) -> None:
    """It has no certificate that is newer than its list."""

    async def scenario(made: Group) -> None:
        path = tmp_path / "lab" / "swarm.toml"
        path.write_text(path.read_text().replace('admission = "certificate"', 'admission = "allow-list"'))
        await made.command("sign", made.swarm, "--bootstrap", made.address)
        peer = LocalPeer(tmp_path / "carol").peer_id
        await made.command("approve", peer, made.swarm, "--role", "host")
        shutil.copytree(tmp_path / "lab", tmp_path / "given")
        (tmp_path / "given" / "authority.key").unlink()
        carol = await asyncio.to_thread(enter, str(tmp_path / "given"), tmp_path / "carol")
        await until(lambda: reads(carol.network(LOOPBACK)))
        async with connected(carol.network(LOOPBACK), client_mode=True) as (transport, _):
            await made.command("revoke", peer, made.swarm, "--bootstrap", made.address)
            with pytest.raises(NotAuthorised):
                await transport.died()
        await made.command("approve", peer, made.swarm, "--role", "host", "--bootstrap", made.address)
        shutil.copy(path, tmp_path / "given")
        again = await asyncio.to_thread(enter, str(tmp_path / "given"), tmp_path / "carol")
        await until(lambda: reads(again.network(LOOPBACK)))

    run(tmp_path, scenario)


def test_a_running_issuer_hands_out_what_the_owner_signs(tmp_path: Path) -> None:
    async def scenario(made: Group) -> None:
        issuer_key = tmp_path / "other.key"
        public = (await made.command("new-key", str(issuer_key)))["public_key"]
        path = tmp_path / "lab" / "swarm.toml"
        path.write_text(path.read_text().replace("issuers = []", f'issuers = ["{public}"]'))
        signed = await made.command("sign", made.swarm, "--bootstrap", made.address)
        await until(lambda: serial_is(tmp_path / "issuer", signed["serial"]))
        invite = (await made.command("invite", made.swarm, "--key", str(issuer_key)))["invite"]
        carol = await asyncio.to_thread(enter, invite, tmp_path / "carol")
        assert carol.file.bootstrap == (made.address,)

    run(tmp_path, scenario)


@pytest.mark.parametrize("overlap", ["7d", "now"])
def test_the_owner_rotates_the_key_while_everything_runs(tmp_path: Path, overlap: str) -> None:
    async def scenario(made: Group) -> None:
        await made.runs(await made.invited("bob"))
        dashboard = await asyncio.to_thread(
            enter, made.swarm, tmp_path / "owner", [made.address], as_client=True
        )
        async with connected(dashboard.network(LOOPBACK), client_mode=True) as (_, directory):
            rotated = await made.command("rotate-key", made.swarm, "--overlap", overlap)
            await until(lambda: serial_is(tmp_path / "issuer", rotated["serial"]))
            await until(lambda: serial_is(tmp_path / "owner" / "client", rotated["serial"]))
            # A record carries the certificate that its signer had then.
            await made.publish()
            assert [record.body for record in await directory.lookup(TOPIC)] == [b"here"]
        carol = await made.invited("carol")
        assert await reads(carol.network(LOOPBACK))
        again = await asyncio.to_thread(enter, made.swarm, tmp_path / "owner", as_client=True)
        assert await reads(again.network(LOOPBACK))

    run(tmp_path, scenario)


def test_a_member_returns_after_a_week_though_addresses_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate and its invite have ended, and the issuer has another address. Bob, whom it
    met, is where he was."""
    bob_listens = list[str]()

    async def before(made: Group) -> None:
        carol, bob = await made.invited("carol"), await made.invited("bob")
        bobs, _ = await made.runs(bob)
        bob_listens.append(bobs.addresses()[0].partition("/p2p/")[0])
        assert await reads(carol.network(LOOPBACK))

    async def after(made: Group) -> None:
        bob = await asyncio.to_thread(enter, "lab", tmp_path / "bob", [made.address])
        await made.stack.enter_async_context(connected(bob.network(bob_listens)))
        carol = await asyncio.to_thread(enter, "lab", tmp_path / "carol")
        assert made.address not in carol.addresses
        assert await reads(carol.network(LOOPBACK))

    run(tmp_path, before)
    set_clocks(monkeypatch, days=8)
    run(tmp_path, after)


def test_the_owner_sees_the_names_of_running_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_key, "SEEN_S", 0.1)

    async def scenario(made: Group) -> None:
        carol = await made.invited("carol")
        named = replace(carol.network(LOOPBACK), name="carol's laptop")
        await made.stack.enter_async_context(connected(named))

        async def is_listed() -> bool:
            listed = await made.command("members", made.swarm, "--data-dir", str(tmp_path / "issuer"))
            return [each["name"] for each in listed["members"]] == ["carol's laptop"]

        await until(is_listed)

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
