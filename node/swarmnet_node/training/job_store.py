"""The jobs on this machine: sealed job files, local paths of their data, and their workers'
folders."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swarmnet_protocols.errors import ConfigError, IntegrityError, SwarmnetError
from swarmnet_protocols.machine.files import write_whole

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.training.job_settings import Job
    from swarmnet_protocols.training.jobs import SealedJob
    from swarmnet_protocols.training.memory_needs import MemoryNeeds


@dataclass(frozen=True)
class LocalFiles:
    """Paths of a job's data, model and method on this machine, chosen by its user.

    Jobs of other peers contain no paths.
    """

    data: tuple[Path, ...] = ()
    """One path for each source of the data that names none, in the order of the job."""
    model: Path | None = None
    method: Path | None = None
    """The Python file of a method from outside."""

    @classmethod
    def named_in(cls, job: "Job") -> "LocalFiles":
        """Return the paths that the user of this machine wrote into a job file."""
        from swarmnet_protocols.training.job_settings import PYTHON_STDLIB, is_published

        paths = (source.path for source in job.data.sources)
        model = job.model.checkpoint
        return cls(
            tuple(Path(path).expanduser() for path in paths if path not in (None, PYTHON_STDLIB)),
            None if model is None or is_published(model) else Path(model).expanduser(),
        )

    def applied_to(self, job: "Job", stage: int | None = None) -> "Job":
        """Return ``job`` with these paths, for a worker of ``stage``. Only stage 0 reads the data.

        Raises ``ConfigError`` if a path is missing or not needed, or if the method's file is not
        the job's.
        """
        from swarmnet_protocols.training.methods.outside import checked_source, find_outside

        code = job.method.code
        if self.method is not None:
            if code is None:
                raise ConfigError("this job's method is part of swarmnet", hint="leave out --method-file")
            checked_source(self.method, code)
        elif code is not None and find_outside(job.method.name, code) is None:
            raise ConfigError(
                f"this job trains with code of its owner: the method {job.method.name}",
                hint=f"get its file from somebody whom you trust, read it, and name it with --method-file FILE.py; its SHA-256 is {code}",
            )
        return job.with_files(self.data, self.model, reads_data=not stage)

    def load_method(self, job: "Job") -> None:
        """Run the file of the job's method, if its SHA-256 is that in the job.

        No file is run if the job names no code. Raises ``ConfigError`` for other code, and for
        another method.
        """
        from swarmnet_protocols.training.methods.outside import load_file

        if self.method is None or job.method.code is None:
            return
        if (name := load_file(self.method, job.method.code).name) != job.method.name:
            raise ConfigError(
                f"{self.method} has the method {name}, and the job names {job.method.name}",
                hint="name another file",
            )


_STAGE = "stage-"
_MOVED = "moved"


def pinned(job: "Job") -> "Job":
    """Return the job with the present commit in every name of the hub.

    Raises ``JobError`` for a name that the hub does not have, and ``Unreachable`` if it does not
    answer.
    """

    def pin(section: str, key: str, name: str | None, kind: Literal["model", "dataset"]) -> str | None:
        from swarmnet_protocols.fetching.hub_ranges import commit_of
        from swarmnet_protocols.training.job_settings import JobError, is_on_hub, is_published

        if name is None or is_published(name) or not is_on_hub(name):
            return name
        if kind == "model" and Path(name).expanduser().exists():  # a directory of this machine
            return name
        repository, _, revision = name.partition("@")
        try:
            return f"{repository}@{commit_of(repository, revision or None, kind)}"
        except ConfigError as error:
            raise JobError(section, key, f"is wrong: {error}", hint=error.hint) from error

    data = {
        "sources": tuple(
            source.model_copy(update={"hub": pin("data", "hub", source.hub, "dataset")})
            for source in job.data.sources
        ),
        "tokenizer": pin("data", "tokenizer", job.data.tokenizer, "model"),
    }
    model = {"checkpoint": pin("model", "checkpoint", job.model.checkpoint, "model")}
    return job.model_copy(
        update={"data": job.data.model_copy(update=data), "model": job.model.model_copy(update=model)}
    )


def check_job(
    job: "Job",
    cache_dir: Path,
    progress: "Progress",
    tell: "Callable[[MemoryNeeds], None]" = lambda needs: None,
) -> "Job":
    """Return the job in its published form: with hashes, without local paths.

    Reads the data and the checkpoint to hash them. Of workers' own data, it reads only the files
    that the owner named. ``tell`` gets the memory needs of a worker. In a job with stages, this is
    a worker of the largest stage. Raises ``JobError`` if this machine could not train the job, or
    if others could not get its data or checkpoint.
    """
    import psutil

    from swarmnet_node.training.data.corpus import open_source, tokenizer_of
    from swarmnet_node.training.model.checks import check_model, with_cuts
    from swarmnet_node.training.model.config import checkpoint_of
    from swarmnet_node.training.steps.training_machine import TrainingMachine

    job = with_cuts(job, cache_dir)
    tokenizer = tokenizer_of(job.data, cache_dir, progress)
    hashes: list[tuple[str, int] | None] = []
    for source in job.data.sources:
        read = None if source.needs_path else open_source(job.data, source, tokenizer, cache_dir, progress)
        hashes.append(None if read is None or source.is_own else (read.digest, read.size_bytes))
    stages = [None] if job.stages is None else range(job.stages.count)
    machine = TrainingMachine(cache_dir, psutil.virtual_memory().total)
    needs = [check_model(job, machine, vocab_size=tokenizer.vocab_size, stage=stage) for stage in stages]
    tell(max(needs, key=lambda each: each.total_bytes))
    manifest = checkpoint_of(job.model, cache_dir).manifest.hash if job.model.is_checkpoint else None
    return job.about(hashes, manifest)


def job_folder(data_dir: Path, job_id: str, stage: int | None = None) -> Path:
    """Return the folder of a job's worker, with checkpoints, status and history.

    The checkpoints of a stage have a folder of their own in it.
    """
    folder = data_dir / "training" / job_id
    return folder if stage is None else folder / f"{_STAGE}{stage}"


def last_stage(data_dir: Path, job_id: str) -> int | None:
    """Return the stage of the job that this machine trained last, or moves to. None if it has
    trained none."""
    moved = moved_stage(data_dir, job_id)
    if moved is not None:
        return moved[0]
    folders = sorted(
        job_folder(data_dir, job_id).glob(f"{_STAGE}[0-9]*"), key=lambda each: -each.stat().st_mtime
    )
    return int(folders[0].name.removeprefix(_STAGE)) if folders else None


def moved_stage(data_dir: Path, job_id: str) -> tuple[int, float] | None:
    """Return the stage to which this machine moved last, and when (Unix time)."""
    path = job_folder(data_dir, job_id) / _MOVED
    try:
        return int(path.read_text()), path.stat().st_mtime
    except (OSError, ValueError):
        return None


def store_move(data_dir: Path, job_id: str, stage: int) -> None:
    """Note that this machine moves to a stage."""
    write_whole(job_folder(data_dir, job_id) / _MOVED, str(stage).encode())


def has_job(data_dir: Path, job_id: str) -> bool:
    """Return whether the data directory has the job."""
    return _job_path(data_dir, job_id).exists()


def store_job(data_dir: Path, job: "SealedJob", sealed: bytes) -> None:
    """Write a sealed job into the data directory."""
    write_whole(_job_path(data_dir, job.id), sealed)


def stored_jobs(data_dir: Path) -> list[str]:
    """Return the ids of the jobs in the data directory, the newest first."""
    paths = [path for path in (data_dir / "jobs").glob("*.job") if re.fullmatch("[0-9a-f]{64}", path.stem)]
    return [path.stem for path in sorted(paths, key=lambda path: -path.stat().st_mtime)]


def own_jobs(data_dir: Path, owner: bytes) -> list[str]:
    """Return the ids of the stored jobs that ``owner`` made, the newest first."""
    made = []
    for job_id in stored_jobs(data_dir):
        with suppress(SwarmnetError):  # a damaged file concerns its own job only
            if load_stored_job(data_dir, job_id)[0].owner == owner:
                made.append(job_id)
    return made


def store_local_files(data_dir: Path, job_id: str, files: LocalFiles) -> None:
    """Write the local paths of a job's files into the data directory."""
    paths = {"model": files.model, "method": files.method}
    stored: dict[str, object] = {
        name: str(path.absolute()) for name, path in paths.items() if path is not None
    }
    stored["data"] = [str(path.absolute()) for path in files.data]
    write_whole(_files_path(data_dir, job_id), json.dumps(stored).encode())


