"""The DHT of five real nodes, and the records that it refuses."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from swarmnet_protocols.directory.dht import directory
from swarmnet_protocols.directory.host_announcements import PROTOCOL, HostSample, hosts_topic
from swarmnet_protocols.directory.records import MAX_RECORD_BYTES, dht_keys
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import DHT_FIND, DHT_SAMPLE
from swarmnet_protocols.wire import records_pb2
from tests.defences import Patch, defence, patience_s
from tests.support.network.conversations import until

from .dht_peers import (
    MALLORY,
    OPEN,
    PRIVATE,
    SWARM,
    Five,
    Peer,
    RawStore,
    bodies,
    hivemind_id,
    join,
    mallorys,
    raw_store,
    rules_of,
    running_five,
)

pytestmark = pytest.mark.slow

MANIFEST = bytes(range(32))
FOREIGN_SWARM = bytes([1]) * 32


@pytest.fixture(scope="module", params=[OPEN, PRIVATE], ids=["open", "private"])
def five(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Five]:
    with running_five(tmp_path_factory.mktemp("dht"), request.param) as peers:
        yield peers


def test_every_peer_finds_the_records_of_every_peer(five: Five) -> None:
    async def scenario(peers: list[Peer]) -> None:
        for number, peer in enumerate(peers):
            await peer.directory.publish("topic", b"%d" % number, lifetime_s=60.0)
        for peer in peers:
            records = await peer.directory.lookup("topic")
            assert {record.peer_id: record.body for record in records} == {
                each.identity.peer_id: b"%d" % number for number, each in enumerate(peers)
            }

    five.run(scenario)


def test_a_new_publication_replaces_an_old_one_of_longer_life(five: Five) -> None:
    async def scenario(peers: list[Peer]) -> None:
        await peers[1].directory.publish("replace", b"old", lifetime_s=600.0)
        await peers[1].directory.publish("replace", b"new", lifetime_s=5.0)
        for peer in peers:
            assert await bodies(peer, "replace") == {b"new"}

    five.run(scenario)


def test_an_unpublished_topic_has_no_records(five: Five) -> None:
    async def scenario(peers: list[Peer]) -> None:
        assert list(await peers[2].directory.lookup("nothing")) == []

    five.run(scenario)


def test_a_publisher_fetches_nothing_and_sends_to_each_peer_once(
    five: Five, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(peers: list[Peer]) -> None:
        for peer in peers[2:]:
            await peer.directory.publish("shared", b"x", lifetime_s=60.0)
        p2p = peers[1].node.protocol.p2p
        call, answers = p2p.call_protobuf_handler, list[tuple[str, Any, Any]]()

        async def recorded(peer: Any, name: str, *rest: Any) -> Any:
            answer = await call(peer, name, *rest)
            answers.append((name.rpartition("_")[2], peer, answer))
            return answer

        monkeypatch.setattr(p2p, "call_protobuf_handler", recorded)
        await peers[1].directory.publish("shared", b"y", lifetime_s=60.0)
        found = [answer for name, _, answer in answers if name == "find"]
        assert found
        assert not any(result.value for answer in found for result in answer.results)
        others = {hivemind_id(peer) for peer in peers} - {hivemind_id(peers[1])}
        stored = {peer: list(answer.store_ok) for name, peer, answer in answers if name == "store"}
        assert stored == dict.fromkeys(others, [True] * 3)
        answers.clear()
        await peers[1].directory.publish("shared", b"z", lifetime_s=60.0)
        assert [name for name, _, _ in answers] == ["store"] * 4
        assert b"z" in await bodies(peers[2], "shared")

    five.run(scenario)


def test_a_late_joiner_and_a_client_find_records_and_publish(five: Five, tmp_path: Path) -> None:
    async def scenario(peers: list[Peer]) -> None:
        await peers[3].directory.publish("late", b"before", lifetime_s=60.0)
        bootstrap = tuple(peers[0].transport.addresses())
        async with (
            join(tmp_path / "late", bootstrap, rules=rules_of(peers)) as late,
            join(tmp_path / "client", bootstrap, client_mode=True, rules=rules_of(peers)) as client,
        ):
            assert await bodies(late, "late") == await bodies(client, "late") == {b"before"}
            await late.directory.publish("late", b"late", lifetime_s=60.0)
            await client.directory.publish("late", b"client", lifetime_s=60.0)
            assert await bodies(peers[4], "late") == {b"before", b"late", b"client"}
            assert client.identity.peer_id not in {
                str(peer_id) for peer in peers for peer_id in peer.node.protocol.routing_table.peer_id_to_uid
            }

    five.run(scenario)


def host_record(start: int, end: int, protocol: int = PROTOCOL) -> bytes:
    body = records_pb2.HostRecord(
        manifest=MANIFEST, start=start, end=end, state=records_pb2.HOST_STATE_ONLINE, protocol=protocol
    )
    return body.SerializeToString()


async def announce(peer: Peer, start: int, end: int) -> None:
    topic = hosts_topic(MANIFEST, peer.identity.peer_id)
    await peer.directory.publish(topic, host_record(start, end), lifetime_s=60.0)


def test_peers_and_clients_sample_the_hosts_of_a_model_and_of_blocks(five: Five, tmp_path: Path) -> None:
    async def scenario(peers: list[Peer]) -> None:
        for number, peer in enumerate(peers):
            await announce(peer, number, number + 2)
        bootstrap = tuple(peers[0].transport.addresses())
        async with join(tmp_path / "sampling", bootstrap, client_mode=True, rules=rules_of(peers)) as client:
            for reader in (peers[4], client):
                sample = HostSample(reader.directory, MANIFEST, random.Random(0))
                found = {each.peer: each.start for each in await sample.refresh()}
                assert found == {peer.identity.peer_id: number for number, peer in enumerate(peers)}
                topics = {hosts_topic(MANIFEST, peer.identity.peer_id) for peer in peers}
                some = await reader.directory.sample(topics, 16, blocks=(2, 3))
                assert {each.peer_id for each in some} == {peers[each].identity.peer_id for each in (1, 2)}

    five.run(scenario)


def test_a_sample_is_bounded_whatever_is_asked(five: Five, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmnet_protocols.directory.dht import node as dht_node

    monkeypatch.setattr(dht_node, "MAX_SAMPLE", 3)
    monkeypatch.setattr(dht_node, "MAX_SAMPLE_BYTES", 4000)

    async def scenario(peers: list[Peer]) -> None:
        for peer in peers:
            await peer.directory.publish("bounded", bytes(1500), lifetime_s=60.0)
        key = DHTID.generate(source=dht_keys(SWARM, "bounded")[0])
        for most, expected in ((1, 1), (1000, 2)):
            request = records_pb2.SampleRequest(keys=[key.to_bytes()], most=most)
            reply = peers[0].node.protocol.draw(request)
            assert [len(sample.records) for sample in reply.samples] == [expected]
        p2p = peers[1].node.protocol.p2p
        for keys in ([bytes(20)] * 2, [bytes(19)], [number.to_bytes(20, "big") for number in range(17)]):
            request = records_pb2.SampleRequest(keys=keys, most=1)
            with pytest.raises(SwarmnetError):
                await p2p.call_protobuf_handler(
                    hivemind_id(peers[0]), DHT_SAMPLE.id, request, records_pb2.SampleReply
                )

    from hivemind.dht.routing import DHTID

    five.run(scenario)


def test_two_groups_become_one_when_one_peer_finds_another(five: Five, tmp_path: Path) -> None:
    """Two groups that meet by mDNS: both already have peers."""

    async def scenario(peers: list[Peer]) -> None:
        rules = rules_of(peers)
        async with join(tmp_path / "first", rules=rules) as first:
            bootstrap = tuple(first.transport.addresses())
            async with join(tmp_path / "second", bootstrap, rules=rules) as second:
                await second.directory.publish("apart", b"theirs", lifetime_s=60.0)
                await peers[1].directory.publish("apart", b"ours", lifetime_s=60.0)
                assert await bodies(first, "apart") == {b"theirs"}
                assert await second.directory.join_through(peers[3].transport.addresses())
                for peer in (first, second):
                    assert await bodies(peer, "apart") == {b"ours", b"theirs"}

    five.run(scenario)


def call_no_lost_peer(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import node as dht_node

    patch.setattr(dht_node, "_LOST_AT_ONCE", 0)


@defence("the parts of a split network find each other again", off=call_no_lost_peer)
def test_two_halves_that_forgot_each_other_reunite_with_the_network(
    five: Five, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence of the other half empties the routing tables of its peers, as in a network split:
    ``tests/net/test_split.py``."""
    from swarmnet_protocols.directory.dht import node as dht_node

    async def scenario(peers: list[Peer]) -> None:
        halves = (peers[:2], peers[2:])
        for here, there in (halves, halves[::-1]):
            for peer in here:
                for other in map(hivemind_id, there):
                    await peer.node.protocol.update_routing_table(None, other, responded=False)
                    peer.node.blacklist.register_failure(other)
                    assert peer.node.protocol.routing_table.get(peer_id=other) is None
                    assert other in peer.node.blacklist
        # in the second run, too: calls that end with the loop would leave their sockets
        async with asyncio.timeout(10.0):
            while any(  # noqa: ASYNC110 - routing tables have no event
                peer.node.protocol.routing_table.get(peer_id=hivemind_id(other)) is None
                or hivemind_id(other) in peer.node.blacklist
                for peer in peers
                for other in peers
                if other is not peer
            ):
                await asyncio.sleep(0.1)

    monkeypatch.setattr(dht_node, "_LOST_PERIOD_S", 0.2)
    five.run(scenario)


