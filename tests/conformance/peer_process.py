"""A peer in its own process, which a test can kill: it prints its address and echoes under the
given protocol id."""

import asyncio
import sys
from pathlib import Path

from swarmnet_protocols.net import ProtocolSpec, Stream
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport


async def main(directory: str, protocol_id: str) -> None:
    async def echo(stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    config = P2pdConfig(Path(directory, "killed"), listen=("/ip4/127.0.0.1/tcp/0",))
    async with P2pdTransport.create(config) as transport:
        await transport.serve(ProtocolSpec(protocol_id, max_payload_bytes=1 << 20), echo)
        print(transport.addresses()[0], flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
