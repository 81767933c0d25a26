"""``swarmnet train``: jobs that many machines train together."""

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet import swarm_file
from swarmnet.addresses import check_listen_address, check_peer_address
from swarmnet.cli.join import DEFAULT_LISTEN
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    JsonFlag,
    SwarmOption,
    check_device,
)
from swarmnet.cli.output import note, print_json, print_table
from swarmnet.paths import default_cache_dir, default_data_dir, locked_data_dir
from swarmnet_protocols.clock import wall_clock
from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    from swarmnet_node.training.start import Network, WorkerConfig

app = typer.Typer(help="Train a model together with others, over slow links.")

STATUS_FILE = "training-status.json"
EVENTS_FILE = "events.jsonl"
WATCH_EVERY_S = 1.0


@app.command("template")
def template(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="diloco, streaming, noloco, ...")],
) -> None:
    """Print a commented job file for a small task that runs as it is."""
    from swarmnet_protocols.training.templates import template as template_of

    typer.echo(template_of(method), nl=False)


@app.command("create")
def create(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a job, sign it with this machine's key, and publish it under the hash of its content."""
    file = swarm_file.load_valid(swarm, wall_clock())
    for address in bootstrap:
        check_peer_address(address)

    from swarmnet_node.training.documents import files_of
    from swarmnet_node.training.start import Network, keep_job
    from swarmnet_protocols.identity import Identity
    from swarmnet_protocols.training.jobs import load_job, open_job, seal_job

    written = load_job(job)
    with written.naming_lines():
        files_of(written.job.data)
    with locked_data_dir(data_dir or default_data_dir()) as directory:
        sealed = seal_job(written.job, Identity.load_or_create(directory / "identity.key"))
        made = open_job(sealed)
        keep_job(directory, made, sealed)
        known = (*file.bootstrap, *bootstrap)
        if known:
            network = Network(file.swarm_id, directory, known, listen=("/ip4/127.0.0.1/tcp/0",))
            asyncio.run(_publish(network, sealed))
    if as_json:
        print_json({"job": made.id})
        return
    typer.echo(made.id)
    if not known:
        note("kept on this machine; a worker that starts from the same --data-dir publishes it")
    note(f"train it with: swarmnet train join {made.id} --swarm {swarm}")


async def _publish(network: "Network", sealed: bytes) -> None:
    from swarmnet_node.training.start import connect
    from swarmnet_protocols.training.board import publish_job

    async with connect(network, client_mode=True) as (_, directory):
        await publish_job(directory, sealed)


@app.command("join")
def join(  # noqa: PLR0913 - a command line, not an interface
    job: Annotated[str, typer.Argument(metavar="JOB", help="The id that `train create` printed.")],
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: Annotated[list[str], typer.Option("--listen", metavar="MULTIADDR", help="As for join.")] = [],  # noqa: B006
    announce: Annotated[list[str], typer.Option("--announce", metavar="MULTIADDR", help="As for join.")] = [],  # noqa: B006
    data_dir: DataDirOption = None,
    cache_dir: CacheDirOption = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:N]|mps")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Cores to compute with.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a job until its rounds are done, or Ctrl-C. Come and go as you like: what was committed is kept."""
    if not re.fullmatch("[0-9a-f]{64}", job):
        raise typer.BadParameter("a job id has 64 hexadecimal digits", param_hint="'JOB'")
    check_device(device)
    for address in (*listen, *announce):
        check_listen_address(address)
    for address in bootstrap:
        check_peer_address(address)
    file = swarm_file.load_valid(swarm, wall_clock())
    with locked_data_dir(data_dir or default_data_dir()) as directory:
        from swarmnet_node.training.start import Network, WorkerConfig

        network = Network(
            file.swarm_id,
            directory,
            (*file.bootstrap, *bootstrap),
            listen=tuple(listen) or DEFAULT_LISTEN,
            announce=tuple(announce),
        )
        config = WorkerConfig(job, network, cache_dir or default_cache_dir(), device, threads)
        reporter = _Reporter(directory, job, as_json=as_json)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(config, reporter))


