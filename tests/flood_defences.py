"""Defences against input that is too much, too fast or too slow."""

import contextlib

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_node.engine import engine, scheduler
from swarmnet_node.engine.scheduler import ClientShares
from swarmnet_protocols.membership import handshake, revocations
from swarmnet_protocols.net import framing, typed_stream
from swarmnet_protocols.net.framing import FrameReader
from swarmnet_protocols.net.limits import resources, subnets
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.limits.subnets import SubnetLimits
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
from swarmnet_protocols.net.protocol_ids import DHT_FIND
from swarmnet_protocols.session import wire_tensors
from swarmnet_protocols.training import matchmaking, rosters
from swarmnet_protocols.training.rosters import EXCHANGES_PER_ROUND
from swarmnet_protocols.wire import session_pb2, workers_pb2
from tests.defences import Defence, nothing, replacing
from tests.limit_defences import count_only, of_a_host, wait_for_ever
from tests.properties import test_membership
from tests.sim import (
    test_admission,
    test_handshake_limits,
    test_host_defences,
    test_matchmaking,
    test_pass_graphs,
    test_training_exchanges,
)
from tests.unit.directory import test_dht_rpc
from tests.unit.engine import test_fairness
from tests.unit.hosting import test_node_reports
from tests.unit.net import test_hostile_messages, test_probes, test_resources, test_subnets
from tests.web_defences import patched


def parse_leniently(kind: type[Protobuf], header: bytes) -> Protobuf:
    """Parse the part of a message before the first error."""
    message = kind()
    with contextlib.suppress(DecodeError):
        message.MergeFromString(header)
    return message


def allow_large_calls(patch: pytest.MonkeyPatch) -> None:
    prepare_hivemind()
    from swarmnet_protocols.directory.dht import rpc as dht_rpc

    patch.setitem(dht_rpc.MAX_REQUEST_BYTES, DHT_FIND.id, 1 << 30)


def reserve_when_announced(patch: pytest.MonkeyPatch) -> None:
    """Reserve the announced size of a message before any of it has come."""
    read_body = FrameReader._read_body

    async def reading(frames: FrameReader, size_bytes: int) -> memoryview:
        await frames._scope.reserve(size_bytes)
        return await read_body(frames, size_bytes)

    patch.setattr(FrameReader, "_read_body", reading)


