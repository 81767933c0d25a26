"""What a person is told when a chain cannot be mended."""

from swarmnet_client.chain.retry_policy import verdict
from swarmnet_protocols.errors import IncompatibleVersion, NotAuthorised, StreamRefused
from swarmnet_protocols.net.resources import ResourceLimitReached


def test_a_person_is_told_what_hosts_refuse_their_streams_for() -> None:
    told = verdict(StreamRefused("one refused the stream: no member", hint="ask"))
    assert isinstance(told, NotAuthorised)
    assert (str(told), told.hint) == ("one refused the stream: no member", "ask")
    told = verdict(StreamRefused("one refused the stream: no room", retry_after_s=2.0))
    assert isinstance(told, ResourceLimitReached)
    assert told.retry_after_s == 2.0


def test_hosts_of_another_version_are_no_reason_to_try_again() -> None:
    told = verdict(IncompatibleVersion("protocols not supported: [/swarmnet/pass/9]"))
    assert isinstance(told, IncompatibleVersion)
    assert "upgrade" in told.hint
    assert "/swarmnet/pass/9" in str(told)
