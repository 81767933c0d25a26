"""Collects the whole model of a job from its workers, also on a machine that trains nothing.

1. ``fetch_stages`` downloads the state of one stage after another, by hash, and writes each stage's
   weights to a file. So memory holds one stage at a time.
2. ``write_collected`` writes the model that these files make up. Memory maps the files.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnet_node.training.model.building import save_whole, trained_parameters
from swarmnet_node.training.model.config import model_config
from swarmnet_node.training.model.stage_model import build_stage, empty_stage
from swarmnet_node.training.shared_state import SharedState, max_state_bytes
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.errors import IntegrityError, Unreachable
from swarmnet_protocols.models import Progress
from swarmnet_protocols.models.partial_model import build_whole
from swarmnet_protocols.net import Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import find_workers
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.matchmaking.positions import ask_positions
from swarmnet_protocols.training.pipeline.stages import groups
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import fetch_state

ATTEMPTS = 5
"""Looks for the newest state of a stage. Its workers may replace the state between a look and the
download. With fewer, a fast job is not collected. With more, the error of a lost stage is late."""


async def fetch_stages(  # noqa: PLR0913 - a job, and how to reach its workers
    transport: Transport,
    directory: Directory,
    job_id: str,
    job: Job,
    folder: Path,
    *,
    cache_dir: Path,
    progress: Progress,
) -> list[int]:
    """Write the weights of each stage into ``folder``. Returns the revision of each stage. A job
    without stages has one.

    Raises ``Unreachable`` if a stage has no worker, and ``IntegrityError`` if its workers send
    another state than they announce.
    """
    revisions = []
    for stage, group in enumerate(groups(job_id, job.stage_count)):
        model = _shapes(job, stage, cache_dir)
        count = sum(each.numel() for _, each in trained_parameters(model))
        data = await _fetch(transport, directory, stage, group, max_state_bytes(count), progress)
        state = SharedState.unpack(data)
        if state.agreed.shape != (count,):
            raise IntegrityError(f"the state of stage {stage} has another size than the stage")
        save_file(_named(model, state.agreed), folder / f"stage-{stage}.safetensors")
        revisions.append(state.revision)
    return revisions


def _shapes(job: Job, stage: int, cache_dir: Path) -> Any:
    """Return a stage, or the whole model of a job without stages. Only a stage in a subspace needs
    its initial weights."""
    if job.stages is None:
        return build_whole(model_config(job.model, cache_dir)).empty().requires_grad_(True)
    return (empty_stage if job.stages.subspace is None else build_stage)(job, stage, cache_dir)


def _named(model: Any, parameters: Tensor) -> dict[str, Tensor]:
    """Return the weights of a stage by their names in the whole model."""
    named, done = {}, 0
    for name, parameter in trained_parameters(model):
        named[name] = parameters[done : done + parameter.numel()].view(parameter.shape)
        done += parameter.numel()
    subspace = getattr(model, "subspace", None)
    found = named if subspace is None else subspace.fold(named)
    return {name: each.contiguous() for name, each in found.items()}


async def _fetch(
    transport: Transport, directory: Directory, stage: int, group: str, max_bytes: int, progress: Progress
) -> bytearray:
    failure = Unreachable(
        f"stage {stage} has no worker", hint="try again when the workers of all stages are there"
    )
    for _ in range(ATTEMPTS):
        # A record may be a minute old, so each worker is asked for its present state.
        listed = {worker.peer: worker for worker in await find_workers(directory, group)}
        now = await ask_positions(transport, bytes.fromhex(group), [*listed.values()], Timing())
        workers = newest({listed[peer]: position for peer, position in now.items()})
        if not workers:
            raise failure
        try:
            data, _ = await fetch_state(
                transport,
                bytes.fromhex(group),
                workers[0][1].state,
                [worker for worker, _ in workers],
                Timing(),
                max_bytes=max_bytes,
                on_bytes=lambda done, total: progress(f"fetching stage {stage}", done, total),
            )
            return data
        except Unreachable as error:
            failure = error
    raise failure


def newest(workers: dict[RoundMember, WorkerPosition]) -> list[tuple[RoundMember, WorkerPosition]]:
    """Return the workers at the position that most of them announce; of several, the latest."""
    counts = Counter(workers.values())
    best = max(counts, key=lambda each: (counts[each], each.round), default=None)
    return [each for each in workers.items() if each[1] == best]


def write_collected(job: Job, pieces: Path, folder: Path, cache_dir: Path) -> None:
    """Write the model of the stages in ``pieces`` into ``folder``, in Hugging Face layout."""
    named: dict[str, Tensor] = {}
    for file in sorted(pieces.glob("stage-*.safetensors")):
        named |= load_file(file)
    save_whole(build_whole(model_config(job.model, cache_dir)).empty(), named, folder)
