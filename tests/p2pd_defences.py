"""Defences of p2pd against outsiders."""

from collections.abc import Iterable, Iterator, Sequence

import pytest

from swarmnet_protocols.directory.dht import contacts as dht_contacts
from swarmnet_protocols.directory.dht.contacts import Contacts
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.net.endpoint import Endpoint
from swarmnet_protocols.net.limits import subnets
from swarmnet_protocols.net.p2pd import connection_limits
from swarmnet_protocols.net.p2pd import daemon as p2pd_daemon
from swarmnet_protocols.net.p2pd import process as p2pd_process
from swarmnet_protocols.net.p2pd.connection_limits import (
    ConnectionGuard,
    ConnectionLimits,
    ListedConnection,
    Use,
)
from swarmnet_protocols.wire import records_pb2 as pb
from tests.conformance import test_p2pd_limits
from tests.defences import Defence, replacing
from tests.flood_defences import parse_leniently
from tests.unit.directory import test_dht_contacts
from tests.unit.net import test_connection_limits, test_subnets


def close_none(*_: object) -> list[ListedConnection]:
    return []


def skip_signatures(sealed: Iterable[bytes], **_: object) -> Iterator[Record]:
    """Accept records without checking their signatures."""
    for data in sealed:
        message = parse_leniently(pb.SignedRecord, data)
        if message.signer:
            yield Record(
                message.swarm,
                message.topic,
                message.signer,
                message.sequence,
                message.expires_at_ms / 1000,
                message.body,
            )


def have_a_kademlia(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(p2pd_process.FLAGS, "dhtServer", 1)


def learn_any_contact(patch: pytest.MonkeyPatch) -> None:
    learn = Contacts.learn
    patch.setattr(Contacts, "learn", lambda self, contacts, **_: learn(self, contacts))


def all_alike(patch: pytest.MonkeyPatch) -> None:
    """Rank every connection as idle."""
    excess = connection_limits.excess

    def blind(
        there: Iterable[ListedConnection], _worth: object, limits: ConnectionLimits
    ) -> Sequence[ListedConnection]:
        return excess(there, lambda _: Use.IDLE, limits)

    patch.setattr(connection_limits, "excess", blind)


P2PD = (
    Defence(
        "libp2p's own Kademlia keeps nothing for outsiders",
        have_a_kademlia,
        test_p2pd_limits.test_an_outsider_leaves_nothing_in_libp2ps_own_kademlia,
    ),
    Defence(
        "libp2p's own relay serves no outsider",
        replacing(p2pd_daemon, "REFUSED", ()),
        test_p2pd_limits.test_libp2ps_own_relay_serves_no_outsider,
    ),
    Defence(
        "a connection that this process forwards counts where its peer is",
        replacing(Endpoint, "real_address", lambda _, address: address),
        test_p2pd_limits.test_a_connection_that_this_process_forwards_counts_where_its_peer_is,
    ),
    Defence(
        "connections of one address are limited",
        replacing(connection_limits, "excess", close_none),
        test_p2pd_limits.test_connections_of_one_address_are_limited_and_those_in_use_stay,
    ),
    Defence(
        "connections of one subnet are limited",
        replacing(connection_limits, "_subnet", lambda each: each.peer),
        lambda _: test_connection_limits.test_a_subnet_keeps_no_more_connections_than_its_share(),
    ),
    Defence(
        "connections of the largest subnets are closed first",
        replacing(subnets, "_SUBNET_BITS", {"ip4": 0, "ip6": 0}),
        lambda _: (
            test_connection_limits.test_over_the_limit_of_all_the_subnets_with_the_most_connections_lose_some_first()
        ),
    ),
    Defence(
        "a /64 of IPv6 counts as one host",
        replacing(subnets, "_HOST_BITS", {"ip4": 32, "ip6": 128}),
        lambda _: test_subnets.test_an_ipv6_host_is_a_64(),
    ),
    Defence(
        "connections in use stay, even from the address of an attacker",
        all_alike,
        lambda _: (
            test_connection_limits.test_connections_in_use_stay_although_an_attacker_has_the_same_address()
        ),
    ),
    Defence(
        "strangers are disconnected first when p2pd is over its memory limit",
        replacing(ConnectionGuard, "_use", lambda *_: Use.KNOWN),
        test_p2pd_limits.test_strangers_are_disconnected_first_when_p2pd_is_over_its_memory_limit,
    ),
    Defence(
        "a p2pd over its memory limit is restarted",
        replacing(ConnectionGuard, "_must_restart", lambda _: False),
        test_p2pd_limits.test_a_p2pd_over_its_memory_limit_is_restarted,
    ),
    Defence(
        "the addresses of a peer are signed by it",
        replacing(dht_contacts, "open_valid", skip_signatures),
        lambda _: test_dht_contacts.test_a_peer_signs_its_own_addresses(),
    ),
    Defence(
        "a DHT caller announces only its own addresses",
        learn_any_contact,
        lambda _: test_dht_contacts.test_a_caller_can_give_only_its_own_contact(),
    ),
    Defence(
        "contacts in a DHT answer are limited",
        replacing(dht_contacts, "MAX_CONTACTS", 1 << 30),
        lambda _: test_dht_contacts.test_an_answer_teaches_a_limited_number_of_contacts_of_limited_size(),
    ),
)
