"""How far honest hosts of any precision are from each other, by the measure that audits use: SmolLM2-135M's blocks on real text.

    python -m tests.bench.audit [--texts 40] [--positions 64] [--spans 0:10 10:20 20:30 0:30]

Every span is computed as a session does it, and as a pass does it, from what goes over the wire: by native code and by torch in
float32, by torch in bfloat16 and float16, from and to each element type of the wire. Prints a line of JSON for each pair: quantiles of the
relative error of a position, and mean and standard deviation of its logarithm.
"""

import argparse
import json
import random
import tempfile
from itertools import combinations
from pathlib import Path

import torch

from swarmnet_client.audit.verdict import relative_errors
from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.models import resolve
from tests.bench.exactness import prompts

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def computed(stage: Stage, inputs: torch.Tensor, *, as_session: bool) -> torch.Tensor:
    """The positions as a session computes them, a prompt of one half and then one by one; or as a pass does, all at once."""
    if not as_session:
        return stage.run_sequences(inputs, (len(inputs),))
    sequence = stage.new_sequence()
    half = len(inputs) // 2
    parts = [inputs[:half], *inputs[half:].split(1)]
    return torch.cat([stage.forward([(sequence, part)])[0] for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--spans", nargs="+", default=["0:10", "10:20", "20:30", "0:30"])
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        local = resolve("smollm2-135m-instruct", cache_dir=Path(folder))
        whole = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        found = prompts(local.tokenizer(), 4 * arguments.texts, random.Random(1))
        texts = [ids[: arguments.positions] for ids in found if len(ids) >= arguments.positions]
        for span in arguments.spans:
            start, end = map(int, span.split(":"))
            native = NativeBackend.load(Path(folder))
            cpu = torch.device("cpu")
            stages = {
                name: Stage.load(local, start, end, dtype=dtype, device=cpu)
                for name, dtype in PRECISIONS.items()
            }
            if native is not None:
                stages["native"] = Stage.load(
                    local, start, end, dtype=torch.float32, device=cpu, backend=native
                )
            errors: dict[tuple[str, str, str], list[torch.Tensor]] = {}
            for ids in texts[: arguments.texts]:
                with torch.inference_mode():
                    states = whole(torch.tensor([ids]), output_hidden_states=True).hidden_states[start][0]
                for wire_name, wire in PRECISIONS.items():
                    inputs = states.to(wire)
                    outputs = {
                        (name, as_session): computed(stage, inputs, as_session=as_session).to(wire).float()
                        for name, stage in stages.items()
                        for as_session in (False, True)
                    }
                    for (one, was_session), (other, is_session) in combinations(outputs, 2):
                        if was_session and is_session:
                            continue
                        pair = f"{one}{'+session' * was_session}/{other}{'+session' * is_session}"
                        measured = relative_errors(outputs[one, was_session], outputs[other, is_session])
                        errors.setdefault((span, wire_name, pair), []).append(measured)
            for (_, wire_name, pair), parts in errors.items():
                all_errors = torch.cat(parts).double()
                logs = all_errors.clamp_min(1e-12).log()
                figures = {
                    "median": all_errors.median().item(),
                    "p99": all_errors.quantile(0.99).item(),
                    "max": all_errors.max().item(),
                    "log_mean": logs.mean().item(),
                    "log_std": logs.std().item(),
                }
                about = {"bench": "audit", "span": span, "wire": wire_name, "pair": pair}
                about |= {"positions": len(all_errors)}
                shown = {name: float(f"{value:.4g}") for name, value in figures.items()}
                print(json.dumps(about | shown), flush=True)


if __name__ == "__main__":
    main()
