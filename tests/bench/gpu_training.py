"""Training on one device: tokens/s, memory and losses in float32, and with each way to save memory.

The model has the structure of SmolLM2-135M and random weights. Memory is measured with one short
sequence, so weights, gradients and optimizer states take most of it.
"""

import copy
import gc
import importlib.util
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.training.data.corpus import open_corpus
from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.steps.memory_options import MemoryOptions
from swarmnet_node.training.steps.trainer import StepReport, Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.job_settings import Job

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
WAYS = {
    "float32": MemoryOptions("float32"),
    "bfloat16": MemoryOptions("bfloat16"),
    "bfloat16, recomputed": MemoryOptions("bfloat16", recompute=True),
    "bfloat16, recomputed, 8-bit states": MemoryOptions("bfloat16", recompute=True, optimizer_states="8bit"),
    "bfloat16, recomputed, states on the CPU": MemoryOptions(
        "bfloat16", recompute=True, optimizer_states="cpu"
    ),
    "bfloat16, Muon": MemoryOptions("bfloat16"),
}
LARGEST_LOSS = 1.02
"""Most that a way's loss may be, relative to that of float32."""


def _job(length: int, batch: int, optimizer: str, layers: int) -> Job:
    settings = {"sync_every": 1000}
    return Job.model_validate(
        {
            "job": {"name": "gpu", "rounds": 1},
            "model": {"config": SMOLLM2 | {"num_hidden_layers": layers}},
            "data": {"path": "python-stdlib", "sequence_length": length, "max_documents": 100},
            "training": {
                "batch_size": batch,
                "learning_rate": 1e-3,
                "warmup_steps": 5,
                "optimizer": optimizer,
            },
            "method": {"name": "diloco", "settings": settings},
        }
    )


def _peak_bytes(device: torch.device, before: int) -> int | None:
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def _run(trainer: Trainer, first: int, count: int, device: torch.device) -> tuple[StepReport, float]:
    started = time.perf_counter()
    report = trainer.steps(0, 0, count, first=first)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return report, time.perf_counter() - started


def measure(device: torch.device) -> dict[str, Any]:
    """Train by each way. ``ok``: every loss is near that of float32, and less memory was used."""
    on_card = device.type == "cuda"
    layers, length, batch, steps = (30, 512, 16, 20) if on_card else (2, 32, 2, 3)
    ways: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = TrainingMachine(Path(folder), 1 << 40, device)
        model = build_model(_job(length, batch, "adamw", layers), machine)
        count = sum(parameter.numel() for parameter in model.parameters())
        for name, memory in WAYS.items():
            if memory.optimizer_states == "8bit" and importlib.util.find_spec("bitsandbytes") is None:
                ways[name] = {"skipped": "bitsandbytes is not installed"}
                continue
            found: dict[str, Any] = {}
            for tokens, sequences in ((32, 1), (length, batch)):
                job = _job(tokens, sequences, "muon" if "Muon" in name else "adamw", layers)
                gc.collect()
                if on_card:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device) if on_card else 0
                corpus = open_corpus(job.data, Path(folder))
                trainer = Trainer(job, corpus, copy.deepcopy(model), replace(machine, memory=memory))
                warm, _ = _run(trainer, 0, 3, device)
                peak = _peak_bytes(device, before)
                if sequences == 1:
                    found["peak_bytes_per_parameter"] = peak and round(peak / count, 2)
                else:
                    report, seconds = _run(trainer, 3, steps, device)
                    found["tokens_per_s"] = round(report.tokens / seconds)
                    found["peak_gib"] = peak and round(peak / 2**30, 2)
                    found["losses"] = [round(each.loss, 4) for each in (warm, report)]
                del trainer  # its hooks form cycles
            ways[name] = found
    exact = ways["float32"]["losses"][1]
    losses = [way["losses"][1] for name, way in ways.items() if "losses" in way and "Muon" not in name]
    ok = all(math.isfinite(each) and each <= LARGEST_LOSS * exact for each in losses)
    if on_card:
        ok = ok and ways["bfloat16, recomputed"]["peak_gib"] < ways["bfloat16"]["peak_gib"]
        offloaded = ways["bfloat16, recomputed, states on the CPU"]["peak_bytes_per_parameter"]
        ok = ok and offloaded <= 6 and ways["float32"]["peak_bytes_per_parameter"] <= 24
    return {"parameters": count, "ways": ways, "ok": ok}
