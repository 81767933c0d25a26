"""Records of mDNS: the announcements of a peer in its local network, and the addresses that it
accepts from others."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf._dns import DNSPointer, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing

from swarmnet_protocols.joining import local_network, mdns_record
from swarmnet_protocols.joining.local_network import (
    MAX_FOUND,
    MAX_PACKETS,
    SERVICE,
    SOURCE_PACKETS,
    LocalNetwork,
    _Ear,
)
from swarmnet_protocols.joining.mdns_record import (
    MAX_ANNOUNCED,
    MAX_RECORD_BYTES,
    make_record,
    read_record,
)
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import LOOPBACK_NETWORKS
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.multiaddr import peer_in
from tests.defences import defence, nothing, replacing, yes
from tests.support.network.virtual_time import run

SWARM, OTHER = b"s" * 32, b"o" * 32
PEER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
RELAY = PeerId("12D3KooWHK9BjDQBUqnavciRPhAYFvqKBe4ZiPPvde7vDaqgn5er")
LAN = (ipaddress.ip_network("192.168.7.0/24"),)
ETHERNET = ("192.168.7.20", "255.255.255.0")
LOOPBACK = ("127.0.0.1", "255.0.0.0")
TCP = f"/ip4/192.168.7.5/tcp/4001/p2p/{PEER}"
QUIC = f"/ip4/192.168.7.5/udp/4001/quic-v1/p2p/{PEER}"


def strings_of(record: bytes) -> list[bytes]:
    found = []
    while record:
        found.append(record[1 : 1 + record[0]])
        record = record[1 + record[0] :]
    return found


def txt(*strings: bytes) -> bytes:
    return b"".join(bytes([len(each)]) + each for each in strings)


# ---- records -----------------------------------------------------------------------------------


def test_a_peer_of_the_swarm_reads_the_addresses_of_a_record() -> None:
    assert read_record(SWARM, make_record(SWARM, [TCP, QUIC]), LAN) == (TCP, QUIC)


def test_a_record_of_another_swarm_is_ignored() -> None:
    assert read_record(SWARM, make_record(OTHER, [TCP]), LAN) == ()


@defence("the announcement of a swarm is salted", off=replacing(mdns_record.secrets, "token_bytes", bytes))
def test_no_two_records_have_a_common_mark_of_the_swarm() -> None:
    """An outsider who collects records cannot tell which swarms they are of."""
    first, second = (strings_of(make_record(SWARM, [TCP]))[0] for _ in range(2))
    assert not {first[at : at + 16] for at in range(6, len(first) - 15)} & {
        second[at : at + 16] for at in range(6, len(second) - 15)
    }
    assert SWARM not in first
    assert SWARM.hex().encode() not in first


@defence(
    "only a peer that knows the swarm announces addresses for it", off=replacing(mdns_record, "_is_of", yes)
)
def test_a_copied_hash_admits_no_other_addresses() -> None:
    """An outsider can repeat a record, and with it an address of a member, but not announce
    addresses of its own."""
    copied = strings_of(make_record(SWARM, [TCP]))[0]
    forged = txt(copied, f"dnsaddr=/ip4/192.168.7.66/tcp/1/p2p/{PEER}".encode())
    assert read_record(SWARM, forged, LAN) == ()


@defence(
    "only addresses in the local network are taken from it",
    off=replacing(mdns_record, "is_local", yes),
    address="/ip4/93.184.216.34/tcp/4001",
)
@defence(
    "addresses in the local network are checked before they are dialled",
    off=replacing(mdns_record, "dialable", lambda _peer, addresses, _networks: tuple(addresses)),
    address="/ip4/192.168.7.5/tcp/0",
)
@pytest.mark.parametrize(
    "address",
    [
        "/ip4/93.184.216.34/tcp/4001",
        "/ip4/192.168.8.5/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/169.254.1.1/tcp/4001",
        "/ip4/224.0.0.251/tcp/4001",
        "/dns4/router.lan/tcp/4001",
        f"/ip4/192.168.7.5/tcp/4001/p2p/{RELAY}/p2p-circuit",
        "/ip4/192.168.7.5/tcp/0",
        "/ip4/192.168.7.5",
    ],
)
def test_an_address_outside_the_local_network_is_ignored(address: str) -> None:
    assert read_record(SWARM, make_record(SWARM, [f"{address}/p2p/{PEER}", TCP]), LAN) == (TCP,)


def test_a_record_with_two_peers_is_ignored() -> None:
    other = TCP.replace(PEER, RELAY)
    assert read_record(SWARM, make_record(SWARM, [TCP, other]), LAN) == ()


@defence(
    "records of the local network have a largest size",
    off=replacing(mdns_record, "MAX_RECORD_BYTES", 1 << 20),
)
def test_a_record_that_is_too_large_is_ignored() -> None:
    padding = txt(*[b"x" * 255] * (MAX_RECORD_BYTES // 255 + 1))
    assert read_record(SWARM, make_record(SWARM, [TCP]) + padding, LAN) == ()


def test_a_peer_with_many_or_long_addresses_announces_as_many_as_fit() -> None:
    many = [
        f"/ip6/fd00:1111:2222:3333:4444:5555:6666:{each:x}/udp/65535/quic-v1/p2p/{PEER}"
        for each in range(1, 40)
    ]
    record = make_record(SWARM, ["/dns4/" + "a" * 300 + f"/tcp/1/p2p/{PEER}", *many])
    assert len(record) <= MAX_RECORD_BYTES
    networks = (ipaddress.ip_network("fd00::/8"),)
    assert read_record(SWARM, record, networks) == tuple(many[:MAX_ANNOUNCED])


@given(st.binary(max_size=1500) | st.lists(st.binary(max_size=255), max_size=8).map(lambda each: txt(*each)))
def test_a_malformed_record_is_ignored(record: bytes) -> None:
    assert read_record(SWARM, record, LAN) == ()


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_damaged_record_is_ignored(at: int, bits: int) -> None:
    record = bytearray(make_record(SWARM, [TCP, QUIC]))
    record[at % len(record)] ^= bits
    assert read_record(SWARM, bytes(record), LAN) == ()


def test_a_record_with_hex_digits_in_capitals_is_ignored() -> None:
    """Each record has one form: a changed one is never taken for a copy."""
    record = make_record(SWARM, [TCP])
    hashed = record[1 + len("swarm=") : 1 + record[0]]
    assert hashed != hashed.upper()
    assert read_record(SWARM, record.replace(hashed, hashed.upper()), LAN) == ()
    salt = hashed[:32]
    # all digits of a random salt are decimal once in three million records
    if salt != salt.upper():
        assert read_record(SWARM, record.replace(salt, salt.upper()), LAN) == ()


# ---- who is found ------------------------------------------------------------------------------


def found_peer(number: int) -> str:
    return f"/ip4/192.168.7.5/tcp/{1 + number}/p2p/{Identity.from_seed(str(number).encode()).peer_id}"


@defence(
    "a bounded number of peers is remembered from the local network",
    off=replacing(local_network, "MAX_FOUND", 1 << 20),
)
def test_the_peers_that_are_remembered_are_bounded() -> None:
    local = LocalNetwork(SWARM)
    for number in range(2 * MAX_FOUND):
        local._remember(f"instance {number}", (found_peer(number),))
    assert local.addresses() == [found_peer(number) for number in range(MAX_FOUND)]
    local._forget("instance 0")
    assert local._remember("instance 1000", (found_peer(1000),))


def test_copies_of_a_record_under_other_names_take_no_place_of_a_peer() -> None:
    local = LocalNetwork(SWARM)
    for number in range(2 * MAX_FOUND):
        assert local._remember(f"copy {number}", (found_peer(1),)) == (number == 0)
    assert local._remember("instance", (found_peer(2),))
    assert local.addresses() == [found_peer(1), found_peer(2)]


@defence(
    "a bounded number of peers from the local network is joined through at once",
    off=replacing(local_network, "MAX_FOUND", 1 << 20),
)
def test_the_peers_that_are_joined_through_at_once_are_bounded() -> None:
    async def main() -> None:
        local, end = LocalNetwork(SWARM), asyncio.Event()
        started: list[int] = []

        async def join(_: Sequence[str]) -> bool:
            started.append(1)
            await end.wait()
            return True

        for number in range(2 * MAX_FOUND):
            peer = peer_in(found_peer(number))
            local._found[peer] = {"instance": (found_peer(number),)}
            local._start_meeting(peer, join)
        await asyncio.sleep(0)
        assert len(started) == MAX_FOUND
        end.set()
        await asyncio.gather(*local._meeting.values())
        await asyncio.sleep(0)
        local._start_meeting(peer_in(found_peer(2 * MAX_FOUND - 1)), join)
        await asyncio.sleep(0)
        assert len(started) == MAX_FOUND + 1

    asyncio.run(main())


class Heard(asyncio.DatagramProtocol):
    """What reaches zeroconf."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.packets.append(data)


