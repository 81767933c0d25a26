"""The defences of what peers say: memberships that stolen keys made up, clocks that came back, words that steer a terminal."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet import logs
from swarmnet.cli import output
from swarmnet.cli.progress import displays
from swarmnet_protocols.directory import dht_storage
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.membership import certificates
from swarmnet_protocols.net import refusal
from tests.defences import Defence, Patch, replacing
from tests.unit import test_dht_storage, test_directory, test_issuer, test_output, test_typed_stream


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


def kept_while_ahead(_: Path) -> None:
    clock = test_dht_storage.Time()
    test_dht_storage.test_a_record_that_was_kept_while_the_clock_was_ahead_does_not_keep_its_successor_out(
        clock
    )


WORDS = (
    Defence(
        "a membership ends with the key that made it up",
        forget_who_admitted,
        test_issuer.test_a_membership_that_a_stolen_key_made_up_ends_with_the_key_whoever_renewed_it,
    ),
    Defence(
        "so does one by its invite",
        forget_who_admitted,
        test_issuer.test_so_does_one_whose_invite_it_signed,
    ),
    Defence(
        "a clock that came back silences nobody",
        replacing(Publisher, "max_lifetime_s", float("inf")),
        lambda _: test_directory.test_a_clock_that_ran_ahead_and_came_back_silences_nobody(2 * 86400.0),
    ),
    Defence(
        "nor keeps its records out",
        replacing(dht_storage, "MAX_LIFETIME_S", float("inf")),
        kept_while_ahead,
    ),
    Defence("words do not steer the terminal", change_nothing(output, displays, logs, name="shown"), printed),
    Defence(
        "nor does a refusal",
        change_nothing(refusal, name="printable"),
        lambda _: test_typed_stream.test_a_refusal_cannot_steer_the_terminal_that_shows_it(),
    ),
)
