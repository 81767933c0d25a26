"""The defences against having others dial, as in ``defences.py``."""

from collections.abc import Iterator
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
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.limit_defences import of_a_host
from tests.properties import test_dialling
from tests.sim import test_introductions
from tests.sim.test_introductions import ADDRESSES


def what_a_stranger_names(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_p2pd.test_what_a_peer_names_is_not_dialled_where_it_has_no_business(folder, patch)


def believe_anybody(records: list[bytes], **_: object) -> Iterator[Record]:
    """Whatever looks like a record."""
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
        "addresses that others name are looked at before they are dialled",
        replacing(p2pd, "dialable", lambda _peer, addresses, _networks: tuple(addresses)),
        what_a_stranger_names,
    ),
    Defence(
        "no private network is dialled that is not shared",
        replacing(dialling, "_may_dial", yes),
        lambda _: test_dialling.test_these_are_not_dialled("/ip4/10.0.0.1/tcp/4001"),
    ),
    Defence(
        "nor an IPv4 address that is hidden in an IPv6 address",
        replacing(dialling, "_CARRIES_IPV4", ()),
        lambda _: test_dialling.test_these_are_not_dialled("/ip6/64:ff9b::a00:1/tcp/4001"),
    ),
    Defence(
        "loopback is shared only by a swarm on one machine",
        share_loopback,
        lambda _: test_dialling.test_what_is_shared(
            ["/ip4/0.0.0.0/tcp/0"], [test_dialling.ETHERNET], {"192.168.7.0/24"}
        ),
    ),
    Defence(
        "few addresses of a peer are dialled",
        replacing(dialling, "MAX_DIALLED", 1000),
        lambda _: test_dialling.test_no_more_than_a_few_are_dialled_and_those_come_first(),
    ),
    Defence(
        "a next hop is dialled where it has signed that it is",
        replacing(host_announcements, "open_valid", believe_anybody),
        lambda _: test_introductions.test_nothing_else_names_addresses(
            test_introductions.announced()[:-1] + b"x"
        ),
    ),
    Defence(
        "a client causes so many dials and no more",
        replacing(IntroducedTransport, "_charge", nothing),
        of_a_host(test_introductions.test_a_client_causes_few_dials_and_takes_none_from_others),
    ),
    Defence(
        "why a next hop is not reached is not told, nor how soon that was known",
        replacing(IntroducedTransport, "open", TransportWrapper.open),
        of_a_host(
            lambda reference: test_introductions.test_every_failure_looks_the_same_and_takes_as_long(
                reference, ADDRESSES, 0.0
            )
        ),
    ),
    Defence(
        "a next hop is tried once at a time",
        try_all_at_once,
        of_a_host(test_introductions.test_one_peer_is_tried_by_one_at_a_time),
    ),
)
