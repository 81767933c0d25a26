"""The Noise handshake and the encryption of a circuit, with a relay that lies."""

import pytest

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.reachability import circuit
from swarmnet_protocols.reachability.circuit import MAX_HANDSHAKE_BYTES, MAX_PLAIN_BYTES, CircuitEnd
from tests.defences import Patch, defence, replacing, yes

ALICE, BOB, MALLORY = (Identity.from_seed(name) for name in (b"alice", b"bob", b"mallory"))
PROTOCOL = "/test/1"


def ends() -> tuple[CircuitEnd, CircuitEnd]:
    """Both ends of a circuit from Alice to Bob, after the handshake."""
    a, b = CircuitEnd(ALICE, connects=True), CircuitEnd(BOB, connects=False)
    assert b.read_hello(a.hello(PROTOCOL)) == PROTOCOL
    assert a.read_reply(b.reply(is_supported=True), BOB.peer_id)
    b.check_confirmation(a.confirm(), ALICE.peer_id)
    return a, b


def test_both_ends_decrypt_what_the_other_encrypts() -> None:
    a, b = ends()
    for sender, receiver in (a, b), (b, a):
        for plain in b"x", bytes(MAX_PLAIN_BYTES):
            assert receiver.decrypt(sender.encrypt(plain)) == plain


def test_an_unsupported_protocol_is_reported() -> None:
    a, b = CircuitEnd(ALICE, connects=True), CircuitEnd(BOB, connects=False)
    b.read_hello(a.hello(PROTOCOL))
    assert not a.read_reply(b.reply(is_supported=False), BOB.peer_id)


def believe_anyone(patch: Patch) -> None:
    patch.setattr(circuit, "verify", yes)


@defence("the other end of a circuit proves its identity to the end that connects", off=believe_anyone)
def test_a_relay_cannot_answer_in_place_of_the_peer() -> None:
    a, relay = CircuitEnd(ALICE, connects=True), CircuitEnd(MALLORY, connects=False)
    relay.read_hello(a.hello(PROTOCOL))
    with pytest.raises(IntegrityError, match="is not"):
        a.read_reply(relay.reply(is_supported=True), BOB.peer_id)


@defence("the end of a circuit that connects proves its identity", off=believe_anyone)
def test_a_relay_cannot_connect_in_place_of_a_peer() -> None:
    relay, b = CircuitEnd(MALLORY, connects=True), CircuitEnd(BOB, connects=False)
    b.read_hello(relay.hello(PROTOCOL))
    relay.read_reply(b.reply(is_supported=True), BOB.peer_id)
    with pytest.raises(IntegrityError, match="is not"):
        b.check_confirmation(relay.confirm(), ALICE.peer_id)


def test_a_relay_cannot_change_the_protocol() -> None:
    a, b = CircuitEnd(ALICE, connects=True), CircuitEnd(BOB, connects=False)
    b.read_hello(a.hello(PROTOCOL).replace(b"/test/1", b"/test/2"))
    with pytest.raises(ProtocolViolation):
        a.read_reply(b.reply(is_supported=True), BOB.peer_id)


def skip_authentication(patch: Patch) -> None:
    """Decrypt with a stream cipher whose tag is not checked: here, do not encrypt at all."""
    patch.setattr(circuit.CircuitEnd, "encrypt", lambda _, plain: plain)
    patch.setattr(circuit.CircuitEnd, "decrypt", lambda _, message: message)


@defence("a relay cannot change what it forwards", off=skip_authentication)
def test_a_changed_message_is_noticed() -> None:
    a, b = ends()
    message = bytearray(a.encrypt(b"a token"))
    message[3] ^= 1
    with pytest.raises(IntegrityError):
        b.decrypt(bytes(message))


@defence("a relay cannot repeat what it forwards", off=skip_authentication, order=(0, 0))
@pytest.mark.parametrize("order", [(0, 0), (1,)], ids=["repeated", "left out"])
def test_a_repeated_or_missing_message_is_noticed(order: tuple[int, ...]) -> None:
    a, b = ends()
    messages = [a.encrypt(b"first"), a.encrypt(b"second")]
    *before, last = order
    if before == [0]:
        b.decrypt(messages[0])
    with pytest.raises(IntegrityError):
        b.decrypt(messages[last])


@defence(
    "a handshake message of a circuit is bounded", off=replacing(circuit, "MAX_HANDSHAKE_BYTES", 1 << 30)
)
def test_a_long_handshake_message_is_not_processed() -> None:
    a = CircuitEnd(ALICE, connects=True)
    a.hello(PROTOCOL)
    with pytest.raises(ProtocolViolation, match="bytes"):
        a.read_reply(bytes(MAX_HANDSHAKE_BYTES + 1), BOB.peer_id)


@pytest.mark.parametrize("message", [b"", b"x", bytes(31), bytes(200), bytes(MAX_HANDSHAKE_BYTES + 1)])
def test_other_bytes_are_no_handshake(message: bytes) -> None:
    a = CircuitEnd(ALICE, connects=True)
    a.hello(PROTOCOL)
    with pytest.raises((ProtocolViolation, IntegrityError)):
        a.read_reply(message, BOB.peer_id)


@pytest.mark.parametrize("message", [b"", b"x", bytes(31), bytes(200), bytes(MAX_HANDSHAKE_BYTES + 1)])
def test_other_bytes_do_not_connect(message: bytes) -> None:
    def answer() -> None:
        b = CircuitEnd(BOB, connects=False)
        b.read_hello(message)
        b.reply(is_supported=True)
        b.check_confirmation(message, ALICE.peer_id)

    with pytest.raises((ProtocolViolation, IntegrityError)):
        answer()
