"""``swarmnet demo --experts``: three peers compute the routed experts of a host, and one of them is killed in the middle of an answer.

The model is tiny and random, so its text means nothing: the demo compares its tokens with those of the same model in one process.
"""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet import swarm_file
from swarmnet.cli.children import deadline, processes, spawn
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.output import print_json, print_table, print_text, progress
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import Progress

BLOCKS, EXPERTS, CHOSEN = 8, 32, 4
PROMPT = "def main() -> None:"
TOKENS = 32
KILLED_AFTER = 10
"""Tokens of the answer after which a peer is killed."""
PEERS = {"peer-1": "all:0-21", "peer-2": "all:11-31", "peer-3": "all:0-10,22-31"}
"""The experts of each peer. Each expert is on two peers."""
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 120.0


async def show_experts(directory: Path, *, as_json: bool) -> None:
    """Run the demo in ``directory``, which has a swarm file. Raises ``SwarmnetError`` if the tokens differ from those of one process."""
    Interrupts.catch()
    with progress(quiet=as_json) as report:
        report("making a model", 0, 1)
        expected = await asyncio.to_thread(_make_model, directory / "model")
    async with processes() as running:
        with progress(quiet=as_json) as report:
            nodes = await _start(directory, running, report, as_json=as_json)
        if not as_json:
            print_text(f"> {PROMPT}")
        answer = await _ask(directory, running, nodes, as_json=as_json)
    tokens = answer["token_ids"]
    same = tokens == expected
    facts: Mapping[str, object] = {
        "experts": f"{EXPERTS} in each of {BLOCKS} blocks, {CHOSEN} for each token, on {len(PEERS)} peers, each on two",
        "killed": f"a peer, after {KILLED_AFTER} of {len(tokens)} tokens",
        "longest wait": f"{answer['longest_stall_s']:.2f} s for one token",
        "tokens": "those of one process" if same else "NOT those of one process",
    }
    if as_json:
        print_json({"event": "compared", "same": same, "expected": expected})
    else:
        print_table("", facts)
    if not same:
        raise SwarmnetError("experts on peers gave other tokens than one process")


@dataclass(frozen=True)
class _Nodes:
    address: str
    """An address at which the client enters the swarm."""
    victim: Process
    """The peer that is killed."""


async def _start(directory: Path, running: list[Process], report: Progress, *, as_json: bool) -> _Nodes:
    """Start the peers with experts, and the host."""
    title, total = "starting three peers with experts and a host", len(PEERS) + 1
    report(title, 0, total)
    address = ""
    started: list[Process] = []
    for done, (name, experts) in enumerate([*PEERS.items(), ("trunk", "none")], 1):
        hosts = ["--experts", experts, *(["--blocks", f"0:{BLOCKS}"] if name == "trunk" else [])]
        where = ["--data-dir", str(directory / name), "--listen", "/ip4/127.0.0.1/tcp/0", "--stop-on-eof"]
        enter = ["--bootstrap", address] if address else []
        child = await spawn(directory, running, name, ["join", *_of(directory), *hosts, *where, *enter])
        async with deadline(_START_TIMEOUT_S, f"{name} did not start"):
            ready = await child.event("ready")
        if as_json:
            print_json(ready)
        address = address or ready["addresses"][0]
        started.append(child.process)
        report(title, done, total)
    return _Nodes(ready["addresses"][0], started[1])


def _of(directory: Path) -> list[str]:
    return [str(directory / swarm_file.FILE_NAME), "--model", str(directory / "model")]


async def _ask(directory: Path, running: list[Process], nodes: _Nodes, *, as_json: bool) -> dict[str, Any]:
    """Ask the model, and kill a peer in the middle of the answer; returns the answer."""
    swarm = str(directory / swarm_file.FILE_NAME)
    where = ["--swarm", swarm, "--bootstrap", nodes.address]
    how = ["--raw", "--stream", "--no-speculate", "-n", str(TOKENS)]
    child = await spawn(directory, running, "client", ["run", str(directory / "model"), PROMPT, *where, *how])
    count = 0
    async with deadline(_ANSWER_TIMEOUT_S, "no answer came"):
        async for event in child.events():
            if as_json:
                print_json(event)
            if event.get("event") == "token":
                count += 1
                if count == KILLED_AFTER:
                    nodes.victim.kill()
            elif "token_ids" in event:
                return event
    raise child.failure()


def _make_model(folder: Path) -> list[int]:
    """Write a random model with routed experts; returns its greedy tokens after the prompt, as transformers gives them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    config = Qwen3MoeConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    found: list[int] = whole[0, ids.shape[1] :].tolist()
    return found
