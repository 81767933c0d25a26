import sys, time, traceback
from collections import Counter
from pathlib import Path
import tempfile
import torch
from tests.sim.overlaps import PROMPT, TOKENS, converse, SILENT
from tests.support.swarm_lab import load_reference, simulate
torch.set_num_threads(1)
from swarmnet_client.chain import standby
standby.SPARE_POSITIONS = 32
first, count = int(sys.argv[1]), int(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    reference = load_reference(Path(folder) / "m", Path(folder) / "c")
    expected = reference.greedy(PROMPT, TOKENS)
    bad = Counter(); hits = Counter(); worst = {}
    began = time.time()
    for seed in range(first, first + count):
        try:
            got = simulate(reference, lambda lab: converse(lab, faults=1 + seed % 2), seed=seed, limit_s=150.0)
        except BaseException as error:
            bad[type(error).__name__] += 1
            print(seed, type(error).__name__, str(error)[:100], getattr(error, "__notes__", "")[:2], flush=True)
            continue
        if got.tokens != expected:
            print(seed, "WRONG", got, flush=True)
        twice = [r for r in got.routes if any(a[0] == b[0] for a, b in zip(r, r[1:]))]
        hits[len(got.kinds)] += 1
        kinds = tuple(sorted(set(got.kinds)))
        wait = max(got.waits_s)
        if wait > worst.get(kinds, (0,))[0]:
            worst[kinds] = (wait, seed)
        limit = 0.6 + (0.6 if len(kinds)>1 else 0) + 3.2 * sum(k in SILENT for k in got.kinds)
        if wait > limit or twice:
            bad["slow"] += 1
            print(seed, "SLOW" if not twice else "TWICE", round(wait, 3), got.faults, got.layout, flush=True)
    print(count, "in", round(time.time() - began, 1), bad, hits)
    for k, v in sorted(worst.items(), key=lambda x: -x[1][0])[:40]:
        print(k, v)
