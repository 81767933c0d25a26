"""Signed messages in one canonical encoding, for certificates, grants and revocation lists."""

from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.wire import membership_pb2 as pb

M = TypeVar("M", bound=Message)

_ENVELOPE_BYTES = 128
"""Bytes that key, signature and field tags add to the body, rounded up."""


class Signer(Protocol):
    """An Ed25519 private key, for example an ``Identity``."""

    @property
    def public_key(self) -> bytes:
        """Raw, 32 bytes."""

    def sign(self, data: bytes) -> bytes: ...


def seal(kind: bytes, body: Message, signer: Signer) -> bytes:
    """Return ``body``, signed by ``signer`` together with ``kind``.

    A signature of one kind is not valid for another.
    """
    data = body.SerializeToString(deterministic=True)
    signature = signer.sign(_signed_bytes(kind, data))
    message = pb.Signed(body=data, signer=signer.public_key, signature=signature)
    return message.SerializeToString(deterministic=True)


def unseal(kind: bytes, body_type: type[M], data: bytes, *, max_body_bytes: int) -> tuple[M, bytes]:
    """Return the body in ``data`` and the public key that signed it.

    The caller decides whether to trust that key. Raises ``IntegrityError`` if ``data`` is too
    large, not in canonical form, of another kind, or not signed by that key.
    """
    if len(data) > max_body_bytes + _ENVELOPE_BYTES:
        raise IntegrityError(f"a signed message of {len(data)} bytes is too large")
    message = decode(pb.Signed, data)
    if not verify(message.signer, message.signature, _signed_bytes(kind, message.body)):
        raise IntegrityError("the signature is wrong")
    return decode(body_type, message.body), message.signer


def decode(kind: type[M], data: bytes) -> M:
    """Decode the message in ``data``.

    Raises ``IntegrityError`` unless ``data`` is its canonical encoding, without unknown fields.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IntegrityError(f"this is no {kind.DESCRIPTOR.name}") from error
    # Protobuf has many encodings of one message. Accepting only one keeps unsigned bytes out.
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise IntegrityError(f"the {kind.DESCRIPTOR.name} is not in canonical form")
    return message


def _signed_bytes(kind: bytes, body: bytes) -> bytes:
    return kind + b"\0" + body
