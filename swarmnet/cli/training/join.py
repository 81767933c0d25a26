"""``swarmnet train join``: a worker that trains a job until it is done or stopped."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from swarmnet.addresses import write_addresses
from swarmnet.cli.consent import TRAINING, ask_once
from swarmnet.cli.foreground import controlled, idle_guest, monitoring, note_if_alone, say_pause
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.limit_options import rows
from swarmnet.cli.options import JsonFlag, MetricsOption, SwarmOption, choice, device_option
from swarmnet.cli.output import progress
from swarmnet.cli.peer_options import MachineOptions
from swarmnet.cli.training.displays import display
from swarmnet.cli.training.job_names import SHOWN_DIGITS, JobArgument, fetch_named, find_here
from swarmnet.cli.training.record import TrainingRecord, newest_job, read_status
from swarmnet.cli.training.trackers import TensorboardOption, WandbOption, trackers
from swarmnet.cli.training.train_words import code_facts, facts_of, tell
from swarmnet.paths import locked_data_dir
from swarmnet.restart import may_restart, restart, take_resting, was_restarted
from swarmnet.swarm_file.entry import Entry
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.machine import OwnersMachine, load_limits, save_limits
from swarmnet_node.training.job_store import (
    LocalFiles,
    has_job,
    job_folder,
    load_local_files,
    load_stored_job,
    store_local_files,
)
from swarmnet_node.training.steps.memory_options import OPTIMIZER_STATES, PRECISIONS, MemoryOptions
from swarmnet_protocols.errors import ConfigError, IntegrityError, Unreachable
from swarmnet_protocols.joining.network import client_listen
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter

if TYPE_CHECKING:
    from swarmnet.cli.training.displays import Display
    from swarmnet.cli.training.trackers import Log
    from swarmnet_node.training.opening import WorkerConfig
    from swarmnet_node.training.start import Training
    from swarmnet_node.training.steps.memory_options import OptimizerStates, Precision

MethodFileOption = Annotated[
    Path | None,
    typer.Option(
        "--method-file",
        metavar="FILE.py",
        help="The Python file of a method from outside swarmnet. It runs here, with your rights: read it first. Remembered.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a worker on this machine, whatever it trains."""

    machine: MachineOptions
    device: Annotated[str, device_option("Device to compute on.")] = "auto"
    metrics: MetricsOption = None
    as_json: JsonFlag = False


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The options by which a worker saves memory."""

    precision: Annotated[
        str,
        choice(
            "--precision",
            PRECISIONS,
            "Format of the computation. bfloat16 halves its memory; the trained weights stay in float32. auto: bfloat16 on CUDA.",
        ),
    ] = "auto"
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Compute activations twice instead of keeping them: less memory, a third more time.",
        ),
    ] = False
    optimizer_states: Annotated[
        str,
        choice(
            "--optimizer-states",
            OPTIMIZER_STATES,
            "How AdamW's two numbers for each weight are kept: 8bit in a quarter of the memory (pip install bitsandbytes), cpu outside the GPU.",
        ),
    ] = "float32"

    @property
    def options(self) -> MemoryOptions:
        states = cast("OptimizerStates", self.optimizer_states)
        return MemoryOptions(cast("Precision", self.precision), self.recompute, states)


def join(  # noqa: PLR0913 - a command line, not an interface
    job: JobArgument,
    *,
    swarm: SwarmOption,
    options: WorkerOptions,
    memory: MemoryFlags,
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="PATH",
            help="Your own files, if the job trains each worker on its own; or your copy of its data, if the owner distributes it as files. Once for each such source. Remembered.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="PATH", help="Your copy of the model that the job starts from. Remembered."
        ),
    ] = None,
    method_file: MethodFileOption = None,
    stage: Annotated[
        int | None,
        typer.Option(
            "--stage",
            metavar="N",
            min=0,
            help="Train this stage, if the job cuts its model into stages.",
            show_default="the stage of the last time; the first time, the stage that needs workers most",
        ),
    ] = None,
    begin_from: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Go on from the checkpoints of another job with the same model and other stages, or none. Once for each stage, such as DATA_DIR/training/JOB/stage-0.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    tensorboard: TensorboardOption = None,
    wandb: WandbOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Train this job without asking first.")] = False,
) -> None:
    """Train a job until its rounds are done, `swarmnet finish` or Ctrl-C. A worker may leave and
    return at any time and loses no committed round.

    The first time, the command shows what the job reads, sends and uses on this machine, and asks
    for consent. All limits of `swarmnet join` hold, and `swarmnet limits`, `pause` and `resume`
    work here, too.

    \b
    Examples:
      swarmnet train join my-job --swarm lab
      swarmnet train join my-job --swarm lab --idle-only --no-battery --max-ram 8GiB
    """
    machine = options.machine
    machine.limits.given()
    entry = machine.enter(swarm)
    # a job that nobody can be asked for leaves no file behind
    found = None if was_restarted() else _find_here(entry, machine.data_dir, job)
    with locked_data_dir(machine.data_dir) as directory:
        if was_restarted():
            take_resting()
            if not run_until_stopped(rest(entry, options)):
                return
            found = _find_here(entry, machine.data_dir, job)
        with progress(quiet=options.as_json) as report:
            report("looking for the job", 0, None)
            job = asyncio.run(
                fetch_named(entry.network(client_listen(entry.addresses)), directory, job, found)
            )
        sealed, _ = load_stored_job(directory, job)
        before = load_local_files(directory, job)
        files = LocalFiles(tuple(data) or before.data, model or before.model, method_file or before.method)
        local = files.applied_to(sealed.job, stage)
        disk = job_folder(directory, job)
        facts = facts_of(local, id=job, name=machine.public_name, device=options.device, disk=disk)
        facts |= code_facts(local, files.method) | rows(machine.owner_limits())
        ask_once(disk, facts, TRAINING, asking=not yes, as_json=options.as_json)
        store_local_files(directory, job, files)
        run = f"{sealed.job.job.name}-{machine.public_name or job[:SHOWN_DIGITS]}"
        while train(
            replace(
                configured(entry, options, job),
                memory=memory.options,
                stage=stage,
                begin_from=begin_from,
            ),
            options,
            trackers(run, sealed.job.model_dump(mode="json"), tensorboard, wandb),
        ):
            if may_restart():
                restart()


async def rest(entry: Entry, options: WorkerOptions) -> bool:
    """Wait until the owner's limits let a worker train. Return False if the owner stops it.

    Meanwhile the process has neither the job nor torch.
    """
    from swarmnet_node.owner.watched_peer import Purpose

    folder, round_bytes = options.machine.data_dir, 0
    with suppress(ConfigError, IntegrityError):
        status = read_status(folder / "training" / newest_job(folder))
        round_bytes = int(status.get("round_bytes", 0))
    limits = options.machine.owner_limits()
    if not await forbidden(limits, folder, round_bytes):
        return True
    network = options.machine.network(entry)
    purpose = Purpose("train join", entry.file.name, folder, network.peer.link, limits=limits)
    async with idle_guest(network, purpose) as (peer, _, _):
        peer.guard.reserve(round_bytes)
        return await peer.may_work(lambda _: say_pause(peer.status(), as_json=options.as_json))


async def forbidden(limits: OwnerLimits, folder: Path, round_bytes: int) -> str:
    """Return the reason why the limits forbid training now. Empty if they allow it."""
    from swarmnet_node.owner.guard import Guard

    guard = Guard(OwnersMachine(folder, LinkLimiter(), wall_clock, lambda _: None), limits, lambda: None)
    guard.reserve(round_bytes)
    await guard.observe()
    return guard.reason()


def train(
    config: "WorkerConfig",
    options: WorkerOptions,
    tracking: "AbstractContextManager[Log]" = nullcontext(lambda event: None),  # noqa: B008
    companion: "Callable[[Training], Coroutine[Any, Any, object]] | None" = None,
) -> bool:
    """Train a job until it is done, the owner stops the worker, or the worker must pause.

    ``companion`` runs meanwhile. Return whether the worker ended for a pause: the caller then
    restarts the program, if that frees memory, and trains again.
    """
    options.machine.give_way()
    record = TrainingRecord(job_folder(config.data_dir, config.job), config.job, wall_clock)
    config = replace(config, round_bytes=int(record.status.get("round_bytes", 0)))
    if may_restart() and asyncio.run(forbidden(config.limits, config.data_dir, config.round_bytes)):
        return True  # the next program rests without the job and torch
    with tracking as log, display(as_json=options.as_json) as shown:
        return run_until_stopped(_work(config, record, shown, log, options, companion))


def configured(entry: Entry, options: WorkerOptions, job: str) -> "WorkerConfig":
    """Return the settings of a worker of ``job``, and store the limits that the owner gave."""
    from swarmnet_node.training.opening import WorkerConfig

    machine = options.machine
    directory, limits = machine.data_dir, machine.owner_limits()
    if limits != load_limits(directory):
        save_limits(directory, limits)
    return WorkerConfig(
        job=job,
        network=machine.network(entry),
        data_dir=directory,
        cache_dir=machine.cache_dir,
        device=options.device,
        max_disk_bytes=machine.max_disk_bytes,
        files=load_local_files(directory, job),
        public_name=machine.public_name,
        swarm_name=entry.file.name,
        limits=limits,
    )


def _find_here(entry: Entry, data_dir: Path, job: str) -> str | None:
    """Return the id of the job that ``job`` names, or None if only the swarm may know it.

    Raises ``Unreachable`` if this machine does not have the job, and no peer can be asked.
    """
    found = find_here(job, data_dir)
    is_here = found is not None and has_job(data_dir, found)
    if not is_here and not entry.addresses and not entry.file.mdns:
        raise Unreachable(
            f"this machine has no job {job!r}, and knows no peer of the swarm that may have it",
            hint="give the address of a worker: --bootstrap ADDR",
        )
    return found


async def _work(
    config: "WorkerConfig",
    record: TrainingRecord,
    shown: "Display",
    log: "Log",
    options: WorkerOptions,
    companion: "Callable[[Training], Coroutine[Any, Any, object]] | None",
) -> bool:
    """Train. Return whether the worker ended for a pause."""
    from swarmnet_node.training.start import start
    from swarmnet_protocols.machine.aio import in_background

    interrupts = Interrupts.catch()

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            with suppress(OSError):  # training continues if the disk is full
                write_addresses(config.data_dir, event["addresses"])
            notify_ready(f"training {event['name']}")
        elif event["event"] == "paused":
            notify_ready(f"paused: {event['reason']}")
        elif event["event"] == "leaving":
            notify_stopping()
        record.take(event)
        log(event)
        shown.show(event, tell(event, record.status))

    async with (
        monitoring(options.metrics, as_json=options.as_json) as monitor,
        start(config, report, shown.progress) as training,
        controlled(training.peer, config.data_dir, monitor),
        in_background(*([companion(training)] if companion else [])),
    ):
        interrupts.first = lambda: training.peer.finish(0.0)
        if not options.as_json:
            note_if_alone(training.peer.status(), mdns=config.network.mdns)
        return await training.run()
