"""A process that is killed in the middle of a download."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.models.model_hub import ModelHub

_PROGRAM = """
import os, signal, sys
from pathlib import Path
from swarmnet_protocols.machine.lean_imports import import_transformers
import_transformers()
import torch
import huggingface_hub.constants as constants
constants.HF_HUB_CACHE = sys.argv[2]
from swarmnet_protocols.fetching import piece_file
from swarmnet_protocols.models import resolve
pieces = []
write = piece_file.PieceFile.write
def dying(self, first, data):
    done = write(self, first, data)
    pieces.append(done)
    if len(pieces) == int(sys.argv[3]):
        os.write(1, str(sum(pieces)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    return done
piece_file.PieceFile.write = dying
piece_file.SYNC_BYTES = 0
options = {"dtype": torch.float32, "device": torch.device("cpu")}
model = resolve(sys.argv[4], cache_dir=Path(sys.argv[1]))
"""


def kill_while(load: str, name: str, hub: ModelHub, tmp_path: Path, writes: int) -> int:
    """Kill a process that executes ``load``, Python code on ``model`` and ``options``, after it has
    written this often. Returns the pieces that it has written.

    Its cache is ``tmp_path / "cache"``; the hub's files are in ``tmp_path / "hf"``.
    """
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hf" / "hub")}
    folders = [str(tmp_path / "cache"), str(tmp_path / "hf" / "hub")]
    arguments = [sys.executable, "-c", _PROGRAM + load, *folders, str(writes), name]
    killed = subprocess.run(arguments, env=environment, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    return int(killed.stdout)
