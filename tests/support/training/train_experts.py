"""Trains the small mixture of experts whose routing tests use, with the project's own workers:
``python -m tests.support.training.train_experts FOLDER``.

Writes ``FOLDER/model``, in Hugging Face layout; ``FOLDER/packed``, the same in 4 bits; and
``FOLDER/expert_routing.npz``, the experts that it chooses for code and for prose. It is no test,
because it takes half an hour: ``stdlib_experts`` in ``swarmnet_protocols/models`` is the packed
model, and ``tests/data`` has the routing.
"""

import argparse
import io
import json
import pydoc_data.topics
import shutil
import signal
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from tests.support.processes.commands import call
from tests.support.processes.worker_processes import create_job, workers

BLOCKS, EXPERTS, CHOSEN = 8, 32, 4
WORKERS = ("anna", "ben")
WINDOW = 256
"""Bytes of a sequence, in training and in the recorded routing."""
GROUP = 64
"""Columns that share a scale in the packed model."""
RECORDED = 3072
"""Rows of each domain in the recorded routing."""
JOB = f"""
[job]
name = "stdlib-experts"
rounds = {{rounds}}

[model.config]
model_type = "glm4_moe"
vocab_size = 256
hidden_size = 128
head_dim = 32
intermediate_size = 128
moe_intermediate_size = 64
num_hidden_layers = {BLOCKS}
num_attention_heads = 4
num_key_value_heads = 2
n_routed_experts = {EXPERTS}
num_experts_per_tok = {CHOSEN}
n_shared_experts = 1
first_k_dense_replace = 0
n_group = 1
topk_group = 1
routed_scaling_factor = 1.0
use_qk_norm = true
max_position_embeddings = 1024
tie_word_embeddings = true

[data]
format = "text"
path = "python-stdlib"
tokenizer = "bytes"
sequence_length = {WINDOW}
validation = 0.02

[training]
batch_size = 4
learning_rate = 3e-3
warmup_steps = 100
schedule = "cosine"
weight_decay = 0.05
betas = [0.9, 0.95]

# Averages of the replicas: an outer step without momentum moves the biases of the routers as far as the workers did.
[method]
name = "diloco"
sync_every = 20
outer_lr = 1.0
momentum = 0.0

[exchange]
deadline_s = 120
max_workers = {len(WORKERS)}

[eval]
every_rounds = 10
batches = 16
"""


def train(folder: Path, rounds: int, most_s: float) -> None:
    """Train for ``rounds`` rounds or ``most_s`` seconds, whichever ends first, and write
    ``folder/model``."""
    folder.mkdir(parents=True, exist_ok=True)
    job = create_job(folder, JOB.format(rounds=rounds))
    began = time.monotonic()
    with workers(folder, job, *WORKERS) as running:
        first = running[WORKERS[0]]
        shown = 0
        while first.process.poll() is None and time.monotonic() - began < most_s:
            first.wait_for_more(timeout_s=10)
            for event in first.events[shown:]:
                print(f"{time.monotonic() - began:.0f} s", event, flush=True)
            shown = len(first.events)
        for worker in running.values():
            worker.send_signal(signal.SIGINT, children=False)  # it leaves after the round
        for worker in running.values():
            worker.wait_for_end()
    kept = ("--data-dir", str(folder / WORKERS[0]), "--cache-dir", str(folder / "cache"))
    call("train", "export", job, "--out", str(folder / "model"), *kept)


def pack(folder: Path) -> None:
    """Write ``folder/packed`` from ``folder/model``: matrices in 4 bits, rounded to the nearest, in
    the layout of GPTQ; embeddings in 16 bits."""
    packed, model = folder / "packed", folder / "model"
    packed.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(model / "model.safetensors").items():
        if "embed" in name:
            tensors[name] = values.bfloat16()
        elif values.dim() == 1 or name.endswith("gate.weight"):
            tensors[name] = values
        else:
            stem = name.removesuffix("weight")
            tensors |= {stem + part: tensor for part, tensor in in_4_bits(values).items()}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    (packed / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, packed)


def in_4_bits(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors by which GPTQ stores ``matrix``, ``[rows, columns]``: codes, and a scale and a
    zero point for ``GROUP`` columns of a row."""
    rows, columns = matrix.shape
    groups = matrix.view(rows, -1, GROUP)
    low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    scales = ((high - low) / 15).half().float().clamp(min=1e-7)
    zeros = (-low / scales).round().clamp(1, 15)  # stored less 1
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).view(rows, columns)
    return {
        "qweight": eight_in_one(codes.T.reshape(columns // 8, 8, rows).transpose(1, 2)),
        "qzeros": eight_in_one((zeros.T - 1).reshape(columns // GROUP, rows // 8, 8)),
        "scales": scales.T.half().contiguous(),
    }


def eight_in_one(digits: torch.Tensor) -> torch.Tensor:
    """Digits of 4 bits, ``[..., 8]``, the first one lowest, in an int32 each: ``[...]``."""
    numbers = sum(digits[..., place].to(torch.int64) << 4 * place for place in range(8))
    return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).to(torch.int32).contiguous()


def code_bytes() -> bytes:
    """Source of the standard library that the job trains on, without comments and docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = []
    for name in ("argparse", "ast", "dataclasses", "datetime", "fractions", "inspect", "ipaddress", "typing"):
        source = (root / f"{name}.py").read_text()
        kept = [
            token
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type != tokenize.COMMENT
            and not (token.type == tokenize.STRING and token.string.endswith(('"' * 3, "'" * 3)))
        ]
        parts.append(tokenize.untokenize([(token.type, token.string) for token in kept]))
    return "\n".join(parts).encode()


def prose_bytes() -> bytes:
    """The texts of Python's ``help``."""
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()


def windows(text: bytes) -> torch.Tensor:
    """``RECORDED`` bytes of ``text`` from places all over it, ``[windows, WINDOW]``."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = RECORDED // WINDOW
    starts = range(0, len(tokens) - WINDOW, (len(tokens) - WINDOW) // count)
    return torch.stack([tokens[start : start + WINDOW] for start in starts[:count]])


@contextmanager
def recording(model: Any) -> Iterator[list[torch.Tensor]]:
    """The experts that each forward within the context chooses, ``[rows, chosen]``, block after
    block."""
    chosen: list[torch.Tensor] = []

    def record(experts: Any, args: tuple[Any, ...]) -> None:
        chosen.append(args[1].clone())

    hooks = [experts.register_forward_pre_hook(record) for _, experts in experts_modules(model)]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def routing(model: Any, text: bytes) -> NDArray[np.uint8]:
    """The experts of the rows of some windows of ``text``, ``[rows, blocks, chosen]``, in ascending
    order for each row and block."""
    with torch.no_grad(), recording(model) as chosen:
        model(input_ids=windows(text), use_cache=False)
    return torch.stack(chosen, 1).sort(-1).values.to(torch.uint8).numpy()


def record(folder: Path) -> None:
    """Write ``folder/expert_routing.npz`` from ``folder/model``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found = {"code": routing(model, code_bytes()), "prose": routing(model, prose_bytes())}
    np.savez_compressed(folder / "expert_routing.npz", allow_pickle=False, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--most-s", type=float, default=1800.0, help="seconds after which training stops")
    parser.add_argument("--trained", action="store_true", help="pack and record the model that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.trained:
        train(arguments.folder, arguments.rounds, arguments.most_s)
    pack(arguments.folder)
    record(arguments.folder)


if __name__ == "__main__":
    main()
