"""Defences against peers that make others dial addresses."""

from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.net import TransportWrapper, dialling
from swarmnet_protocols.net.dialling import IntroducedTransport, Introductions
from swarmnet_protocols.net.p2pd import transport as p2pd
from swarmnet_protocols.wire import records_pb2
from tests.conformance import test_p2pd
from tests.defences import Defence, Patch, nothing, replacing, unshrunk, yes
from tests.limit_defences import of_a_host
from tests.properties import test_dialling
from tests.sim import test_introductions
from tests.sim.test_introductions import ADDRESSES

MANY_ADDRESSES = [IPv4Address(f"93.184.216.{last}") for last in range(20)]


def stranger_names_addresses(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_p2pd.test_private_addresses_named_by_a_peer_are_not_dialled(folder, patch)


def skip_signatures(records: list[bytes], **_: object) -> Iterator[Record]:
    """Accept records without checking their signatures."""
    for data in records:
        said = records_pb2.SignedRecord.FromString(data)
        yield Record(said.swarm, said.topic, said.signer, said.sequence, said.expires_at_ms / 1000, said.body)


def share_loopback(patch: Patch) -> None:
    shared = dialling.shared_networks
    patch.setattr(
        test_dialling, "shared_networks", lambda *given: (*dialling.LOOPBACK_NETWORKS, *shared(*given))
    )


def try_all_at_once(patch: Patch) -> None:
    patch.setattr(
        Introductions,
        "by",
        lambda self, asker: IntroducedTransport(self._transport, asker, WeakValueDictionary()),
    )


DIALS = (
    Defence(
        "addresses that peers name are checked before they are dialled",
        replacing(p2pd, "dialable", lambda _peer, addresses, _networks: tuple(addresses)),
        stranger_names_addresses,
    ),
    Defence(
        "addresses of private networks are dialled only in shared ones",
        replacing(dialling, "_may_dial", yes),
        lambda _: test_dialling.test_private_and_malformed_addresses_are_not_dialled(
            "/ip4/10.0.0.1/tcp/4001"
        ),
    ),
    Defence(
        "an IPv4 address inside an IPv6 address is checked too",
        replacing(dialling, "_CARRIES_IPV4", ()),
        lambda _: test_dialling.test_private_and_malformed_addresses_are_not_dialled(
            "/ip6/64:ff9b::a00:1/tcp/4001"
        ),
    ),
    Defence(
        "loopback is shared only by a swarm on one machine",
        share_loopback,
        lambda _: test_dialling.test_a_node_shares_the_networks_of_its_listening_interfaces(
            ["/ip4/0.0.0.0/tcp/0"], [test_dialling.ETHERNET], {"192.168.7.0/24"}
        ),
    ),
    Defence(
        "few addresses of each peer are dialled",
        replacing(dialling, "MAX_DIALLED", 1000),
        lambda _: unshrunk(test_dialling.test_only_the_first_few_addresses_are_dialled)(MANY_ADDRESSES),
    ),
    Defence(
        "a next hop is dialled at addresses that it signed",
        replacing(host_announcements, "open_valid", skip_signatures),
        lambda _: test_introductions.test_addresses_without_the_signature_of_the_next_hop_are_refused(
            test_introductions.announced()[:-1] + b"x"
        ),
    ),
    Defence(
        "the dials that a client causes are limited",
        replacing(IntroducedTransport, "_charge", nothing),
        of_a_host(test_introductions.test_the_dials_that_a_client_causes_are_limited_for_it_alone),
    ),
    Defence(
        "a client learns neither why a next hop is unreachable nor how soon that was known",
        replacing(IntroducedTransport, "open", TransportWrapper.open),
        of_a_host(
            lambda reference: test_introductions.test_every_failure_looks_the_same_and_takes_as_long(
                reference, ADDRESSES, 0.0
            )
        ),
    ),
    Defence(
        "a next hop is dialled once at a time",
        try_all_at_once,
        of_a_host(test_introductions.test_a_next_hop_is_dialled_once_at_a_time),
    ),
)
