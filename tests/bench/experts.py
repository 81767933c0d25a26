"""A host whose routed experts are on three peers, against one node with the whole model and against
transformers in one process.

    python -m tests.bench.experts [--clients 8] [--tokens 48] [--rounds 3] [--delay-ms 1 | --in-memory 0.25]

The model has about 75 million random weights: 8 blocks of 32 experts, of which each token uses 4.
Nodes and clients are processes; each peer has every third expert. With ``--delay-ms``, which needs
root, the host and each peer are machines of a local network with that one-way delay. Prints JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.answering_process import AnsweringProcess
from tests.bench.generating_process import generating
from tests.support.processes.commands import LOOPBACK, Place
from tests.support.processes.nodes import RunProcess, Swarm
from tests.support.processes.wan import Uplink, wan

BLOCKS, EXPERTS, PEERS = 8, 32, 3
SHARES = [",".join(map(str, range(first, EXPERTS, PEERS))) for first in range(PEERS)]
"""The experts of each peer."""
EXPERT_BYTES = 3 * 384 * 256 * 4
"""Bytes of one expert in memory: the checkpoint has float32."""
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
GOALS = {"loopback_over_one_node": 0.6, "clients_over_one": 2.0}


def save_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.support.swarm.tiny_swarm import save_words

    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=384,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_hidden_layers=BLOCKS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    save_words(folder)
    return folder


def start_peer(lab: Swarm, name: str, share: str, place: Place) -> None:
    """Start a node with these experts of every block, and wait until it is ready."""
    _ = lab.launch(name, "--experts", f"all:{share}", place=place).ready


@contextmanager
def experts_swarm(
    folder: Path, model: Path, shares: Sequence[str] = SHARES, places: Sequence[Place] = ()
) -> Iterator[Swarm]:
    """A node ``peerN`` for each of ``shares``, the experts of every block that it has, and a host
    ``trunk`` of all blocks without experts.

    ``places``: those of the peers in their order, then that of the host; empty: all on loopback.
    """
    *of_peers, of_trunk = places or [LOOPBACK] * (len(shares) + 1)
    lab = Swarm(folder, folder.parent / "cache", model=str(model))
    try:
        for number, (share, place) in enumerate(zip(shares, of_peers, strict=True)):
            start_peer(lab, f"peer{number}", share, place)
        options = ("--experts", "none", "--blocks", f"0:{BLOCKS}", "--client-share", "100")
        _ = lab.launch("trunk", *options, place=of_trunk).ready
        yield lab
    finally:
        lab.close()


@contextmanager
def one_node(folder: Path, model: Path, *options: str) -> Iterator[Swarm]:
    lab = Swarm(folder, folder.parent / "cache", model=str(model))
    try:
        _ = lab.launch("whole", "--blocks", f"0:{BLOCKS}", *options).ready
        yield lab
    finally:
        lab.close()


def clients_of(lab: Swarm, count: int) -> list[AnsweringProcess]:
    where = (str(lab.file), *lab.bootstrap)
    clients = [generating(lab.cache_dir, 1, *where, model=lab.model) for _ in range(count)]
    for client in clients:
        client.wait_until_ready()
    return clients


def rate(client: AnsweringProcess, tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second after the first, and the tokens."""
    told = client.ask(ids=[PROMPT], tokens=tokens)
    return (tokens - 1) / (told["seconds"] - told["first_s"]), told["ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-memory", type=float, help="share of the experts that one node has in memory")
    parser.add_argument("--delay-ms", type=float, help="of a local network, one way; needs root")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save_model(folder / "model")
        if arguments.in_memory is not None:
            from_disk(folder, model, arguments)
        elif arguments.delay_ms is None:
            on_loopback(folder, model, arguments)
        else:
            on_a_local_network(folder, model, arguments)


