"""The first token of long prompts through three hops far away, by wire format.

    python -m tests.bench.wan_prompt [--rtt-ms 100] [--rate-mbit 20] [--positions 512 2048] [--wires float32 int8] [--rounds 3]

Every node and the client are on a host of their own with emulated links between them; needs root.
Formats take turns. Prints JSON.
"""

import argparse
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

from swarmnet_protocols.models import resolve
from tests.support.processes.nodes import RunProcess
from tests.support.processes.wan import Uplink, wan_swarm

SPANS = ((0, 10), (10, 20), (20, 30))
MODEL = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="between any two hosts")
    parser.add_argument("--rate-mbit", type=float, default=20.0, help="uplink of every host")
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--wires", nargs="+", default=["float32", "int8"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    uplink = Uplink(arguments.rtt_ms / 4000, bytes_per_s=arguments.rate_mbit * 125_000)
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = Path(folder) / "cache"
        with wan_swarm(Path(folder) / "lab", cache_dir, uplink, *SPANS) as lab:
            for positions in arguments.positions:
                prompt = prompt_of(positions, cache_dir)
                first_s: dict[str, list[float]] = {wire: [] for wire in arguments.wires}
                failovers = 0
                for _ in range(arguments.rounds):
                    for wire in arguments.wires:
                        with RunProcess(lab.swarm, prompt, 2, lab.client, "--wire", wire) as run:
                            code, answer = run.finish()
                        if code:
                            raise RuntimeError(answer)
                        first_s[wire].append(round(answer["first_token_s"], 2))
                        failovers += answer["failovers"]
                report: dict[str, Any] = {
                    "bench": "wan_prompt",
                    "rtt_ms": arguments.rtt_ms,
                    "rate_mbit": arguments.rate_mbit,
                    "positions": positions,
                    "first_token_s": first_s,
                    "failovers": failovers,
                }
                for wire in first_s.keys() & {"bfloat16", "int8"}:
                    pairs = zip(first_s[wire], first_s.get("float32", ()), strict=False)
                    report[f"{wire}_of_float32"] = [round(one / other, 2) for one, other in pairs]
                print(json.dumps(report), flush=True)


def prompt_of(positions: int, cache_dir: Path) -> str:
    """Source text of the standard library with this number of tokens."""
    tokenizer = resolve(MODEL, cache_dir=cache_dir).tokenizer()
    ids = tokenizer(inspect.getsource(argparse))["input_ids"][:positions]
    return str(tokenizer.decode(ids))


if __name__ == "__main__":
    main()