def answer(*names: str, record: bytes = b"", ttl: int = 4500, others: int = 0) -> bytes:
    """An mDNS answer with instances of the service; the first has a TXT record."""
    packet = DNSOutgoing(0x8400)
    for name in names:
        packet.add_answer_at_time(DNSPointer(SERVICE, 12, 1, ttl, f"{name}.{SERVICE}"), 0)
    if record:
        packet.add_answer_at_time(DNSText(f"{names[0]}.{SERVICE}", 16, 1, ttl, record), 0)
    for number in range(others):
        packet.add_answer_at_time(DNSPointer(SERVICE, 12, 1, ttl, f"other {number}.{SERVICE}"), 0)
    return packet.packets()[0]


def ear(hear: Callable[[bytes], bool]) -> tuple[Heard, _Ear]:
    sources = ResourceManager()
    sources.limit_rate(Rate.FRAMES, system=MAX_PACKETS, per_peer=SOURCE_PACKETS)
    heard = Heard()
    return heard, _Ear(heard, sources, lambda text: hear(text.text))


@defence(
    "answers of others in the local network are not kept",
    off=replacing(local_network._Ear, "_is_wanted", yes),
)
@defence("answers with many records are not kept", off=replacing(local_network, "MAX_RECORDS", 1 << 20))
def test_answers_without_a_record_of_the_swarm_leave_no_trace() -> None:
    async def main() -> None:
        mine = make_record(SWARM, [TCP])
        heard, listening = ear(lambda record: bool(read_record(SWARM, record, LAN)))
        source = ("192.168.7.5", 5353)
        listening.datagram_received(answer("a", "b", "c"), source)
        listening.datagram_received(answer("a", record=make_record(OTHER, [TCP])), source)
        listening.datagram_received(answer("a", record=mine, others=60), source)
        listening.datagram_received(b"nonsense", source)
        assert heard.packets == []
        good = answer("a", record=mine)
        listening.datagram_received(good, source)
        assert heard.packets == [good]

    run(main())


