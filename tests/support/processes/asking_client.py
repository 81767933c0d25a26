"""A client process that sends a prompt every few seconds, and prints one JSON object for each
answer: its tokens or its error, its seconds, the time of its end, and the number of hosts that the
client knows then.

python -m tests.support.processes.asking_client SWARM_FILE CACHE_DIR PERIOD_S TOTAL_S BOOTSTRAP...
"""

import json
import sys
import time
from pathlib import Path

from swarmnet import AutoSwarmModelForCausalLM
from swarmnet_protocols.errors import SwarmnetError
from tests.support.swarm.generation import greedy


def main(swarm: str, cache_dir: str, period_s: float, total_s: float, bootstrap: list[str]) -> None:
    until = time.monotonic() + total_s
    with AutoSwarmModelForCausalLM.from_pretrained(
        "smollm2-135m-instruct", swarm=swarm, bootstrap=bootstrap, cache_dir=Path(cache_dir)
    ) as model:
        while time.monotonic() < until:
            began = time.monotonic()
            row: dict[str, object] = {}
            try:
                row["tokens"] = greedy(model, [[1, 2, 3, 4, 5]], 8)[0]
            except SwarmnetError as error:
                row["error"] = str(error)
            row["ended"] = time.monotonic()
            row["s"] = round(time.monotonic() - began, 3)
            row["hosts"] = len(model._runtime.opened.known)
            print(json.dumps(row), flush=True)
            time.sleep(period_s)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
