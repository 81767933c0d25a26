"""``swarmnet train status`` and ``train list``: the worker on this machine, all workers of a job,
and all jobs."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.cli.options import BootstrapOption, DataDirOption, JsonFlag
from swarmnet.cli.output import clear_terminal, note, print_json, print_table, progress
from swarmnet.cli.training.job_names import OptionalJobArgument, find_here, job_here, job_in_swarm, short_ids
from swarmnet.cli.training.record import newest_job, read_status
from swarmnet.cli.training.train_words import (
    job_summary,
    model_of,
    stage_name,
    stage_summary,
    summary,
    worker_summary,
)
from swarmnet.swarm_file.entry import client_network
from swarmnet.units import counted
from swarmnet_protocols.averages import pooled
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.joining.network import Network, connect

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.net import PeerId, Transport
    from swarmnet_protocols.training.jobs import SealedJob
    from swarmnet_protocols.wire.report_pb2 import WorkerReport

WATCH_EVERY_S = 1.0
LOOK_EVERY_S = 5.0
JOBS_AT_ONCE = 8
"""Jobs whose workers are asked at the same time. With fewer, the list waits longer for workers that
do not answer. With more, hundreds of streams are open at once."""


def status(
    *,
    job: OptionalJobArgument = None,
    swarm: Annotated[
        str | None,
        typer.Option("--swarm", metavar="SWARM", help="Ask this swarm about all workers of the job."),
    ] = None,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the status again whenever it changes.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the status of the worker on this machine, or with --swarm all workers of a job."""
    if swarm is None:
        _watch_here(data_dir / "training" / job_here(job, data_dir), watch=watch, as_json=as_json)
        return
    job = newest_job(data_dir) if job is None else find_here(job, data_dir) or job
    network = client_network(swarm, bootstrap, data_dir)
    asyncio.run(_watch_swarm(network, job, watch=watch, as_json=as_json))


def _watch_here(folder: Path, *, watch: bool, as_json: bool) -> None:
    shown: dict[str, Any] = {}
    while True:
        fields = read_status(folder)
        fields["running"] = _is_running(fields)
        if not fields["running"] and fields["state"] not in {"done", "finished", "left"}:
            fields["state"] = "stopped"
        if not fields["running"] or not fields.get("warning"):
            fields.pop("warning", None)
        if fields != shown:
            shown = fields
            _show(fields, _print_worker, watch=watch, as_json=as_json)
        if not watch or not fields["running"]:
            return
        time.sleep(WATCH_EVERY_S)


async def _watch_swarm(network: Network, name: str, *, watch: bool, as_json: bool) -> None:
    from swarmnet_protocols.training.job_records import find_job

    shown: dict[str, Any] = {}
    with ExitStack() as waiting:
        waiting.enter_context(progress(quiet=as_json))("asking the swarm", 0, None)
        async with connect(network, client_mode=True) as (transport, directory):
            job, _ = await find_job(directory, await job_in_swarm(name, directory))
            while True:
                workers, stages = await _workers(transport, directory, job)
                losses = [(each["val_loss"], each["val_tokens"]) for each in workers]
                known = [(loss, tokens) for loss, tokens in losses if loss is not None]
                val_loss = pooled(known, most=job.job.evaluation_tokens)
                fields = _about(job) | {"val_loss": val_loss, "stages": stages, "workers": workers}
                waiting.close()
                if fields != shown:
                    shown = fields
                    _show(fields, _print_swarm, watch=watch, as_json=as_json)
                if not watch:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


