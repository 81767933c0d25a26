"""``swarmnet join``: host a part of a model until told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from swarmnet_protocols.clock import wall_clock
from swarmnet_protocols.models import DEFAULT_MODEL

from swarmnet import swarm_file
from swarmnet.addresses import check_listen_address, check_peer_address
from swarmnet.cli.control import DEFAULT_GRACE_S
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    DtypeOption,
    JsonFlag,
    ModelOption,
    SwarmPath,
    check_device,
    check_dtype,
    parse_blocks,
    parse_size_bytes,
)
from swarmnet.cli.output import note, print_json, progress
from swarmnet.paths import default_cache_dir, default_data_dir, locked_data_dir

if TYPE_CHECKING:
    from swarmnet_node.control import NodeStatus
    from swarmnet_node.node import NodeConfig

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")


def join(  # noqa: PLR0913 - a command line, not an interface
    swarm: SwarmPath,
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
    max_cache: Annotated[
        str,
        typer.Option(
            "--max-cache", metavar="SIZE", help="Memory for the sessions of others, beside the weights."
        ),
    ] = "1GiB",
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
    file = swarm_file.load_valid(swarm, wall_clock())
    with locked_data_dir(data_dir or default_data_dir()) as directory:
        from swarmnet_node.node import NodeConfig

        config = NodeConfig(
            model=model,
            swarm=file.swarm_id,
            swarm_name=file.name,
            data_dir=directory,
            cache_dir=cache_dir or default_cache_dir(),
            bootstrap=(*file.bootstrap, *bootstrap),
            listen=tuple(listen) or DEFAULT_LISTEN,
            announce=tuple(announce),
            blocks=span,
            num_blocks=num_blocks,
            device=device,
            dtype=dtype,
            max_cache_bytes=max_cache_bytes,
            public_name=public_name,
        )
        _run(_host(config, as_json=as_json, stop_on_eof=stop_on_eof))


def _run(main: Coroutine[Any, Any, None]) -> None:
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Interrupts:
    """What SIGINT and SIGTERM do: the first does ``first``, every later one cancels ``task``."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._cancel: Callable[[], object] = task.cancel
        self.first: Callable[[], object] = task.cancel

    def __call__(self) -> None:
        action, self.first = self.first, self._cancel
        action()


async def _host(config: "NodeConfig", *, as_json: bool, stop_on_eof: bool) -> None:
    from swarmnet_node import control
    from swarmnet_node.node import Node

    interrupts = _Interrupts(_this_task())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts)
    if stop_on_eof:
        loop.add_reader(sys.stdin.fileno(), _at_eof, interrupts)
    async with AsyncExitStack() as stack:
        with progress(quiet=as_json) as report:
            node = await stack.enter_async_context(Node.start(config, progress=report))
        await stack.enter_async_context(control.serve(node, config.data_dir))

        def finish() -> None:
            if as_json:
                print_json({"event": "finishing", "grace_s": DEFAULT_GRACE_S})
            else:
                note(
                    f"stopping: sessions have {DEFAULT_GRACE_S:g} s to move away; press Ctrl-C again to stop at once"
                )
            node.finish(DEFAULT_GRACE_S)

        interrupts.first = finish
        _announce(node.status(), config.data_dir, as_json=as_json)
        await node.finished()
    if as_json:
        print_json({"event": "stopped"})
    else:
        note("stopped")


def _this_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not running as a task")
    return task


def _at_eof(interrupts: _Interrupts) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        interrupts()


def _announce(status: "NodeStatus", data_dir: Path, *, as_json: bool) -> None:
    (data_dir / "addresses").write_text("".join(f"{address}\n" for address in status.addresses))
    if as_json:
        span = [status.start, status.end]
        event = {"event": "ready", "peer_id": status.peer_id, "addresses": list(status.addresses)}
        print_json(event | {"model": status.model, "blocks": span})
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    lines = [
        f"peer      {status.peer_id}",
        f"model     {status.model}, blocks {status.start}:{status.end} of {status.total_blocks}",
        "",
        "others join with",
        *(f"  --bootstrap {address}" for address in status.addresses),
        "",
        "stop with Ctrl-C, or `swarmnet finish` from another terminal",
    ]
    Console().print(Panel(Text("\n".join(lines)), title=f"serving swarm {status.swarm}", expand=False))
