"""The JSON of models: replicas of each block, speed of answers, and what a newcomer should host:
blocks or experts. Pure functions."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median_low
from typing import Any

from swarmnet.dashboard.experts import ExpertCoverage, runs
from swarmnet.dashboard.observing.counts import Counts, quantile
from swarmnet.dashboard.observing.observations import Snapshot
from swarmnet.units import counted
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.routing.placement import closing

DEFAULT_SHARE = 3
"""If blocks have no host, a newcomer is advised to host up to the ``1 / DEFAULT_SHARE`` part of a
model. Longer spans fit fewer machines. With shorter ones, a model waits for more newcomers."""
MAX_RUNS_SHOWN = 4
"""Most ranges of blocks in a sentence; further ones are counted."""
_SHELL_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]*")

Hosts = Sequence[tuple[str, Mapping[str, Any]]]


def model_entry(
    model: CatalogModel,
    snapshot: Snapshot,
    hosts: Hosts,
    answered_per_s: float,
    sessions: int,
    experts: ExpertCoverage,
) -> dict[str, Any]:
    """Return the JSON of one model. ``hosts``: id and JSON of each peer that hosts blocks or
    experts of it and is not gone."""
    of_blocks = [(peer, entry) for peer, entry in hosts if entry["blocks"]]
    replicas = replicas_of(model.blocks, [entry for _, entry in of_blocks if entry["state"] == "online"])
    waiting = [entry for _, entry in of_blocks if _waits(entry) or entry["state"] == "online"]
    advised = experts.advice(min(replicas_of(model.blocks, waiting)))
    weakest = min(range(model.blocks), key=lambda block: (replicas[block], block))
    recent = snapshot.recent.get(model.manifest, Counts())
    return {
        "name": model.name,
        "blocks": model.blocks,
        "replicas": replicas,
        "weakest": {"block": weakest, "replicas": replicas[weakest]},
        "healthy": replicas[weakest] > 0,
        "experts": experts.entry(),
        "peers": len(hosts),
        "sessions": sessions,
        "tokens_per_s": round(answered_per_s, 1),
        "peak_sessions": max(sessions, snapshot.peak_sessions.get(model.manifest, 0)),
        "first_token_s": quantiles(recent.first_tokens),
        "token_s": quantiles(recent.token_times),
        "advice": (
            expert_advice(model, snapshot.swarm.join, *advised)
            if advised is not None
            else advice(model, snapshot.swarm.join, of_blocks, replicas)
        ),
    }


def _waits(entry: Mapping[str, Any]) -> bool:
    """Return whether a host would be online if peers had the experts that it lacks."""
    return entry["state"] == "joining" and bool(entry["trunk"] and entry["trunk"]["missing"])


def replicas_of(blocks: int, online: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of hosts of each block, from the JSON of the hosts that are online."""
    changes = [0] * (blocks + 1)
    for entry in online:
        start, end = entry["blocks"]
        changes[min(start, blocks)] += 1
        changes[min(end, blocks)] -= 1
    return list(accumulate(changes))[:blocks]


def quantiles(times: tuple[int, ...]) -> dict[str, float] | None:
    """Return the median and 95th percentile of a histogram in seconds; None for an empty one."""
    middle, high = quantile(times, 0.5), quantile(times, 0.95)
    if middle is None or high is None:
        return None
    return {"p50": round(middle, 4), "p95": round(high, 4)}


def advice(model: CatalogModel, join: Sequence[str], hosts: Hosts, replicas: Sequence[int]) -> dict[str, Any]:
    """Return the span that a newcomer should host, with the reason and the command.

    The span is as long as the median of the hosts' spans, or longer if more blocks in a row have no
    host. It holds as many of the weakest blocks as it can, and leaves the rest of them in the
    fewest pieces. The page shows the same blocks as the weakest.
    """
    lengths = [entry["blocks"][1] - entry["blocks"][0] for _, entry in hosts]
    gaps = [end - start for start, end in runs(_with(0, replicas))]
    part = min(max(gaps, default=0), -(-model.blocks // DEFAULT_SHARE))
    length = min(model.blocks, max(part, median_low(lengths) if lengths else 0))
    fewest = min(replicas)
    starts = closing([number - fewest for number in replicas], length)
    start = min(starts, key=lambda first: (sum(replicas[first : first + length]), first))
    span = (start, start + length)
    return {
        "blocks": list(span),
        "reason": _reason(span, replicas),
        "command": _command(model, join, "--blocks", f"{span[0]}:{span[1]}"),
    }


def expert_advice(model: CatalogModel, join: Sequence[str], experts: str, reason: str) -> dict[str, Any]:
    """Return the experts that a newcomer should host, when the model needs these more than
    blocks."""
    return {
        "blocks": None,
        "experts": experts,
        "reason": reason,
        "command": _command(model, join, "--experts", experts),
    }


def _command(model: CatalogModel, join: Sequence[str], option: str, value: str) -> str:
    # Users paste this command into a shell, and any peer may choose the name of a model.
    name = model.name if _SHELL_SAFE_NAME.fullmatch(model.name) else "MODEL"
    return shlex.join(["swarmnet", "join", *join, "--model", name, option, value])


def _reason(span: tuple[int, int], replicas: Sequence[int]) -> str:
    """Return the reason to host ``span``: its weakest blocks, or all blocks that have no host, and
    what another host changes."""
    fewest = min(replicas)
    if fewest == 0:
        return f"no host has {block_list(_with(0, replicas))}, so the model cannot answer"
    weak = [block for block in _with(fewest, replicas) if block in range(*span)]
    where = block_list(weak)
    if fewest == 1:
        one = "has only one host: if it" if len(weak) == 1 else "have only one host each: if one of them"
        return f"{where} {one} leaves, the model cannot answer"
    if len(set(replicas)) == 1:
        return f"each block has {fewest} hosts: another one lets more people use the model at once"
    has = "has" if len(weak) == 1 else "have"
    return f"{where} {has} the fewest hosts ({fewest}), which limits how many people the model can serve"


def _with(number: int, replicas: Sequence[int]) -> list[int]:
    return [block for block, hosts in enumerate(replicas) if hosts == number]


def block_list(blocks: Sequence[int]) -> str:
    """Return ascending blocks as text, such as ``blocks 4:10, 17 and 21:31``."""
    names = [f"{start}:{end}" if end - start > 1 else str(start) for start, end in runs(blocks)]
    if len(names) > MAX_RUNS_SHOWN:
        further = len(names) - MAX_RUNS_SHOWN
        names[MAX_RUNS_SHOWN:] = [counted(further, "further range")]
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'block' if len(blocks) == 1 else 'blocks'} {listed}"
