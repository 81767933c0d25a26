"""Bytes and CPU time of a client that reads the hosts of a model. A real DHT stores the records of
100, 1,000 or 10,000 hosts.

    python -m tests.bench.directory [--hosts 100 1000 10000] [--peers 8] [--rounds 10]

The peers run in another process, so that the CPU is the client's own. ``first`` and ``refresh`` are
the reads of a client, ``some_blocks`` is one for the hosts of a certain block. ``one_topic``, for
comparison: all records under one topic, read whole from all replicas; ``refused_one_topic`` counts
the hosts that did not fit. Each host has 10 of 80 blocks and three addresses. Prints JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swarmnet_protocols.directory.host_announcements import (
    PROTOCOL,
    HostSample,
    hosts_topic,
)
from swarmnet_protocols.directory.records import Publisher, dht_keys
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import records_pb2 as pb

SWARM, MANIFEST = bytes(32), bytes(range(32))
BLOCKS, LENGTH = 80, 10
ONE_TOPIC = f"hosts/{MANIFEST.hex()}"
LIFETIME_S = 6 * 3600.0


def announcement(number: int, identity: Identity) -> bytes:
    start = random.Random(number).randrange(BLOCKS - LENGTH + 1)
    peer = identity.peer_id
    body = pb.HostRecord(
        manifest=MANIFEST,
        start=start,
        end=start + LENGTH,
        state=pb.HOST_STATE_ONLINE,
        version="0.1.0",
        protocol=PROTOCOL,
        step_s=0.0123,
        token_s=0.0045,
        cache_bytes_free=1 << 33,
        sessions=3,
        addresses=[
            f"/ip4/{number % 200 + 11}.{number // 250}.7.9/tcp/31337/p2p/{peer}",
            f"/ip4/{number % 200 + 11}.{number // 250}.7.9/udp/31337/quic-v1/p2p/{peer}",
            f"/ip4/192.168.1.{number % 250}/tcp/31337/p2p/{peer}",
        ],
        public_name="a volunteer",
        nat=pb.NAT_NONE,
        precision="bf16",
        coordinate=[0.1, -0.02, 0.03, 0.004, 0.001, 0.2],
    )
    return body.SerializeToString()


@contextlib.asynccontextmanager
async def join(folder: Path, bootstrap: tuple[str, ...], *, client_mode: bool = False) -> Any:
    from swarmnet_protocols.directory.dht.directory import DhtDirectory
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.p2pd.config import P2pdConfig
    from swarmnet_protocols.net.p2pd.transport import P2pdTransport
    from swarmnet_protocols.timing import Timing

    identity = Identity.load_or_create(folder)
    membership = Membership(Rules(SWARM, Admission.OPEN), identity.peer_id, wall_clock)
    config = P2pdConfig(folder, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=bootstrap)
    async with (
        P2pdTransport.create(config) as transport,
        Handshakes(transport, membership, Timing()).running() as handshakes,
        DhtDirectory.create(
            transport, handshakes, identity, bootstrap=lambda: bootstrap, client_mode=client_mode
        ) as directory,
    ):
        yield transport, directory


async def serve(hosts: int, peers: int, folder: Path) -> None:
    """Peers that store the records of ``hosts`` hosts, until stdin ends. The records are put into
    their storages, not sent."""
    async with contextlib.AsyncExitStack() as stack:
        bootstrap: tuple[str, ...] = ()
        directories = []
        for number in range(peers):
            transport, directory = await stack.enter_async_context(join(folder / str(number), bootstrap))
            bootstrap = bootstrap or tuple(transport.addresses())
            directories.append(directory)
        refused = [0, 0]
        from hivemind.dht.routing import DHTID

        for number in range(hosts):
            identity = Identity.from_seed(b"host %d" % number)
            publisher = Publisher(identity, SWARM, wall_clock)
            body = announcement(number, identity)
            for which, topic in enumerate((hosts_topic(MANIFEST, identity.peer_id), ONE_TOPIC)):
                if refused[which]:  # the topic is full: the other records would be refused, too
                    refused[which] += 1
                    continue
                record, sealed = publisher.seal(topic, body, lifetime_s=LIFETIME_S)
                for key in map(DHTID.generate, dht_keys(SWARM, topic)):
                    nearest = sorted(directories, key=lambda each: key.xor_distance(each._node.node_id))
                    for directory in nearest[:5]:
                        protocol = directory._node.protocol
                        value = protocol.serializer.dumps(sealed)
                        if not protocol.storage.store(key, value, record.expires_at, subkey=record.signer):
                            refused[which] = 1
        print(json.dumps({"bootstrap": bootstrap, "refused": refused, "record": len(sealed)}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def measure(bootstrap: tuple[str, ...], folder: Path, rounds: int) -> dict[str, Any]:
    from swarmnet_protocols.directory.dht.rpc import GuardedP2P

    traffic = {"bytes": 0, "calls": 0}
    call = GuardedP2P._call

    async def counted(self: GuardedP2P, peer: Any, protocol: Any, request: bytes, addresses: Any) -> bytes:
        answer = await call(self, peer, protocol, request, addresses)
        traffic["bytes"] += len(request) + len(answer)
        traffic["calls"] += 1
        return answer

    GuardedP2P._call = counted  # type: ignore[method-assign]
    found: dict[str, list[dict[str, float]]] = {}

    async def timed(name: str, read: Any) -> None:
        traffic.update(bytes=0, calls=0)
        began, cpu = time.perf_counter(), time.process_time()
        known = await read()
        found.setdefault(name, []).append(
            {
                "bytes": traffic["bytes"],
                "calls": traffic["calls"],
                "cpu_ms": 1000 * (time.process_time() - cpu),
                "wall_ms": 1000 * (time.perf_counter() - began),
                "hosts": len(known),
            }
        )

    async with join(folder / "client", bootstrap, client_mode=True) as (_, directory):
        await directory.lookup("warm-up")

        sample = HostSample(directory, MANIFEST, random.Random(0))
        await timed("first", sample.refresh)
        for _ in range(rounds):
            await timed("refresh", sample.refresh)
        await timed("some_blocks", lambda: sample.refresh(blocks=(40, 41)))
        await timed("one_topic", lambda: directory.lookup(ONE_TOPIC))
    return {
        name: {key: round(statistics.median(each[key] for each in rows), 1) for key in rows[0]}
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.hosts[0], options.peers, options.serve))
        return
    report: dict[str, Any] = {"bench": "directory", "peers": options.peers, "hosts": {}}
    for hosts in options.hosts:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.bench.directory", "--hosts", str(hosts)]
            command += ["--peers", str(options.peers), "--serve", folder]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peers:
                assert peers.stdout is not None
                ready = json.loads(peers.stdout.readline())
                costs = asyncio.run(measure(tuple(ready["bootstrap"]), Path(folder), options.rounds))
                peers.communicate("")
        report["hosts"][str(hosts)] = costs | {
            "record_bytes": ready["record"],
            "refused": ready["refused"][0],
            "refused_one_topic": ready["refused"][1],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
