"""From a job's newest checkpoint to a folder that plain transformers loads."""

import os
import shutil
import tempfile
from pathlib import Path

from swarmnet_node.training.checkpoint import Checkpoints
from swarmnet_node.training.start import job_folder, kept_job
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.training.jobs import BYTES


def export_model(
    data_dir: Path, job_id: str, target: Path, *, cache_dir: Path, overwrite: bool, progress: Progress
) -> str:
    """Write the newest model of a job, with the files of its tokenizer, into ``target``; returns the tokenizer's name.

    A model of bytes has no such files. Raises ``ConfigError`` if there is no checkpoint, or if ``target`` exists and is not
    a model's folder that may be overwritten; ``OutOfResources`` when the disk is full.
    """
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} already exists", hint="choose another --out, or replace it with --force")
    if target.exists() and not (target / "config.json").is_file():
        raise ConfigError(
            f"{target} is not the folder of a model: it is not replaced", hint="choose another --out"
        )
    job, _ = kept_job(data_dir, job_id)
    tokenizer = job.job.data.tokenizer
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
            made = Path(scratch, "model")
            Checkpoints(job_folder(data_dir, job_id)).export(made)
            if tokenizer != BYTES:
                resolve(tokenizer, cache_dir=cache_dir, progress=progress).tokenizer().save_pretrained(made)
            if target.exists():
                shutil.rmtree(target)
            os.rename(made, target)
    except OSError as error:
        raise OutOfResources(
            f"cannot write into {target.parent}: {error.strerror}",
            hint="make room there, or choose another --out",
        ) from error
    return tokenizer