def store_origin(data_dir: Path, job_id: str, digest: str) -> None:
    """Write the SHA-256 of the job file from which a job was made into the data directory."""
    write_whole(_origin_path(data_dir, job_id), digest.encode())


def made_from(data_dir: Path, job_id: str) -> str | None:
    """Return the SHA-256 of the job file from which a job was made, or None for another machine's
    job."""
    try:
        with _origin_path(data_dir, job_id).open(errors="replace") as file:
            return file.read(64)
    except FileNotFoundError:
        return None


def load_local_files(data_dir: Path, job_id: str) -> LocalFiles:
    """Load the local paths of a job's files, if stored. Raises ``ConfigError`` for a damaged
    file."""
    path = _files_path(data_dir, job_id)
    try:
        stored = json.loads(path.read_bytes())
        data = tuple(Path(path) for path in stored.pop("data"))
        return LocalFiles(data, **{name: Path(path) for name, path in stored.items()})
    except FileNotFoundError:
        return LocalFiles()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged", hint="remove it, and give --data, --model and --method-file again"
        ) from error


async def fetch_job(data_dir: Path, directory: "Directory", job_id: str) -> bytes:
    """Return the sealed job with this id, from the data directory or the swarm.

    A job from the swarm is stored. Raises ``Unreachable`` if no peer has it.
    """
    from swarmnet_protocols.training.job_records import find_job

    if has_job(data_dir, job_id):
        return load_stored_job(data_dir, job_id)[1]
    job, sealed = await find_job(directory, job_id)
    store_job(data_dir, job, sealed)
    return sealed


def load_stored_job(data_dir: Path, job_id: str) -> "tuple[SealedJob, bytes]":
    """Load a stored job and its sealed form.

    Raises ``ConfigError`` if there is none, ``IntegrityError`` if the file is damaged.
    """
    from swarmnet_protocols.training.jobs import MAX_JOB_BYTES, open_job

    path = _job_path(data_dir, job_id)
    try:
        with path.open("rb") as file:
            sealed = file.read(MAX_JOB_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"no job {job_id[:16]}… is kept in {data_dir}",
            hint="name the data directory of its worker with --data-dir",
        ) from None
    try:
        job = open_job(sealed)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}", hint="remove the file and get the job again") from error
    if job.id != job_id:
        raise IntegrityError(
            f"{path} holds the job {job.id[:16]}…, not the job of its name", hint="remove the file"
        )
    return job, sealed


def _job_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.job"


def _origin_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.origin"


def _files_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.files"
