"""``swarmnet demo``: starts a swarm on this machine, asks it one question, and stops it."""

import asyncio
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnet import swarm_file
from swarmnet.cli.children import Child, deadline, processes, spawn
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.options import CacheDirOption, JsonFlag
from swarmnet.cli.output import print_json, print_table, print_text, progress
from swarmnet.paths import default_cache_dir
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet.units import counted
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.models import DEFAULT_MODEL, Progress

QUESTION = "What is the capital of France?"
_HOW_TO_USE = """
the swarm stays until Ctrl-C. From another terminal:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "smollm2-135m-instruct", "messages": [{{"role": "user", "content": "Who are you?"}}]}}'

  swarmnet run smollm2-135m-instruct --swarm {swarm} --bootstrap {address}
"""
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Demo:
    """The options of a demo, and the folder of its files."""

    directory: Path
    cache_dir: Path
    as_json: bool
    keep: bool

    @property
    def swarm(self) -> str:
        return str(self.directory / swarm_file.FILE_NAME)

    def event(self, fields: Mapping[str, object]) -> None:
        if self.as_json:
            print_json(fields)


def demo(
    *,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=16, help="Number of nodes that share the model.")
    ] = 3,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="Keep the swarm running until Ctrl-C, with an OpenAI-compatible endpoint."
        ),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="Show experts on peers instead: three peers compute them, and one is killed during the answer.",
        ),
    ] = False,
    cache_dir: CacheDirOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a swarm of several nodes on this machine, ask it a question, and stop it again.

    \b
    Examples:
      swarmnet demo
      swarmnet demo --keep    then, from another terminal, use the endpoint it prints
      swarmnet demo --experts
    """
    if experts and (keep or nodes != 3):
        raise typer.BadParameter(
            "leave out --nodes and --keep: this demo always has one host and three expert peers",
            param_hint="'--experts'",
        )
    with tempfile.TemporaryDirectory(prefix="swarmnet-demo-") as directory:
        swarm_writer.create(Path(directory), NewSwarm("demo", is_open=True), now=wall_clock())
        try:
            if experts:
                from swarmnet.cli.expert_demo import show_experts

                asyncio.run(show_experts(Path(directory), cache_dir or default_cache_dir(), as_json=as_json))
                return
            asyncio.run(_demo(_Demo(Path(directory), cache_dir or default_cache_dir(), as_json, keep), nodes))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _demo(demo: _Demo, count: int) -> None:
    interrupts = Interrupts.catch()
    with progress(quiet=demo.as_json) as report:
        spans = _split(await asyncio.to_thread(_count_blocks, demo.cache_dir, report), count)
    async with processes() as running:
        with progress(quiet=demo.as_json) as report:
            address = await _start_swarm(demo, running, spans, report)
        if not demo.as_json:
            print_text(f"> {QUESTION}")
        answer = await _ask(demo, running, address)
        if not demo.as_json:
            _print_summary(answer)
        if demo.keep:
            gateway = await _serve(demo, running, address)
            stopping = asyncio.Event()
            interrupts.first = stopping.set
            await race(stopping.wait(), gateway.fail_at_end())
    demo.event({"event": "stopped"})


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


async def _start_swarm(
    demo: _Demo, running: list[Process], spans: Sequence[tuple[int, int]], report: Progress
) -> str:
    """Start a node for each span. The first node starts alone, as the bootstrap peer of the others;
    returns its address."""
    title = f"starting {counted(len(spans), 'node')}"
    report(title, 0, len(spans))
    address: str = (await _start_node(demo, running, spans[0], []))["addresses"][0]
    done = 1
    report(title, done, len(spans))
    async with asyncio.TaskGroup() as group:
        others = [
            group.create_task(_start_node(demo, running, span, ["--bootstrap", address]))
            for span in spans[1:]
        ]
        for other in asyncio.as_completed(others):
            await other
            done += 1
            report(title, done, len(spans))
    return address


async def _start_node(
    demo: _Demo, running: list[Process], span: tuple[int, int], options: Sequence[str]
) -> dict[str, Any]:
    name = f"node-{span[0]}-{span[1]}"
    where = ["--data-dir", str(demo.directory / name), "--cache-dir", str(demo.cache_dir)]
    what = ["--blocks", f"{span[0]}:{span[1]}", "--listen", "/ip4/127.0.0.1/tcp/0", "--stop-on-eof"]
    child = await spawn(demo.directory, running, name, ["join", demo.swarm, *where, *what, *options])
    async with deadline(_START_TIMEOUT_S, f"{name} did not start"):
        async for event in child.events():
            if event.get("event") == "ready":
                demo.event(event)
                return event
    raise child.failure()


async def _ask(demo: _Demo, running: list[Process], address: str) -> dict[str, Any]:
    arguments = ["run", DEFAULT_MODEL, QUESTION, "--swarm", demo.swarm, "--bootstrap", address]
    child = await spawn(
        demo.directory,
        running,
        "client",
        [*arguments, "--cache-dir", str(demo.cache_dir), "--stream", "-n", "48"],
    )
    async with deadline(_ANSWER_TIMEOUT_S, "no answer came"):
        async for event in child.events():
            if event.get("event") == "token":
                demo.event(event)
                _show(event["text"], demo)
            elif "token_ids" in event:
                demo.event({"event": "answer"} | event)
                _show("\n", demo)
                return event
    raise child.failure()


async def _serve(demo: _Demo, running: list[Process], address: str) -> Child:
    """Start a gateway, and print how to use it and the swarm."""
    where = ["--swarm", demo.swarm, "--bootstrap", address, "--cache-dir", str(demo.cache_dir)]
    child = await spawn(demo.directory, running, "gateway", ["serve", *where, "--port", "0", "--stop-on-eof"])
    async with deadline(_START_TIMEOUT_S, "the gateway did not start"):
        async for event in child.events():
            if event.get("event") == "ready":
                demo.event(event | {"event": "serving", "swarm": demo.swarm, "bootstrap": address})
                if not demo.as_json:
                    print_text(_HOW_TO_USE.format(url=event["url"], swarm=demo.swarm, address=address))
                return child
    raise child.failure()


def _show(text: str, demo: _Demo) -> None:
    if not demo.as_json:
        print_text(text, end="")


def _print_summary(answer: Mapping[str, Any]) -> None:
    hops = [f"{hop['start']}:{hop['end']} on {hop['peer_id']}" for hop in answer["route"]]
    print_table(
        "",
        {
            "route": "\n".join(hops),
            "speed": f"{answer['tokens_per_s']:.1f} tokens/s, the first after {answer['first_token_s']:.2f} s",
            "next": "swarmnet swarm create NAME --out DIR, then swarmnet join DIR/swarm.toml",
        },
    )
