"""``swarmnet join``: host a part of a model until told to stop."""

from typing import Annotated

import typer

from swarmnet.addresses import check_listen_address, check_peer_address
from swarmnet.cli.hosting import Foreground
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    DtypeOption,
    IssuerOption,
    JsonFlag,
    ModelOption,
    SwarmArgument,
    check_device,
    check_dtype,
    parse_blocks,
    parse_size_bytes,
)
from swarmnet.entering import enter
from swarmnet.paths import default_cache_dir, default_data_dir, locked_data_dir
from swarmnet_protocols.models import DEFAULT_MODEL
from swarmnet_protocols.network import ANY_PORT


def join(  # noqa: PLR0913 - a command line, not an interface
    swarm: SwarmArgument,
    *,
    model: ModelOption = DEFAULT_MODEL,
    blocks: Annotated[
        str | None, typer.Option("--blocks", metavar="A:B", help="Host exactly blocks [A, B).")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks", metavar="N", min=1, help="Host N blocks, where the swarm needs them most."
        ),
    ] = None,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: Annotated[
        list[str],
        typer.Option(
            "--listen", metavar="MULTIADDR", help="Where to listen; repeatable.", show_default="any port"
        ),
    ] = [],  # noqa: B006
    announce: Annotated[
        list[str],
        typer.Option("--announce", metavar="MULTIADDR", help="The address others should use; repeatable."),
    ] = [],  # noqa: B006
    data_dir: DataDirOption = None,
    cache_dir: CacheDirOption = None,
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda[:N]|mps", help="Where to compute.")
    ] = "auto",
    dtype: DtypeOption = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Cores to compute with. Nodes that share a machine should share its cores.",
            show_default="all",
        ),
    ] = None,
    max_cache: Annotated[
        str,
        typer.Option(
            "--max-cache", metavar="SIZE", help="Memory for the sessions of others, beside the weights."
        ),
    ] = "1GiB",
    issuer: IssuerOption = None,
    public_name: Annotated[str, typer.Option("--name", help="A name that others see.")] = "",
    as_json: JsonFlag = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Host a part of a model until `swarmnet finish` or Ctrl-C. A first node without --bootstrap starts the swarm."""
    if blocks is not None and num_blocks is not None:
        raise typer.BadParameter("give either --blocks or --num-blocks", param_hint="'--num-blocks'")
    span = parse_blocks(blocks) if blocks is not None else None
    check_device(device)
    check_dtype(dtype)
    max_cache_bytes = parse_size_bytes(max_cache, option="--max-cache")
    for address in (*listen, *announce):
        check_listen_address(address)
    for address in bootstrap:
        check_peer_address(address)
    if len(public_name) > 64 or not public_name.isprintable():
        raise typer.BadParameter("use at most 64 printable characters", param_hint="'--name'")
    entry = enter(swarm, data_dir or default_data_dir(), bootstrap)
    with locked_data_dir(data_dir or default_data_dir()) as directory:
        from swarmnet_node.start import NodeConfig, start

        config = NodeConfig(
            model=model,
            network=entry.network(listen or ANY_PORT, announce, issuer),
            swarm_name=entry.file.name,
            cache_dir=cache_dir or default_cache_dir(),
            blocks=span,
            num_blocks=num_blocks,
            device=device,
            dtype=dtype,
            threads=threads,
            max_cache_bytes=max_cache_bytes,
            public_name=public_name,
        )
        Foreground(
            lambda report: start(config, progress=report), directory, as_json=as_json, stop_on_eof=stop_on_eof
        ).run()
