"""What a worker sends in a round, by kind of message, as the number of workers grows. Whole workers
in virtual time.

    python -m tests.bench.train_traffic [--method sparseloco] [--workers 8 16 32 64]

For each kind and worker: the bytes outside of payloads, frames included; the bytes of payloads; the
messages. The model is so small that every worker just owns a slice. What is not payload does not
grow with the model until slices travel in several parts; ``payload_of_template`` is the payload of
a model of the template's size, by the codec's sizes. Prints one JSON object a number.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from swarmnet_protocols.net.framing import SIZES
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.jobs import parse_job
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.network.memory_network import Delivery, LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, train, write_job

TEMPLATE_PARAMETERS = 1_312_384
ROUNDS = 2
"""The first round is not counted: in it workers join, and learn the addresses of the others."""
LINK = LinkProfile(delay_s=0.02, bytes_per_s=12.5e6)


class Traffic:
    """Arrived traffic by kind: bytes without payload, bytes of payload, and messages."""

    def __init__(self) -> None:
        self.headers: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def see(self, delivery: Delivery) -> None:
        kind = _kind(delivery)
        self.headers[kind] += SIZES.size + len(delivery.message.header)
        self.payload[kind] += len(delivery.message.payload)
        self.messages[kind] += 1

    def clear(self) -> None:
        for counter in (self.headers, self.payload, self.messages):
            counter.clear()


def _kind(delivery: Delivery) -> str:
    protocol = delivery.protocol.id.split("/")[2]
    if delivery.protocol is not EXCHANGE:
        return protocol
    if delivery.message.header == pb.ExchangeReply(heartbeat=pb.Heartbeat()).SerializeToString():
        return "heartbeat"
    return pb.ExchangeRequest.FromString(delivery.message.header).WhichOneof("kind") or protocol


def job_toml(folder: Path, method: str, workers: int) -> str:
    """A job of a model with 21,000 parameters a layer and a layer for every four workers."""
    steps = "sync_every = 100" if method == "zo" else "sync_every = 1"
    toml = write_job(folder, method, steps, f"min_workers = {workers}", rounds=ROUNDS)
    toml = toml.replace("max_workers = 8", f"max_workers = {MAX_MEMBERS}").replace("s = 15", "s = 60")
    return toml.replace("hidden_size = 16", "hidden_size = 64").replace(
        "layers = 1", f"layers = {max(1, workers // 4)}"
    )


def last_round(method: str, workers: int) -> dict[str, Any]:
    """The traffic of all workers from the end of the first round to the end of the last."""
    network, traffic = MemoryNetwork(random.Random(0), LINK), Traffic()
    names = [f"worker-{number}" for number in range(workers)]
    rounds: list[dict[str, Any]] = []

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == names[0] and event["event"] == "round":
            rounds.append(event)
            if len(rounds) < ROUNDS:
                traffic.clear()

    network.observers.append(traffic.see)
    with tempfile.TemporaryDirectory() as folder:
        toml = job_toml(Path(folder), method, workers)
        run(train(WorkerLab(Path(folder), toml, network, watch), *names))
    job = parse_job(toml.encode()).job
    codec = get_codec(job.exchange.codec or job.make_method().codec)
    whole, others = codec.max_bytes(TEMPLATE_PARAMETERS), workers - 1
    result = whole * others if codec.sparse else whole * others / workers
    return {
        "method": method,
        "workers": workers,
        "contributors": len(rounds[-1]["contributors"]),
        "headers": round(traffic.headers.total() / workers),
        "payload": round(traffic.payload.total() / workers),
        "payload_of_template": None if method == "zo" else round(whole * others / workers + result),
        "kinds": {
            kind: [
                round(count[kind] / workers, 1)
                for count in (traffic.headers, traffic.payload, traffic.messages)
            ]
            for kind, _ in traffic.headers.most_common()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", default="sparseloco")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    arguments = parser.parse_args()
    for workers in arguments.workers:
        print(json.dumps({"bench": "train_traffic"} | last_round(arguments.method, workers)), flush=True)


if __name__ == "__main__":
    main()