def call_no_absent_peer(patch: Patch) -> None:
    patch.setattr(directory.DhtDirectory, "_find_another_half", lambda _: asyncio.Event().wait())


@defence("halves of a swarm that began apart find each other", off=call_no_absent_peer)
def test_two_halves_that_began_apart_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both bootstrap peers began alone, and each has admitted a member since."""

    async def main() -> None:
        async with join(tmp_path / "0") as one, join(tmp_path / "1") as two:
            first, second = one.transport.addresses(), two.transport.addresses()
            async with (
                join(tmp_path / "2", tuple(first)) as here,
                join(tmp_path / "3", tuple(second)) as there,
            ):
                await there.directory.publish("topic", b"x", lifetime_s=60.0)
                assert await bodies(here, "topic") == set()
                one.directory._bootstrap = lambda: second
                async with asyncio.timeout(patience_s(20.0)):
                    while await bodies(here, "topic") != {b"x"}:  # noqa: ASYNC110 - a DHT has no event
                        await asyncio.sleep(0.1)

    monkeypatch.setattr(directory, "_APART_S", 0.1)
    asyncio.run(main())


def tampered(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


def forgeries() -> dict[str, RawStore]:
    good = RawStore.of(mallorys())
    return {
        "signature": replace(good, sealed=tampered(good.sealed)),
        "swarm": RawStore.of(mallorys(swarm=FOREIGN_SWARM)),
        "swarm under our key": replace(RawStore.of(mallorys(swarm=FOREIGN_SWARM)), key=good.key),
        "key": replace(good, key=dht_keys(SWARM, "another topic")[0]),
        "signer": replace(good, subkey=Identity.from_seed(b"another").public_key),
        "no signer": replace(good, subkey=None),
        "lifetime": replace(good, expires_at=good.expires_at + 60),
        "far future": RawStore.of(mallorys(expires_at=round(wall_clock() + 48 * 3600, 3))),
        "size": replace(good, sealed=bytes(MAX_RECORD_BYTES + 1)),
        "a number": replace(good, sealed=5),  # type: ignore[arg-type]
        "a list": replace(good, sealed=[1, 2, 3]),  # type: ignore[arg-type]
    }


def test_an_honest_raw_store_is_accepted(five: Five) -> None:
    async def scenario(peers: list[Peer]) -> None:
        store = RawStore.of(mallorys(topic="honest"))
        assert await raw_store(peers[0], peers[1], store) == [True]
        assert await bodies(peers[2], "honest") == {b"evil"}

    five.run(scenario)


def test_a_private_swarm_neither_stores_nor_reads_strangers_records(
    five: Five, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(peers: list[Peer]) -> None:
        from hivemind.dht.routing import DHTID

        is_open = rules_of(peers) is OPEN
        store = RawStore.of(mallorys(topic="stranger", certificate=b""))
        assert await raw_store(peers[0], peers[1], store) == [is_open]
        entry = store.subkey, msgpack.packb(store.sealed), store.expires_at
        forged = {DHTID.generate(source=key): [entry] for key in dht_keys(SWARM, "stranger")}
        for liar in peers:  # members that store it all the same
            monkeypatch.setattr(liar.node.protocol, "storage", Lies(liar.node.protocol.storage, forged))
        bootstrap = tuple(peers[0].transport.addresses())
        async with join(tmp_path / "reader", bootstrap, client_mode=True, rules=rules_of(peers)) as reader:
            assert await bodies(reader, "stranger") == ({b"evil"} if is_open else set())

    five.run(scenario)


@pytest.mark.parametrize("name", forgeries())
def test_a_forged_record_is_refused_on_store(five: Five, name: str) -> None:
    async def scenario(peers: list[Peer]) -> None:
        before = peers[1].node.protocol.storage.total_bytes
        assert await raw_store(peers[0], peers[1], forgeries()[name]) == [False]
        assert peers[1].node.protocol.storage.total_bytes == before

    five.run(scenario)


class Lies:
    """A storage that answers with forged records next to the honest ones."""

    def __init__(self, honest: Any, forged: dict[Any, list[tuple[Any, bytes, float]]]) -> None:
        self._honest = honest
        self._forged = forged

    def get(self, key: Any) -> Any:
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.utils.timed_storage import ValueWithExpiration

        found = self._honest.get(key)
        dictionary = found.value if found else DictionaryDHTValue()
        for subkey, value, expires_at in self._forged.get(key, []):
            dictionary.store(subkey, value, expires_at)
        return ValueWithExpiration(dictionary, wall_clock() + 60) if dictionary else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


def test_forged_records_are_dropped_on_read_and_do_not_hide_good_ones(
    five: Five, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(peers: list[Peer]) -> None:
        from hivemind.dht.routing import DHTID

        await peers[3].directory.publish("target", b"good", lifetime_s=60.0)
        forged: dict[Any, list[tuple[Any, bytes, float]]] = {}
        for number, store in enumerate(forgeries().values()):
            for key in dht_keys(SWARM, "target"):
                entry = (store.subkey or bytes([number]), msgpack.packb(store.sealed), store.expires_at)
                forged.setdefault(DHTID.generate(source=key), []).append(entry)
        for liar in peers:
            monkeypatch.setattr(liar.node.protocol, "storage", Lies(liar.node.protocol.storage, forged))
        bootstrap = tuple(peers[0].transport.addresses())
        async with join(tmp_path / "reader", bootstrap, client_mode=True, rules=rules_of(peers)) as reader:
            assert await bodies(reader, "target") == {b"good"}

    five.run(scenario)


def test_a_node_with_a_false_node_id_is_not_used(five: Five, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(peers: list[Peer]) -> None:
        from hivemind.dht.routing import DHTID
        from hivemind.proto import dht_pb2

        liar, victim = peers[1], peers[2]
        wanted = DHTID.generate(source=dht_keys(SWARM, "censored")[0])
        honest_id = victim.node.protocol.routing_table.get(peer_id=hivemind_id(liar))
        monkeypatch.setattr(liar.node.protocol, "node_info", dht_pb2.NodeInfo(node_id=wanted.to_bytes()))
        await liar.node.protocol.call_ping(hivemind_id(victim))
        await victim.node.protocol.call_ping(hivemind_id(liar))
        await asyncio.sleep(0)
        assert wanted not in victim.node.protocol.routing_table
        assert victim.node.protocol.routing_table.get(peer_id=hivemind_id(liar)) == honest_id
        assert victim.node._filter_blacklisted({wanted: hivemind_id(liar)}) == {}

    five.run(scenario)


def test_lookups_go_on_when_the_only_bootstrap_peer_is_dead(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            bootstrap_stack = contextlib.AsyncExitStack()
            first = await bootstrap_stack.enter_async_context(join(tmp_path / "0"))
            bootstrap = tuple(first.transport.addresses())
            peers = [
                await stack.enter_async_context(join(tmp_path / str(number), bootstrap))
                for number in (1, 2, 3)
            ]
            await peers[0].directory.publish("before", b"x", lifetime_s=60.0)
            first.transport._daemon.process.kill()
            await first.transport._daemon.process.wait()
            await peers[1].directory.publish("after", b"y", lifetime_s=60.0)
            for peer in peers:
                assert await bodies(peer, "before") == {b"x"}
                assert await bodies(peer, "after") == {b"y"}
            # A newcomer needs one live peer, whichever it is.
            through = (*bootstrap, *peers[2].transport.addresses())
            async with join(tmp_path / "new", through) as newcomer:
                assert await bodies(newcomer, "before") == {b"x"}
            await bootstrap_stack.aclose()

    asyncio.run(main())


def test_a_dead_bootstrap_peer_is_named_once_and_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with join(tmp_path / "0") as first:
            bootstrap = tuple(first.transport.addresses())[:1]
        async with join(tmp_path / "1", bootstrap) as alone:
            for _ in range(2):
                assert await bodies(alone, "anything") == set()

    asyncio.run(main())
    (said,) = [
        each.getMessage()
        for each in caplog.records
        if each.name == "swarmnet_protocols.directory.dht.directory"
    ]
    assert "does not answer" in said
    assert "\n" not in said


def test_a_cancelled_lookup_leaves_no_task_behind(five: Five, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(peers: list[Peer]) -> None:
        from swarmnet_protocols.directory.dht.node import SwarmDirectoryV1

        async def late(*_: object) -> None:
            await asyncio.sleep(1.0)

        before = asyncio.all_tasks()
        with monkeypatch.context() as slow:
            slow.setattr(SwarmDirectoryV1, "call_find", late)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await peers[1].directory.lookup("anything")
        await until(lambda: not peers[1].node._searches, within_s=10.0)
        await asyncio.sleep(0.1)
        left = [str(task.get_coro()) for task in asyncio.all_tasks() - before]
        assert not [each for each in left if "Event.wait" in each or "worker" in each]

    five.run(scenario)


def test_hivemind_does_not_write_to_the_terminal(five: Five, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(peers: list[Peer]) -> None:
        await peers[0].node.protocol.call_ping(type(hivemind_id(peers[0])).from_base58(MALLORY.peer_id))

    five.run(scenario)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def fill(peer: Peer, keys: int) -> list[bytes]:
    """Records of strangers under ``keys`` keys, up to the limit of each, put into the storage of
    ``peer``."""
    from hivemind.dht.routing import DHTID

    storage, expires_at = peer.node.protocol.storage, wall_clock() + 600
    made = [DHTID.generate(source=b"full %d" % number) for number in range(keys)]
    for key in made:
        for signer in range(200):
            value = msgpack.packb(bytes(10_000))
            with storage.stored_by(peer.transport.resources.peer(f"{key}-{signer}", 0.0), f"{signer % 50}"):
                storage.store_subkey(key, b"%d" % signer, value, expires_at)
    return [key.to_bytes() for key in made]


def test_a_small_call_has_no_large_answer_and_leaves_no_state(five: Five) -> None:
    from hivemind.proto import dht_pb2

    from swarmnet_protocols.directory.dht.node import MAX_ANSWER_BYTES

    async def scenario(peers: list[Peer]) -> None:
        victim, caller = peers[0], peers[1]
        keys = fill(victim, 16)
        call = caller.node.protocol.p2p.call_protobuf_handler

        async def find(asked: list[bytes]) -> Any:
            request = dht_pb2.FindRequest(
                keys=asked, peer=dht_pb2.NodeInfo(node_id=caller.node.node_id.to_bytes())
            )
            return await call(hivemind_id(victim), DHT_FIND.id, request, dht_pb2.FindResponse)

        for too_many in ([keys[0]] * 200, [keys[0]] * 2, [bytes([n]) * 20 for n in range(17)]):
            with pytest.raises(SwarmnetError):
                await find(too_many)
        answer = await find(keys)
        assert len(answer.results) == 16
        assert 1 << 20 < answer.ByteSize() < MAX_ANSWER_BYTES + (64 << 10)
        assert any(not result.value for result in answer.results)
        used = victim.transport.resources.system.used
        assert used[Resource.CALLS] == 0
        assert used[Resource.MEMORY] < 1 << 20

    five.run(scenario)


def test_a_peer_that_nobody_can_dial_is_in_no_table_and_may_publish(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            join(tmp_path / "server") as server,
            join(tmp_path / "hidden", tuple(server.transport.addresses()), is_reachable=False) as hidden,
        ):
            await hidden.directory.publish("topic", b"body", lifetime_s=60)
            assert [record.body for record in await server.directory.lookup("topic")] == [b"body"]
            table = server.directory._node.protocol.routing_table.uid_to_peer_id
            assert not table
            hidden.directory.set_reachable(True)
            await hidden.directory.lookup("topic")
            assert [str(peer) for peer in table.values()] == [hidden.identity.peer_id]

    asyncio.run(main())
