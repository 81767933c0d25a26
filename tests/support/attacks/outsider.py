"""A small libp2p peer outside the swarm: TCP, multistream, Noise XX, yamux. Its identity costs
nothing."""

import asyncio
import contextlib
import hashlib
import hmac
import struct
from collections.abc import AsyncIterator
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

MULTISTREAM, NOISE, YAMUX = "/multistream/1.0.0", "/noise", "/yamux/1.0.0"
_FRAME = struct.Struct(">BBHII")  # header of a yamux frame: version, kind, flags, stream, length
_DATA, _WINDOW, _PING = 0, 1, 2
_SYN, _ACK, _RST = 1, 2, 8
_MOST_AT_ONCE = 60_000  # largest plain text in a message of Noise
_ED25519 = b"\x08\x01\x12\x20"  # the first bytes of libp2p's protobuf of a key


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    """A protobuf field that holds bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def line(text: str) -> bytes:
    """A message of multistream-select."""
    return varint(len(text) + 1) + text.encode() + b"\n"


class _Handshake:
    """The initiator of Noise_XX_25519_ChaChaPoly_SHA256."""

    def __init__(self) -> None:
        self._hash = self._chain = b"Noise_XX_25519_ChaChaPoly_SHA256"
        self._key: ChaCha20Poly1305 | None = None
        self._nonce = 0
        self.mix(b"")

    def mix(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def mix_key(self, shared: bytes) -> None:
        self._chain, key = self._derive(shared)
        self._key, self._nonce = ChaCha20Poly1305(key), 0

    def split(self) -> tuple[ChaCha20Poly1305, ChaCha20Poly1305]:
        there, back = self._derive(b"")
        return ChaCha20Poly1305(there), ChaCha20Poly1305(back)

    def encrypt(self, plain: bytes) -> bytes:
        data = self._key.encrypt(self._next_nonce(), plain, self._hash) if self._key else plain
        self.mix(data)
        return data

    def decrypt(self, data: bytes) -> bytes:
        plain = self._key.decrypt(self._next_nonce(), data, self._hash) if self._key else data
        self.mix(data)
        return plain

    def _derive(self, shared: bytes) -> tuple[bytes, bytes]:
        secret = hmac.digest(self._chain, shared, "sha256")
        first = hmac.digest(secret, b"\1", "sha256")
        return first, hmac.digest(secret, first + b"\2", "sha256")

    def _next_nonce(self) -> bytes:
        self._nonce += 1
        return nonce(self._nonce - 1)


def nonce(number: int) -> bytes:
    return bytes(4) + struct.pack("<Q", number)


class Outsider:
    """One connection. It opens streams and accepts none. Made by :meth:`connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._key = Ed25519PrivateKey.generate()
        public = _ED25519 + self._key.public_key().public_bytes_raw()
        self._public = public
        self.id = b"\x00" + bytes([len(public)]) + public
        """Its peer id as bytes."""
        self.heard: dict[int, bytes] = {}
        """The bytes that arrived on each of its streams."""
        self.reset: set[int] = set()
        """Its streams that the other side has reset."""
        self.is_connected = True
        self._plain = b""
        self._sent = self._received = 0
        self._next_stream = 1
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, *, source: str | None = None) -> Self:
        """Connect to a TCP multiaddr from an address of this machine."""
        _, _, host, _, port, *_ = address.split("/")
        local = (source, 0) if source is not None else None
        peer = cls(*await asyncio.open_connection(host, int(port), local_addr=local))
        try:
            await peer._upgrade()
        except BaseException:
            peer.close()
            raise
        return peer

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        self.is_connected = False
        self._writer.close()

    async def open(self, protocol: str, said: bytes = b"") -> int:
        """Open a stream under ``protocol``, or begin a negotiation without one, and send a first
        message on it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.heard[stream] = b""
        await self._write(_FRAME.pack(0, _WINDOW, _SYN, stream, 0))
        await self.say(stream, line(MULTISTREAM) + (line(protocol) if protocol else b"") + said)
        return stream

    async def say(self, stream: int, data: bytes) -> None:
        await self._write(_FRAME.pack(0, _DATA, 0, stream, len(data)) + data)

    async def until_heard(self, stream: int, data: bytes) -> None:
        """Wait until ``data`` has arrived on ``stream``. Raises ``ConnectionError`` if the
        connection ends before."""
        while data not in self.heard[stream]:
            if not self.is_connected:
                raise ConnectionError
            await asyncio.sleep(0.01)

    async def _upgrade(self) -> None:
        self._writer.write(line(MULTISTREAM) + line(NOISE))
        for expected in line(MULTISTREAM), line(NOISE):
            if await self._reader.readexactly(len(expected)) != expected:
                raise ConnectionError("no Noise")
        await self._shake_hands()
        await self._write(line(MULTISTREAM) + line(YAMUX))
        for expected in line(MULTISTREAM), line(YAMUX):
            if await self._read(len(expected)) != expected:
                raise ConnectionError("no yamux")
        self._listening = asyncio.create_task(self._listen())

    async def _shake_hands(self) -> None:
        noise, ephemeral, static = _Handshake(), X25519PrivateKey.generate(), X25519PrivateKey.generate()
        public = ephemeral.public_key().public_bytes_raw()
        noise.mix(public)
        self._write_message(public + noise.encrypt(b""))
        answer = await self._read_message()
        noise.mix(answer[:32])
        theirs = X25519PublicKey.from_public_bytes(answer[:32])
        noise.mix_key(ephemeral.exchange(theirs))
        noise.mix_key(ephemeral.exchange(X25519PublicKey.from_public_bytes(noise.decrypt(answer[32:80]))))
        noise.decrypt(answer[80:])
        public = static.public_key().public_bytes_raw()
        last = noise.encrypt(public)
        noise.mix_key(static.exchange(theirs))
        signed = self._key.sign(b"noise-libp2p-static-key:" + public)
        self._write_message(last + noise.encrypt(field(1, self._public) + field(2, signed)))
        self._there, self._back = noise.split()

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                _, kind, flags, stream, length = _FRAME.unpack(await self._read(_FRAME.size))
                if kind == _DATA:
                    data = await self._read(length)
                    if stream in self.heard:
                        self.heard[stream] += data
                        await self._write(_FRAME.pack(0, _WINDOW, 0, stream, length))
                    elif stream % 2 == 0 and data:
                        await self._write(_FRAME.pack(0, _WINDOW, _RST, stream, 0))
                elif kind == _WINDOW and flags & _RST:
                    self.reset.add(stream)
                elif kind == _PING and flags & _SYN:
                    await self._write(_FRAME.pack(0, _PING, _ACK, 0, length))
        self.is_connected = False

    async def _write(self, data: bytes) -> None:
        for start in range(0, len(data), _MOST_AT_ONCE):
            piece = data[start : start + _MOST_AT_ONCE]
            self._write_message(self._there.encrypt(nonce(self._sent), piece, b""))
            self._sent += 1
        await self._writer.drain()

    async def _read(self, size: int) -> bytes:
        while len(self._plain) < size:
            message = await self._read_message()
            self._plain += self._back.decrypt(nonce(self._received), message, b"")
            self._received += 1
        data, self._plain = self._plain[:size], self._plain[size:]
        return data

    def _write_message(self, message: bytes) -> None:
        self._writer.write(struct.pack(">H", len(message)) + message)

    async def _read_message(self) -> bytes:
        return await self._reader.readexactly(struct.unpack(">H", await self._reader.readexactly(2))[0])


@contextlib.asynccontextmanager
async def outsiders(
    address: str, number: int, *, sources: tuple[str | None, ...] = (None,)
) -> AsyncIterator[list[Outsider]]:
    """``count`` connections from each of ``sources``, each with an identity of its own. Those that
    were refused are missing."""
    joined: list[Outsider] = []

    async def join(source: str | None) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            joined.append(await Outsider.connect(address, source=source))

    try:
        for start in range(0, number, 25):
            await asyncio.gather(
                *(join(source) for _ in range(min(25, number - start)) for source in sources)
            )
        yield joined
    finally:
        for each in joined:
            each.close()
