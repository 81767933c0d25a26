"""``swarmnet train status``: the worker on this machine, or all workers of a job."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnet.cli.options import BootstrapOption, DataDirOption, JsonFlag, check_job_id
from swarmnet.cli.output import clear_terminal, note, print_json, print_table, progress
from swarmnet.cli.training.record import newest_job, read_status
from swarmnet.cli.training.train_words import summary
from swarmnet.swarm_file.entry import client_network
from swarmnet.units import counted
from swarmnet_protocols.joining.network import Network, connect

WATCH_EVERY_S = 1.0
LOOK_EVERY_S = 5.0


def status(
    *,
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The id of the job.", show_default="the newest here")
    ] = None,
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
    if job is not None:
        check_job_id(job)
    job = job or newest_job(data_dir)
    if swarm is None:
        _watch_here(data_dir / "training" / job, watch=watch, as_json=as_json)
        return
    network = client_network(swarm, bootstrap, data_dir)
    asyncio.run(_watch_swarm(network, job, watch=watch, as_json=as_json))


def _watch_here(folder: Path, *, watch: bool, as_json: bool) -> None:
    shown: dict[str, Any] = {}
    while True:
        fields = read_status(folder)
        fields["running"] = _is_running(fields)
        if not fields["running"] and fields["state"] not in {"done", "left"}:
            fields["state"] = "stopped"
        if not fields["running"] or not fields.get("warning"):
            fields.pop("warning", None)
        if fields != shown:
            shown = fields
            _show(fields, _print_worker, watch=watch, as_json=as_json)
        if not watch or not fields["running"]:
            return
        time.sleep(WATCH_EVERY_S)


async def _watch_swarm(network: Network, job_id: str, *, watch: bool, as_json: bool) -> None:
    from swarmnet_protocols.training.job_records import find_job, find_workers

    shown: dict[str, Any] = {}
    with ExitStack() as waiting:
        waiting.enter_context(progress(quiet=as_json))("asking the swarm", 0, None)
        async with connect(network, client_mode=True) as (_, directory):
            job, _ = await find_job(directory, job_id)
            about: dict[str, Any] = {"job": job.id, "name": job.job.job.name, "owner": job.owner.hex()}
            about |= {"method": job.job.method.name, "rounds": job.job.job.rounds}
            while True:
                workers = [
                    {
                        "peer_id": worker.peer,
                        "round": position.round,
                        "state": position.state.hex(),
                        "addresses": list(worker.addresses),
                    }
                    for worker, position in (await find_workers(directory, job_id)).items()
                ]
                waiting.close()
                fields = about | {"workers": workers}
                if fields != shown:
                    shown = fields
                    _show(fields, _print_swarm, watch=watch, as_json=as_json)
                if not watch:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


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
    rows |= {name: fields[name] for name in ("params_hash", "peer_id") if name in fields}
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
    about = {name: fields[name] for name in ("job", "owner", "method", "rounds")}
    print_table(fields["name"], about)
    if not fields["workers"]:
        note("no worker trains it now")
        return
    rows = {
        worker["peer_id"]: "\n".join([f"round {worker['round']}", *worker["addresses"]])
        for worker in fields["workers"]
    }
    print_table(f"{len(rows)} training", rows)
