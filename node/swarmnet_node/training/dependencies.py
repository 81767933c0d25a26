"""What a training worker is given: its ports to the outside, and what it trains."""

import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.trainer import Trainer
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.models import Progress
from swarmnet_protocols.net import Transport
from swarmnet_protocols.timing import Timing

Report = Callable[[dict[str, Any]], None]
"""Takes one event, with the fields the command line prints."""


@dataclass(frozen=True)
class WorkerDependencies:
    """The ports of a worker: everything it knows of the outside."""

    transport: Transport
    directory: Directory
    executor: Executor
    """Of one thread: what computes with torch."""
    codec_executor: Executor
    """Of another, serial one: encoding and decoding go on while inner steps are computed."""
    rng: random.Random
    sign: Callable[[bytes], bytes]
    """Signs with the key of the transport's peer id."""
    timing: Timing = field(default_factory=Timing)
    stopwatch: Callable[[], float] = time.perf_counter
    progress: Progress = lambda *_: None


@dataclass(frozen=True)
class Hosted:
    """What a worker trains: the job as it travels, and the model and folder it has here."""

    sealed: bytes
    trainer: Trainer
    checkpoints: CheckpointStore
