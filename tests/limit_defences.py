"""The defences that bound what one peer may hold, send and say."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnet_client.chain.failures import Blame, Suspects
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.membership import handshake
from swarmnet_protocols.net import Message, framing
from swarmnet_protocols.net.flow_control import ReceiveWindow, SendWindow
from swarmnet_protocols.net.p2pd import pipe as p2pd_pipe
from swarmnet_protocols.net.p2pd import stream as p2pd_stream
from swarmnet_protocols.net.resources import Resource, Scope
from swarmnet_protocols.net.stream_scope import StreamScope
from swarmnet_protocols.session import steps
from tests.defences import Defence, Patch, nothing, replacing
from tests.properties import test_framing
from tests.sim import (
    test_client_defences,
    test_handshake_limits,
    test_host_defences,
    test_limited_line,
    test_pass_blame,
    test_pass_defences,
)
from tests.support.swarm_lab import Reference, load_reference
from tests.unit import (
    test_dht_storage,
    test_flow_control,
    test_flow_control_streams,
    test_p2pd_stream,
    test_resources,
    test_steps,
)


def wait_for_ever(patch: Patch) -> None:
    """No timeout for the first message of a stream, nor for handshake messages."""
    inbound, receive = StreamScope.inbound, handshake.receive

    def patient(*arguments: Any) -> StreamScope:
        meter = inbound(*arguments)
        meter._first_message_by = None
        return meter

    patch.setattr(StreamScope, "inbound", patient)
    patch.setattr(handshake, "receive", lambda stream, _: receive(stream, None))


def count_only(patch: Patch) -> None:
    """Everybody gets whatever they want; it is noted."""

    def change(scope: Scope, resource: Resource, amount: int) -> None:
        for each in scope._path:
            each.used[resource] += amount

    patch.setattr(Scope, "change", change)


def of_all_peers(_: Path) -> None:
    test_resources.test_what_one_scope_refuses_is_held_in_none_and_says_where_and_for_how_long("all peers")


def of_a_host(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_reference(folder / "model", folder / "cache"))


def a_host_that_blames_its_client(reference: Reference) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_client_defences.test_a_last_hop_that_lies_is_replaced(
            reference, {"a": (0, 6), "b": (0, 6)}, test_client_defences.blame, patch
        )


def hosts_whose_numbers_overflow_at_others(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lies = test_pass_blame.LIES["gradients"]
        test_pass_blame.test_a_host_whose_numbers_overflow_at_others_is_found_and_replaced(
            lies, folder, patch
        )


def suspect_nobody_else(patch: Patch) -> None:
    """Than the host that fails."""
    attribute = Blame.attribute
    patch.setattr(Blame, "attribute", lambda self, error, hop, **_: attribute(self, error, hop))


def overlooking(where: type, name: str) -> Callable[[Patch], None]:
    """What a method finds to be against the rules."""
    strict = getattr(where, name)

    def lenient(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(ProtocolViolation):
            strict(*arguments, **options)

    return replacing(where, name, lenient)


def prompts_for_a_limited_line(reference: Reference) -> None:
    test_limited_line.test_many_prompts_at_once_come_at_the_rate_and_all_are_answered(
        reference, {"limited": (0, 3), "other": (3, 6)}
    )


def a_host_that_grants_nothing(reference: Reference) -> None:
    test_limited_line.test_a_host_that_grants_nothing_is_replaced(reference, test_limited_line.answer)


LIMITS = (
    Defence(
        "the silent are gone in time",
        wait_for_ever,
        lambda _: test_handshake_limits.test_who_says_nothing_at_the_door_is_gone_in_time(),
    ),
    Defence(
        "messages have a largest size",
        replacing(framing, "check_sizes", nothing),
        lambda _: test_framing.test_oversized_messages_are_not_encoded(Message(bytes(51))),
    ),
    Defence(
        "refusals have a largest size",
        replacing(framing, "MAX_REFUSAL_BYTES", 1 << 40),
        lambda _: test_framing.test_an_oversized_refusal_is_a_violation(),
    ),
    Defence(
        "who was refused has to go in time",
        replacing(p2pd_stream, "LINGER_S", 1e9),
        lambda _: test_p2pd_stream.test_who_was_refused_and_does_not_close_is_not_waited_for(),
    ),
    Defence(
        "and is not listened to for ever",
        replacing(p2pd_pipe, "LINGER_BYTES", 1 << 40),
        lambda _: test_p2pd_stream.test_who_goes_on_speaking_is_not_listened_to_for_ever(),
    ),
    Defence(
        "who was served has to go in time",
        replacing(p2pd_stream, "MAX_IN_FLIGHT_MIB", 1e9),
        lambda _: test_p2pd_stream.test_who_was_sent_a_lot_has_no_more_time_than_a_line_holds(),
    ),
    Defence(
        "positions of a step are bounded",
        replacing(steps, "MAX_POSITION", 1 << 40),
        lambda _: test_steps.test_numbers_of_a_decoded_step_are_bounded({"start": test_steps.MAX_POSITION}),
    ),
    Defence(
        "rows of a step are bounded",
        replacing(steps, "MAX_ROWS", 1 << 40),
        lambda _: test_steps.test_the_number_of_rows_is_bounded(test_steps.MAX_ROWS + 1),
    ),
    Defence("every scope has its limit", count_only, of_all_peers),
    Defence(
        "a client has its share of sessions",
        count_only,
        of_a_host(test_host_defences.test_no_client_has_more_sessions_than_its_share),
    ),
    Defence(
        "a client has its share of passes",
        count_only,
        of_a_host(test_pass_defences.test_no_client_has_more_passes_at_once_than_its_share),
    ),
    Defence(
        "caches have a budget",
        count_only,
        of_a_host(test_host_defences.test_a_cache_over_its_budget_is_refused_before_it_is_allocated),
    ),
    Defence(
        "logs have a budget",
        count_only,
        of_a_host(test_host_defences.test_who_never_acknowledges_fills_no_more_than_the_log_may_take),
    ),
    Defence(
        "positions come at a rate",
        replacing(Scope, "charge", lambda *_: 0.0),
        of_a_host(test_host_defences.test_positions_come_at_the_rate_of_the_client),
    ),
    Defence(
        "records of one peer are bounded",
        count_only,
        lambda _: (
            test_dht_storage.test_what_one_peer_stores_is_bounded_whoever_signed_it_and_counts_until_it_is_gone(
                test_dht_storage.Time()
            )
        ),
    ),
    Defence(
        "one host that blames its client is not believed",
        replacing(Suspects, "narrow", lambda *_: (frozenset(), frozenset())),
        of_a_host(a_host_that_blames_its_client),
    ),
    Defence(
        "one host whose numbers overflow at others is not believed over them",
        suspect_nobody_else,
        hosts_whose_numbers_overflow_at_others,
    ),
    Defence(
        "what a limited line cannot take is not sent",
        replacing(ReceiveWindow, "_send_limit", nothing),
        of_a_host(prompts_for_a_limited_line),
    ),
    Defence(
        "who does not wait for grants is ended",
        overlooking(ReceiveWindow, "start"),
        of_a_host(test_limited_line.test_a_feeder_that_does_not_wait_for_grants_is_ended_and_has_to_pay),
    ),
    Defence(
        "and so is who sends more than was granted",
        overlooking(ReceiveWindow, "received"),
        lambda _: test_flow_control_streams.test_a_sender_that_ignores_flow_control_is_disconnected(True),
    ),
    Defence(
        "nobody grants more than is waited for, or too little",
        overlooking(SendWindow, "on_control"),
        lambda _: test_flow_control.test_too_little_or_too_much_credit_is_a_violation(
            (test_flow_control.MIN_BYTES - 1,)
        ),
    ),
    Defence(
        "who grants nothing is replaced",
        replacing(ChainSupervisor, "_drop_stuck_hop", nothing),
        of_a_host(a_host_that_grants_nothing),
    ),
)
