"""``swarmnet join``: a node that hosts a part of a model until it is stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from swarmnet.addresses import parse_endpoint, usual_listen
from swarmnet.cli import limit_options
from swarmnet.cli.commands.dashboard import dashboard_config, dashboard_of
from swarmnet.cli.consent import ask_once
from swarmnet.cli.foreground import Foreground
from swarmnet.cli.options import (
    AnnounceOption,
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    HostDtypeOption,
    IssuerOption,
    JsonFlag,
    ListenOption,
    MaxDiskOption,
    MaxP2pdOption,
    MetricsOption,
    ModelOption,
    SwarmArgument,
    TransportOption,
    devices_option,
    parse_blocks,
    parse_p2pd_bytes,
    parse_size_bytes,
)
from swarmnet.cli.output import note_if_first, say
from swarmnet.paths import default_cache_dir, default_data_dir, locked_data_dir
from swarmnet.swarm_file.entry import enter
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.models import DEFAULT_MODEL


def join(  # noqa: PLR0913 - a command line, not an interface
    context: typer.Context,
    swarm: SwarmArgument,
    *,
    model: ModelOption = DEFAULT_MODEL,
    blocks: Annotated[
        str | None,
        typer.Option("--blocks", metavar="A:B", help="Host exactly blocks A to B-1, such as 0:10."),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            metavar="N",
            min=1,
            help="Host N blocks. The node chooses those that the swarm needs most.",
        ),
    ] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(
            "--experts",
            metavar="BLOCKS:EXPERTS",
            help="Host these experts, such as 3:0-15 or all:0-7; auto: as many as fit. With --blocks, other peers compute the rest of the blocks' experts; none: they compute all.",
            show_default=False,
        ),
    ] = None,
    expert_memory: Annotated[
        str | None,
        typer.Option(
            "--expert-memory",
            metavar="SIZE",
            help="Keep at most this much of the experts in memory; read the others from disk when a token needs them.",
            show_default=False,
        ),
    ] = None,
    expert_delay: Annotated[
        float | None,
        typer.Option(
            "--expert-delay",
            metavar="MS",
            min=0,
            help="Use expert peers only within this round-trip time. Every MoE block waits for one round trip.",
            show_default="20",
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="Never move to other blocks or another model, even when the swarm needs them more."
        ),
    ] = False,
    keep_model: Annotated[
        bool,
        typer.Option(
            "--keep-model",
            help="Never switch to another model of the swarm file, even when that model lacks hosts.",
        ),
    ] = False,
    transport: TransportOption = "auto",
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: ListenOption = [],  # noqa: B006
    announce: AnnounceOption = [],  # noqa: B006
    data_dir: DataDirOption = None,
    cache_dir: CacheDirOption = None,
    max_disk: MaxDiskOption = None,
    device: Annotated[
        str, devices_option("Compute on this device, or on several GPUs: cuda:0,cuda:1.")
    ] = "auto",
    dtype: HostDtypeOption = "auto",
    max_cache: Annotated[
        str,
        typer.Option(
            "--max-cache",
            metavar="SIZE",
            help="Memory for clients' sessions (KV caches), in addition to the weights.",
        ),
    ] = "1GiB",
    max_p2pd: MaxP2pdOption = "256MiB",
    client_share: Annotated[
        int,
        typer.Option(
            "--client-share",
            metavar="PERCENT",
            min=1,
            max=100,
            help="Share of sessions and their memory that one client may use. Raise it if one gateway is your only client.",
        ),
    ] = 25,
    max_wait: Annotated[
        float,
        typer.Option(
            "--max-wait",
            metavar="SECONDS",
            min=0,
            help="Refuse a new session that would wait longer than this, so that its client goes to another host.",
        ),
    ] = 20,
    max_ram: limit_options.MaxRam = None,  # these, down to the cores, are read from the context
    max_gpu_mem: limit_options.MaxGpuMem = None,
    up: limit_options.Up = None,
    down: limit_options.Down = None,
    relay: limit_options.Relay = None,
    monthly: limit_options.Monthly = None,
    schedule: limit_options.ScheduleText = None,
    idle_only: limit_options.IdleOnly = None,
    idle_after: limit_options.IdleAfter = None,
    no_battery: limit_options.NoBattery = None,
    cores: limit_options.Cores = None,
    priority: Annotated[
        str,
        typer.Option(
            "--priority",
            metavar="low|normal",
            help="low: every other program on this machine goes first.",
            rich_help_panel=limit_options.PANEL,
        ),
    ] = "low",
    issuer: IssuerOption = None,
    public_name: Annotated[
        str,
        typer.Option(
            "--public-name",
            "--name",
            metavar="NAME",
            help="Name of this node that everybody sees, such as on the dashboard.",
        ),
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Share this machine without asking first.")
    ] = False,
    metrics: MetricsOption = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            "--dashboard",
            metavar="[HOST:]PORT",
            help="Serve the swarm's dashboard on this port; 0 takes a free one.",
            show_default=False,
        ),
    ] = None,
    dashboard_key_file: Annotated[
        Path | None,
        typer.Option(
            "--dashboard-key-file",
            metavar="FILE",
            help="File with a key. The dashboard then asks its visitors for it.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Host a part of a model until `swarmnet finish` or Ctrl-C. The first node of a swarm needs no
    --bootstrap.

    \b
    Examples:
      swarmnet join lab/swarm.toml --num-blocks 10
      swarmnet join swn1… --max-ram 8GiB --up 20mbit --schedule "mon-fri 19:00-07:00"
      swarmnet join lab --issuer lab/authority.key    also admit members
    """
    if blocks is not None and num_blocks is not None:
        raise typer.BadParameter("give either --blocks or --num-blocks", param_hint="'--num-blocks'")
    span = parse_blocks(blocks) if blocks is not None else None
    max_cache_bytes = parse_size_bytes(max_cache, option="--max-cache")
    max_p2pd_bytes = parse_p2pd_bytes(max_p2pd)
    max_disk_bytes = parse_size_bytes(max_disk, option="--max-disk") if max_disk is not None else None
    if len(public_name) > 64 or not public_name.isprintable():
        raise typer.BadParameter("use at most 64 printable characters", param_hint="'--name'")
    if priority not in {"low", "normal"}:
        raise typer.BadParameter("use low or normal", param_hint="'--priority'")
    changes = limit_options.read_options(context.params)
    endpoint = parse_endpoint(metrics) if metrics is not None else None
    page = dashboard_config(parse_endpoint(dashboard), dashboard_key_file) if dashboard is not None else None
    entry = enter(swarm, data_dir or default_data_dir(), bootstrap)
    with locked_data_dir(data_dir or default_data_dir()) as directory:
        limits = replace(limit_options.remembered(directory), **changes)
        cache_dir = cache_dir or default_cache_dir()
        keeps = keep_model or stay or blocks is not None or experts is not None
        others = "" if keeps or len(entry.file.models) < 2 else ", or another model of the swarm,"
        disk = f"{model}{others} and its cache in {cache_dir}"
        facts = _facts(entry.file.rules(), limits, disk, public_name)
        ask_once(directory, facts, asking=not yes, as_json=as_json)
        note_if_first(entry.addresses, mdns=entry.file.mdns, as_json=as_json)

        from swarmnet_node.loading import NodeConfig
        from swarmnet_node.owner.machine import yield_to_others
        from swarmnet_node.start import start

        if priority == "low":
            yield_to_others()
        config = NodeConfig(
            model=model,
            network=replace(
                entry.network(listen or usual_listen(directory), announce, issuer),
                max_p2pd_bytes=max_p2pd_bytes,
            ),
            swarm_name=entry.file.name,
            cache_dir=cache_dir,
            max_disk_bytes=max_disk_bytes,
            blocks=span,
            num_blocks=num_blocks,
            experts=";".join(experts) if experts else None,
            expert_memory_bytes=parse_size_bytes(expert_memory, option="--expert-memory")
            if expert_memory is not None
            else None,
            max_expert_round_trip_s=None if expert_delay is None else expert_delay / 1000,
            stay=stay,
            keep_model=keep_model,
            device=device,
            dtype=dtype,
            max_cache_bytes=max_cache_bytes,
            client_share=client_share / 100,
            max_wait_s=max_wait,
            public_name=public_name,
            folder=directory,
            limits=limits,
        )
        Foreground(
            lambda report: start(
                config,
                progress=report,
                notice=lambda text: say({"event": "notice", "text": text}, text, as_json=as_json),
            ),
            directory,
            as_json=as_json,
            stop_on_eof=stop_on_eof,
            metrics=endpoint,
            dashboard=(lambda node: dashboard_of(node, entry.file, directory, page)) if page else None,
        ).run()


def _facts(rules: Rules, limits: OwnerLimits, disk: str, public_name: str) -> dict[str, str]:
    """What the owner of this machine is shown before it is shared for the first time."""
    open_to_all = rules.admission is Admission.OPEN
    return limit_options.rows(limits) | {
        "disk": disk,
        "used by": "every peer that has the swarm file" if open_to_all else "members of the swarm",
        "others see": "this machine's IP address, its peer id, the blocks it hosts and how fast they are"
        + (f", and the name {public_name}" if public_name else ""),
    }
