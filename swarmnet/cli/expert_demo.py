"""``swarmnet demo --experts``: three peers compute the routed experts of a host, and one of them is
killed in the middle of an answer.

The model is a small one that comes with the package. The demo compares the answer with that of the
same model in one process.
"""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet import swarm_file
from swarmnet.cli.children import Child, deadline, processes, spawn
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.output import print_json, print_table, print_text, progress
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import EXPERTS_MODEL, Progress

BLOCKS, EXPERTS, CHOSEN = 8, 32, 4
PROMPT = "def main():\n"
TOKENS = 64
KILLED_AFTER = 20
"""Pieces of the answer after which a peer is killed."""
PEERS = {"peer-1": "all:0-21", "peer-2": "all:11-31", "peer-3": "all:0-10,22-31"}
"""The experts of each peer. Each expert is on two peers."""
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class _Demo:
    """Where the demo keeps its files, and the commands that it runs."""

    directory: Path
    cache_dir: Path
    as_json: bool
    running: list[Process]

    @property
    def swarm(self) -> str:
        return str(self.directory / swarm_file.FILE_NAME)

    async def spawn(self, name: str, *arguments: str) -> Child:
        where = ("--cache-dir", str(self.cache_dir))
        return await spawn(self.directory, self.running, name, [*arguments, *where])

    def event(self, fields: Mapping[str, object]) -> None:
        if self.as_json:
            print_json(fields)

    def text(self, text: str) -> None:
        if not self.as_json:
            print_text(text, end="")


async def show_experts(directory: Path, cache_dir: Path, *, as_json: bool) -> None:
    """Run the demo in ``directory``, which has a swarm file.

    Raises ``SwarmnetError`` if one process alone answers with other tokens.
    """
    Interrupts.catch()
    with progress(quiet=as_json) as report:
        report("computing the answer in one process", 0, 1)
        expected = await asyncio.to_thread(_expected, cache_dir)
    async with processes() as running:
        demo = _Demo(directory, cache_dir, as_json, running)
        with progress(quiet=as_json) as report:
            nodes = await _start(demo, report)
        answer = await _ask(demo, nodes)
    tokens = answer["token_ids"]
    same = tokens == expected
    facts: Mapping[str, object] = {
        "experts": f"{EXPERTS} in each of {BLOCKS} blocks, {CHOSEN} used for each token; each is on two of {len(PEERS)} peers",
        "killed": "a peer, in the middle of the answer",
        "longest wait": f"{answer['longest_stall_s']:.2f} s for one token",
        "tokens": "same as from one process" if same else "DIFFERENT from one process",
    }
    demo.event({"event": "compared", "same": same, "expected": expected})
    if not as_json:
        print_table("", facts)
    if not same:
        raise SwarmnetError("with experts on peers, the tokens differ from those of one process")


@dataclass(frozen=True)
class _Nodes:
    address: str
    """An address at which the client enters the swarm."""
    victim: Process
    """The peer that is killed."""


async def _start(demo: _Demo, report: Progress) -> _Nodes:
    """Start the peers with experts, and the host."""
    title, total = "starting three peers with experts and a host", len(PEERS) + 1
    report(title, 0, total)
    address = ""
    started: list[Process] = []
    for done, (name, experts) in enumerate([*PEERS.items(), ("trunk", "none")], 1):
        blocks = ["--blocks", f"0:{BLOCKS}"] if name == "trunk" else []
        where = [
            "--data-dir",
            str(demo.directory / name),
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--stop-on-eof",
        ]
        enter = ["--bootstrap", address] if address else []
        what = ["--model", EXPERTS_MODEL, "--experts", experts, *blocks]
        child = await demo.spawn(name, "join", demo.swarm, *what, *where, *enter)
        async with deadline(_START_TIMEOUT_S, f"{name} did not start"):
            ready = await child.event("ready")
        demo.event(ready)
        address = address or ready["addresses"][0]
        started.append(child.process)
        report(title, done, total)
    return _Nodes(ready["addresses"][0], started[1])


async def _ask(demo: _Demo, nodes: _Nodes) -> dict[str, Any]:
    """Ask the model, and kill a peer in the middle of the answer; returns the answer."""
    where = ["--swarm", demo.swarm, "--bootstrap", nodes.address]
    how = ["--raw", "--stream", "--no-speculate", "-n", str(TOKENS)]
    child = await demo.spawn("client", "run", EXPERTS_MODEL, PROMPT, *where, *how)
    demo.text(PROMPT)
    pieces = 0
    async with deadline(_ANSWER_TIMEOUT_S, "no answer came"):
        async for event in child.events():
            demo.event(event)
            if event.get("event") == "token":
                demo.text(event["text"])
                pieces += 1
                if pieces == KILLED_AFTER:
                    nodes.victim.kill()
                    demo.event({"event": "killed"})
            elif "token_ids" in event:
                demo.text("\n")
                return event
    raise child.failure()


def _expected(cache_dir: Path) -> list[int]:
    """The greedy tokens of the model in one process, as transformers gives them."""
    import torch

    from swarmnet_protocols.models import resolve

    model = resolve(EXPERTS_MODEL, cache_dir=cache_dir)
    whole: Any = model.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    ids = model.tokenizer()(PROMPT, return_tensors="pt").input_ids
    answer = whole.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens
