"""``swarmnet join``: a node that hosts a part of a model until it is stopped."""

import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet import units
from swarmnet.cli.commands.dashboard import node_page
from swarmnet.cli.consent import ask_once, estimate
from swarmnet.cli.endpoint.serve import node_endpoint
from swarmnet.cli.foreground import Foreground
from swarmnet.cli.limit_options import rows
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import (
    ENDPOINT,
    HostDtypeOption,
    JsonFlag,
    MaxP2pdOption,
    MetricsOption,
    ModelOption,
    OptionalSwarmArgument,
    StopOnEofFlag,
    TransportOption,
    devices_option,
    endpoint_option,
)
from swarmnet.cli.output import note, say
from swarmnet.cli.pairing import enter_household
from swarmnet.cli.peer_options import MachineOptions
from swarmnet.paths import locked_data_dir
from swarmnet.restart import take_resting
from swarmnet.swarm_file.entry import Entry, client_of
from swarmnet_protocols.membership.rules import Admission
from swarmnet_protocols.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from swarmnet.swarm_file.content import SwarmFile
    from swarmnet_node.config import NodeConfig
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.joining.pairing import House


def _read_blocks(text: str) -> tuple[int, int]:
    """Read ``A:B`` as the span [A, B)."""
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("give two numbers A:B with A < B, such as 0:10")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node. Those with the name of a field of ``NodeConfig`` become that field."""

    model: ModelOption = DEFAULT_MODEL
    blocks: Annotated[
        tuple[int, int] | None,
        typer.Option("--blocks", metavar="A:B", help="Host exactly blocks A to B-1, such as 0:10."),
        From(str, _read_blocks),
    ]
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            metavar="N",
            min=1,
            help="Host N blocks. The node chooses those that the swarm needs most.",
        ),
    ] = None
    experts: Annotated[
        list[str],
        typer.Option(
            "--experts",
            metavar="BLOCKS:EXPERTS",
            help="Host these experts, such as 3:0-15 or all:0-7. auto: as many as fit. With --blocks, peers compute the other experts of these blocks; with none, peers compute all of them.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    expert_memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--expert-memory",
            metavar="SIZE",
            help="Keep at most this much of the experts in memory; read the others from disk when a token needs them.",
            show_default=False,
        ),
        From(str, units.parse_size_bytes),
    ]
    max_expert_round_trip_s: Annotated[
        float | None,
        typer.Option(
            "--expert-delay",
            metavar="MS",
            min=0,
            help="Use expert peers only within this round-trip time. Every MoE block waits for one round trip.",
            show_default="20",
        ),
        From(float, lambda ms: ms / 1000),
    ]
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="Never move to other blocks or another model, even when the swarm needs them more."
        ),
    ] = False
    keep_model: Annotated[
        bool,
        typer.Option(
            "--keep-model",
            help="Never switch to another model of the swarm file, even when that model lacks hosts.",
        ),
    ] = False
    transport: TransportOption = "auto"
    machine: MachineOptions
    device: Annotated[str, devices_option("Compute on this device, or on several GPUs: cuda:0,cuda:1.")] = (
        "auto"
    )
    dtype: HostDtypeOption = "auto"
    max_cache_bytes: Annotated[
        int,
        typer.Option(
            "--max-cache",
            metavar="SIZE",
            help="Memory for clients' sessions (KV caches), in addition to the weights.",
        ),
        From(str, units.parse_size_bytes, "1GiB"),
    ]
    max_p2pd_bytes: MaxP2pdOption
    client_share: Annotated[
        float,
        typer.Option(
            "--client-share",
            metavar="PERCENT",
            min=1,
            max=100,
            help="Share of sessions and their memory that one client may use. Raise it if one gateway is your only client.",
        ),
        From(int, lambda percent: percent / 100, 25),
    ]
    max_wait_s: Annotated[
        float,
        typer.Option(
            "--max-wait",
            metavar="SECONDS",
            min=0,
            help="Refuse a new session that would wait longer than this, so that its client goes to another host.",
        ),
    ] = 20

    def check(self) -> None:
        """Raise ``typer.BadParameter`` for options that contradict each other."""
        if self.blocks is not None and self.num_blocks is not None:
            raise typer.BadParameter("give either --blocks or --num-blocks", param_hint="'--num-blocks'")
        self.machine.limits.given()


@dataclass(frozen=True, kw_only=True)
class ForegroundOptions:
    """The options of a node in a terminal, or under another program."""

    serve: Annotated[
        tuple[str, int] | None,
        endpoint_option(
            "--serve",
            "Also serve an endpoint for OpenAI's clients, as `swarmnet serve` does. `swarmnet run` on this machine then answers within a second.",
        ),
        ENDPOINT,
    ] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Share this machine without asking first.")] = False
    as_json: JsonFlag = False
    stop_on_eof: StopOnEofFlag = False


def join(  # noqa: PLR0913 - a command line, not an interface
    swarm: OptionalSwarmArgument = None,
    *,
    options: NodeOptions,
    foreground: ForegroundOptions,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="Host what the workers of this training job have learned so far: `swarmnet run JOB` asks it.",
            show_default=False,
        ),
    ] = None,
    refresh_s: Annotated[
        int,
        typer.Option(
            "--refresh",
            metavar="TIME",
            help="With --job: host a newer revision after this time, when no session is open.",
        ),
        From(str, units.parse_duration_s, "10m"),
    ],
    metrics: MetricsOption = None,
    dashboard: Annotated[
        tuple[str, int] | None,
        endpoint_option("--dashboard", "Serve the swarm's dashboard on this port; 0 takes a free one."),
        ENDPOINT,
    ] = None,
    dashboard_key_file: Annotated[
        Path | None,
        typer.Option(
            "--dashboard-key-file",
            metavar="FILE",
            help="File with a key. The dashboard then asks its visitors for it.",
        ),
    ] = None,
) -> None:
    """Host a part of a model until `swarmnet finish` or Ctrl-C. The first node of a swarm needs no
    --bootstrap.

    Without SWARM, join the swarm that another computer in this network started with `swarmnet
    start`: type the code that it shows.

    \b
    Examples:
      swarmnet join
      swarmnet join lab/swarm.toml --num-blocks 10
      swarmnet join invite.txt --max-ram 8GiB --up 20mbit --schedule "mon-fri 19:00-07:00"
      swarmnet join lab --issuer lab/authority.key    also admit members
      swarmnet join lab --job my-job                  what a job has learned so far
    """
    options.check()
    page = node_page(dashboard, dashboard_key_file) if dashboard is not None else None
    machine = options.machine
    if swarm is None:
        machine = machine.named()
        entry = enter_household(
            machine.data_dir, machine.public_name, machine.bootstrap, as_json=foreground.as_json
        )
        options = replace(options, machine=machine)
        if not foreground.as_json:
            note(f"ask it with `swarmnet run {job or options.model} --swarm {entry.file.name}`")
    else:
        entry = machine.enter(swarm)
    if job is None:
        host(entry, options, foreground, metrics=metrics, page=page)
        return
    from swarmnet.cli.training.served_job import ServedJob

    with locked_data_dir(machine.data_dir) as directory:
        pass
    served = ServedJob(entry, job, directory, machine.cache_dir, refresh_s)
    while True:
        host(
            entry,
            replace(options, model=served.model(as_json=foreground.as_json), keep_model=True),
            foreground,
            metrics=metrics,
            page=page,
            companion=served.end_when_outdated,
        )
        if not served.is_outdated:
            return


def host(  # noqa: PLR0913 - what a node needs, and what runs with it
    entry: Entry,
    options: NodeOptions,
    foreground: ForegroundOptions,
    *,
    house: "House | None" = None,
    metrics: tuple[str, int] | None = None,
    page: "Callable[[Entry, Path, Supervisor], AbstractAsyncContextManager[str]] | None" = None,
    companion: "Callable[[Supervisor], Coroutine[Any, Any, object]] | None" = None,
) -> None:
    """Host a part of a model in the swarm of ``entry`` until the node is stopped. ``house`` pairs
    newcomers. ``companion`` runs while the node does."""
    as_json, machine = foreground.as_json, options.machine
    endpoint = None
    if foreground.serve is not None:
        endpoint = node_endpoint(
            foreground.serve,
            options.model,
            partial(client_of, entry),
            cache_dir=machine.cache_dir,
            max_disk_bytes=machine.max_disk_bytes,
        )
    with locked_data_dir(machine.data_dir) as directory:
        from swarmnet_node.config import NodeConfig
        from swarmnet_node.start import start

        resting = take_resting()
        network = machine.network(entry, keeps_ports=resting is not None)
        peer = replace(network.peer, max_daemon_bytes=options.max_p2pd_bytes)
        values = {**vars(options), **vars(machine)} | {
            "network": replace(network, peer=peer, house=house, name=machine.public_name),
            "swarm_name": entry.file.name,
            "experts": ";".join(options.experts) or None,
            "folder": directory,
            "limits": machine.owner_limits(),
            "resting": resting,
        }
        config = NodeConfig(
            **{each.name: values[each.name] for each in fields(NodeConfig) if each.name in values}
        )
        ask_once(directory, _facts(config, entry.file), asking=not foreground.yes, as_json=as_json)
        machine.give_way()
        Foreground(
            lambda report: start(
                config,
                progress=report,
                notice=lambda text: say({"event": "notice", "text": text}, text, as_json=as_json),
            ),
            directory,
            as_json=as_json,
            stop_on_eof=foreground.stop_on_eof,
            metrics=metrics,
            mdns=entry.file.mdns,
            services={
                **({"dashboard": partial(page, entry, directory)} if page else {}),
                **({"endpoint": endpoint} if endpoint else {}),
            },
            is_resting=resting is not None,
            companion=companion,
        ).run()


def _facts(config: "NodeConfig", file: "SwarmFile") -> dict[str, str]:
    """Return the facts that the owner sees before this machine is shared for the first time."""
    others = ", or another model of the swarm," if config.may_switch and len(file.models) > 1 else ""
    return rows(config.limits) | {
        "estimate": estimate(config),
        "disk": f"{config.model}{others} and its cache in {config.cache_dir}",
        "used by": "every peer that has the swarm file"
        if file.admission is Admission.OPEN
        else "members of the swarm",
        "others see": "this machine's IP address, its peer id, the blocks it hosts and how fast they are"
        + (f", and the name {config.public_name}" if config.public_name else ""),
    }
