"""The defences against too much, too fast or too slowly, as in ``defences.py``."""

from swarmnet_protocols.resources import Scope
from tests.defences import Defence, nothing, replacing, wait_for_ever
from tests.sim import test_door_limits
from tests.unit import test_dht_guard, test_hostile_messages

FLOODS = (
    Defence(
        "messages come at a rate",
        replacing(Scope, "use", lambda *_: 0.0),
        lambda _: test_hostile_messages.test_frames_are_read_at_the_rate_of_their_peer_over_all_its_streams(),
    ),
    Defence(
        "who owes too much opens no streams",
        replacing(Scope, "check", nothing),
        lambda _: test_hostile_messages.test_streams_of_a_peer_that_owes_too_much_are_not_taken(),
    ),
    Defence(
        "nor calls the DHT",
        replacing(Scope, "check", nothing),
        lambda _: test_dht_guard.test_who_calls_without_end_is_told_to_wait_before_its_calls_are_parsed(),
    ),
    Defence(
        "a first message may not drip in",
        wait_for_ever,
        lambda _: test_hostile_messages.test_a_first_message_that_drips_in_is_not_waited_for(),
    ),
    Defence(
        "the silent make room at the door",
        replacing(Scope, "spare", lambda *_: 1 << 30),
        lambda _: test_door_limits.test_silent_strangers_keep_no_member_out(),
    ),
)
