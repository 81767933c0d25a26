"""Exporting a job's newest checkpoint, with its tokenizer, to a folder that transformers loads."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.data import END_OF_DOCUMENT
from swarmnet_node.training.job_store import job_folder, load_local_files, load_stored_job
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.models import Progress, resolve
from swarmnet_protocols.training.jobs import BYTES, is_published


def export_model(
    data_dir: Path, job_id: str, target: Path, *, cache_dir: Path, overwrite: bool, progress: Progress
) -> str:
    """Write the newest model of a job and its tokenizer into ``target``; returns the tokenizer's name.

    Raises ``ConfigError`` if there is no checkpoint, or if ``target`` exists and is not a model's folder that may be overwritten;
    ``OutOfResources`` if the disk is full.
    """
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} already exists", hint="choose another --out, or replace it with --force")
    if target.exists() and not (target / "config.json").is_file():
        raise ConfigError(
            f"{target} is not the folder of a model: it is not replaced", hint="choose another --out"
        )
    job, _ = load_stored_job(data_dir, job_id)
    tokenizer = load_local_files(data_dir, job_id).applied_to(job.job).data.tokenizer
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
            made = Path(scratch, "model")
            CheckpointStore(job_folder(data_dir, job_id)).export(made)
            if tokenizer == BYTES:
                _write_byte_tokenizer(made)
            else:
                model = resolve(
                    tokenizer, cache_dir=cache_dir, progress=progress, published=is_published(tokenizer)
                )
                model.tokenizer().save_pretrained(made)
            if target.exists():
                shutil.rmtree(target)
            os.rename(made, target)
    except OSError as error:
        raise OutOfResources(
            f"cannot write into {target.parent}: {error.strerror}",
            hint="make room there, or choose another --out",
        ) from error
    return tokenizer


def _write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which token N is byte N, and make byte 0 the model's end token."""
    for name in ("config.json", "generation_config.json"):
        _update_json(folder / name, {"bos_token_id": None, "eos_token_id": END_OF_DOCUMENT})
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    parts = {"added_tokens": [], "pre_tokenizer": kind, "decoder": kind, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts}))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _characters() -> list[str]:
    """The character of each byte in byte-level BPE (GPT-2): itself if printable in Latin-1, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _update_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")
