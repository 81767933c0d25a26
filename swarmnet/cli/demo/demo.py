"""``swarmnet demo``: starts a swarm on this machine, asks it one question, and stops it."""

import asyncio
import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from swarmnet.cli.demo.demo_swarm import Child, DemoSwarm
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.options import CacheDirOption, JsonFlag
from swarmnet.cli.output import print_table, progress
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet.units import counted
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.models import DEFAULT_MODEL, Progress

QUESTION = "What is the capital of France?"
_HOW_TO_USE = """
the swarm stays until Ctrl-C. {page} shows it. Chat with it{kill}:

  {chat}

From another terminal:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "smollm2-135m-instruct", "messages": [{{"role": "user", "content": "Who are you?"}}]}}'

  swarmnet run smollm2-135m-instruct --swarm {swarm} --bootstrap {address}
"""


def demo(
    *,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=16, help="Number of nodes that share the model.")
    ] = 3,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep the swarm running until Ctrl-C, with an endpoint and a chat page. On a desktop, the page opens in the browser.",
        ),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="Show experts on peers instead: three peers compute them, and one is killed during the answer.",
        ),
    ] = False,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Start a swarm of several nodes on this machine, ask it a question, and stop it again.

    \b
    Examples:
      swarmnet demo
      swarmnet demo --keep    then chat in the browser, or use the endpoint it prints
      swarmnet demo --experts
    """
    if experts and (keep or nodes != 3):
        raise typer.BadParameter(
            "leave out --nodes and --keep: this demo always has one host and three expert peers",
            param_hint="'--experts'",
        )
    with tempfile.TemporaryDirectory(prefix="swarmnet-demo-") as directory:
        swarm_writer.create(Path(directory), NewSwarm("demo", is_open=True), now=wall_clock())
        swarm = DemoSwarm(Path(directory), cache_dir, as_json)
        try:
            if experts:
                from swarmnet.cli.demo.experts import show_experts

                asyncio.run(show_experts(swarm))
            else:
                asyncio.run(_demo(swarm, nodes, keep=keep))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _demo(swarm: DemoSwarm, count: int, *, keep: bool) -> None:
    interrupts = Interrupts.catch()
    with progress(quiet=swarm.as_json) as report:
        spans = _split(await asyncio.to_thread(_count_blocks, swarm.cache_dir, report), count)
    async with swarm:
        with progress(quiet=swarm.as_json) as report:
            nodes = await _start_nodes(swarm, spans, report, has_page=keep)
            address = nodes[0].address
        swarm.text(f"> {QUESTION}\n")
        answer = await swarm.ask(DEFAULT_MODEL, QUESTION, address, "-n", "48")
        if not swarm.as_json:
            _print_summary(answer)
        if keep:
            gateway = await _serve(swarm, address, nodes[0].ready["page"], can_kill=len(nodes) > 1)
            stopping = asyncio.Event()
            interrupts.first = stopping.set
            await race(stopping.wait(), _kill_hosts(swarm, gateway, nodes))
    swarm.event({"event": "stopped"})


def _count_blocks(cache_dir: Path, report: Progress) -> int:
    from swarmnet_protocols.models import resolve

    return resolve(DEFAULT_MODEL, cache_dir=cache_dir, progress=report).manifest.blocks


def _split(blocks: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, blocks) into ``parts`` spans whose sizes differ by at most one."""
    if parts > blocks:
        raise typer.BadParameter(
            f"the model has {blocks} blocks: choose at most as many nodes", param_hint="'--nodes'"
        )
    return list(pairwise(blocks * part // parts for part in range(parts + 1)))


async def _start_nodes(
    swarm: DemoSwarm, spans: Sequence[tuple[int, int]], report: Progress, *, has_page: bool
) -> "list[_Node]":
    """Start a node for each span. The first one starts alone, as the bootstrap peer of the others.
    With ``has_page`` it serves a page that shows the swarm."""
    title = f"starting {counted(len(spans), 'node')}"
    report(title, 0, len(spans))
    first = await _start_node(swarm, spans[0], "", *(("--dashboard", "0") if has_page else ()))
    report(title, 1, len(spans))
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(_start_node(swarm, span, first.address)) for span in spans[1:]]
        for done, other in enumerate(asyncio.as_completed(others), 2):
            await other
            report(title, done, len(spans))
    return [first, *(other.result() for other in others)]


async def _start_node(
    swarm: DemoSwarm, span: tuple[int, int], bootstrap: str, *options: str, name: str = ""
) -> "_Node":
    start, end = span
    blocks = ("--blocks", f"{start}:{end}")
    name = name or f"node-{start}-{end}"
    return _Node(*await swarm.start_node(name, bootstrap, *blocks, *options), span)


@dataclass(frozen=True)
class _Node:
    """A node of the demo, its event "ready", and its blocks."""

    child: Child
    ready: Mapping[str, Any]
    span: tuple[int, int]

    @property
    def address(self) -> str:
        return str(self.ready["addresses"][0])


async def _kill_hosts(swarm: DemoSwarm, gateway: Child, nodes: Sequence[_Node]) -> NoReturn:
    """Kill a host whenever the reader of the page wants it, and start another one for its blocks.
    Raises ``SwarmnetError`` when the gateway ends, or if the other host does not start.

    The first node stays: the others enter the swarm there, and it serves the page of the swarm.
    """
    first, *others = nodes
    async for event in gateway.events():
        if event.get("event") != "kill" or not others:
            continue
        node = next((each for each in others if each.ready["peer_id"] == event["peer_id"]), others[0])
        node.child.process.kill()
        swarm.event({"event": "killed", "peer_id": node.ready["peer_id"]})
        start, end = node.span
        name = f"node-{start}-{end}-{node.child.process.pid}"
        others[others.index(node)] = await _start_node(swarm, node.span, first.address, name=name)
    await gateway.fail_at_end()


async def _serve(swarm: DemoSwarm, address: str, page: str, *, can_kill: bool) -> Child:
    """Start a gateway, print how to use it and the swarm, and show its page. With ``can_kill`` the
    page has a button that kills a host."""
    enter = ("--swarm", swarm.file, "--bootstrap", address)
    child, ready = await swarm.start(
        "gateway", "serve", *enter, "--model", DEFAULT_MODEL, "--port", "0", "--demo"
    )
    chat = f"{ready['url']}/#demo" if can_kill else ready["url"]
    swarm.event(
        ready | {"event": "serving", "swarm": swarm.file, "bootstrap": address, "page": page, "chat": chat}
    )
    kill = ", and kill a host in the middle of an answer" if can_kill else ""
    places = {"url": ready["url"], "swarm": swarm.file, "address": address, "page": page, "chat": chat}
    swarm.text(_HOW_TO_USE.format(kill=kill, **places) + "\n")
    if not swarm.as_json and sys.stdout.isatty() and has_display(sys.platform, os.environ):
        # a daemon, because some browsers keep the call until they are closed
        threading.Thread(target=webbrowser.open, args=(chat,), daemon=True).start()
    return child


def has_display(platform: str, environment: Mapping[str, str]) -> bool:
    """Return whether a browser that starts here appears before the user. Over SSH it would not, and
    without a display Python would start a browser within the terminal."""
    if "SSH_CONNECTION" in environment:
        return False
    return platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())


def _print_summary(answer: Mapping[str, Any]) -> None:
    hops = [f"{hop['start']}:{hop['end']} on {hop['peer_id']}" for hop in answer["route"]]
    print_table(
        "",
        {
            "route": "\n".join(hops),
            "speed": f"{answer['tokens_per_s']:.1f} tokens/s, the first after {answer['first_token_s']:.2f} s",
            "next": "swarmnet start, which shares a model with the computers in this room",
        },
    )
