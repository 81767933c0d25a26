"""The defences of HTTP endpoints and of the gateway, as in ``defences.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarmnet.dashboard.observing import seats
from swarmnet.gateway.quotas import Quotas
from swarmnet.web import guards, serving
from swarmnet_client.batching import continuous_batching as batching
from swarmnet_client.batching.sequences import RunningSequence, SequenceGroup
from tests.defences import Defence, nothing, replacing, yes
from tests.sim import test_batching, test_gateway_limits
from tests.support.swarm_lab import Reference
from tests.support.tiny_swarm import load_tiny
from tests.unit import test_dashboard_seats, test_web_guards, test_web_serving


def letting_through(guard: type) -> Callable[[pytest.MonkeyPatch], None]:
    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    return replacing(guard, "__call__", call)


def impatient(where: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    """``replacing``, and the test does not wait long for what then never comes."""

    def switch_off(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(where, name, value)
        patch.setattr(test_web_serving, "PATIENCE_S", 2.0)

    return switch_off


def whoever_owns_it(patch: pytest.MonkeyPatch) -> None:
    shared = RunningSequence.shared

    def of_anybody(sequence: RunningSequence, request: Any) -> int:
        sequence.owner = request.owner
        return shared(sequence, request)

    patch.setattr(RunningSequence, "shared", of_anybody)


def over_nodes(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_tiny(folder))


def patched(test: Callable[[pytest.MonkeyPatch], object]) -> Callable[[Path], object]:
    def fails(_: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return fails


WEB = (
    Defence(
        "no name but ours (DNS rebinding)",
        letting_through(guards.HostGuard),
        lambda _: test_web_guards.test_a_name_that_is_not_ours_is_refused("evil.example"),
    ),
    Defence(
        "no page of another origin",
        letting_through(guards.OriginGuard),
        lambda _: test_web_guards.test_pages_of_other_origins_are_refused(),
    ),
    Defence(
        "no caller without a key",
        letting_through(guards.KeyGuard),
        lambda _: test_web_guards.test_only_a_key_opens(),
    ),
    Defence(
        "bodies have a largest size",
        letting_through(guards.BodyLimit),
        lambda _: test_web_guards.test_a_body_that_announces_or_has_too_much_is_refused(),
    ),
    Defence(
        "browsers are told what answers may do",
        letting_through(guards.SecurityHeaders),
        lambda _: test_web_guards.test_every_answer_says_what_browsers_may_do_with_it(),
    ),
    Defence(
        "no endpoint for others without a key",
        replacing(guards, "is_loopback", yes),
        lambda _: test_web_guards.test_others_need_one("0.0.0.0"),
    ),
    Defence(
        "connections that ask nothing end",
        impatient(serving._Connection, "_wait", nothing),
        patched(lambda patch: test_web_serving.test_a_connection_without_a_request_is_closed(b"", patch)),
    ),
    Defence(
        "connections have a largest number",
        impatient(serving._Connection, "connection_made", H11Protocol.connection_made),
        patched(test_web_serving.test_connections_beyond_the_limit_are_closed),
    ),
    Defence(
        "streams do not keep a server that ends",
        impatient(serving._Server, "cut_off", nothing),
        patched(test_web_serving.test_an_open_stream_is_cut_off_at_the_end),
    ),
    Defence(
        "a key has its quota",
        replacing(Quotas, "enter", nothing),
        over_nodes(
            lambda tiny: test_gateway_limits.test_a_key_uses_what_it_may_and_no_more(tiny, "requests")
        ),
    ),
    Defence(
        "the queue has an end",
        replacing(batching, "may_wait", yes),
        over_nodes(test_batching.test_no_more_are_let_in_than_lanes_and_places),
    ),
    Defence(
        "who leaves costs nothing more",
        replacing(SequenceGroup, "leave", nothing),
        over_nodes(test_gateway_limits.test_so_does_one_who_waits_for_a_whole_answer),
    ),
    Defence(
        "a network has its share of a dashboard's places",
        replacing(seats, "_crowds", lambda candidates, _: {each.peer: 0 for each in candidates}),
        lambda _: test_dashboard_seats.test_a_flood_takes_no_place_of_those_who_answer(
            "answer, from one network"
        ),
    ),
    Defence(
        "caches are of one owner",
        whoever_owns_it,
        over_nodes(test_batching.test_the_next_turn_of_a_conversation_sends_only_what_is_new),
    ),
)