FLOODS = (
    Defence(
        "messages of a peer are read at a limited rate",
        replacing(Scope, "charge", lambda *_: 0.0),
        lambda _: test_hostile_messages.test_frames_are_read_at_the_rate_of_their_peer_over_all_its_streams(),
    ),
    Defence(
        "a peer far over its rate opens no streams",
        replacing(Scope, "check_rate", nothing),
        lambda _: test_hostile_messages.test_streams_of_a_peer_that_owes_too_much_are_not_taken(),
    ),
    Defence(
        "a peer far over its rate makes no DHT calls",
        replacing(Scope, "check_rate", nothing),
        lambda _: test_dht_rpc.test_endless_calls_are_delayed_before_they_are_parsed(),
    ),
    Defence(
        "DHT calls have a size limit",
        allow_large_calls,
        lambda _: test_dht_rpc.test_a_call_that_asks_for_too_much_is_not_parsed(),
    ),
    Defence(
        "concurrent DHT calls of a peer are limited",
        count_only,
        lambda _: test_dht_rpc.test_calls_that_wait_for_a_handshake_are_few(),
    ),
    Defence(
        "the shape of a tensor is checked before memory is allocated",
        replacing(wire_tensors, "_check_shape", nothing),
        lambda _: test_hostile_messages.test_a_tensor_of_two_to_the_sixty_numbers_is_refused_by_its_header(
            (1 << 30, 1 << 30)
        ),
    ),
    Defence(
        "messages nested 100,000 deep are refused",
        replacing(typed_stream, "parse", parse_leniently),
        lambda _: test_hostile_messages.test_messages_nested_without_end_are_not_parsed(
            session_pb2.SessionRequest
        ),
    ),
    Defence(
        "a first message has a deadline",
        wait_for_ever,
        lambda _: test_hostile_messages.test_a_first_message_that_drips_in_is_not_waited_for(),
    ),
    Defence(
        "silent streams are evicted from the pending handshakes",
        replacing(Scope, "available", lambda *_: 1 << 30),
        lambda _: test_handshake_limits.test_silent_strangers_keep_no_member_out(),
    ),
    Defence(
        "one subnet does not fill the pending handshakes",
        replacing(subnets, "subnet_of", lambda _: "one subnet"),
        test_admission.test_many_identities_in_one_subnet_evict_each_other,
    ),
    Defence(
        "one subnet does not take all streams",
        replacing(SubnetLimits, "_evict_from", nothing),
        lambda _: test_handshake_limits.test_sixteen_strangers_with_all_streams_keep_no_member_out(),
    ),
    Defence(
        "silent newcomers are evicted",
        replacing(Scope, "available", lambda *_: 1 << 30),
        test_admission.test_silent_newcomers_keep_no_other_newcomer_out,
    ),
    Defence(
        "newcomers that ask without end are evicted",
        replacing(Scope, "available", lambda *_: 1 << 30),
        test_admission.test_endless_requests_keep_no_other_newcomer_from_asking,
    ),
    Defence(
        "a peer stays admitted when its handshake stream is evicted",
        replacing(handshake, "MAX_WITHOUT_STREAM", 0),
        patched(
            test_handshake_limits.test_a_peer_whose_handshake_stream_was_evicted_stays_admitted_until_it_is_revoked
        ),
    ),
    Defence(
        "a revocation is kept for as long as it counts",
        replacing(revocations, "KEPT_S", 0),
        lambda _: (
            test_membership.test_a_list_names_every_revoked_peer_that_could_still_enter_and_stays_bounded()
        ),
    ),
    Defence(
        "waiting links of a client are limited",
        count_only,
        of_a_host(test_host_defences.test_one_client_leaves_pending_links_to_others),
    ),
    Defence(
        "a member evicts only its own handshake streams",
        replacing(handshake, "MAX_STREAMS_PER_PEER", 1 << 30),
        lambda _: test_handshake_limits.test_a_member_evicts_only_its_own_handshake_streams(),
    ),
    Defence(
        "strangers leave a share of the resources to known peers",
        replacing(resources, "KNOWN_PEER_SHARE", {}),
        lambda _: test_resources.test_unknown_peers_together_leave_room_for_known_peers(),
    ),
    Defence(
        "strangers leave a share of the DHT calls to known peers",
        replacing(resources, "KNOWN_PEER_SHARE", {}),
        lambda _: (
            test_dht_rpc.test_a_known_peer_is_answered_while_unknown_peers_have_all_the_calls_they_may()
        ),
    ),
    Defence(
        "the memory for graphs of one client is limited",
        replacing(engine, "GRAPH_CLIENT_SHARE", 1),
        of_a_host(test_pass_graphs.test_graphs_of_one_client_take_at_most_its_share),
    ),
    Defence(
        "a client that is ahead makes the forwards of others hardly longer",
        replacing(scheduler, "AHEAD_SHARE", 1),
        lambda _: test_fairness.test_a_client_that_is_ahead_makes_the_forwards_of_others_hardly_longer(),
    ),
    Defence(
        "a client has its share of a host beside one that floods it",
        replacing(ClientShares, "charge", nothing),
        lambda _: test_fairness.test_a_client_has_as_many_requests_beside_a_flood_as_beside_an_equal(),
    ),
    Defence(
        "forwards are short while several sessions have work",
        replacing(engine, "shared_tokens", lambda _, max_tokens: max_tokens),
        lambda _: test_fairness.test_a_short_request_among_long_prompts_waits_for_one_short_forward(1),
    ),
    Defence(
        "a message waits for memory",
        count_only,
        lambda _: (
            test_hostile_messages.test_a_message_waits_for_room_and_is_refused_where_there_never_is_any()
        ),
    ),
    Defence(
        "report streams of a peer are limited",
        count_only,
        lambda _: test_node_reports.test_streams_for_reports_are_limited_for_each_peer_and_end_when_idle(),
    ),
    Defence(
        "reports are sent at a limited rate",
        replacing(Scope, "charge", lambda *_: 0.0),
        lambda _: test_node_reports.test_frequent_requests_wait_and_share_one_report(),
    ),
    Defence(
        "a follower does not use up exchange numbers",
        replacing(matchmaking, "highest_exchange_number", lambda *_: 1 << 64),
        lambda _: test_training_exchanges.test_a_follower_that_claims_a_high_exchange_number_is_left_out(
            9 * EXCHANGES_PER_ROUND
        ),
    ),
    Defence(
        "a leader does not use up exchange numbers",
        replacing(rosters, "highest_exchange_number", lambda *_: 1 << 64),
        lambda _: test_matchmaking.test_a_roster_by_hash_is_checked(
            workers_pb2.Roster(exchange_number=4 * EXCHANGES_PER_ROUND)
        ),
    ),
    Defence(
        "concurrent dials for probes are limited",
        count_only,
        lambda _: test_probes.test_probes_at_once_are_limited_for_one_asker_and_for_all(),
    ),
    Defence(
        "a subnet leaves some of each shared resource to others",
        replacing(resources, "SHARED", frozenset()),
        lambda _: test_resources.test_however_many_identities_a_subnet_has_others_find_room(100),
    ),
    Defence(
        "a subnet leaves places to others",
        replacing(resources, "SHARED", frozenset()),
        lambda _: test_resources.test_a_subnet_leaves_places_to_others(resources.Resource.TRANSFERS),
    ),
    Defence(
        "large messages leave memory to small ones",
        replacing(resources, "SMALL_SHARE", 0.0),
        lambda _: test_resources.test_however_many_identities_there_are_small_messages_find_room(),
    ),
    Defence(
        "messages that are announced and not sent hold no memory",
        reserve_when_announced,
        lambda _: test_hostile_messages.test_messages_that_are_announced_and_not_sent_hold_no_memory(),
    ),
    Defence(
        "a message that stops gives way",
        replacing(framing, "STALL_S", 1e6),
        lambda _: (
            test_hostile_messages.test_a_message_that_stops_holds_memory_only_while_no_other_peer_needs_it()
        ),
    ),
    Defence(
        "streams without a message give way",
        replacing(subnets, "MAX_SILENT", 1 << 30),
        lambda _: test_subnets.test_streams_without_a_message_give_way_to_each_other(),
    ),
)
