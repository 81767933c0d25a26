"""How far honest hosts are from each other, by the measures that audits use: SmolLM2-135M on real
text.

    python -m tests.bench.audit [--texts 40] [--positions 64] [--spans 0:10 10:20] [--wires int8]
        [--sessions 40]

Each span is computed as a session does it, as a pass does it, and as one sequence of a batch, in
float32 by native code and by torch, in bfloat16 and in float16; then from weights packed to int8
and int4, by native code and by torch. Inputs and outputs travel in each of the wire formats. Every
two of the first four are compared, and every two with the same packed weights: audits never compare
different weights. Sessions and batches take most of the time, so ``--sessions`` limits their texts.
Prints a line of JSON for each pair: quantiles of the whole difference and of the largest part, in
each view, and how many audits of 16 positions would accuse the other host.
"""

import argparse
import json
import random
from collections import defaultdict
from itertools import combinations

import torch

from swarmnet.paths import default_cache_dir
from swarmnet_client.audit.verdict import SLICE, agree, differences, views
from swarmnet_client.model.local_layers import LoadOptions, LocalLayers
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage import TORCH, Stage
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.quantize import PRECISIONS
from swarmnet_protocols.session.wire_tensors import as_received
from tests.bench.exactness import prompts

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
WIRES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": torch.int8}
VIEWS = ("outputs", "after a norm", "logits")


def stages(local: LocalModel, start: int, end: int) -> dict[str, Stage]:
    """Stages of all precisions, by "weights/activations"."""
    native = NativeBackend.load(default_cache_dir())
    found = {}
    for weights in ("float32", "int8", "int4"):
        options = {} if weights == "float32" else {"packed": True, "quantized": PRECISIONS[weights]}
        for name, dtype, backend in (
            ("native", FLOAT32, native),
            ("float32", FLOAT32, TORCH),
            ("bfloat16", BFLOAT16, TORCH),
            ("float16", FLOAT16, TORCH),
        ):
            if backend is not None:
                found[f"{weights}/{name}"] = Stage.load(
                    local, start, end, dtype=dtype, device=CPU, backend=backend, **options
                )
    return found


def computed(stage: Stage, inputs: torch.Tensor, other: torch.Tensor, way: str) -> torch.Tensor:
    """Outputs of ``inputs``: as a session computes them (a prompt of one half, then one by one),
    beside another sequence in each step ("batch"), or all at once as a pass does."""
    if way == "pass":
        return stage.run_sequences(inputs, (len(inputs),))
    sequence, beside = stage.new_sequence(), stage.new_sequence()
    half = len(inputs) // 2
    parts = [inputs[:half], *inputs[half:].split(1)]
    rows = [[(sequence, part)] for part in parts]
    if way == "batch":
        rows = [
            [(beside, part), *row]
            for part, row in zip([other[:half], *other[half:].split(1)], rows, strict=True)
        ]
    return torch.cat([stage.forward(row)[-1] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--spans", nargs="+", default=["0:10", "10:20", "20:30", "0:30"])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--wires", nargs="+", choices=list(WIRES), default=list(WIRES))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local = resolve("smollm2-135m-instruct", cache_dir=default_cache_dir())
    whole = local.load_whole(dtype=FLOAT32, device=CPU)
    layers = LocalLayers(local, LoadOptions(FLOAT32, CPU))
    found = prompts(local.tokenizer(), 4 * arguments.texts, random.Random(arguments.seed))
    texts = [ids[: arguments.positions] for ids in found if len(ids) >= arguments.positions]
    for span in arguments.spans:
        start, end = map(int, span.split(":"))
        read = layers.logits if end == local.manifest.blocks else None
        measured, accused = defaultdict(list), defaultdict(int)
        loaded = stages(local, start, end)
        before = None
        for text, ids in enumerate(texts[: arguments.texts]):
            with torch.inference_mode():
                states = whole(torch.tensor([ids]), output_hidden_states=True).hidden_states[start][0]
                before = states if before is None else before
                for wire_name in arguments.wires:
                    wire = WIRES[wire_name]
                    inputs = as_received(states, wire).float()
                    beside = as_received(before, wire).float()
                    outputs = {}
                    for name, stage in loaded.items():
                        for way in (
                            ("pass", "session", "batch")
                            if text < arguments.sessions and name in ("float32/native", "int4/bfloat16")
                            else ("pass",)
                        ):
                            made = computed(stage, inputs, beside, way).float()
                            outputs[name, way] = as_received(made, wire).float()
                    for one, other in combinations(outputs, 2):
                        if one[0].partition("/")[0] != other[0].partition("/")[0]:
                            continue
                        for at in range(0, len(ids), SLICE):
                            cut = slice(at, at + SLICE)
                            mine, theirs = outputs[one][cut], outputs[other][cut]
                            pairs = zip(VIEWS, views(mine, theirs, read), strict=False)
                            for view, (seen, expected, _) in pairs:
                                measured[wire_name, one, other, view].append(
                                    torch.stack(differences(seen, expected))
                                )
                            accused[wire_name, one, other] += not agree(mine, theirs, read)
                before = states
        for (wire_name, one, other, view), parts in measured.items():
            both = torch.cat(parts, 1)
            report = {
                "bench": "audit",
                "span": span,
                "wire": wire_name,
                "pair": f"{' '.join(one)} | {' '.join(other)}",
            }
            report |= {"view": view, "positions": both.shape[1], "accused": accused[wire_name, one, other]}
            for name, values in zip(("whole", "part"), both, strict=True):
                report |= {
                    f"{name}_{q}": float(f"{values.quantile(p).item():.4g}")
                    for q, p in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
                }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
