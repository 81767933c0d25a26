"""``swarmnet train export`` and ``train plot``: the model and the curves of a job."""

import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.options import BootstrapOption, CacheDirOption, DataDirOption, JsonFlag
from swarmnet.cli.output import note, print_json, print_result, print_text, progress
from swarmnet.cli.training.job_names import (
    JobArguments,
    OptionalJobArgument,
    fetch_named,
    find_here,
    job_here,
    jobs_here,
    short_ids,
)
from swarmnet.cli.training.record import newest_job, read_history
from swarmnet.swarm_file.entry import client_network
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.joining.network import Network, connect
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.models import Progress

if TYPE_CHECKING:
    from swarmnet_protocols.training.job_settings import Job


def export(  # noqa: PLR0913 - a command line, not an interface
    job: OptionalJobArgument = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the model to this new directory.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model.")] = False,
    swarm: Annotated[
        str | None,
        typer.Option(
            "--swarm",
            metavar="SWARM",
            help="Collect the stages of the model from the workers in this swarm, if the job has stages.",
        ),
    ] = None,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Write the newest model of a job with its tokenizer, in Hugging Face layout, as transformers
    loads it. Of a job that trains an adapter, write the adapter as PEFT loads it.

    Each worker of a job with stages has one stage. With --swarm, the command collects them all,
    also on a machine that trains nothing.
    """
    revisions: list[int] = []
    with progress(quiet=as_json) as report:
        report("looking for the job", 0, None)
        import_transformers()
        from swarmnet_node.training.checkpoint import export_model
        from swarmnet_protocols.training.job_settings import BYTES

        network = None
        if swarm is None:
            job = job_here(job, data_dir)
        else:
            network = client_network(swarm, bootstrap, data_dir)
            job = newest_job(data_dir) if job is None else job
            job = asyncio.run(fetch_named(network, data_dir, job, find_here(job, data_dir)))
        if network is not None and _has_stages(data_dir, job):
            exported, revisions = collect_model(
                network, data_dir, job, out, cache_dir, report, overwrite=force
            )
        else:
            exported = export_model(data_dir, job, out, cache_dir=cache_dir, overwrite=force, progress=report)
    tokenizer, base = exported.data.tokenizer, exported.model.checkpoint or ""
    if as_json:
        print_json({"job": job, "path": str(out), "tokenizer": tokenizer})
        return
    if exported.model.is_lora:
        print_text(f"the adapter is in {out}")
        words = ["swarmnet", "run", base, "YOUR QUESTION", "--raw", "--adapter", str(out)]
        note(f"ask the model with it: {shlex.join(words)} --swarm SWARM")
        return
    print_text(f"the model is in {out}")
    if len(set(revisions)) > 1:
        note(
            f"its stages are of rounds {min(revisions)} to {max(revisions)}, because the job went on meanwhile"
        )
    if tokenizer == BYTES:
        note("it reads bytes: token N is byte N, and 0 ends a document")


def _has_stages(data_dir: Path, job: str) -> bool:
    from swarmnet_node.training.job_store import load_stored_job

    return load_stored_job(data_dir, job)[0].job.stages is not None


def collect_model(  # noqa: PLR0913 - a job, how to reach its workers, and where its model goes
    network: Network,
    data_dir: Path,
    job: str,
    out: Path,
    cache_dir: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> "tuple[Job, list[int]]":
    """Write the present model of a job's workers into ``out``. Return the job with the local paths
    of its files, and the revision of each stage."""
    from swarmnet_node.training.checkpoint import export_model

    revisions: list[int] = []

    def collect(folder: Path) -> None:
        revisions.extend(asyncio.run(_collect(network, data_dir, job, folder, cache_dir, progress)))

    exported = export_model(
        data_dir, job, out, cache_dir=cache_dir, overwrite=overwrite, progress=progress, collect=collect
    )
    return exported, revisions


async def _collect(
    network: Network, data_dir: Path, job: str, folder: Path, cache_dir: Path, progress: Progress
) -> list[int]:
    from swarmnet_node.training.collecting import fetch_stages
    from swarmnet_node.training.job_store import load_local_files, load_stored_job

    sealed, _ = load_stored_job(data_dir, job)
    local = load_local_files(data_dir, job).applied_to(sealed.job, stage=1)  # needs no data
    async with connect(network, client_mode=True) as (transport, directory):
        return await fetch_stages(
            transport, directory, job, local, folder, cache_dir=cache_dir, progress=progress
        )


def plot(
    jobs: JobArguments = [],  # noqa: B006 - typer copies it
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the PNG files to this folder.")],
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Draw the loss of the worker on this machine against tokens, bytes sent and time. Several jobs
    are drawn together, to compare them."""
    with progress(quiet=as_json):
        ids, paths = _drawn(jobs, out, data_dir)
    drawn = [str(path) for path in paths]
    print_result({"jobs": ids, "paths": drawn}, "\n".join(drawn), as_json=as_json)


def _drawn(jobs: list[str], out: Path, data_dir: Path) -> tuple[list[str], list[Path]]:
    """Draw the curves of the jobs, or of the newest job. Return their ids and the pictures."""
    from swarmnet.cli.training.plots import plot_histories

    ids = list(dict.fromkeys(job_here(job, data_dir) for job in jobs)) or [newest_job(data_dir)]
    names, short = jobs_here(data_dir), short_ids(ids)
    runs = {}
    for id in ids:
        points = list(read_history(data_dir / "training" / id))
        if not points:
            raise ConfigError(
                f"the worker of job {short[id]} has no round yet", hint="try again after its first round"
            )
        name = names.get(id) or short[id]
        runs[name if name not in runs else f"{name} {short[id]}"] = points
    return ids, plot_histories(runs, out)
