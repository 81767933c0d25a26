"""Defences of HTTP endpoints and of the gateway."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarmnet.dashboard import peer_selection
from swarmnet.gateway.quotas import QuotaTracker
from swarmnet.web import middleware, server
from swarmnet_client.batching import continuous_batching as batching
from swarmnet_client.batching.sequences import RunningSequence, SequenceGroup
from tests.defences import Defence, nothing, replacing, yes
from tests.sim import test_batching, test_gateway_limits
from tests.support.swarm_lab import Reference
from tests.support.tiny_swarm import load_tiny
from tests.unit.web import test_dashboard_peer_selection, test_web_middleware, test_web_server


def letting_through(guard: type) -> Callable[[pytest.MonkeyPatch], None]:
    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    return replacing(guard, "__call__", call)


async def unauthenticated(*_: object) -> None:
    """Accept a request without a key."""


def with_short_timeout(where: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace an attribute as ``replacing`` does; the test gives up after 2 s."""

    def switch_off(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(where, name, value)
        patch.setattr(test_web_server, "TIMEOUT_S", 2.0)

    return switch_off


def for_any_owner(patch: pytest.MonkeyPatch) -> None:
    shared = RunningSequence.shared

    def shared_with_all(sequence: RunningSequence, request: Any) -> int:
        sequence.owner = request.owner
        return shared(sequence, request)

    patch.setattr(RunningSequence, "shared", shared_with_all)


def over_nodes(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_tiny(folder))


def too_many_in_all(connection: Any) -> bool:
    return len(connection.connections) > server.MAX_CONNECTIONS


def patched(test: Callable[[pytest.MonkeyPatch], object]) -> Callable[[Path], object]:
    def fails(_: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return fails


WEB = (
    Defence(
        "unknown host names are refused (DNS rebinding)",
        letting_through(middleware.HostCheck),
        lambda _: test_web_middleware.test_an_unknown_host_name_is_refused("evil.example"),
    ),
    Defence(
        "pages of other origins are refused",
        letting_through(middleware.OriginCheck),
        lambda _: test_web_middleware.test_pages_of_other_origins_are_refused(),
    ),
    Defence(
        "requests without a key are refused",
        replacing(middleware.ApiKeyBackend, "authenticate", unauthenticated),
        lambda _: test_web_middleware.test_requests_without_a_valid_key_are_refused(),
    ),
    Defence(
        "unfinished bodies of one caller leave room for others",
        replacing(middleware.BodyLimit, "_caller", lambda limit, _: limit._resources.system),
        patched(test_web_middleware.test_unfinished_bodies_of_one_caller_leave_room_for_others),
    ),
    Defence(
        "one address leaves connections to others",
        replacing(server._TimedConnection, "_is_one_too_many", too_many_in_all),
        patched(test_web_server.test_one_address_leaves_connections_to_others),
    ),
    Defence(
        "a body has a minimum rate",
        replacing(middleware, "_body_within_s", lambda _: middleware.BODY_TIMEOUT_S),
        lambda _: test_web_middleware.test_a_body_that_stops_is_refused_long_before_the_last_moment(),
    ),
    Defence(
        "bodies have a size limit",
        letting_through(middleware.BodyLimit),
        lambda _: test_web_middleware.test_a_body_that_is_too_long_is_refused(),
    ),
    Defence(
        "responses have security headers",
        letting_through(middleware.SecurityHeaders),
        lambda _: test_web_middleware.test_every_response_has_security_headers(),
    ),
    Defence(
        "exposed endpoints need a key",
        replacing(middleware, "is_loopback", yes),
        lambda _: test_web_middleware.test_other_addresses_need_a_key("0.0.0.0"),
    ),
    Defence(
        "idle connections are closed",
        with_short_timeout(server._TimedConnection, "_start_request_timer", nothing),
        patched(lambda patch: test_web_server.test_a_connection_without_a_request_is_closed(b"", patch)),
    ),
    Defence(
        "connections have a limit",
        with_short_timeout(server._TimedConnection, "connection_made", H11Protocol.connection_made),
        patched(test_web_server.test_connections_beyond_the_limit_are_closed),
    ),
    Defence(
        "open streams do not block a shutdown",
        with_short_timeout(server._Server, "abort_connections", nothing),
        patched(test_web_server.test_an_open_stream_is_aborted_at_shutdown),
    ),
    Defence(
        "keys have a quota",
        replacing(QuotaTracker, "admit", nothing),
        over_nodes(lambda tiny: test_gateway_limits.test_a_quota_limits_its_key_only(tiny, "requests")),
    ),
    Defence(
        "the queue is bounded",
        replacing(batching, "may_wait", yes),
        over_nodes(test_batching.test_requests_beyond_the_sequences_and_the_queue_are_refused),
    ),
    Defence(
        "a client that leaves ends its generation",
        replacing(SequenceGroup, "leave", nothing),
        over_nodes(test_gateway_limits.test_generation_ends_when_the_client_of_a_whole_response_leaves),
    ),
    Defence(
        "a subnet has a share of a dashboard's slots",
        replacing(
            peer_selection, "_subnet_ranks", lambda candidates, _: {each.peer: 0 for each in candidates}
        ),
        lambda _: test_dashboard_peer_selection.test_a_flood_displaces_no_host_that_answers(
            "answering, from one subnet"
        ),
    ),
    Defence(
        "caches are reused for their owner only",
        for_any_owner,
        over_nodes(test_batching.test_the_next_turn_of_a_conversation_sends_only_what_is_new),
    ),
)
