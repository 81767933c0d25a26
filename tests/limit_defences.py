"""Defences that bound what one peer may hold and send."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet_client.chain import trace
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.failures import Blame, Suspects
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_node.engine import engine
from swarmnet_node.engine.kernels import ranged_attention
from swarmnet_node.hosting import step_times
from swarmnet_node.hosting.adapter_store import AdapterStore
from swarmnet_node.hosting.session import HostedSession
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.membership import handshake
from swarmnet_protocols.net import Message, framed_stream, framing, pipe, typed_stream
from swarmnet_protocols.net.limits.flow_control import ReceiveWindow, SendWindow
from swarmnet_protocols.net.limits.resources import Resource, Scope
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.protocol_ids import HANDSHAKE
from swarmnet_protocols.net.typed_stream import Patience
from swarmnet_protocols.session import hop_times, steps
from tests.defences import Defence, Patch, nothing, replacing, unshrunk, yes
from tests.properties import test_framing
from tests.sim import (
    test_client_defences,
    test_handshake_limits,
    test_host_defences,
    test_limited_line,
    test_pass_blame,
    test_pass_defences,
    test_recurrent_models,
    test_trace,
)
from tests.support.swarm_lab import Reference, load_reference
from tests.unit.directory import test_dht_storage
from tests.unit.engine import test_decode_graphs, test_recurrent_state
from tests.unit.hosting import test_adapter_store, test_step_times
from tests.unit.net import (
    test_flow_control,
    test_flow_control_streams,
    test_framed_stream,
    test_resources,
    test_typed_stream,
)
from tests.unit.session import test_steps


def wait_for_ever(patch: Patch) -> None:
    """No timeout for the first message of a stream, nor for handshake messages."""
    inbound, untimed_handshakes = StreamScope.inbound, replace(HANDSHAKE, server=lambda _: Patience(math.inf))

    def untimed(*arguments: Any) -> StreamScope:
        meter = inbound(*arguments)
        meter._first_message_by = None
        return meter

    patch.setattr(StreamScope, "inbound", untimed)

    patch.setattr(handshake, "HANDSHAKE", untimed_handshakes)


def count_only(patch: Patch) -> None:
    """Grant every request and count it."""

    def change(scope: Scope, resource: Resource, amount: int) -> None:
        for each in scope._path:
            each.used[resource] += amount

    patch.setattr(Scope, "change", change)


def of_all_peers(_: Path) -> None:
    test_resources.test_a_reservation_that_one_scope_refuses_is_held_in_none_and_names_scope_and_wait(
        "all peers"
    )


def of_a_host(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_reference(folder / "model", folder / "cache"))


def a_host_that_blames_its_client(reference: Reference) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_client_defences.test_a_last_hop_that_lies_is_replaced(
            reference, {"a": (0, 6), "b": (0, 6)}, test_client_defences.blame, patch
        )


def a_host_that_tells_times(reference: Reference) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_trace.test_a_host_that_tells_times_unasked_is_replaced(reference, patch)


def hosts_whose_numbers_overflow_at_others(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lies = test_pass_blame.LIES["gradients"]
        test_pass_blame.test_a_host_whose_numbers_overflow_at_others_is_found_and_replaced(
            lies, folder, patch
        )


def suspect_only_the_failing_host(patch: Patch) -> None:
    """Suspect only the host that fails."""
    attribute = Blame.attribute
    patch.setattr(Blame, "attribute", lambda self, error, hop, **_: attribute(self, error, hop))


def overlooking(where: type, name: str) -> Callable[[Patch], None]:
    """Ignore the violations that a method finds."""
    strict = getattr(where, name)

    def lenient(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(ProtocolViolation):
            strict(*arguments, **options)

    return replacing(where, name, lenient)


def prompts_for_a_limited_host(reference: Reference) -> None:
    test_limited_line.test_many_prompts_at_once_arrive_at_the_limited_rate_and_all_are_answered(
        reference, {"limited": (0, 3), "other": (3, 6)}
    )


def without_positions_again(patch: Patch) -> None:
    """Work counts its new positions only."""
    work = engine._StepWork

    def counting_new(*arguments: Any, **fields: Any) -> Any:
        made = work(*arguments, **fields)
        made.behind = 0
        return made

    patch.setattr(engine, "_StepWork", counting_new)


def a_host_without_credit(reference: Reference) -> None:
    test_limited_line.test_a_host_that_grants_no_credit_is_replaced(reference, test_limited_line.answer)


def reserve_announced_uploads(patch: Patch) -> None:
    """Reserve memory for an upload before its bytes come."""
    reserve = AdapterStore.reserve

    @contextlib.contextmanager
    def at_once(store: AdapterStore, scope: Scope, nbytes: int) -> Iterator[Callable[[int], None]]:
        with reserve(store, scope, nbytes) as grow:
            grow(nbytes)
            yield grow

    patch.setattr(AdapterStore, "reserve", at_once)


LIMITS = (
    Defence(
        "silent streams time out",
        wait_for_ever,
        lambda _: test_handshake_limits.test_a_silent_handshake_stream_times_out(),
    ),
    Defence(
        "a peer that sends its heartbeats later and later is not waited for",
        replacing(typed_stream, "MAX_EXTENSION", 1e9),
        lambda _: test_typed_stream.test_late_heartbeats_are_waited_for_but_not_for_ever(),
    ),
    Defence(
        "messages have a size limit",
        replacing(framing, "check_sizes", nothing),
        lambda _: test_framing.test_oversized_messages_are_not_encoded(Message(bytes(51))),
    ),
    Defence(
        "refusals have a size limit",
        replacing(framing, "MAX_REFUSAL_BYTES", 1 << 40),
        lambda _: unshrunk(test_framing.test_an_oversized_refusal_is_a_violation)(1 << 31, b""),
    ),
    Defence(
        "times of a hop that cannot be are refused",
        replacing(hop_times, "_check", nothing),
        lambda _: test_trace.test_times_that_cannot_be_are_refused(test_trace.IMPOSSIBLE["not a number"]),
    ),
    Defence(
        "a hop that says it had a step before that was sent is refused",
        replacing(trace, "SLACK_S", 1e9),
        lambda _: test_trace.test_a_hop_cannot_have_had_a_step_before_it_was_sent(),
    ),
    Defence(
        "a host that tells times unasked is replaced",
        overlooking(Chain, "_take_times"),
        of_a_host(a_host_that_tells_times),
    ),
    Defence(
        "the steps of a trace are limited",
        replacing(trace, "MAX_STEPS", 1 << 40),
        lambda _: test_trace.test_a_trace_has_a_limited_number_of_steps(),
    ),
    Defence(
        "a host takes the times of a limited number of steps",
        replacing(step_times, "MAX_STEPS", 1 << 40),
        lambda _: test_step_times.test_the_memory_for_times_is_limited(),
    ),
    Defence(
        "a refused stream that stays open is closed",
        replacing(framed_stream, "LINGER_S", 1e9),
        lambda _: test_framed_stream.test_a_refused_peer_that_does_not_close_is_not_waited_for(),
    ),
    Defence(
        "a refused stream is read to a limit",
        replacing(pipe, "LINGER_BYTES", 1 << 40),
        lambda _: test_framed_stream.test_a_refused_peer_that_goes_on_sending_is_read_to_a_limit(),
    ),
    Defence(
        "a served stream that stays open is closed",
        replacing(framed_stream, "MAX_IN_FLIGHT_MIB", 1e9),
        lambda _: test_framed_stream.test_the_time_to_receive_what_was_sent_is_bounded(),
    ),
    Defence(
        "positions that are computed again after a rewind count in the batches",
        without_positions_again,
        lambda folder: test_recurrent_state.test_positions_that_are_computed_again_share_forwards_with_others(
            test_recurrent_state.load(test_recurrent_state.saved(folder))
        ),
    ),
    Defence(
        "positions that are computed again after a rewind count in a client's rate",
        replacing(HostedSession, "_behind", lambda *_: 0),
        lambda folder: (
            test_recurrent_models.test_positions_that_are_computed_again_come_at_the_rate_of_the_client(
                test_recurrent_models.reference_in(folder)
            )
        ),
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
    Defence("every scope has a limit", count_only, of_all_peers),
    Defence(
        "sessions of a client are limited",
        count_only,
        of_a_host(test_host_defences.test_no_client_has_more_sessions_than_its_share),
    ),
    Defence(
        "only the client that opened a session resumes it",
        replacing(HostedSession, "belongs_to", yes),
        of_a_host(test_host_defences.test_only_the_client_that_opened_a_session_resumes_it),
    ),
    Defence(
        "passes of a client are limited",
        count_only,
        of_a_host(test_pass_defences.test_no_client_has_more_passes_at_once_than_its_share),
    ),
    Defence(
        "KV caches have a budget",
        count_only,
        of_a_host(test_host_defences.test_a_cache_over_its_budget_is_refused_before_it_is_allocated),
    ),
    Defence(
        "activation logs have a budget",
        count_only,
        of_a_host(test_host_defences.test_a_client_that_never_acknowledges_fills_no_more_than_the_log_budget),
    ),
    Defence(
        "positions of a client are accepted at a limited rate",
        replacing(Scope, "charge", lambda *_: 0.0),
        of_a_host(test_host_defences.test_positions_come_at_the_rate_of_the_client),
    ),
    Defence(
        "records of one peer are bounded",
        count_only,
        lambda _: (
            test_dht_storage.test_records_that_one_peer_stores_are_bounded_for_any_signer_until_they_expire(
                test_dht_storage.Time()
            )
        ),
    ),
    Defence(
        "a host that blames its client does not end the session alone",
        replacing(Suspects, "narrow", lambda *_: (frozenset(), frozenset())),
        of_a_host(a_host_that_blames_its_client),
    ),
    Defence(
        "a host whose outputs overflow at others is suspected with them",
        suspect_only_the_failing_host,
        hosts_whose_numbers_overflow_at_others,
    ),
    Defence(
        "a rate limit on a host limits its senders",
        replacing(ReceiveWindow, "_send_limit", nothing),
        of_a_host(prompts_for_a_limited_host),
    ),
    Defence(
        "a sender that does not wait for credit is disconnected",
        overlooking(ReceiveWindow, "start"),
        of_a_host(test_limited_line.test_an_upstream_that_sends_without_credit_is_disconnected_and_charged),
    ),
    Defence(
        "a sender that exceeds its credit is disconnected",
        overlooking(ReceiveWindow, "received"),
        lambda _: test_flow_control_streams.test_a_sender_that_ignores_flow_control_is_disconnected(True),
    ),
    Defence(
        "a receiver that grants too little or too much credit is disconnected",
        overlooking(SendWindow, "on_control"),
        lambda _: test_flow_control.test_too_little_or_too_much_credit_is_a_violation(
            (test_flow_control.MIN_BYTES - 1,)
        ),
    ),
    Defence(
        "a host that grants no credit is replaced",
        replacing(ChainSupervisor, "_drop_stuck_hop", nothing),
        of_a_host(a_host_without_credit),
    ),
    Defence(
        "numbers of one client do not reach another through padding",
        replacing(ranged_attention, "_own_positions", lambda positions, lengths: positions + 0 * lengths),
        test_decode_graphs.test_other_sequences_do_not_reach_a_sequence_through_padding,
    ),
    Defence(
        "an announced upload drops no adapter of others",
        reserve_announced_uploads,
        lambda _: test_adapter_store.test_an_announced_upload_drops_no_adapter_before_its_bytes_come(),
    ),
)
