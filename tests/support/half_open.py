"""Connections at a p2pd that never finish a handshake. As a program: whether they stay where no process lends its descriptors."""

import asyncio
import contextlib
import ctypes
import logging
import struct
import sys
import time
from pathlib import Path

from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport
from swarmnet_protocols.timing import Timing

HANDSHAKE_S = 0.3
HELLO = b"\x13/multistream/1.0.0\n\x07/noise\n"


async def say_nothing(address: str) -> float:
    """To whoever listens at a multiaddr, until it ends the connection; for how many seconds that was."""
    return await drip(address, 0.0, b"")


async def drip(address: str, every_s: float, hello: bytes = HELLO) -> float:
    """Say what a peer would say, a byte at a time, until the other side ends the connection; for how many seconds that was."""
    began = time.monotonic()
    _, _, host, _, port, *_ = address.split("/")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        end = asyncio.create_task(_ended(reader))
        for byte in hello:
            await asyncio.wait([end], timeout=every_s)
            if end.done():
                break
            writer.write(bytes([byte]))
        await end
    return time.monotonic() - began


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read()


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid_getfd() -> None:
    """To this process and whatever it starts, as containers do: seccomp(2) answers pidfd_getfd(2) with EPERM."""
    load, unless_equal, answer = 0x20, 0x15, 0x06  # of linux/bpf_common.h
    instructions = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (load, 0, 0, 0),  # the number of the call
            (unless_equal, 0, 1, 438),
            (answer, 0, 0, 0x00050001),  # of linux/seccomp.h: an error, and which
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(4, instructions)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program)):  # of linux/prctl.h
        raise OSError(ctypes.get_errno(), "seccomp")


async def main(directory: Path) -> None:
    config = P2pdConfig(
        directory / "id", listen=("/ip4/127.0.0.1/tcp/0",), timing=Timing(handshake_s=HANDSHAKE_S)
    )
    async with P2pdTransport.create(config) as transport:
        try:
            async with asyncio.timeout(6 * HANDSHAKE_S):
                await say_nothing(transport.addresses()[0])
            print("it was ended")
        except TimeoutError:
            print("it stays")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    forbid_getfd()
    asyncio.run(main(Path(sys.argv[1])))
