"""Exactness, speed and memory of a host on CUDA.

    python -m tests.bench.gpu [--model M] [--parts exact speed training memory swarm]
                              [--device cuda|cpu]

Prints one JSON object for each part, with ``ok``, and the card. Without CUDA it prints why it is
skipped. ``--device cpu`` runs the parts exact, speed and training on the CPU, the first two in
float32 with the caches of an accelerator. This shows that the bench works and nothing about a GPU.
The exit code is 1 if a part is not ok.

* exact: torch unpacks every packed format to the same bits as on the CPU; a host's outputs in
  bfloat16 and float32 agree with transformers' layers, one sequence alone with the same in a batch,
  and recorded steps with others; steps are recorded, and attention is fused if torch can do it.
* speed: greedy decoding of one stream, and of 32, through all blocks on the card, against
  transformers' `generate` in bfloat16 with a static cache.
* training: steps of a worker in float32, and with each way to save memory (``gpu_training``).
* memory: a node that serves fills at most 95 % of the card, as nvidia-smi sees it, and 5 s after
  `pause` at most 5 % of what it took is left.
* swarm: two nodes on one card give the tokens that transformers gives in bfloat16. Where the two
  first differ, the swarm's token must be as likely as the likeliest one up to the rounding of
  bfloat16, which float32 shows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.ranged_attention import varlen_attention
from swarmnet_node.engine.kernels.torch_backend import TorchBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.owner import control
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.products import load_products
from swarmnet_protocols.quantization.unpack import unpack
from tests.bench import gpu_training
from tests.support.gguf.packed_matrices import random_matrix
from tests.support.processes.nodes import Swarm

STREAMS = 32
PROMPT_TOKENS = 32
PAUSED_S = 5.0
CACHE_BYTES = 1 << 28


def stage_of(
    local: LocalModel, device: torch.device, dtype: torch.dtype, *, arena: bool = True, packed: bool = False
) -> Stage:
    """All blocks on one device."""
    blocks, backend = local.manifest.blocks, TorchBackend(load_products(local.cache_dir))
    stage = load_stage(local, 0, blocks, dtype=dtype, device=device, backend=backend, packed=packed)
    if arena:
        stage.preallocate(CACHE_BYTES)
    return stage


def relative_error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())


def exact(local: LocalModel, device: torch.device) -> dict[str, Any]:
    same_bits = {
        format.name: all(
            torch.equal(
                unpack(format, segment.tensor.to(device)).cpu().view(torch.int32),
                segment.dequantize().view(torch.int32),
            )
            for segment in random_matrix(format, 64, 1024).segments
        )
        for format in Format
    }
    report: dict[str, Any] = {"same_bits": same_bits}
    ok = all(same_bits.values())
    for dtype in (torch.float32, torch.bfloat16):
        plain, arena = (stage_of(local, device, dtype, arena=each) for each in (False, True))
        packed = stage_of(local, device, dtype, packed=True)
        inputs = torch.randn(5, 70, plain.hidden_size, generator=torch.Generator().manual_seed(0))
        outputs = {}
        for name, stage in (("plain", plain), ("arena", arena), ("packed", packed)):
            sequences = [stage.new_sequence() for _ in range(5)]
            found = stage.forward([(each, inputs[i, : 60 + i]) for i, each in enumerate(sequences)])
            for step in range(4):
                found += stage.forward(
                    [(each, inputs[i, 60 + i + step][None]) for i, each in enumerate(sequences)]
                )
            outputs[name] = torch.cat(found)
        alone = arena.new_sequence()
        found = arena.forward([(alone, inputs[0, :60])])
        found += [arena.forward([(alone, inputs[0, 60 + step][None])])[0] for step in range(4)]
        batched = torch.cat([outputs["arena"][:60], outputs["arena"][310:330:5]])
        tolerance = 100 * torch.finfo(dtype).eps
        errors = {
            "arena": relative_error(outputs["arena"], outputs["plain"]),
            "packed": relative_error(outputs["packed"], outputs["plain"]),
            "alone": relative_error(torch.cat(found), batched),
        }
        name = str(dtype).removeprefix("torch.")
        report[name] = {"errors": errors, "fused": arena.method.is_fused, "recorded": arena.has_recordings}
        report[name]["failure"] = arena._graphs.failure if arena._graphs else ""
        ok = ok and all(each <= tolerance for each in errors.values())
    if device.type == "cuda":
        half = report["bfloat16"]
        ok = ok and half["recorded"] and half["fused"] == (varlen_attention() is not None)
    return report | {"ok": ok}


class Local:
    """Greedy decoding through a stage with embeddings and head on the same device."""

    def __init__(self, stage: Stage, model: Any) -> None:
        self.stage, self.model, self.device = stage, model, stage.device

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor, tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds for ``tokens`` tokens after each of ``prompts`` [B, n], the prompts not counted,
        and the tokens."""
        sequences = [self.stage.new_sequence() for _ in prompts]
        ids = self._step(sequences, prompts)
        found = [ids]
        began = time.perf_counter()
        for _ in range(tokens - 1):
            ids = self._step(sequences, ids[:, None])
            found.append(ids)
        return time.perf_counter() - began, torch.stack(found, 1).tolist()

    def _step(self, sequences: list[Any], ids: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(ids.to(self.device)).to(self.stage.dtype)
        outputs = self.stage.forward(list(zip(sequences, embedded, strict=True)))
        last = torch.stack([each[-1] for each in outputs]).to(self.device)
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(last))
        return logits.argmax(-1).cpu()


