"""The addresses of other peers that are dialled."""

import ipaddress
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId, dialling
from swarmnet_protocols.net.dialling import (
    LOOPBACK_NETWORKS,
    MAX_DIALLED,
    Network,
    dialable,
    ip_of,
    own_interfaces,
    shared_networks,
)
from tests.defences import Patch, defence, replacing, yes

PEER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
RELAY = PeerId("12D3KooWHK9BjDQBUqnavciRPhAYFvqKBe4ZiPPvde7vDaqgn5er")
LAN = (ipaddress.ip_network("192.168.7.0/24"),)
ETHERNET = ("192.168.7.20", "255.255.255.0")
LOOPBACK = [("127.0.0.1", "255.0.0.0"), ("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")]

ips = st.one_of(
    st.ip_addresses(),
    st.sampled_from(
        ["10.0.0.0/8", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8", "fe80::/10", "fc00::/7"]
    ).flatmap(lambda network: st.ip_addresses(network=network)),
    st.ip_addresses(v=4).map(lambda ip: ipaddress.ip_address(f"::ffff:{ip}")),
)
ports = st.integers(-1, 1 << 17).map(str) | st.text(max_size=3)
multiaddrs = st.builds(
    lambda ip, tail: f"/ip{ip.version}/{ip}/{tail}",
    ips,
    st.one_of(
        ports.map(lambda port: f"tcp/{port}"),
        ports.map(lambda port: f"udp/{port}/quic-v1"),
        st.just(f"tcp/1/p2p/{RELAY}/p2p-circuit"),
        st.text(max_size=20),
    ),
)
networks = st.lists(
    st.builds(
        lambda ip, cut: ipaddress.ip_network((ip, ip.max_prefixlen - cut), strict=False),
        ips,
        st.integers(0, 24),
    ),
    max_size=3,
)


@given(st.lists(multiaddrs | st.text(), max_size=30), networks)
def test_every_dial_goes_to_a_public_address_or_into_a_shared_network(
    addresses: list[str], shared: list[Network]
) -> None:
    dialled = dialable(PEER, addresses, shared)
    assert len(dialled) <= MAX_DIALLED
    assert len(set(dialled)) == len(dialled)
    for address in dialled:
        ip = ip_of(address)
        assert ip is not None
        assert any(ip == ip_of(each) for each in addresses)
        is_public = ip.is_global and not ip.is_multicast
        assert is_public or any(ip in network for network in shared)
        assert not address.endswith(PEER)


@defence(
    "few addresses of each peer are dialled",
    off=replacing(dialling, "MAX_DIALLED", 1000),
    found=[ipaddress.IPv4Address(f"93.184.216.{last}") for last in range(20)],
)
@given(st.lists(ips, min_size=1, max_size=20, unique=True))
def test_only_the_first_few_addresses_are_dialled(found: list[ipaddress.IPv4Address]) -> None:
    addresses = [f"/ip{ip.version}/{ip}/tcp/4001" for ip in found]
    everywhere = tuple(ipaddress.ip_network(each) for each in ("0.0.0.0/0", "::/0"))
    assert dialable(PEER, addresses, everywhere) == tuple(addresses[:MAX_DIALLED])


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/93.184.216.34/tcp/4001",
        "/ip4/93.184.216.34/udp/4001/quic-v1",
        "/ip6/2606:4700::1111/tcp/4001",
        "/ip4/192.168.7.9/tcp/4001",
        f"/ip4/93.184.216.34/tcp/4001/p2p/{RELAY}/p2p-circuit",
    ],
)
def test_public_and_shared_addresses_are_dialled(address: str) -> None:
    assert dialable(PEER, [address], LAN) == dialable(PEER, [f"{address}/p2p/{PEER}"], LAN) == (address,)


