"""Multiaddrs: what is accepted, and that nothing else gets through."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net.multiaddr import MAX_ADDRESS_CHARS, parse_ip, parse_multiaddr, parse_multiaddrs
from swarmnet_protocols.reachability.hole_punching import HolePunching

PEER = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@pytest.mark.parametrize(
    ("text", "kind", "port", "is_relayed"),
    [
        ("/ip4/203.0.113.5/tcp/4001", "tcp", 4001, False),
        ("/ip4/203.0.113.5/udp/4001/quic-v1", "udp", 4001, False),
        (f"/ip6/2001:db8::1/tcp/0/p2p/{PEER}", "tcp", 0, False),
        (f"/ip4/203.0.113.5/tcp/65535/p2p/{PEER}/p2p-circuit", "tcp", 65535, True),
    ],
)
def test_an_address_is_parsed_and_written_as_it_was(
    text: str, kind: str, port: int, is_relayed: bool
) -> None:
    parsed = parse_multiaddr(text)
    assert parsed is not None
    assert (str(parsed), parsed.kind, parsed.port, parsed.is_relayed) == (text, kind, port, is_relayed)


def test_the_peer_at_the_end_is_left_out() -> None:
    for address in "/ip4/203.0.113.5/tcp/1", f"/ip4/203.0.113.5/tcp/1/p2p/{PEER}/p2p-circuit":
        for text in address, f"{address}/p2p/{PEER}":
            parsed = parse_multiaddr(text)
            assert parsed is not None
            assert str(parsed.without_peer()) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/ip4/1.2.3.4/tcp/²",
        "/ip4/1.2.3.4/tcp/٣",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/ 1",
        "/ip4/1.2.3.4/tcp/1\n",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3.4",
        "/ip4/1.2.3/tcp/1",
        "/ip4/١.2.3.4/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/1.2.3.4/tcp/1",
        "/ip6/fe80::1%/tcp/1",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dns4/example.org/tcp/1",
        "/ip4/1.2.3.4/sctp/1",
        "/ip4/1.2.3.4/tcp/1/\x1b[2J",
        "/ip4/1.2.3.4/tcp/1/" + "a" * MAX_ADDRESS_CHARS,
        "ip4/1.2.3.4/tcp/1",
    ],
)
def test_other_text_is_no_address(text: str) -> None:
    assert parse_multiaddr(text) is None


@given(
    st.text()
    | st.lists(st.sampled_from(["ip4", "ip6", "tcp", "udp", "1", "²", "::1", "1.2.3.4", ""])).map("/".join)
)
def test_no_text_raises(text: str) -> None:
    parse_multiaddr(text)
    parse_ip(text)


def shown(own: list[str], observed: list[str]) -> list[str]:
    """The addresses that a peer behind a router shows for hole punching."""
    transport: Any = SimpleNamespace(
        own_addresses=lambda: own, observed_addresses=lambda: list(parse_multiaddrs(observed))
    )
    reachability: Any = SimpleNamespace(is_surely_open=False)
    return list(HolePunching(transport, transport, reachability)._my_addresses().addresses)


def test_a_peer_shows_where_relays_see_it_with_kept_ports_first() -> None:
    own = [
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
        f"/ip4/192.168.7.5/tcp/4001/p2p/{PEER}",
        f"/ip4/192.168.7.5/udp/4002/quic-v1/p2p/{PEER}",
    ]
    observed = ["/ip4/203.0.113.5/tcp/60000", "/ip4/203.0.113.5/tcp/4001"]
    kept_first = ["/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/tcp/60000"]
    assert shown(own, observed) == [*kept_first, "/ip4/203.0.113.5/udp/4002/quic-v1"]
    quic = "/ip4/203.0.113.5/udp/5000/quic-v1"
    assert shown(own, [*observed, quic]) == [*kept_first, quic]
    assert shown(own, ["/ip6/2001:db8::1/tcp/1"]) == ["/ip6/2001:db8::1/tcp/1"]
