"""``swarmnet train``: creates and joins training jobs."""

import asyncio
import hashlib
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from swarmnet.addresses import usual_listen, write_addresses
from swarmnet.cli.consent import TRAINING, ask_once
from swarmnet.cli.foreground import controlled, monitoring, note_if_alone
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.lazy import command_group
from swarmnet.cli.limit_options import Down, LimitOptions, MaxRam, PresetOption, Up
from swarmnet.cli.options import (
    AnnounceOption,
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    IssuerOption,
    JsonFlag,
    ListenOption,
    MetricsOption,
    PublicNameOption,
    SwarmOption,
    device_option,
    one_of,
)
from swarmnet.cli.output import note, print_json, print_text, progress
from swarmnet.cli.training import train_results, train_status
from swarmnet.cli.training.displays import Display, display
from swarmnet.cli.training.job_names import (
    SHOWN_DIGITS,
    JobArgument,
    find_here,
    job_in_swarm,
)
from swarmnet.cli.training.record import TrainingRecord
from swarmnet.cli.training.trackers import Log, TensorboardOption, WandbOption, trackers
from swarmnet.cli.training.train_words import code_facts, facts_of, tell
from swarmnet.paths import default_data_dir, locked_data_dir
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_node.training.steps.memory_options import OPTIMIZER_STATES, PRECISIONS, MemoryOptions
from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.joining.network import Network, client_listen, connect
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.lean_imports import import_transformers

if TYPE_CHECKING:
    from swarmnet_node.training.start import WorkerConfig
    from swarmnet_node.training.steps.memory_options import OptimizerStates, Precision
    from swarmnet_protocols.training.jobs import JobFile
    from swarmnet_protocols.training.memory_needs import MemoryNeeds

app = command_group("Train a model together with others, over slow links.")

MethodFileOption = Annotated[
    Path | None,
    typer.Option(
        "--method-file",
        metavar="FILE.py",
        help="The Python file of a method from outside swarmnet. It runs here, with your rights: read it first. Remembered.",
    ),
]


@app.command("template")
def template(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="How workers combine what they learned: allreduce, diloco, streaming, eager, noloco, sparseloco, co2 or zo. Or lora: train an adapter by diloco.",
        ),
    ],
) -> None:
    """Print a commented job file for a small task that runs as it is."""
    from swarmnet_protocols.training.job_templates import template as template_of

    print_text(template_of(method), end="")


