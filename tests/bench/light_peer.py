"""A process that joins a swarm as a host does, without a model: prints its reach as JSON once it is
joined, and when asked on stdin."""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from swarmnet.swarm_file.entry import enter
from swarmnet_protocols.joining.network import any_port, connect


async def main(swarm: str, data_dir: Path, bootstrap: list[str]) -> None:
    entry = enter(swarm, data_dir, bootstrap)
    began = time.monotonic()
    async with connect(entry.network(any_port())) as (transport, _):
        loop = asyncio.get_running_loop()
        while True:
            reach = asdict(transport.reach()) | {"after_s": time.monotonic() - began}
            print(json.dumps(reach | {"peer_id": transport.peer_id}), flush=True)
            if not await loop.run_in_executor(None, sys.stdin.readline):
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