async def _work(config: "WorkerConfig", reporter: "_Reporter") -> None:
    from swarmnet_node.training.start import start

    async with start(config, reporter) as worker:
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(worker.run())

        def interrupt() -> None:
            if worker.stopping:
                running.cancel()
                return
            note("stopping after this round; press Ctrl-C again to stop at once")
            worker.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            await running
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


class _Reporter:
    """Shows a worker's events, and keeps them: the newest for `status`, all of them for plots."""

    def __init__(self, data_dir: Path, job: str, *, as_json: bool) -> None:
        self._data_dir = data_dir
        self._as_json = as_json
        self._status: dict[str, Any] = {"job": job, "pid": os.getpid(), "state": "starting", "round": 0}
        folder = data_dir / "training" / job
        folder.mkdir(parents=True, exist_ok=True)
        self._events = folder / EVENTS_FILE

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self._status |= {name: value for name, value in event.items() if name != "event"}
        self._status |= {"state": "done" if kind == "done" else "training", "time": wall_clock()}
        _replace(self._data_dir / STATUS_FILE, json.dumps(self._status))
        with self._events.open("a") as file:
            file.write(json.dumps({"time": wall_clock(), **event}) + "\n")
        if self._as_json:
            print_json(event)
        else:
            note(_sentence(event))


def _sentence(event: dict[str, Any]) -> str:
    match event["event"]:
        case "round":
            outcome = "committed" if event["committed"] else f"discarded ({event['reason']})"
            sent, received = event["bytes_sent"] / 1e6, event["bytes_received"] / 1e6
            return (
                f"round {event['round']} {outcome}: loss {event['loss']:.4f}, {event['workers']} workers, "
                f"{sent:.2f} MB sent, {received:.2f} MB received, {event['wait_s']:.1f} s waited"
            )
        case "eval":
            return f"round {event['round']}: validation loss {event['val_loss']:.4f}"
        case "ready":
            lines = [
                f"training {event['job'][:16]} as {event['peer_id']}; others reach this worker with one of"
            ]
            return "\n".join([*lines, *(f"  --bootstrap {address}" for address in event["addresses"])])
        case kind:
            rest = ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")
            return f"{kind}: {rest}" if rest else kind


@app.command("status")
def status(
    *,
    data_dir: DataDirOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print it again whenever it changes.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print what the worker on this machine is doing, or did last."""
    path = (data_dir or default_data_dir()) / STATUS_FILE
    shown = ""
    while True:
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise ConfigError(
                f"no worker has run with the data directory {path.parent}",
                hint="name the one of `train join` with --data-dir",
            ) from None
        if text != shown:
            shown = text
            fields = json.loads(text)
            fields["running"] = _is_running(fields["pid"])
            if as_json:
                print_json(fields)
            else:
                print_table("training", fields)
        if not watch or not fields["running"]:
            return
        time.sleep(WATCH_EVERY_S)


@app.command("export")
def export(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory for the model.")],
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Which job.", show_default="the newest")
    ] = None,
    data_dir: DataDirOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the newest model of a job in Hugging Face layout: plain transformers loads it."""
    from swarmnet_node.training.checkpoint import Checkpoints

    directory = data_dir or default_data_dir()
    if job is None:
        try:
            job = str(json.loads((directory / STATUS_FILE).read_text())["job"])
        except FileNotFoundError:
            raise ConfigError(
                f"no worker has run with the data directory {directory}",
                hint="name the one of `train join` with --data-dir",
            ) from None
    Checkpoints(directory / "training" / job).export(out)
    if as_json:
        print_json({"job": job, "path": str(out)})
    else:
        typer.echo(f"the model is in {out}")


def _is_running(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)
