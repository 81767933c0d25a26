"""A small training job: a byte-level Llama of 23 thousand parameters on a page of text."""

from pathlib import Path
from typing import Any

from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.models import Progress
from swarmnet_protocols.training.job_settings import Job

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tiny_job(folder: Path, **changes: dict[str, Any]) -> Job:
    """A job with its text in ``folder``; ``changes`` are further keys of its sections."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"{n} squared is {n * n}, and its cube is {n**3}.\n" for n in range(8000)))
    sections: dict[str, dict[str, Any]] = {
        "job": {"name": "tiny", "seed": 3, "rounds": 10},
        "model": {"config": CONFIG},
        "data": {"path": str(path), "sequence_length": 16, "validation": 0.3},
        "training": {"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 2},
        "method": {"name": "diloco", "settings": {"sync_every": 5}},
        "exchange": {"max_workers": 4},
        "eval": {},
    }
    return Job.model_validate(
        {name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes}
    )


def for_others(job: Job, manifest: bytes | None = None) -> Job:
    """``job`` as it is published, with the digest of data that no machine has."""
    return job.about([("00" * 32, 1)], manifest)


def tiny_trainer(folder: Path, progress: Progress = lambda *_: None, **changes: dict[str, Any]) -> Trainer:
    machine = TrainingMachine(folder / "cache", 1 << 30, progress=progress)
    return Trainer.open(tiny_job(folder, **changes), machine)
