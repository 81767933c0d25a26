"""Addresses that people type are checked before anything is started."""

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.addresses import (
    FOLLOW_S,
    check_listen_address,
    check_peer_address,
    follow_addresses,
    read_addresses,
    usual_listen,
    write_addresses,
)
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.joining import network
from swarmnet_protocols.joining.network import any_port
from swarmnet_protocols.machine.aio import cancel
from tests.support.network.virtual_time import run

PEER_ID = "12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"


def test_the_file_of_addresses_follows_them(tmp_path: Path) -> None:
    current = ["/ip4/10.0.0.7/tcp/4001"]

    async def scenario() -> None:
        following = asyncio.create_task(follow_addresses(tmp_path, lambda: current))
        await asyncio.sleep(FOLLOW_S / 2)
        assert (tmp_path / "addresses").read_text().splitlines() == current
        current[0] = "/ip4/10.0.0.8/tcp/4001"
        await asyncio.sleep(FOLLOW_S)
        assert (tmp_path / "addresses").read_text().splitlines() == current
        await cancel(following)

    run(scenario())


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/127.0.0.1/tcp/0",
        "/ip4/0.0.0.0/udp/4001/quic-v1",
        "/ip6/::1/tcp/65535",
        "/dns4/node.example.org/tcp/31337",
    ],
)
def test_usual_addresses_are_accepted(address: str) -> None:
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
def test_invalid_addresses_are_refused_with_an_example(address: str) -> None:
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


def _free_port(kind: socket.SocketKind, host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_peer_listens_on_its_former_ports_unless_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_has_ipv6", lambda: True)
    assert usual_listen(tmp_path) == any_port()
    tcp, udp = _free_port(socket.SOCK_STREAM), _free_port(socket.SOCK_DGRAM)
    tcp6 = _free_port(socket.SOCK_STREAM, "::1")
    others = [f"/ip4/203.0.113.7/tcp/1/p2p/{PEER_ID}/p2p-circuit", "/dns4/example.org/tcp/2"]
    own = [f"/ip4/127.0.0.1/tcp/{tcp}", f"/ip4/127.0.0.1/udp/{udp}/quic-v1", f"/ip6/::1/tcp/{tcp6}"]
    addresses = [f"{each}/p2p/{PEER_ID}" for each in (*others, *own, f"/ip4/192.0.2.2/tcp/{tcp}")]
    write_addresses(tmp_path, addresses)
    assert read_addresses(tmp_path) == tuple(addresses)
    quic, *ipv6 = f"/ip4/0.0.0.0/udp/{udp}/quic-v1", f"/ip6/::/tcp/{tcp6}", "/ip6/::/udp/0/quic-v1"
    assert usual_listen(tmp_path) == (f"/ip4/0.0.0.0/tcp/{tcp}", quic, *ipv6)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", tcp))
        taken.listen()
        assert usual_listen(tmp_path) == ("/ip4/0.0.0.0/tcp/0", quic, *ipv6)


def test_a_machine_without_ipv6_listens_on_ipv4_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_has_ipv6", lambda: False)
    assert all(each.startswith("/ip4/") for each in any_port())


@pytest.mark.parametrize(
    "content", [b"\xff", b"", b"/ip4/127.0.0.1/tcp/99999/p2p/me\n", b"/ip4/127.0.0.1/tcp/"]
)
def test_addresses_of_other_peers_are_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "addresses").write_bytes(content)
    assert usual_listen(tmp_path) == any_port()
