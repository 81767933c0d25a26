"""``swarmnet train``: creates and joins training jobs."""

import asyncio
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    JsonFlag,
    SwarmOption,
)
from swarmnet.cli.output import note, print_json, print_text, progress
from swarmnet.cli.training import train_results, train_status
from swarmnet.cli.training.join import MethodFileOption, join
from swarmnet.paths import default_data_dir, locked_data_dir
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.joining.network import Network, client_listen, connect
from swarmnet_protocols.machine.lean_imports import import_transformers

if TYPE_CHECKING:
    from swarmnet_protocols.training.job_settings import Job
    from swarmnet_protocols.training.jobs import JobFile
    from swarmnet_protocols.training.memory_needs import MemoryNeeds

app = command_group("Train a model together with others, over slow links.")


@app.command("template")
def template(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="How workers combine what they learned: allreduce, diloco, streaming, eager, noloco, sparseloco, co2 or zo. Or lora: train an adapter by diloco. Or pipeline: each worker has one stage of the model.",
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
            from swarmnet_node.training.model.config import obstacle_to_hosts

            pinned_job = pinned(written.job)
            needs: list[MemoryNeeds] = []
            checked = check_job(pinned_job, cache_dir, report, needs.append)
            obstacle = obstacle_to_hosts(pinned_job.model, cache_dir)
        sealed = seal_job(checked, Identity.load_or_create(directory / "identity.key"))
        made = open_job(sealed)
        store_job(directory, made, sealed)
        store_local_files(directory, made.id, replace(LocalFiles.named_in(pinned_job), method=method_file))
        store_origin(directory, made.id, hashlib.sha256(written.text.encode()).hexdigest())
        is_published = _publish(entry, sealed, own_jobs(directory, made.owner))
    warning = f"this model can be trained, but hosts cannot serve it: {obstacle}; docs/families.md lists families that work"
    if as_json:
        fields = {"job": made.id, "name": made.job.job.name, "memory_bytes": needs[0].total_bytes}
        print_json(fields | ({"warning": warning} if obstacle else {}))
        return
    print_text(made.id)
    note(f"the model has {needs[0]}")
    for name in sorted(_on_hub(made.job) - _on_hub(written.job)):
        note(f"the hub's newest commit is part of the job: {name}")
    if obstacle:
        note(f"warning: {warning}")
    if not is_published:
        note("stored on this machine; a worker with the same --data-dir publishes it")
    here = "" if data_dir == default_data_dir() else f" --data-dir {shlex.quote(str(data_dir))}"
    note(f"train it here: swarmnet train join {made.job.job.name} --swarm {shlex.quote(swarm)}{here}")


def _on_hub(job: "Job") -> set[str]:
    names = {job.model.checkpoint, *(source.hub for source in job.data.sources)}
    return {name for name in names if name is not None}


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


def _publish(entry: Entry, sealed: bytes, made: Sequence[str]) -> bool:
    """Publish a job, and list it in the catalog with the other jobs that this machine made.

    Returns False if no other peer of the swarm is in the local network yet. Raises ``Unreachable``
    if none answers at the addresses of the swarm.
    """
    if not entry.addresses and not entry.file.mdns:
        return False
    try:
        asyncio.run(_announce(entry.network(client_listen(entry.addresses)), sealed, made))
    except Unreachable:
        if entry.addresses:
            raise
        return False
    return True


async def _announce(network: Network, sealed: bytes, made: Sequence[str]) -> None:
    from swarmnet_protocols.directory.catalog import made_jobs
    from swarmnet_protocols.training.job_records import JOB_LIFETIME_S, job_announcement

    async with connect(network, client_mode=True) as (_, directory):
        await job_announcement(sealed).publish(directory)
        await made_jobs(made, JOB_LIFETIME_S).publish(directory)


app.command("join")(join)
app.command("status")(train_status.status)
app.command("list")(train_status.list_jobs)
app.command("export")(train_results.export)
app.command("plot")(train_results.plot)
