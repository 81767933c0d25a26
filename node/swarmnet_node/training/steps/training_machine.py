"""The machine that trains a job."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_protocols.models import Progress
from swarmnet_protocols.training.memory_needs import MemoryNeeds

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.peers import SwarmPeers

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainingMachine:
    """The memory, the device and the files with which a worker trains."""

    cache_dir: Path
    available_bytes: int
    """Memory that the worker may take."""
    device: torch.device = _CPU
    memory: MemoryOptions = AUTOMATIC
    progress: Progress = lambda *_: None
    """Called at every inner step. An exception from it ends the computation."""
    peers: "SwarmPeers | None" = None
    """Peers that provide missing weights, or None."""
    tell: Callable[[MemoryNeeds], int | None] = lambda needs: None
    """Gets the memory needs before a weight is loaded. Returns the most bytes of model files on the
    disk, or None for no limit."""