@app.command("create")
def create(  # noqa: PLR0913 - a command line, not an interface
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    method_file: MethodFileOption = None,
    data_dir: DataDirOption,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Check a job and its data, sign it with this machine's key, and publish it under the hash of
    its content."""
    entry = enter(swarm, data_dir, bootstrap)

    from swarmnet_node.training.job_store import (
        LocalFiles,
        check_job,
        own_jobs,
        pinned,
        store_job,
        store_local_files,
        store_origin,
    )
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.training.jobs import open_job, seal_job

    written = _read_job(job, method_file)
    with locked_data_dir(data_dir) as directory:
        with written.naming_lines(), progress(quiet=as_json) as report:
            import_transformers()
            from swarmnet_node.training.model import obstacle_to_hosts

            pinned_job = pinned(written.job)
            needs: list[MemoryNeeds] = []
            checked = check_job(pinned_job, cache_dir, report, needs.append)
            obstacle = obstacle_to_hosts(pinned_job.model, cache_dir)
        sealed = seal_job(checked, Identity.load_or_create(directory / "identity.key"))
        made = open_job(sealed)
        store_job(directory, made, sealed)
        store_local_files(directory, made.id, replace(LocalFiles.named_in(pinned_job), method=method_file))
        store_origin(directory, made.id, hashlib.sha256(written.text.encode()).hexdigest())
        is_published = bool(entry.addresses) or entry.file.mdns
        if is_published:
            try:
                made_here = own_jobs(directory, made.owner)
                asyncio.run(_publish(entry.network(client_listen(entry.addresses)), sealed, made_here))
            except Unreachable:
                if entry.addresses:
                    raise
                is_published = False  # no other peer of the swarm is in the local network yet
    if as_json:
        warning = {"warning": _not_served(obstacle)} if obstacle else {}
        memory = {"memory_bytes": needs[0].total_bytes}
        print_json({"job": made.id, "name": made.job.job.name, **memory, **warning})
        return
    print_text(made.id)
    note(f"the model has {needs[0]}")
    before, after = (
        {job.model.checkpoint, *(source.hub for source in job.data.sources)}
        for job in (written.job, made.job)
    )
    for name in sorted(after - before, key=str):
        if name is not None:
            note(f"the hub's newest commit is part of the job: {name}")
    if obstacle:
        note(f"warning: {_not_served(obstacle)}")
    if not is_published:
        note("stored on this machine; a worker with the same --data-dir publishes it")
    here = "" if data_dir == default_data_dir() else f" --data-dir {shlex.quote(str(data_dir))}"
    note(f"train it here: swarmnet train join {made.job.job.name} --swarm {shlex.quote(swarm)}{here}")


def _read_job(job: Path, method_file: Path | None) -> "JobFile":
    """Load the method from outside, if the user named one, then the job file.

    Raises ``ConfigError`` if the job trains by another method.
    """
    from swarmnet_protocols.training.jobs import load_job

    if method_file is None:
        return load_job(job)
    from swarmnet_protocols.training.methods import code_of
    from swarmnet_protocols.training.methods.outside import load_file

    outside = load_file(method_file)
    written = load_job(job)
    if code_of(name := written.job.method.name) != outside.code:
        raise ConfigError(
            f"the job trains by {name}, and not by the method in {method_file}: {outside.name}",
            hint="give that method a name which no built-in method has, and write the name into the job",
        )
    return written


def _not_served(obstacle: str) -> str:
    return f"this model can be trained, but hosts cannot serve it: {obstacle}; docs/families.md lists families that work"


async def _publish(network: Network, sealed: bytes, made: Sequence[str]) -> None:
    """Publish a job, and list it in the catalog with the other jobs that this machine made."""
    from swarmnet_protocols.directory.catalog import made_jobs
    from swarmnet_protocols.training.job_records import JOB_LIFETIME_S, job_announcement

    async with connect(network, client_mode=True) as (_, directory):
        await job_announcement(sealed).publish(directory)
        await made_jobs(made, JOB_LIFETIME_S).publish(directory)


@app.command("join")
def join(  # noqa: PLR0913 - a command line, not an interface
    job: JobArgument,
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: ListenOption = [],  # noqa: B006
    announce: AnnounceOption = [],  # noqa: B006
    data_dir: DataDirOption,
    cache_dir: CacheDirOption,
    device: Annotated[str, device_option("Device to compute on.")] = "auto",
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores", "--threads", metavar="N", min=1, max=1024, help="Compute with this many cores."
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="|".join(PRECISIONS),
            help="Format of the computation. bfloat16 halves its memory; the trained weights stay in float32. auto: bfloat16 on CUDA.",
            callback=one_of("--precision", *PRECISIONS),
        ),
    ] = "auto",
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Compute activations twice instead of keeping them: less memory, a third more time.",
        ),
    ] = False,
    optimizer_states: Annotated[
        str,
        typer.Option(
            "--optimizer-states",
            metavar="|".join(OPTIMIZER_STATES),
            help="How AdamW's two numbers for each weight are kept: 8bit in a quarter of the memory (pip install bitsandbytes), cpu outside the GPU.",
            callback=one_of("--optimizer-states", *OPTIMIZER_STATES),
        ),
    ] = "float32",
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
            show_default="the stage of the last time, or the one that needs workers most",
        ),
    ] = None,
    preset: PresetOption = None,
    max_ram_bytes: MaxRam = None,
    up_bytes_per_s: Up = None,
    down_bytes_per_s: Down = None,
    public_name: PublicNameOption = "",
    tensorboard: TensorboardOption = None,
    wandb: WandbOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Train this job without asking first.")] = False,
    issuer: IssuerOption = None,
    metrics: MetricsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a job until its rounds are done, `swarmnet finish` or Ctrl-C. A worker may leave and
    return at any time and loses no committed round.

    The first time, the command shows what the job reads, sends and uses on this machine, and asks
    for consent.
    """
    changes = LimitOptions(
        preset=preset,
        max_ram_bytes=max_ram_bytes,
        up_bytes_per_s=up_bytes_per_s,
        down_bytes_per_s=down_bytes_per_s,
    )
    changes.given()
    entry = enter(swarm, data_dir, bootstrap)
    found = _find_here(entry, data_dir, job)
    with locked_data_dir(data_dir) as directory:
        with progress(quiet=as_json) as report:
            report("looking for the job", 0, None)
            import_transformers()
            from swarmnet_node.owner.machine import load_limits, save_limits
            from swarmnet_node.training.job_store import (
                LocalFiles,
                job_folder,
                load_local_files,
                load_stored_job,
                store_local_files,
            )
            from swarmnet_node.training.start import WorkerConfig

            job = asyncio.run(_fetch(entry.network(client_listen(entry.addresses)), directory, job, found))
        sealed, _ = load_stored_job(directory, job)
        before = load_local_files(directory, job)
        files = LocalFiles(tuple(data) or before.data, model or before.model, method_file or before.method)
        local = files.applied_to(sealed.job, stage)
        stored = load_limits(directory)
        limits = changes.applied_to(stored)
        cores = cores or limits.cores
        disk = job_folder(directory, job)
        facts = facts_of(local, id=job, name=public_name, device=device, threads=cores, disk=disk)
        facts |= code_facts(local, files.method)
        ask_once(job_folder(directory, job), facts, TRAINING, asking=not yes, as_json=as_json)
        store_local_files(directory, job, files)
        if limits != stored:
            save_limits(directory, limits)
        config = WorkerConfig(
            job=job,
            network=entry.network(listen or usual_listen(directory), announce, issuer),
            data_dir=directory,
            cache_dir=cache_dir,
            device=device,
            memory=MemoryOptions(
                cast("Precision", precision), recompute, cast("OptimizerStates", optimizer_states)
            ),
            threads=cores,
            files=files,
            stage=stage,
            public_name=public_name,
            swarm_name=entry.file.name,
            limits=limits,
        )
        run = f"{sealed.job.job.name}-{public_name or job[:SHOWN_DIGITS]}"
        with (
            trackers(run, sealed.job.model_dump(mode="json"), tensorboard, wandb) as log,
            display(as_json=as_json) as shown,
        ):
            record = TrainingRecord(job_folder(directory, job), job, wall_clock)
            run_until_stopped(_work(config, record, shown, log, metrics, as_json=as_json))


def _find_here(entry: Entry, data_dir: Path, job: str) -> str | None:
    """Return the id of the job that ``job`` names, or None if only the swarm may know it.

    Raises ``Unreachable`` if this machine does not have the job, and no peer can be asked.
    """
    from swarmnet_node.training.job_store import has_job

    found = find_here(job, data_dir)
    is_here = found is not None and has_job(data_dir, found)
    if not is_here and not entry.addresses and not entry.file.mdns:
        raise Unreachable(
            f"this machine has no job {job!r}, and knows no peer of the swarm that may have it",
            hint="give the address of a worker: --bootstrap ADDR",
        )
    return found


async def _fetch(network: Network, data_dir: Path, job: str, found: str | None) -> str:
    """Return the id of the job that ``job`` names. Fetch the job from the swarm unless the data
    directory has it. ``found``: the id, or None until the swarm is asked."""
    from swarmnet_node.training.job_store import fetch_job, has_job

    if found is not None and has_job(data_dir, found):
        return found
    async with connect(network, client_mode=True) as (_, directory):
        found = found or await job_in_swarm(job, directory)
        await fetch_job(data_dir, directory, found)
    return found


async def _work(
    config: "WorkerConfig",
    record: TrainingRecord,
    shown: Display,
    log: Log,
    metrics: tuple[str, int] | None,
    *,
    as_json: bool,
) -> None:
    from swarmnet_node.training.start import start
    from swarmnet_protocols.machine.aio import in_background

    interrupts = Interrupts.catch()

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            with suppress(OSError):  # training continues if the disk is full
                write_addresses(config.data_dir, event["addresses"])
        record.take(event)
        log(event)
        shown.show(event, tell(event, record.status))

    async with (
        monitoring(metrics, as_json=as_json) as monitor,
        start(config, report, shown.progress) as (worker, peer),
        controlled(peer, config.data_dir, monitor),
    ):

        async def leave_when_stopped() -> None:
            await peer.stopping.wait()
            notify_stopping()
            worker.stop()
            report({"event": "leaving"})

        interrupts.first = peer.stopping.set
        status = peer.status()
        notify_ready(f"training {status.worker.name}")
        if not as_json:
            note_if_alone(status, mdns=config.network.mdns)
        async with in_background(leave_when_stopped()):
            await worker.run()


app.command("status")(train_status.status)
app.command("list")(train_status.list_jobs)
app.command("export")(train_results.export)
app.command("plot")(train_results.plot)
