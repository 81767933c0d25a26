"""How far honest hosts are from each other, and whom audits convict: SmolLM2-135M on real text.

    python -m tests.bench.audit [--texts 40] [--positions 64] [--spans 0:10 10:20] [--wires int8]
        [--weights float32] [--sessions 40] [--forged 2]

Each span is computed as a session does it, as a pass does it, and as one sequence of a batch. The
weights are float32, or packed to int8 or int4. The activations are float32 by native code and by
torch, bfloat16 and float16. One more kind adds its products in two halves, each rounded to
bfloat16, as some GPUs do. Sessions and batches take most of the time, so ``--sessions`` limits
their texts.

Every kind claims outputs, in each wire format, and every other kind of the same weights is its
witness. Where a witness differs, each kind in turn is the third host, with nudged inputs. Prints a
line of JSON for each pair: quantiles of the whole difference and of the largest part, in each view;
how many verdicts on 16 positions were open and how many convict; and how close to a conviction the
closest position was, in nudges. Then, for each forger, how many first audits did not convict it.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from swarmnet.paths import default_cache_dir
from swarmnet_client.audit.plan import NEWCOMER_POSITIONS
from swarmnet_client.audit.verdict import (
    SLICE,
    Read,
    Verdict,
    differences,
    distances,
    judge,
    nudged,
    views,
)
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TORCH
from swarmnet_protocols.arrays import Array, as_array, as_float32, as_tensor
from swarmnet_protocols.machine.platform import return_freed_memory
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.wire_tensors import as_received
from tests.bench.exactness import prompts
from tests.support.attacks.forgers import FORGERS

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
WIRES = {str(each): each for each in ElementType}
WEIGHTS = ("float32", "int8", "int4")
SESSIONS = ("float32/native", "float32/bfloat16", "int4/bfloat16")
"""Kinds of hosts that also compute as sessions and batches do."""
VIEWS = ("outputs", "after a norm", "logits")


CLOSE = 0.5
"""Least distance, in units of the bounds, of positions that count for ``closest``."""


@contextmanager
def halves() -> Iterator[None]:
    """Compute each product of a linear layer in two halves, rounded before they are added."""
    linear = functional.linear

    def in_halves(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        half = inputs.shape[-1] // 2
        outputs = linear(inputs[..., :half], weight[:, :half]) + linear(inputs[..., half:], weight[:, half:])
        return outputs if bias is None else outputs + bias

    with patch.object(functional, "linear", in_halves):
        yield


def stages(local: LocalModel, start: int, end: int, weights: list[str]) -> dict[str, Stage]:
    """Stages of all kinds of hosts, by "weights/activations"."""
    native = NativeBackend.load(default_cache_dir())
    found = {}
    for packed in weights:
        options = {} if packed == "float32" else {"packed": True, "quantized": PRECISIONS[packed]}
        for name, dtype, backend in (
            ("native", FLOAT32, native),
            ("float32", FLOAT32, TORCH),
            ("bfloat16", BFLOAT16, TORCH),
            ("float16", FLOAT16, TORCH),
        ):
            if backend is not None:
                found[f"{packed}/{name}"] = load_stage(
                    local, start, end, dtype=dtype, device=CPU, backend=backend, **options
                )
    if "float32" in weights:
        found["float32/halves"] = found["float32/bfloat16"]
    return found


def computed(
    name: str, stage: Stage, inputs: torch.Tensor, way: str = "pass", other: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the outputs of ``inputs``, computed in one of three ways.

    A pass computes all at once. A session computes a prompt of one half, then one by one. A batch
    has ``other`` in each step, too.
    """
    with halves() if name.endswith("/halves") else nullcontext():
        if way == "pass":
            return stage.run_sequences(inputs, (len(inputs),)).float()
        sequence, beside = stage.new_sequence(), stage.new_sequence()
        half = len(inputs) // 2
        rows = [[(sequence, part)] for part in (inputs[:half], *inputs[half:].split(1))]
        if other is not None:
            parts = (other[:half], *other[half:].split(1))
            rows = [[(beside, part), *row] for part, row in zip(parts, rows, strict=True)]
        return torch.cat([stage.forward(row)[-1] for row in rows]).float()


def received(values: torch.Tensor, wire: ElementType) -> torch.Tensor:
    return as_tensor(as_float32(as_received(as_array(values), wire)))


