"""Child processes that are killed while they write a checkpoint.

    python -m tests.support.training.torn_writes ROOT KILLS

Prints one JSON object: ``torn``, the number of kills that left an unfinished write, and ``rounds``:
for each child, the round of the newest whole checkpoint before and after it.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.model.building import flatten, write_model
from tests.support.training.tiny_job import CONFIG

JOB = "a job"


@cache
def _model() -> PreTrainedModel:
    settings = dict(CONFIG)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings)
    )
    return model


def plain_model(folder: Path, parameters: torch.Tensor) -> None:
    write_model(_model(), parameters, folder)


def checkpoint_of(round: int, job_id: str = JOB) -> WorkerCheckpoint:
    """A checkpoint with the parameters of one model, except that the first one is the round."""
    parameters = flatten(list(_model().parameters()))
    parameters[0] = round
    moments = {name: torch.full_like(parameters, round) for name in ("exp_avg", "exp_avg_sq")}
    optimizer = {"step": torch.tensor(float(round)), **moments}
    return WorkerCheckpoint(job_id, round, round, parameters, optimizer, {"momentum": parameters + 1})


def _count_calls(action: Callable[[], object]) -> int:
    """The number of Python and C calls that ``action`` makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def _kill_before(number: int) -> None:
    """SIGKILL this process before its ``number``-th call from here on."""
    left = number

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def _kill_while_saving(root: Path, checkpoint: WorkerCheckpoint, call: int) -> None:
    child = os.fork()
    if not child:
        _kill_before(call)
        CheckpointStore(root).save(checkpoint, plain_model)
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)  # a forked child has no other threads
    checkpoints = CheckpointStore(root)
    for number in (
        1,
        2,
    ):  # the first write imports modules, the second removes an old checkpoint: later writes make equal calls
        checkpoints.save(checkpoint_of(number), plain_model)
    calls = _count_calls(lambda: checkpoints.save(checkpoint_of(3), plain_model))
    chance = random.Random(0)
    newest, torn, rounds = 3, 0, []
    for part in range(kills):
        at = 1 + int((part + chance.random()) / kills * (calls - 1))
        _kill_while_saving(root, checkpoint_of(newest + 1), at)
        torn += any(path.name.startswith(".new-") for path in root.iterdir())
        found = checkpoints.load_newest(JOB)
        if found is None or float(found.parameters[0]) != found.round:
            raise SystemExit(f"after round {newest}: {found}")
        rounds.append((newest, found.round))
        newest = found.round
    print(json.dumps({"torn": torn, "rounds": rounds}))


if __name__ == "__main__":
    main()