def on_loopback(folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    local = generating(folder / "cache", os.cpu_count() or 1, model=str(model))
    local.wait_until_ready()
    with one_node(folder / "one", model) as whole, experts_swarm(folder / "experts", model) as lab:
        one, *others = clients_of(lab, arguments.clients)
        [alone] = clients_of(whole, 1)
        kinds = {"transformers": local, "one_node": alone, "experts": one}
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        answers: list[list[list[int]]] = []
        for _ in range(arguments.rounds + 1):
            for kind, client in kinds.items():
                found, ids = rate(client, arguments.tokens)
                rates[kind].append(found)
                answers.append(ids)
        clients = [one, *others]
        with ThreadPoolExecutor(len(clients)) as pool:
            started = time.perf_counter()
            answers += pool.map(
                lambda client: client.ask(ids=[PROMPT], tokens=arguments.tokens)["ids"], clients
            )
            together = arguments.tokens * len(clients) / (time.perf_counter() - started)
        for client in (local, alone, *clients):
            client.close()
    median = {kind: statistics.median(found[1:]) for kind, found in rates.items()}
    report = {
        "bench": "experts",
        "tokens_per_s": {kind: round(found, 2) for kind, found in median.items()},
        "over_one_node": round(median["experts"] / median["one_node"], 2),
        "over_transformers": round(median["experts"] / median["transformers"], 2),
        "clients": len(clients),
        "clients_over_one": round(together / median["experts"], 2),
        "equal_tokens": all(each == answers[0] for each in answers),
        "goals": GOALS,
    }
    print(json.dumps(report), flush=True)


def from_disk(folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    """The rate of a node with some of its experts in memory, against that of one with all."""
    memory = int(arguments.in_memory * EXPERTS * BLOCKS * EXPERT_BYTES)
    with (
        one_node(folder / "all", model) as everything,
        one_node(folder / "some", model, "--expert-memory", str(memory)) as some,
    ):
        clients = {"all": clients_of(everything, 1)[0], "some": clients_of(some, 1)[0]}
        rates: dict[str, list[float]] = {kind: [] for kind in clients}
        answers = []
        for _ in range(arguments.rounds + 1):
            for kind, client in clients.items():
                found, ids = rate(client, arguments.tokens)
                rates[kind].append(found)
                answers.append(ids)
        for client in clients.values():
            client.close()
    median = {kind: statistics.median(found[1:]) for kind, found in rates.items()}
    report = {
        "bench": "experts",
        "in_memory": arguments.in_memory,
        "tokens_per_s": {kind: round(found, 2) for kind, found in median.items()},
        "some_over_all": round(median["some"] / median["all"], 2),
        "equal_tokens": all(each == answers[0] for each in answers),
        "goal": 0.5,
    }
    print(json.dumps(report), flush=True)


def on_a_local_network(folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    """Milliseconds of a token more than on machines without a delay between them."""
    times = {}
    for delay_ms in (0.0, arguments.delay_ms):
        uplink = Uplink(delay_ms / 2000, bytes_per_s=125_000_000)
        with wan(*[uplink] * (PEERS + 1)) as hosts:
            places = [host.place for host in hosts]
            with experts_swarm(folder / f"lan{delay_ms:g}", model, places=places) as lab:
                found = []
                for _ in range(arguments.rounds):
                    # The client is on the machine of the host: the delay is that of the experts
                    # alone.
                    with RunProcess(
                        lab, "w11 w12 w13", arguments.tokens, places[PEERS], "--no-speculate"
                    ) as run:
                        code, answer = run.finish()
                    if code:
                        raise RuntimeError(answer)
                    left_s = answer["total_s"] - answer["first_token_s"]
                    found.append(1000 * left_s / (len(answer["token_ids"]) - 1))
                times[delay_ms] = statistics.median(found)
    more_ms = times[arguments.delay_ms] - times[0.0]
    report = {
        "bench": "experts",
        "delay_ms": arguments.delay_ms,
        "token_ms": {str(delay): round(found, 2) for delay, found in times.items()},
        "more_ms": round(more_ms, 2),
        "goal_ms": 1 + 1.3 * arguments.delay_ms * 2 * BLOCKS,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