class Pair:
    """What was measured of one kind of host and its witness."""

    def __init__(self) -> None:
        self.differences = defaultdict[str, list[Array]](list)
        self.positions = self.open = self.convicted = 0
        self.closest = 0.0

    def add(
        self,
        claimed: Array,
        second: Array,
        thirds: list[list[Array]],
        read: Read | None,
    ) -> None:
        """Judge ``claimed`` with each of the ``thirds``, 16 positions at a time."""
        self.positions += len(claimed)
        for at in range(0, len(claimed), SLICE):
            mine, theirs = claimed[at : at + SLICE], second[at : at + SLICE]
            apart = np.zeros(len(mine))
            for view, (seen, expected, bound) in zip(VIEWS, views(mine, theirs, read), strict=False):
                found = differences(seen, expected)
                self.differences[view].append(np.stack(found))
                apart = np.maximum(apart, bound.ratio(*found))
            self.open += bool((apart > 1).any())
            if not (apart > CLOSE).any():
                continue
            for third in thirds:
                cut = [each[at : at + SLICE] for each in third]
                moved = np.max([distances(theirs, each, read) for each in cut], axis=0)
                self.closest = max(self.closest, (apart / moved)[apart > CLOSE].max().item())
                self.convicted += judge(mine, theirs, cut, read=read) is Verdict.WRONG

    def report(self, about: dict[str, object]) -> None:
        counts = {"positions": self.positions, "open": self.open, "convicted": self.convicted}
        about = about | counts | {"closest": float(f"{self.closest:.3g}")}
        for view, parts in self.differences.items():
            report = about | {"view": view}
            for name, values in zip(("whole", "part"), np.concatenate(parts, 1), strict=True):
                report |= {
                    f"{name}_{q}": float(f"{np.quantile(values, p):.4g}")
                    for q, p in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
                }
            print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--spans", nargs="+", default=["0:10", "10:20", "20:30", "0:30"])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--forged", type=int, default=2)
    parser.add_argument("--wires", nargs="+", choices=list(WIRES), default=list(WIRES))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local = resolve("smollm2-135m-instruct", cache_dir=default_cache_dir())
    whole = local.load_whole(dtype=FLOAT32, device=CPU)
    layers = LocalLayers(local, LoadOptions())
    found = prompts(local.tokenizer(), 4 * arguments.texts, random.Random(arguments.seed))
    texts = [ids[: arguments.positions] for ids in found if len(ids) >= arguments.positions]
    for span in arguments.spans:
        start, end = map(int, span.split(":"))
        read = layers.logits if end == local.manifest.blocks else None
        pairs, missed, forged = defaultdict[tuple[str, ...], Pair](Pair), defaultdict[str, int](int), 0
        loaded = stages(local, start, end, arguments.weights)
        before = None
        for text, ids in enumerate(texts[: arguments.texts]):
            with torch.inference_mode():
                states = whole(torch.tensor([ids]), output_hidden_states=True).hidden_states[start][0]
                for wire_name, wire in ((name, WIRES[name]) for name in arguments.wires):
                    inputs = received(states, wire)
                    beside = inputs if before is None else received(before, wire)
                    seconds = {name: computed(name, stage, inputs) for name, stage in loaded.items()}
                    nudges = [as_tensor(each) for each in nudged(as_array(inputs), text)]
                    thirds = {
                        name: tuple(computed(name, stage, each) for each in nudges)
                        for name, stage in loaded.items()
                    }
                    claims = {(name, "pass"): outputs for name, outputs in seconds.items()}
                    for name in SESSIONS if text < arguments.sessions else ():
                        if name in loaded:
                            claims[name, "session"] = computed(name, loaded[name], inputs, "session")
                            claims[name, "batch"] = computed(name, loaded[name], inputs, "batch", beside)
                    for (name, way), second in product(claims, seconds):
                        weights = name.partition("/")[0] + "/"
                        if not second.startswith(weights) or (name, way) == (second, "pass"):
                            continue
                        claimed = received(claims[name, way], wire)
                        same = [outputs for third, outputs in thirds.items() if third.startswith(weights)]
                        pair = pairs[wire_name, f"{name} {way} | {second}"]
                        pair.add(
                            as_array(claimed),
                            as_array(seconds[second]),
                            [list(map(as_array, each)) for each in same],
                            read,
                        )
                        if text < arguments.forged and way == "pass":
                            forged += 1
                            first = slice(NEWCOMER_POSITIONS)
                            for lie, forger in FORGERS.items():
                                said = received(forger(claimed[first]), wire)
                                third = [as_array(outputs[first]) for outputs in thirds[second]]
                                right = as_array(seconds[second][first])
                                verdict = judge(as_array(said), right, third, read=read)
                                missed[lie] += verdict is not Verdict.WRONG
                before = states
            return_freed_memory()  # small results lie between the logits of many pairs
        for (wire_name, names), pair in pairs.items():
            pair.report({"bench": "audit", "span": span, "wire": wire_name, "pair": names})
        print(json.dumps({"bench": "audit", "span": span, "forged": forged, "missed": missed}), flush=True)


if __name__ == "__main__":
    main()