async def _workers(
    transport: "Transport", directory: "Directory", job: "SealedJob"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the workers of a job with their own reports, and its stages, if it has any. A worker
    that gives no report has nulls, and the round that it announced last."""
    from swarmnet_protocols.directory.node_reports import ask_report
    from swarmnet_protocols.machine.aio import all_of
    from swarmnet_protocols.training import MAX_WORKERS
    from swarmnet_protocols.training.job_records import find_workers
    from swarmnet_protocols.training.pipeline.stage_rows import stage_rows
    from swarmnet_protocols.training.pipeline.stages import groups

    members = groups(job.id, job.job.stage_count)
    listed = await all_of(*(find_workers(directory, group) for group in members))
    found = [(stage, *each) for stage, group in enumerate(listed) for each in [*group.items()][:MAX_WORKERS]]
    reports = await all_of(*(ask_report(transport, each.peer, each.addresses) for _, each, _ in found))
    workers = []
    of_stages: list[dict[PeerId, WorkerReport | None]] = [{} for _ in members]
    for (stage, worker, position), report in zip(found, reports, strict=True):
        about = report.worker if report is not None and report.worker.job.hex() == job.id else None
        of_stages[stage][worker.peer] = about
        workers.append(
            {
                "peer_id": worker.peer,
                "stage": None if job.job.stages is None else stage,
                "name": report.public_name if report is not None and about is not None else None,
                "state": about.state if about is not None else None,
                "round": min(about.round if about is not None else position.round, job.job.job.rounds),
                "loss": about.loss if about is not None and about.HasField("loss") else None,
                "val_loss": about.val_loss if about is not None and about.HasField("val_loss") else None,
                "val_tokens": about.val_tokens if about is not None else None,
                "weights": position.state.hex(),
                "addresses": list(worker.addresses),
            }
        )
    return workers, None if job.job.stages is None else stage_rows(of_stages)


def _about(job: "SealedJob") -> dict[str, Any]:
    return {
        "job": job.id,
        "name": job.job.job.name,
        "owner": job.owner.hex(),
        "method": job.job.method.name,
        "model": model_of(job.job),
        "rounds": job.job.job.rounds,
    }


def list_jobs(
    *,
    swarm: Annotated[
        str | None,
        typer.Option(
            "--swarm", metavar="SWARM", help="List the jobs of this swarm.", show_default="this machine's"
        ),
    ] = None,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """List the jobs on this machine, or with --swarm the jobs of a swarm, with their progress."""
    if swarm is None:
        jobs = list(_jobs_here(data_dir))
    else:
        with progress(quiet=as_json) as report:
            report("asking the swarm", 0, None)
            jobs = asyncio.run(_jobs_of(client_network(swarm, bootstrap, data_dir)))
    if as_json:
        print_json({"jobs": jobs})
    elif jobs:
        short = short_ids(each["job"] for each in jobs)
        for each in jobs:
            rows = {"method": each["method"], "model": each["model"], "progress": job_summary(each)}
            print_table(f"{each['name']}  {short[each['job']]}", rows)
    else:
        where = "in this swarm" if swarm is not None else f"in {data_dir}"
        note(f"there is no job {where}; `swarmnet train create JOB.toml` makes one")


def _jobs_here(data_dir: Path) -> Iterator[dict[str, Any]]:
    from swarmnet_node.training.job_store import load_stored_job, stored_jobs

    for job_id in stored_jobs(data_dir):
        status: dict[str, Any] = {}
        with suppress(SwarmnetError):  # no worker has run yet, or its status is damaged
            status = read_status(data_dir / "training" / job_id)
        try:
            about = _about(load_stored_job(data_dir, job_id)[0])
        except SwarmnetError as error:
            note(str(error))
            continue
        values = {name: status.get(name) for name in ("round", "loss", "val_loss", "workers")}
        yield about | values


async def _jobs_of(network: Network) -> list[dict[str, Any]]:
    from swarmnet_protocols.machine.aio import all_of
    from swarmnet_protocols.training.job_records import find_jobs

    async with connect(network, client_mode=True) as (transport, directory):
        at_once = asyncio.Semaphore(JOBS_AT_ONCE)

        async def row(job: "SealedJob") -> dict[str, Any]:
            async with at_once:
                return _about(job) | _progress((await _workers(transport, directory, job))[0])

        return await all_of(*map(row, await find_jobs(directory)))


def _progress(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest round of the workers, and the losses that the worker in it reports."""
    ahead = max(workers, key=lambda each: (each["round"], each["loss"] is not None), default=None)
    values = {name: ahead[name] if ahead else None for name in ("round", "loss", "val_loss")}
    return values | {"workers": len(workers)}


def _show(
    fields: dict[str, Any], print_it: Callable[[dict[str, Any]], None], *, watch: bool, as_json: bool
) -> None:
    """Print the status; with --watch, clear the terminal first."""
    if as_json:
        print_json(fields)
        return
    if watch:
        clear_terminal()
    print_it(fields)


def _is_running(fields: dict[str, Any]) -> bool:
    """Return whether the process that wrote the status still runs. A process that started later has
    only reused its pid."""
    import psutil

    try:
        return bool(psutil.Process(fields["pid"]).create_time() <= fields["time"])
    except psutil.NoSuchProcess:
        return False


def _print_worker(fields: dict[str, Any]) -> None:
    rows: dict[str, object] = {"job": fields["job"], "state": fields["state"], "progress": summary(fields)}
    if fields.get("wait_share"):
        rows["waiting"] = f"{fields['wait_s']:.0f} of {fields['elapsed_s']:.0f} s"
    if waited := fields.get("waited_for"):
        rows["waited for"] = (
            f"{waited['peer_id']}, {waited['seconds']:.0f} s in the last round ({waited['why']})"
        )
    if "epsilon" in fields:
        rows["privacy"] = (
            f"epsilon {fields['epsilon']:.2f} of a row so far, {fields['epsilon_at_end']:.2f} after all"
            f" rounds (delta {fields['delta']:g})"
        )
    if "params_hash" in fields:
        rows["weights"] = f"SHA-256 {fields['params_hash']}"
    if "peer_id" in fields:
        rows["peer id"] = fields["peer_id"]
    if fields["running"] and "addresses" in fields:
        rows["addresses"] = "\n".join(fields["addresses"])
    if "warning" in fields:
        rows["warning"] = fields["warning"]
    print_table(fields.get("name", "training"), rows)
    if fields["peers"]:
        counts = {
            peer: f"{counted(each['rounds'], 'round')}, the last one {each['last_round']}"
            for peer, each in fields["peers"].items()
        }
        print_table("contributed", counts)
    if fields["excluded"]:
        reasons = {
            peer: f"{counted(each['times'], 'time')}, last in round {each['round']}: {each['reason']}"
            for peer, each in fields["excluded"].items()
        }
        print_table("excluded", reasons)


def _print_swarm(fields: dict[str, Any]) -> None:
    about = {name: fields[name] for name in ("job", "owner", "method", "model", "rounds")}
    if fields["val_loss"] is not None:
        about["validation"] = f"{fields['val_loss']:.4f} on what all workers hold out"
    print_table(fields["name"], about)
    if not fields["workers"]:
        note("no worker trains it now")
        return
    rows = {}
    for worker in fields["workers"]:
        title = f"{worker['name'] or 'no name'}  {worker['peer_id']}"
        rows[title] = "\n".join([worker_summary(worker, fields["rounds"]), *worker["addresses"]])
    print_table(counted(len(rows), "worker"), rows)
    if fields["stages"] is not None:
        print_table("stages", {stage_name(each): stage_summary(each) for each in fields["stages"]})
