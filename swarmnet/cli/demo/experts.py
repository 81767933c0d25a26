"""``swarmnet demo --experts``: three peers compute the routed experts of a host, and one of them is
killed in the middle of an answer.

The model is a small one that comes with the package. The demo compares the answer with that of the
same model in one process.
"""

import asyncio
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from swarmnet.cli.demo.demo_swarm import DemoSwarm
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.output import print_table, progress
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import EXPERTS_MODEL

BLOCKS, EXPERTS, CHOSEN = 8, 32, 4
PROMPT = "def main():\n"
TOKENS = 64
KILLED_AFTER = 20
"""Pieces of the answer after which a peer is killed."""
PEERS = {"peer-1": "all:0-21", "peer-2": "all:11-31", "peer-3": "all:0-10,22-31"}
"""The experts of each peer. Each expert is on two peers."""


async def show_experts(swarm: DemoSwarm) -> None:
    """Run the demo. Raises ``SwarmnetError`` if one process alone answers with other tokens."""
    Interrupts.catch()
    with progress(quiet=swarm.as_json) as report:
        report("computing the answer in one process", 0, 1)
        expected = await asyncio.to_thread(_expected, swarm.cache_dir)
    async with swarm:
        answer = await _ask(swarm)
    same = answer["token_ids"] == expected
    facts: Mapping[str, object] = {
        "experts": f"{EXPERTS} in each of {BLOCKS} blocks, {CHOSEN} used for each token; each is on two of {len(PEERS)} peers",
        "killed": "a peer, in the middle of the answer",
        "longest wait": f"{answer['longest_stall_s']:.2f} s for one token",
        "tokens": "same as from one process" if same else "DIFFERENT from one process",
    }
    swarm.event({"event": "compared", "same": same, "expected": expected})
    if not swarm.as_json:
        print_table("", facts)
    if not same:
        raise SwarmnetError("with experts on peers, the tokens differ from those of one process")


async def _ask(swarm: DemoSwarm) -> dict[str, Any]:
    """Start the peers with experts and the host, ask the model, and kill a peer in the middle of
    the answer; returns the answer."""
    title, address, peers = "starting three peers with experts and a host", "", []
    with progress(quiet=swarm.as_json) as report:
        for done, (name, experts) in enumerate(PEERS.items()):
            report(title, done, len(PEERS) + 1)
            options = ("--model", EXPERTS_MODEL, "--experts", experts)
            peer, ready = await swarm.start_node(name, address, *options)
            peers.append(peer)
            address = address or ready["addresses"][0]
        report(title, len(PEERS), len(PEERS) + 1)
        blocks = ("--blocks", f"0:{BLOCKS}", "--experts", "none")
        _, ready = await swarm.start_node("trunk", address, "--model", EXPERTS_MODEL, *blocks)
        address = ready["addresses"][0]
    pieces = count(1)

    def kill_in_the_middle() -> None:
        if next(pieces) == KILLED_AFTER:
            peers[1].process.kill()
            swarm.event({"event": "killed"})

    swarm.text(PROMPT)
    how = ("--raw", "--no-speculate", "-n", str(TOKENS))
    return await swarm.ask(EXPERTS_MODEL, PROMPT, address, *how, on_piece=kill_in_the_middle)


def _expected(cache_dir: Path) -> list[int]:
    """Return the greedy tokens of the model in one process, as transformers gives them."""
    import torch

    from swarmnet_protocols.models import resolve

    model = resolve(EXPERTS_MODEL, cache_dir=cache_dir)
    whole: Any = model.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    ids = model.tokenizer()(PROMPT, return_tensors="pt").input_ids
    answer = whole.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens
