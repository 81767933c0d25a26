"""Defences against what is announced in the local network."""

from swarmnet_protocols.joining import local_network
from tests.defences import Defence, nothing, replacing, yes
from tests.unit.net import test_local_network as tests

LOCAL_NETWORK = (
    Defence(
        "only a peer that knows the swarm announces addresses for it",
        replacing(local_network, "_is_of", yes),
        lambda _: tests.test_a_copied_hash_admits_no_other_addresses(),
    ),
    Defence(
        "the announcement of a swarm is salted",
        replacing(local_network.secrets, "token_bytes", bytes),
        lambda _: tests.test_no_two_records_have_a_common_mark_of_the_swarm(),
    ),
    Defence(
        "only addresses in the local network are taken from it",
        replacing(local_network, "_is_local", yes),
        lambda _: tests.test_an_address_outside_the_local_network_is_ignored("/ip4/93.184.216.34/tcp/4001"),
    ),
    Defence(
        "addresses in the local network are checked before they are dialled",
        replacing(local_network, "dialable", lambda _peer, addresses, _networks: tuple(addresses)),
        lambda _: tests.test_an_address_outside_the_local_network_is_ignored("/ip4/192.168.7.5/tcp/0"),
    ),
    Defence(
        "records of the local network have a largest size",
        replacing(local_network, "MAX_RECORD_BYTES", 1 << 20),
        lambda _: tests.test_a_record_that_is_too_large_is_ignored(),
    ),
    Defence(
        "a bounded number of peers is remembered from the local network",
        replacing(local_network, "MAX_FOUND", 1 << 20),
        lambda _: tests.test_the_peers_that_are_remembered_are_bounded(),
    ),
    Defence(
        "a bounded number of peers from the local network is joined through at once",
        replacing(local_network, "MAX_FOUND", 1 << 20),
        lambda _: tests.test_the_peers_that_are_joined_through_at_once_are_bounded(),
    ),
    Defence(
        "answers of others in the local network are not kept",
        replacing(local_network._Ear, "_is_wanted", yes),
        lambda _: tests.test_answers_without_a_record_of_the_swarm_leave_no_trace(),
    ),
    Defence(
        "answers with many records are not kept",
        replacing(local_network, "MAX_RECORDS", 1 << 20),
        lambda _: tests.test_answers_without_a_record_of_the_swarm_leave_no_trace(),
    ),
    Defence(
        "packets of one machine in the local network are read at a limited rate",
        replacing(local_network.ResourceManager, "limit_rate", nothing),
        lambda _: tests.test_a_machine_that_floods_the_local_network_is_not_read_and_others_are(),
    ),
)
