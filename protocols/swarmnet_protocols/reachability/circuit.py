"""A circuit: a stream to a peer through a relay, encrypted end to end with Noise (pattern XX).

1. Both ends exchange Noise messages as payloads of a stream that the relay forwards.
2. In the handshake each end signs its static Noise key with its identity key, as in libp2p's Noise.
   So the relay cannot impersonate either end.
3. Afterwards each end has a pair of sockets. The stream's user reads and writes plain bytes on one,
   as on p2pd's socket of a direct stream. Two tasks encrypt and decrypt between the other socket
   and the relay.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from cryptography.exceptions import InvalidTag
from noise.connection import Keypair, NoiseConnection  # type: ignore[import-untyped]
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError  # type: ignore[import-untyped]

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, StreamEnded, SwarmnetError
from swarmnet_protocols.machine.aio import cancel, within
from swarmnet_protocols.net import Message, PeerId, Stream
from swarmnet_protocols.net.framing import LINGER_S
from swarmnet_protocols.net.identity import Identity, public_key_of, verify
from swarmnet_protocols.net.pipe import Pipe, adopt
from swarmnet_protocols.net.typed_stream import parse
from swarmnet_protocols.wire import relay_pb2 as pb

_log = logging.getLogger(__name__)

_PATTERN = b"Noise_XX_25519_ChaChaPoly_SHA256"
_PROLOGUE = b"swarmnet-circuit/1"
_SIGNED = b"swarmnet-circuit-static-key:"
_TAG_BYTES = 16
MAX_PLAIN_BYTES = (1 << 16) - 1 - _TAG_BYTES
"""Most plain bytes in one Noise message: a message has at most 65,535 bytes, its tag included."""
MAX_HANDSHAKE_BYTES = 4096
_NOISE_ERRORS = (InvalidTag, NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError, ValueError)


class CircuitEnd:
    """One end of the Noise handshake and of the encryption after it.

    The end that opens the circuit calls ``hello``, ``read_reply`` and ``confirm``. The other end
    calls ``read_hello``, ``reply`` and ``check_confirmation``.
    """

    def __init__(self, identity: Identity, *, connects: bool) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._identity = identity
        static = X25519PrivateKey.generate()
        self._static_public = static.public_key().public_bytes_raw()
        self._noise = NoiseConnection.from_name(_PATTERN)
        self._noise.set_prologue(_PROLOGUE)
        if connects:
            self._noise.set_as_initiator()
        else:
            self._noise.set_as_responder()
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, static.private_bytes_raw())
        self._noise.start_handshake()
        self._handshake = self._noise.noise_protocol.handshake_state

    def hello(self, protocol_id: str) -> bytes:
        """Return the opener's first message. It names the protocol of the stream, unencrypted."""
        return self._write(protocol_id.encode())

    def read_hello(self, message: bytes) -> str:
        """Return the protocol id of the stream. Raises ``ProtocolViolation``."""
        return self._read(message).decode(errors="replace")

    def reply(self, *, is_supported: bool) -> bytes:
        """Return the accepting end's message: its proof, and whether it serves the protocol.

        Raises ``ProtocolViolation`` if the first message had an unusable key.
        """
        return self._write(self._proof(is_unsupported=not is_supported))

    def read_reply(self, message: bytes, peer: PeerId) -> bool:
        """Return whether the other end serves the protocol.

        Raises ``ProtocolViolation``, and ``IntegrityError`` if the other end is not ``peer``.
        """
        return not self._check(self._read(message), peer).is_unsupported

    def confirm(self) -> bytes:
        """Return the opener's proof, the third message. It authenticates the first two."""
        return self._write(self._proof())

    def check_confirmation(self, message: bytes, peer: PeerId) -> None:
        """Check the opener's proof.

        Raises ``ProtocolViolation``, and ``IntegrityError`` if the other end is not ``peer``.
        """
        self._check(self._read(message), peer)

    def encrypt(self, plain: bytes) -> bytes:
        return bytes(self._noise.encrypt(plain))

    def decrypt(self, message: bytes) -> bytes:
        """Decrypt the next message.

        Raises ``IntegrityError`` if a message was changed, left out or repeated on the way.
        """
        try:
            return bytes(self._noise.decrypt(message))
        except _NOISE_ERRORS as error:
            raise IntegrityError("a relay changed what it forwards") from error

    def _proof(self, *, is_unsupported: bool = False) -> bytes:
        signature = self._identity.sign(_SIGNED + self._static_public)
        return pb.Proof(signature=signature, is_unsupported=is_unsupported).SerializeToString()

    def _write(self, payload: bytes) -> bytes:
        try:
            return bytes(self._noise.write_message(payload))
        except _NOISE_ERRORS as error:  # the other end's key is a point of low order
            raise ProtocolViolation("the Noise handshake of a circuit failed") from error

    def _read(self, message: bytes) -> bytes:
        if len(message) > MAX_HANDSHAKE_BYTES:
            raise ProtocolViolation(f"a Noise handshake message of {len(message)} bytes")
        try:
            return bytes(self._noise.read_message(message))
        except _NOISE_ERRORS as error:
            raise ProtocolViolation("the Noise handshake of a circuit failed") from error

    def _check(self, payload: bytes, peer: PeerId) -> pb.Proof:
        proof = parse(pb.Proof, payload)
        remote_static: bytes = self._handshake.rs.public_bytes
        if not verify(public_key_of(peer), proof.signature, _SIGNED + remote_static):
            raise IntegrityError(f"the other end of a circuit is not {peer}")
        return proof


async def join(stream: Stream, end: CircuitEnd) -> tuple[Pipe, Coroutine[Any, Any, None]]:
    """Return a pipe for the plain bytes of a circuit, and a coroutine that carries them.

    The coroutine encrypts and decrypts between the pipe and ``stream`` until either side closes.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with contextlib.ExitStack() as unused:
        unused.callback(theirs.close)
        pipe = await adopt(ours)
        unused.callback(pipe.writer.close)
        plain = await adopt(theirs)
        unused.pop_all()
    return pipe, _carry(stream, end, plain)


async def _carry(stream: Stream, end: CircuitEnd, plain: Pipe) -> None:
    encrypting = asyncio.create_task(_encrypt(plain, end, stream))
    decrypting = asyncio.create_task(_decrypt(stream, end, plain))
    try:
        await asyncio.wait((encrypting, decrypting), return_when=asyncio.FIRST_COMPLETED)
        plain.writer.close()  # closes only once all decrypted bytes are written
        await within(LINGER_S, plain.closed())
    finally:
        stream.close()
        plain.writer.transport.abort()
        await cancel(encrypting, decrypting)


async def _encrypt(plain: Pipe, end: CircuitEnd, stream: Stream) -> None:
    with contextlib.suppress(SwarmnetError, OSError):
        while data := await plain.reader.read(MAX_PLAIN_BYTES):
            await stream.send(Message(b"", end.encrypt(data)))


async def _decrypt(stream: Stream, end: CircuitEnd, plain: Pipe) -> None:
    with contextlib.suppress(StreamEnded, OSError):
        while True:
            message = await stream.receive()
            try:
                data = end.decrypt(bytes(message.payload))
            except IntegrityError as error:
                _log.warning("%s: %s", stream.peer, error)
                return
            plain.writer.write(data)
            await plain.writer.drain()
