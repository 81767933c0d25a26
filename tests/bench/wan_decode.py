"""Decoding through three hops far away from each other and from the client.

    python -m tests.bench.wan_decode [--rtt-ms 50 100] [--tokens 48] [--rounds 3] [--rate-mbit 100]

Every node and the client are on a host of their own with emulated links between them; needs root.
The rate is that of the tokens after the first. Petals reached 3.7 tokens/s at 50 ms and 2.4 at 100
ms with three hops of this model. Prints JSON.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.support.processes.nodes import RunProcess
from tests.support.processes.wan import Uplink, wan_swarm

SPANS = ((0, 10), (10, 20), (20, 30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rtt-ms", type=float, nargs="+", default=[50.0, 100.0], help="between any two hosts"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="uplink of every host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rtt_ms in arguments.rtt_ms:
            uplink = Uplink(rtt_ms / 4000, bytes_per_s=arguments.rate_mbit * 125_000)
            answers = []
            with wan_swarm(Path(folder) / f"lab{rtt_ms:g}", Path(folder) / "cache", uplink, *SPANS) as lab:
                for _ in range(arguments.rounds):
                    with RunProcess(lab.swarm, "Once upon a time", arguments.tokens, lab.client) as run:
                        code, answer = run.finish()
                    if code:
                        raise RuntimeError(answer)
                    answers.append(answer)
            rates = [
                (len(answer["token_ids"]) - 1) / (answer["total_s"] - answer["first_token_s"])
                for answer in answers
            ]
            report = {
                "bench": "wan_decode",
                "rtt_ms": rtt_ms,
                "rate_mbit": arguments.rate_mbit,
                "hops": len(answers[0]["route"]),
                "tokens": len(answers[0]["token_ids"]),
                "tokens_per_s": round(statistics.median(rates), 2),
                "bound_tokens_per_s": round(1000 / ((len(SPANS) + 1) * rtt_ms / 2), 2),
                "first_token_s": round(statistics.median(answer["first_token_s"] for answer in answers), 2),
                "equal_tokens": all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers),
                "rounds": [round(rate, 2) for rate in rates],
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
