"""Defences of a peer over py-libp2p against outsiders."""

from pathlib import Path

import pytest

from swarmnet_protocols.net.p2pd import connection_limits
from tests.conformance import test_pylibp2p_limits as tests
from tests.conformance.test_pylibp2p_limits import connection, host
from tests.defences import Defence, nothing, replacing


def no_limit_of_streams(patch: pytest.MonkeyPatch) -> None:
    """A limit so high that a 32nd of it is still more than the test opens."""
    patch.setattr(host, "MAX_STREAMS", 1 << 20)


def with_patch(test: object, folder: Path) -> None:
    """Run a test that patches limits itself."""
    with pytest.MonkeyPatch.context() as patch:
        test(folder, patch)  # type: ignore[operator]


PYLIBP2P = (
    Defence(
        "a subnet has its share of the pending handshakes",
        replacing(host, "subnet_of", lambda address: address),
        lambda folder: with_patch(tests.test_a_subnet_that_hoards_handshakes_keeps_no_other_out, folder),
    ),
    Defence(
        "handshakes have a timeout",
        replacing(host, "HANDSHAKE_S", 1e6),
        lambda folder: with_patch(tests.test_a_silent_handshake_ends, folder),
    ),
    Defence(
        "lines of a negotiation are bounded",
        replacing(connection, "MAX_LINE_BYTES", 1 << 14),
        tests.test_a_long_line_ends_a_negotiation_before_it_is_received,
    ),
    Defence(
        "protocols offered in a negotiation are bounded",
        replacing(connection, "MAX_OFFERS", 1 << 20),
        tests.test_a_bounded_number_of_protocols_is_offered,
    ),
    Defence(
        "streams of a connection are bounded",
        no_limit_of_streams,
        lambda folder: with_patch(tests.test_a_connection_has_a_bounded_number_of_streams, folder),
    ),
    Defence(
        "bytes that wait on a connection are bounded",
        replacing(connection, "MAX_BUFFERED_BYTES", 1 << 40),
        lambda folder: with_patch(
            tests.test_a_peer_that_sends_more_than_it_was_granted_is_disconnected, folder
        ),
    ),
    Defence(
        "bytes that wait are bounded over all connections",
        replacing(host.PyLibp2p, "_make_room", nothing),
        lambda folder: with_patch(tests.test_bytes_that_wait_are_bounded_over_all_connections, folder),
    ),
    Defence(
        "connections of one address are limited over py-libp2p, too",
        replacing(connection_limits, "excess", lambda *_: []),
        tests.test_connections_of_one_address_are_limited,
    ),
)