def reference_s(model: Any, prompts: torch.Tensor, tokens: int) -> tuple[float, list[list[int]]]:
    """The same by transformers' ``generate`` with a static cache, less the time of the first
    token."""
    options = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cache_implementation": "static",
    }
    prompts = prompts.to(model.device)
    times = {}
    for count in (1, tokens):
        began = time.perf_counter()
        output = model.generate(prompts, max_new_tokens=count, **options)
        times[count] = time.perf_counter() - began
    return times[tokens] - times[1], output[:, prompts.shape[1] :].tolist()


def speed(local: LocalModel, device: torch.device, tokens: int, rounds: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = local.load_whole(dtype=dtype, device=device)
    mine = Local(stage_of(local, device, dtype), model)
    packed = Local(stage_of(local, device, dtype, packed=True), model)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 1000, (STREAMS, PROMPT_TOKENS), generator=generator)
    rates: dict[str, list[float]] = {}
    equal = True
    for number in range(rounds + 1):
        ways: dict[str, Callable[[], tuple[float, list[list[int]]]]] = {
            "transformers": lambda: reference_s(model, prompts[:1], tokens),
            "one stream": lambda: mine.generate(prompts[:1], tokens),
            "32 streams": lambda: mine.generate(prompts, tokens),
            "one stream, packed": lambda: packed.generate(prompts[:1], tokens),
        }
        answers = {}
        for name, way in ways.items():
            seconds, answers[name] = way()
            if number:  # the first round warms up and records
                rates.setdefault(name, []).append((tokens - 1) * len(answers[name]) / seconds)
        equal = equal and answers["one stream"] == answers["transformers"]
    medians = {name: round(statistics.median(each), 1) for name, each in rates.items()}
    ratios = {
        "one_stream_over_transformers": round(medians["one stream"] / medians["transformers"], 3),
        "32_streams_over_one": round(medians["32 streams"] / medians["one stream"], 2),
    }
    ok = ratios["one_stream_over_transformers"] >= 1.0 and ratios["32_streams_over_one"] >= 8.0
    return {"tokens_per_s": medians, **ratios, "equal_tokens": equal, "ok": ok or device.type == "cpu"}


def used_mib() -> tuple[int, int]:
    """MiB of the first card that are used, and its size, as nvidia-smi sees them."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    used, total = map(int, found.split(","))
    return used, total


def memory(model: str, folder: Path) -> dict[str, Any]:
    before, total = used_mib()
    lab = Swarm(folder / "memory", default_cache_dir(), model)
    try:
        node = lab.launch("whole", "--max-cache", f"{int(0.8 * (total - before))}MiB")
        _ = node.ready
        serving, _ = used_mib()
        control.pause(node.data_dir)
        time.sleep(PAUSED_S)
        paused, _ = used_mib()
    finally:
        lab.close()
    taken = serving - before
    freed = (serving - paused) / taken
    return {
        "total_mib": total,
        "before_mib": before,
        "serving_mib": serving,
        "paused_mib": paused,
        "freed": round(freed, 4),
        "ok": serving <= 0.95 * total and freed >= 0.95,
    }


def in_a_swarm(local: LocalModel, model: str, folder: Path, tokens: int) -> dict[str, Any]:
    from tests.support.swarm.generation import greedy

    prompts = [list(range(100, 100 + count)) for count in (5, 32, 17)]
    whole = local.load_whole(dtype=torch.bfloat16, device=torch.device("cuda"))
    wanted = [
        whole.generate(
            torch.tensor([prompt], device="cuda"),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    half = local.manifest.blocks // 2
    lab = Swarm(folder / "swarm", default_cache_dir(), model)
    try:
        lab.start((0, half), (half, local.manifest.blocks))
        with lab.connect() as client:
            found = [greedy(client, [prompt], tokens)[0] for prompt in prompts]
    finally:
        lab.close()
    exact = local.load_whole(dtype=torch.float32, device=torch.device("cuda"))
    answers = list(zip(prompts, found, wanted, strict=True))
    equal = [mine == theirs for _, mine, theirs in answers]
    explained = [rounding_explains(whole, exact, *answer) for answer in answers]
    return {"equal_tokens": equal, "rounding_explains": explained, "ok": all(explained)}


@torch.inference_mode()
def rounding_explains(whole: Any, exact: Any, prompt: list[int], mine: list[int], theirs: list[int]) -> bool:
    """Whether the first token of ``mine`` that differs is within the error of ``whole``'s bfloat16
    logits of the best one of ``exact``."""
    first = next((at for at, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        return True
    ids = torch.tensor([prompt + mine[:first]], device="cuda")
    right, rounded = (model(ids).logits[0, -1].float() for model in (exact, whole))
    error = float((right - rounded).abs().max())
    return float(right.max() - right[mine[first]]) <= 2 * error


def card() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"card": "none"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "gib": round(properties.total_memory / (1 << 30), 1),
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--parts", nargs="+", default=["exact", "speed", "training", "memory", "swarm"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            json.dumps(
                {"bench": "gpu", "skipped": "this machine has no CUDA device, or torch is built without CUDA"}
            )
        )
        return
    device = torch.device(options.device)
    local = resolve(options.model, cache_dir=default_cache_dir())
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "exact": lambda: exact(local, device),
            "speed": lambda: speed(local, device, options.tokens, options.rounds),
            "training": lambda: gpu_training.measure(device),
        }
        if device.type == "cuda":
            parts["memory"] = lambda: memory(options.model, Path(folder))
            parts["swarm"] = lambda: in_a_swarm(local, options.model, Path(folder), options.tokens)
        for name in options.parts:
            if name not in parts:
                continue
            try:
                report = parts[name]()
            except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
                report = {"error": f"{type(error).__name__}: {error}", "ok": False}
            failed = failed or not report["ok"]
            print(
                json.dumps({"bench": "gpu", "part": name, "device": options.device, **card(), **report}),
                flush=True,
            )
            if device.type == "cuda":
                torch.cuda.empty_cache()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
