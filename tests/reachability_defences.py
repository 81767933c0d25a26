"""Defences against relays that lie, and against peers that misuse relays."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet_protocols.directory import relay_announcements
from swarmnet_protocols.net.limits.resources import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.protocol_ids import RELAY
from swarmnet_protocols.net.typed_stream import Patience
from swarmnet_protocols.reachability import circuit, detection, dial_back, relay, reservations
from tests.defences import Defence, Patch, no, replacing, yes
from tests.sim import test_relays
from tests.unit.machine import test_aio
from tests.unit.net import test_circuit, test_probes


def believe_anyone(patch: Patch) -> None:
    patch.setattr(circuit, "verify", yes)


def skip_authentication(patch: Patch) -> None:
    """Decrypt with a stream cipher whose tag is not checked: here, do not encrypt at all."""
    patch.setattr(circuit.CircuitEnd, "encrypt", lambda _, plain: plain)
    patch.setattr(circuit.CircuitEnd, "decrypt", lambda _, message: message)


def slots_for_the_first(patch: Patch) -> None:
    @contextmanager
    def first_come(self, stream):  # type: ignore[no-untyped-def]
        with stream.scope.reserve(self._resource):
            yield

    patch.setattr(relay.SubnetSlots, "slot", first_come)


def believe_one_report(patch: Patch) -> None:
    patch.setattr(detection, "judge", lambda answers: any(each.reached for each in answers) or None)


def any_number_of_circuits(patch: Patch) -> None:
    patch.setattr(test_relays, "CIRCUITS_PER_PEER", SYSTEM_LIMITS[Resource.CIRCUITS])


def on_loopback(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_probes.test_a_peer_has_ports_of_this_machine_dialled_only_in_a_swarm_of_this_machine(
            "/ip4/127.0.0.1/tcp/60000", (), False, patch
        )


def survive(_: Path) -> None:
    try:
        test_aio.test_a_loop_that_fails_begins_again_ever_later()
    except ValueError as error:
        raise AssertionError("the loop ended") from error


REACHABILITY = (
    Defence(
        "the other end of a circuit proves its identity to the end that connects",
        believe_anyone,
        lambda _: test_circuit.test_a_relay_cannot_answer_in_place_of_the_peer(),
    ),
    Defence(
        "the end of a circuit that connects proves its identity",
        believe_anyone,
        lambda _: test_circuit.test_a_relay_cannot_connect_in_place_of_a_peer(),
    ),
    Defence(
        "a relay cannot change what it forwards",
        skip_authentication,
        lambda _: test_circuit.test_a_changed_message_is_noticed(),
    ),
    Defence(
        "a relay cannot repeat what it forwards",
        skip_authentication,
        lambda _: test_circuit.test_a_repeated_or_missing_message_is_noticed((0, 0)),
    ),
    Defence(
        "a handshake message of a circuit is bounded",
        replacing(circuit, "MAX_HANDSHAKE_BYTES", 1 << 30),
        lambda _: test_circuit.test_a_long_handshake_message_is_not_processed(),
    ),
    Defence(
        "a subnet cannot hoard the reservations of a relay",
        slots_for_the_first,
        lambda _: test_relays.test_a_subnet_that_hoards_reservations_keeps_no_other_out(),
    ),
    Defence(
        "a relay forwards a bounded number of circuits for one peer",
        any_number_of_circuits,
        lambda _: test_relays.test_a_relay_forwards_a_bounded_number_of_circuits_for_one_peer(),
    ),
    Defence(
        "circuits that are not confirmed keep no other peer out",
        replacing(relay, "MAX_UNCONFIRMED", 1 << 20),
        lambda _: test_relays.test_circuits_that_are_not_confirmed_keep_no_other_peer_out(),
    ),
    Defence(
        "a peer with all circuits to another loses one to a peer with fewer",
        replacing(relay, "has_larger_share", no),
        lambda _: test_relays.test_a_peer_with_all_circuits_to_another_loses_one_to_a_peer_with_fewer(),
    ),
    Defence(
        "a loop that a process lives on survives an error",
        replacing(test_aio, "persist", lambda _, loop: loop()),
        survive,
    ),
    Defence(
        "an observed address is checked where it arrives",
        replacing(reservations, "parse_multiaddr", str),
        lambda _: test_relays.test_an_observed_address_that_is_none_is_not_known("/ip4/1.2.3.4/tcp/²"),
    ),
    Defence(
        "a peer has ports of this machine dialled only in a swarm of this machine",
        replacing(dial_back, "may_dial_back", yes),
        on_loopback,
    ),
    Defence(
        "a relay that is silent is given up",
        replacing(reservations, "RELAY", replace(RELAY, opener=lambda _: Patience(1e9))),
        lambda _: test_relays.test_a_reservation_ends_when_a_side_is_silent("the relay"),
    ),
    Defence(
        "a reserved peer that is silent is given up",
        replacing(relay, "RELAY", replace(RELAY, server=lambda _: Patience(1e9))),
        lambda _: test_relays.test_a_reservation_ends_when_a_side_is_silent("the peer"),
    ),
    Defence(
        "an owner's relay that is off forwards nothing",
        replacing(relay.Relay, "relays", True),
        lambda _: test_relays.test_a_relay_that_is_switched_off_takes_no_peer(),
    ),
    Defence(
        "relays that do not answer are tried at a bounded rate",
        replacing(reservations, "WANTED", 1000),
        lambda _: test_relays.test_thousands_of_relays_that_do_not_answer_do_not_hide_one_that_does(),
    ),
    Defence(
        "a bounded number of announced relays is read",
        replacing(relay_announcements, "MAX_FOUND", 1 << 20),
        lambda _: test_relays.test_a_bounded_number_of_announced_relays_is_read(),
    ),
    Defence(
        "one false report does not decide whether a peer can be dialled",
        believe_one_report,
        lambda _: test_relays.test_the_majority_of_reports_decides_whether_a_peer_can_be_dialled(
            [1, 0, 0], False
        ),
    ),
)
