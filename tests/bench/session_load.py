"""Clients that have no model and send a swarm prompts of random numbers, to load its hosts.

    python -m tests.bench.session_load SWARM_FILE MANIFEST --bootstrap ADDR [--sessions 4] [--positions 4096] [--keep]

Each session is filled up to ``--positions``, again and again; with ``--keep`` it then stays, and
another one is opened.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from swarmnet.swarm_file.entry import enter
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.joining.network import client_listen, connect
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.timing import Timing

HIDDEN_SIZE = 576
CHUNK_POSITIONS = 2048


async def fill(hosts: ModelHosts, blocks: int, positions: int, *, keep: bool) -> None:
    """Open and fill sessions one after another; a session that a host refuses for lack of room is
    given up."""
    spec = ChainSpec(blocks, HIDDEN_SIZE, 8192, ElementType.FLOAT32)
    while True:
        try:
            async with Chain(hosts, spec, lambda values: values).open() as chain:
                for start in range(0, positions, CHUNK_POSITIONS):
                    row = Row(0, start, CHUNK_POSITIONS, 1, 0)
                    await chain.forward(
                        (row,),
                        np.random.default_rng().standard_normal((CHUNK_POSITIONS, HIDDEN_SIZE), np.float32),
                    )
                if keep:
                    await asyncio.Event().wait()
        except SwarmnetError as error:
            print(f"a session was given up: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)


async def load(arguments: argparse.Namespace, data_dir: Path) -> None:
    entry = enter(str(arguments.swarm), data_dir, arguments.bootstrap)
    async with connect(entry.network(client_listen(entry.bootstrap)), client_mode=True) as (
        transport,
        directory,
    ):
        manifest, timing = bytes.fromhex(arguments.manifest), Timing(recover_s=30.0)
        hosts = ModelHosts(transport, directory, manifest, random.Random(0), timing)
        async with hosts.watching(), asyncio.TaskGroup() as group:
            for _ in range(arguments.sessions):
                group.create_task(fill(hosts, arguments.blocks, arguments.positions, keep=arguments.keep))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("swarm", type=Path)
    parser.add_argument("manifest")
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument(
        "--blocks", type=int, default=30, help="number of blocks, from block 0 on, that sessions use"
    )
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(load(arguments, Path(folder)))


if __name__ == "__main__":
    main()
