"""Time to fetch a model over slow links, from the hub, from two peers, and from all three, relative
to what their rates allow.

    python -m tests.bench.fetching [--mbit 20] [--layers 12]

The hub is a stand-in over HTTP on this machine, whose connections together have the given rate.
Each peer sends at the same rate, over links that delay messages by 10 ms, in this process. The
tables of pieces are known, as in a swarm whose file names the pieces hash. Prints one JSON object a
case; ``bound_s`` is the size of the weights divided by the rates of all sources.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from swarmnet_protocols.models import resolve
from tests.support.models.big_model import load, make_tables
from tests.support.models.model_hub import model_hub
from tests.support.models.tiny_models import save_tiny
from tests.support.network.memory_network import LinkProfile
from tests.support.swarm.weight_swarm import weight_swarm

CASES = {"the hub": (True, 0), "two peers": (False, 2), "the hub and two peers": (True, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of the hub, and of each peer")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model, 4.2 MB each")
    options = parser.parse_args()
    bytes_per_s = options.mbit * 1e6 / 8
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = {"hidden_size": 320, "intermediate_size": 800, "num_hidden_layers": options.layers}
        model = save_tiny("mistral", folder / "model", max_shard_size="12MB", **sizes)
        tables, pieces_hash = make_tables(model, folder / "maker")
        for case in CASES:
            report = measure(case, model, folder, tables, pieces_hash, bytes_per_s)
            print(json.dumps({"bench": "fetching", "case": case, "mbit": options.mbit, **report}), flush=True)


def measure(
    case: str, model: Path, folder: Path, tables: Path, pieces_hash: bytes, bytes_per_s: float
) -> dict[str, object]:
    """Fetch all weights into an empty cache."""
    has_hub, peers = CASES[case]
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with model_hub(model, folder / "hf") as hub, weight_swarm(LinkProfile(bytes_per_s=bytes_per_s)) as swarm:
        newcomer = load(cache, tables)
        whole = resolve(str(model), cache_dir=folder / "maker")
        whole.verify()
        for _ in range(peers):
            swarm.host(whole.shared())
        swarm.join(newcomer, pieces_hash)
        hub.bytes_per_s, hub.is_closed = bytes_per_s, not has_hub
        began = time.monotonic()
        newcomer.fetch()
        took_s = time.monotonic() - began
        size, sources = sum(newcomer.parts.bytes_from.values()), peers + has_hub
        bound_s = size / bytes_per_s / sources
        return {
            "bytes": size,
            "seconds": round(took_s, 2),
            "bound_s": round(bound_s, 2),
            "ratio": round(took_s / bound_s, 3),
            "from_hub": round(newcomer.parts.bytes_from.get("the hub", 0) / size, 3),
        }


if __name__ == "__main__":
    main()
