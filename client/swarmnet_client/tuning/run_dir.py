"""The directory of a tuning run: its checkpoint until it is done, then the adapter and
``tune.json``."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarmnet_client.tuning.adapter_dir import SUMMARY_FILE, hashes_of, save_adapter
from swarmnet_client.tuning.checkpoint import CHECKPOINT_FILE, UNFINISHED, TuneCheckpoint, replacing
from swarmnet_client.tuning.model_card import CARD_FILE, model_card
from swarmnet_client.tuning.trainer import Tuner
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import FOLDER_LOCK, folder_descriptor, lock
from swarmnet_protocols.models.peft_adapters import CONFIG_FILE, WEIGHTS_FILE

CURVE_FILE = "loss.png"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the directory ``path``, which is created if missing, until the block ends or the process
    dies.

    Raises ``ConfigError`` when it cannot be created or another run has locked it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = folder_descriptor(path)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}", hint="choose another --out") from error
    try:
        try:
            lock(descriptor)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run is running in {path}", hint="wait for it, or choose another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)


class RunDir:
    """The directory ``path`` of the run that ``about`` describes. ``unfinished`` is its last
    checkpoint, None for a new run."""

    def __init__(self, path: Path, about: Mapping[str, Any], *, force: bool) -> None:
        """With ``force``, files of other runs are ignored and ``save`` replaces them; an unfinished
        run begins again at step 0.

        Raises ``ConfigError`` for a directory with other files, ``IntegrityError`` for a damaged
        checkpoint.
        """
        self.path = path
        self.unfinished: TuneCheckpoint | None = None
        self.about = dict(about)
        try:
            for torn in path.glob(f"{UNFINISHED}*"):
                shutil.rmtree(torn) if torn.is_dir() else torn.unlink()
            held = {file.name for file in path.iterdir()} - {FOLDER_LOCK}
        except OSError as error:
            raise ConfigError(f"cannot use {path}: {error.strerror}", hint="choose another --out") from error
        if force:
            return
        self.unfinished = TuneCheckpoint.load(path / CHECKPOINT_FILE)
        if self.unfinished is not None:
            self._check_same(self.unfinished.about)
        elif held & {SUMMARY_FILE, CONFIG_FILE, WEIGHTS_FILE}:
            raise ConfigError(
                f"{path} has the adapter of a finished run",
                hint="choose another --out, or replace it: --force",
            )
        elif held:
            raise ConfigError(f"{path} holds other files", hint="choose a new directory for --out")

    def save(self, tuner: Tuner) -> Path:
        """Write a checkpoint of ``tuner``; returns its path. Raises ``OutOfResources`` when the
        disk is full."""
        tuner.checkpoint(self.about).save(self.path / CHECKPOINT_FILE)
        return self.path / CHECKPOINT_FILE

    def finish(self, tuned: Any, summary: Mapping[str, Any]) -> None:
        """Write the adapter, its model card and the summary, then remove the checkpoint. Raises
        ``OutOfResources`` when the disk is full."""
        save_adapter(tuned, self.path)
        content = self.about | dict(summary) | {"files": hashes_of(self.path)}
        with replacing(self.path / CARD_FILE) as temporary:
            temporary.write_text(model_card(content), encoding="utf-8")
        with replacing(self.path / SUMMARY_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        (self.path / CHECKPOINT_FILE).unlink(missing_ok=True)

    def _check_same(self, about: Mapping[str, Any]) -> None:
        differ = [name for name in {**about, **self.about} if about.get(name) != self.about.get(name)]
        if differ:
            then, now = ([which.get(name) for name in differ] for which in (about, self.about))
            changes = (f"{name} was {a!r} and is {b!r}" for name, a, b in zip(differ, then, now, strict=True))
            raise ConfigError(
                f"{self.path} has an unfinished run with other options: {'; '.join(changes)}",
                hint="repeat those options to continue, choose another --out, or start over with --force",
            )
