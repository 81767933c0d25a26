"""Addresses that people type are checked before anything is started."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.addresses import check_listen_address, check_peer_address
from swarmnet_protocols.errors import ConfigError

PEER_ID = "12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/127.0.0.1/tcp/0",
        "/ip4/0.0.0.0/udp/4001/quic-v1",
        "/ip6/::1/tcp/65535",
        "/dns4/node.example.org/tcp/31337",
    ],
)
def test_addresses_people_use(address: str) -> None:
    check_listen_address(address)
    check_peer_address(f"{address}/p2p/{PEER_ID}")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1",
        "/ip4/127.0.0.1/tcp",
        "/ip4/127.0.0.256/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/65536",
        "/ip4/127.0.0.1/tcp/-1",
        "/ip4/127.0.0.1/tcp/²",
        "/ip4/127.0.0.1/sctp/1",
        "/dns4/no spaces/tcp/1",
        "/ip4/127.0.0.1/tcp/1/",
        '/ip4/127.0.0.1/tcp/1/x"y',
        "/ip4/127.0.0.1/tcp/1" + "/x" * 300,
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    for check, suffix in ((check_listen_address, ""), (check_peer_address, f"/p2p/{PEER_ID}")):
        with pytest.raises(ConfigError) as caught:
            check(address + suffix)
        assert "/ip4/" in caught.value.hint


@pytest.mark.parametrize(
    "end", ["", "/p2p", "/p2p/", "/p2p/short", f"/p2p/{PEER_ID}/x", f"/p2p/{PEER_ID[:-1]}0"]
)
def test_a_peer_address_has_to_name_the_peer(end: str) -> None:
    with pytest.raises(ConfigError):
        check_peer_address(f"/ip4/127.0.0.1/tcp/1{end}")


@given(st.text(max_size=600))
def test_any_text_is_accepted_or_refused_in_words(text: str) -> None:
    try:
        check_listen_address(text)
    except ConfigError:
        return
    assert all(character.isascii() and character.isprintable() for character in text)