@defence(
    "addresses of private networks are dialled only in shared ones",
    off=replacing(dialling, "_may_dial", yes),
    address="/ip4/10.0.0.1/tcp/4001",
)
@defence(
    "an IPv4 address inside an IPv6 address is checked too",
    off=replacing(dialling, "_CARRIES_IPV4", ()),
    address="/ip6/64:ff9b::a00:1/tcp/4001",
)
@pytest.mark.parametrize(
    "address",
    [
        "",
        "/dns4/localhost/tcp/4001",
        "/dns/example.org/tcp/4001",
        "/dnsaddr/example.org",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/10.0.0.1/tcp/4001",
        "/ip4/192.168.8.9/tcp/4001",
        "/ip4/169.254.169.254/tcp/80",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/255.255.255.255/tcp/4001",
        "/ip4/224.0.0.1/tcp/4001",
        "/ip6/::1/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/ip6/fe80::1%eth0/tcp/4001",
        "/ip6zone/eth0/ip6/fe80::1/tcp/4001",
        "/ip6/ff02::1/tcp/4001",
        "/ip6/::ffff:127.0.0.1/tcp/4001",
        "/ip6/::ffff:93.184.216.34/tcp/4001",
        "/ip6/64:ff9b::a00:1/tcp/4001",
        "/ip6/2002:a00:1::/tcp/4001",
        "/ip4/93.184.216.34/tcp/0",
        "/ip4/93.184.216.34/tcp/65536",
        "/ip4/93.184.216.34/tcp/4001/ws",
        "/ip4/93.184.216.34/tcp/4001/http/x",
        f"/ip4/93.184.216.34/tcp/4001/p2p/{RELAY}",
        f"/ip4/10.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit",
        f"/ip4/93.184.216.34/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p-circuit",
        f"/p2p/{RELAY}/p2p-circuit",
        "/unix/var/run/docker.sock",
    ],
)
def test_private_and_malformed_addresses_are_not_dialled(address: str) -> None:
    assert dialable(PEER, [address, f"{address}/p2p/{PEER}"], LAN) == ()


def shared(named: list[str], *interfaces: tuple[str, str]) -> set[str]:
    return {str(network) for network in shared_networks([*LOOPBACK, *interfaces], named)}


LOOPBACKS = {str(network) for network in LOOPBACK_NETWORKS}


def share_loopback(patch: Patch) -> None:
    shared = dialling.shared_networks
    patch.setattr(
        sys.modules[__name__],
        "shared_networks",
        lambda *given: (*dialling.LOOPBACK_NETWORKS, *shared(*given)),
    )


@defence(
    "loopback is shared only by a swarm on one machine",
    off=share_loopback,
    named=["/ip4/0.0.0.0/tcp/0"],
    interfaces=[("192.168.7.20", "255.255.255.0")],
    expected={"192.168.7.0/24"},
)
@pytest.mark.parametrize(
    ("named", "interfaces", "expected"),
    [
        (["/ip4/0.0.0.0/tcp/0"], [ETHERNET], {"192.168.7.0/24"}),
        ([], [ETHERNET], {"192.168.7.0/24"}),
        ([], [], LOOPBACKS),
        (["/ip4/127.0.0.1/tcp/0"], [ETHERNET], {"192.168.7.0/24"} | LOOPBACKS),
        (["/ip4/127.0.0.1/tcp/0", "/ip4/93.184.216.34/tcp/1"], [ETHERNET], {"192.168.7.0/24"}),
        (["/ip4/127.0.0.1/tcp/0", "/dns4/a.example/tcp/1"], [ETHERNET], {"192.168.7.0/24"}),
        (["/ip4/10.1.2.3/tcp/1"], [("10.9.9.9", "255.255.255.255")], {"10.0.0.0/8"}),
        ([], [("169.254.3.4", "255.255.0.0"), ("fe80::1%eth0", "ffff:ffff:ffff:ffff::"), ("x", "")], set()),
        ([], [("fd00::2", "ffff:ffff:ffff:ffff::")], {"fd00::/64"}),
    ],
)
def test_a_node_shares_the_networks_of_its_listening_interfaces(
    named: list[str], interfaces: list[tuple[str, str]], expected: set[str]
) -> None:
    assert shared(named, *interfaces) == expected


def test_interfaces_of_this_machine_are_found() -> None:
    assert shared_networks(own_interfaces(), ["/ip4/127.0.0.1/tcp/0"])
