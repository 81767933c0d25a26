"""How long an answer stands still when a node that serves it is killed, hangs, or is cut off.

    python -m tests.bench.failover [--runs 5] [--faults kill stop cut] [--prompt-tokens 128] [--standby] [--seed 0]

Three hops with a spare for the middle one; each run faults it at a seeded random token. A stall is
the longest wait for one token in the run; ``replay_s`` is how long the same chain takes to compute
such a prompt when nothing fails. Cuts happen on emulated links of 10 ms round trip and need root;
each heals at the end of its run, so the host that takes over may be the one that was cut off
before. ``first_tokens_s`` is how long the prompt took in each of these runs, which is what a replay
takes in that moment of a busy machine. Prints one line of JSON for each fault.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.bench.generating_process import timed_generate
from tests.support.processes.commands import TIMEOUT_S
from tests.support.processes.faults import At, Strike, kill, resume, stop
from tests.support.processes.nodes import NodeProcess, RunProcess, Swarm, swarm
from tests.support.processes.wan import Uplink, WanSwarm, wan_swarm
from tests.support.swarm.generation import greedy

SPANS = ((0, 10), (10, 20), (10, 20), (20, 30))
TOKENS = 24
CUT_TOKENS = 160
"""The answer must be long enough that, on a machine of any speed, the node that computes it is
found and cut off before its end."""
TOKENS_PER_LOOK, LOOKS = 3, 4
"""Tokens between two looks are more than one, because a node may compute the next token ahead of a
look."""
GOALS_S = {"kill": 0.5, "stop": 3.0, "cut": 3.0}
"""Goals for the stall without the replay."""
PLAIN = "--no-speculate"
"""The text repeats: with drafts an answer ends before a host can be cut off."""


def faulted(
    lab: Swarm, fault: Callable[[NodeProcess], None], ids: list[int], token: int, *, standby: bool | None
) -> tuple[float, list[int]]:
    """The longest stall of a run whose middle hop is faulted at ``token``, and the tokens it
    gave."""
    with lab.connect(standby=standby) as model:
        strike = Strike(lab, model, fault)
        (tokens,) = greedy(model, [ids], TOKENS, At((token, strike)))
        stall_s: float = model.last_run.longest_stall_s
    (hit,) = strike.hit
    if fault is stop:
        resume(hit)
    else:
        _ = lab.relaunch(hit.name).ready
    return stall_s, tokens


def computing(run: RunProcess, nodes: Iterable[NodeProcess]) -> str:
    """The name of the node that computes the answer of ``run``: it has computed more in each of
    several looks. The witness of an audit computes once.
    """
    before = {node: node.status.host.positions for node in nodes}
    looks = dict.fromkeys(before, 0)
    while True:
        printed = len(run.events)
        while len(run.events) < printed + TOKENS_PER_LOOK:
            if run.process.poll() is not None:
                raise RuntimeError(
                    f"the answer ended before the node that computes it was known: {run.finish()}"
                )
            run.wait_for_more(timeout_s=TIMEOUT_S)
        for node, tokens in before.items():
            before[node] = node.status.host.positions
            looks[node] = looks[node] + 1 if before[node] > tokens else 0
            if looks[node] == LOOKS:
                return node.name


def cut_off(lab: WanSwarm, prompt: str) -> tuple[float, list[int], float]:
    """The longest stall of a run whose middle hop is cut off once the answer has begun, its tokens,
    and the seconds of its first token."""
    with RunProcess(lab.swarm, prompt, CUT_TOKENS, lab.client, PLAIN) as run:
        run.wait("token")
        used = computing(run, (node for name, node in lab.swarm.nodes.items() if name.startswith("10-20")))
        lab.hosts[used].cut()
        code, answer = run.finish()
    lab.hosts[used].heal()
    if code or not answer["failovers"]:
        raise RuntimeError(f"cut off {used}, and got {answer}")
    return answer["longest_stall_s"], answer["token_ids"], answer["first_token_s"]


def report(fault: str, runs: list[tuple[float, list[int]]], expected: list[int], **more: Any) -> None:
    stalls = [stall_s for stall_s, _ in runs]
    print(
        json.dumps(
            {
                "bench": "failover",
                "fault": fault,
                "runs": len(runs),
                "equal_tokens": all(tokens == expected for _, tokens in runs),
                "stall_s_median": round(statistics.median(stalls), 3),
                "stall_s_max": round(max(stalls), 3),
                "goal_s": GOALS_S[fault],
                "stalls_s": [round(stall_s, 3) for stall_s in stalls],
                **more,
            }
        ),
        flush=True,
    )


def on_loopback(folder: Path, arguments: argparse.Namespace) -> None:
    rng = random.Random(arguments.seed)
    ids = [rng.randrange(1000, 20000) for _ in range(arguments.prompt_tokens)]
    earliest = TOKENS // 2 if arguments.standby else 1
    """A standby is ready some tokens after the prompt."""
    with swarm(folder / "lab", folder / "cache", *SPANS) as lab:
        with lab.connect() as model:
            undisturbed = [timed_generate(model, [ids], TOKENS) for _ in range(2)][1]
            replay_s = timed_generate(model, [ids], 1)["seconds"]
        for name, fault in (("kill", kill), ("stop", stop)):
            if name in arguments.faults:
                runs = [
                    faulted(
                        lab, fault, ids, rng.randrange(earliest, TOKENS), standby=arguments.standby or None
                    )
                    for _ in range(arguments.runs)
                ]
                more = {
                    "prompt_tokens": len(ids),
                    "standby": arguments.standby,
                    "replay_s": round(replay_s, 3),
                }
                report(name, runs, undisturbed["ids"][0], **more)


def on_emulated_links(folder: Path, arguments: argparse.Namespace) -> None:
    prompt = "Once upon a time " * (arguments.prompt_tokens // 4)
    with wan_swarm(folder / "wan", folder / "cache", Uplink(delay_s=0.0025), *SPANS) as lab:
        with RunProcess(lab.swarm, prompt, CUT_TOKENS, lab.client, PLAIN) as run:
            _, undisturbed = run.finish()
        cuts = [cut_off(lab, prompt) for _ in range(arguments.runs)]
        first_s = [undisturbed["first_token_s"], *(seconds for *_, seconds in cuts)]
        report(
            "cut",
            [(stall_s, tokens) for stall_s, tokens, _ in cuts],
            undisturbed["token_ids"],
            first_tokens_s=[round(seconds, 3) for seconds in first_s],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", choices=list(GOALS_S), default=list(GOALS_S))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--standby", action="store_true", help="the session asks for standbys; not for cuts")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if {"kill", "stop"} & set(arguments.faults):
            on_loopback(Path(folder), arguments)
        if "cut" in arguments.faults:
            on_emulated_links(Path(folder), arguments)


if __name__ == "__main__":
    main()