@defence(
    "packets of one machine in the local network are read at a limited rate",
    off=replacing(local_network.ResourceManager, "limit_rate", nothing),
)
def test_a_machine_that_floods_the_local_network_is_not_read() -> None:
    async def main() -> None:
        heard, listening = ear(lambda _: True)
        packet = answer("a", record=make_record(SWARM, [TCP]))
        for _ in range(10):
            for _ in range(500):
                listening.datagram_received(packet, ("192.168.7.66", 5353))
            await asyncio.sleep(1.0)
        assert len(heard.packets) <= SOURCE_PACKETS.burst + 10 * SOURCE_PACKETS.per_s
        before = len(heard.packets)
        listening.datagram_received(packet, ("192.168.7.5", 5353))
        assert len(heard.packets) == before + 1

    run(main())


def test_a_peer_does_not_find_itself() -> None:
    local = LocalNetwork(SWARM, own=lambda: [TCP])
    assert not local._remember("earlier instance", (QUIC,))
    assert local.addresses() == []


# ---- where this machine is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interfaces", "listen", "spoken", "announced"),
    [
        ([LOOPBACK, ETHERNET], "/ip4/0.0.0.0/tcp/0", ("192.168.7.20",), (TCP,)),
        (
            [LOOPBACK, ETHERNET, ("93.184.216.34", "255.255.255.0")],
            "/ip4/0.0.0.0/tcp/0",
            ("192.168.7.20",),
            (TCP,),
        ),
        ([LOOPBACK, ("93.184.216.34", "255.255.255.0")], "/ip4/0.0.0.0/tcp/0", (), ()),
        ([LOOPBACK], "/ip4/0.0.0.0/tcp/0", ("127.0.0.1",), ("loopback",)),
        ([LOOPBACK, ETHERNET], "/ip4/127.0.0.1/tcp/0", ("127.0.0.1",), ("loopback",)),
    ],
    ids=["at home", "also public", "public only", "offline", "on loopback only"],
)
def test_private_addresses_are_announced_on_private_interfaces(
    interfaces: list[tuple[str, str]],
    listen: str,
    spoken: tuple[str, ...],
    announced: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loopback only if the whole swarm is on it, and public addresses never."""
    monkeypatch.setattr(local_network, "own_interfaces", lambda: interfaces)
    loopback = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
    own = [
        TCP,
        loopback,
        f"/ip4/93.184.216.34/tcp/4001/p2p/{PEER}",
        f"/ip4/192.168.7.9/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ]
    place = LocalNetwork(SWARM, listen=[listen], own=lambda: own)._place()
    assert place.interfaces == spoken
    assert place.announced == tuple(loopback if each == "loopback" else each for each in announced)
    assert (LOOPBACK_NETWORKS[0] in place.networks) == ("loopback" in announced)


def test_a_peer_that_is_not_dialled_announces_nothing() -> None:
    assert LocalNetwork(SWARM)._place().announced == ()
