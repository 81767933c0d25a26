"""Defences against memberships made with stolen keys, clocks that were ahead, and text that controls a terminal."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet import logs
from swarmnet.cli import output
from swarmnet.cli.progress import displays
from swarmnet_protocols.directory.dht import storage as dht_storage
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.membership import certificates
from swarmnet_protocols.net import refusal
from tests.defences import Defence, Patch, replacing
from tests.unit.cli import test_output
from tests.unit.directory import test_dht_storage, test_directory
from tests.unit.membership import test_issuer
from tests.unit.net import test_typed_stream


def forget_who_admitted(patch: Patch) -> None:
    read = certificates._open
    patch.setattr(certificates, "_open", lambda data: replace(read(data), admitted_by=()))


def change_nothing(*modules: object, name: str) -> Callable[[Patch], None]:
    def switch_off(patch: Patch) -> None:
        for module in modules:
            patch.setattr(module, name, lambda text: text)

    return switch_off


def printed(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, written)
        test_output.print_everywhere(test_output.HOSTILE)
        written.flush()
        written.seek(0)
        assert "\x1b" not in written.read()


def stored_while_ahead(_: Path) -> None:
    clock = test_dht_storage.Time()
    test_dht_storage.test_a_record_that_was_kept_while_the_clock_was_ahead_does_not_keep_its_successor_out(
        clock
    )


WORDS = (
    Defence(
        "a membership made with a stolen key ends with the key",
        forget_who_admitted,
        test_issuer.test_a_membership_made_with_a_stolen_key_ends_with_the_key_after_any_renewal,
    ),
    Defence(
        "a membership by an invite of a stolen key ends with the key",
        forget_who_admitted,
        test_issuer.test_a_membership_by_an_invite_that_a_stolen_key_signed_ends_with_the_key,
    ),
    Defence(
        "a publisher whose clock was ahead is heard again",
        replacing(Publisher, "max_lifetime_s", float("inf")),
        lambda _: test_directory.test_a_publisher_is_heard_again_after_its_clock_was_ahead(2 * 86400.0),
    ),
    Defence(
        "a record stored while a clock was ahead is replaced",
        replacing(dht_storage, "MAX_LIFETIME_S", float("inf")),
        stored_while_ahead,
    ),
    Defence(
        "text of peers does not control the terminal",
        change_nothing(output, displays, logs, name="shown"),
        printed,
    ),
    Defence(
        "the reason of a refusal does not control the terminal",
        change_nothing(refusal, name="printable"),
        lambda _: test_typed_stream.test_a_refusal_cannot_steer_the_terminal_that_shows_it(),
    ),
)
