"""The JSON of routed experts: of a peer, and of a model with the replicas and the load of each
expert. Pure functions."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median_low
from typing import Any

from swarmnet.dashboard.observing.counts import hosts_blocks
from swarmnet.dashboard.observing.observations import PeerObservation
from swarmnet.units import counted
from swarmnet_protocols.directory.expert_announcements import BlockExperts, format_experts, from_bits
from swarmnet_protocols.wire import report_pb2

MAX_TEXT_CHARS = 200
"""Most characters of a list of experts."""
MAX_SHORT_CHARS = 60
"""Most characters of a list of experts within a sentence; longer ones are counted."""
MAX_COMMAND_CHARS = 80
"""Most characters of the experts in a command; for more, the newcomer chooses (`--experts
auto`)."""
MAX_RUNS = 64
MAX_REPLICAS = 9
"""The map of a model has one digit for each expert."""
MISSING = "x"
"""The mark of an expert that a host waits for."""
DEFAULT_SHARE = 3
"""If no peer has some experts, a newcomer is advised to host the ``1 / DEFAULT_SHARE`` part of
them."""

Cell = tuple[int, int]
"""Block and expert."""
_experts_in = lru_cache(maxsize=1 << 14)(from_bits)


def reported_experts(report: report_pb2.NodeReport) -> Sequence[report_pb2.BlockExperts]:
    """Return the experts that a node computes for other hosts."""
    return report.host.experts


def hosted_experts(seen: PeerObservation) -> BlockExperts:
    """Return the experts that a peer computes for other hosts: as it reports them, else as it
    announced them."""
    if seen.answers and seen.newest is not None:
        return {each.block: _experts_in(each.experts) for each in reported_experts(seen.newest.report)}
    return seen.experts


def peer_experts(seen: PeerObservation, rows_per_s: float) -> dict[str, Any] | None:
    """Return the JSON of the experts that a peer computes for other hosts; None if it has none."""
    experts = hosted_experts(seen)
    if not experts:
        return None
    report = seen.newest.report if seen.newest else report_pb2.NodeReport()
    return {
        "count": sum(map(len, experts.values())),
        "text": _text(experts),
        "runs": runs(experts)[:MAX_RUNS],
        "rows_per_s": round(rows_per_s, 1),
        "streams": report.host.expert_streams,
    }


def trunk_entry(report: report_pb2.NodeReport) -> dict[str, Any] | None:
    """Return the JSON of the experts of a host that peers compute; None if it has them all."""
    if not report.host.HasField("trunk"):
        return None
    trunk = report.host.trunk
    missing = _experts(trunk.missing)
    return {
        "lacks": sum(len(_experts_in(each.experts)) for each in trunk.lacks),
        "missing": sum(map(len, missing.values())),
        "missing_text": _text(missing),
        "peers": len(trunk.round_trips_s),
        "round_trip_s": float(f"{max(trunk.round_trips_s):.2g}") if trunk.round_trips_s else None,
        "far": trunk.far,
        "rows": trunk.rows,
        "failed": trunk.failed,
        "hedged": trunk.hedged,
        "loaded": trunk.loaded,
    }


@dataclass
class ExpertCoverage:
    """The experts of one model, from the peers that are online or join."""

    blocks: int
    peers: int = 0
    """Peers that compute experts for others."""
    replicas: Counter[Cell] = field(default_factory=Counter)
    """Peers that compute each expert for others."""
    rows: Counter[Cell] = field(default_factory=Counter)
    """Rows that each expert has computed."""
    lacks: set[Cell] = field(default_factory=set)
    """Experts that some host lacks."""
    missing: set[Cell] = field(default_factory=set)
    """Experts that the host waits for, because no peer within its reach has them."""
    sizes: list[int] = field(default_factory=list)
    """Experts of each peer that hosts experts only."""

    def add(self, seen: PeerObservation, *, is_online: bool) -> None:
        """Count a peer with this model."""
        experts = hosted_experts(seen)
        report = seen.newest.report if seen.newest is not None and seen.answers else report_pb2.NodeReport()
        if experts and (is_online or hosts_blocks(report)):
            self.peers += 1
            self.replicas.update(self._cells(experts))
            if not hosts_blocks(report):
                self.sizes.append(sum(map(len, experts.values())))
        for each in reported_experts(report):
            if each.block < self.blocks:
                numbers = sorted(_experts_in(each.experts))
                for expert, rows in zip(numbers, each.rows, strict=False):
                    self.rows[each.block, expert] += rows
        self.lacks.update(self._cells(_experts(report.host.trunk.lacks)))
        self.missing.update(self._cells(_experts(report.host.trunk.missing)))

    def entry(self) -> dict[str, Any] | None:
        """Return the JSON of the map: for each block, one character for each expert; None if no
        peer says that the model has experts."""
        known = {*self.replicas, *self.lacks, *self.missing}
        if not known:
            return None
        counts: dict[int, int] = {}
        for block, expert in known:
            counts[block] = max(counts.get(block, 0), expert + 1)
        missing = _grouped(self.missing)
        return {
            "peers": self.peers,
            "experts": max(counts.values()),
            "replicas": {str(block): self._replicas_text(block, counts[block]) for block in sorted(counts)},
            "load": {
                str(block): text
                for block in sorted(counts)
                if (text := self._load_text(block, counts[block])).strip("0")
            },
            "missing": len(self.missing),
            "missing_text": _text(missing),
            "single": sum(self.replicas[cell] == 1 for cell in self.lacks - self.missing),
        }

    def advice(self, fewest_hosts: int) -> tuple[str, str] | None:
        """Return the experts that a newcomer should host, as `join --experts` takes them, and the
        reason.

        None if the swarm needs blocks more. ``fewest_hosts``: number of hosts of the weakest block,
        including hosts that wait for experts.
        """
        if not self.lacks:
            return None
        replicas = {cell: 0 if cell in self.missing else self.replicas[cell] for cell in self.lacks}
        fewest = min(replicas.values())
        if fewest >= fewest_hosts:
            return None
        size = median_low(self.sizes) if self.sizes else -(-len(self.lacks) // DEFAULT_SHARE)
        # As `experts/expert_choice.py` of a node: a peer then has the same experts of every block.
        chosen = sorted(self.lacks, key=lambda cell: (replicas[cell], cell[1], cell[0]))[: max(1, size)]
        weak = [cell for cell, number in replicas.items() if number == fewest]
        weak_text = format_experts(_grouped(weak))
        named = counted(len(weak), "expert")
        if len(weak_text) <= MAX_SHORT_CHARS:
            named += f" {weak_text} (blocks:experts)"
        reason = (
            f"no peer within reach of the hosts has {named}: the model cannot answer"
            if fewest == 0
            else f"no spare peer has {named}: when a peer leaves, the model may be unable to answer"
            if fewest == 1
            else f"the fewest peers have {named}"
        )
        text = format_experts(_grouped(chosen))
        return (text if len(text) <= MAX_COMMAND_CHARS else "auto"), reason

    def _cells(self, experts: BlockExperts) -> Iterable[Cell]:
        return ((block, expert) for block, each in experts.items() if block < self.blocks for expert in each)

    def _replicas_text(self, block: int, count: int) -> str:
        return "".join(
            MISSING
            if (block, expert) in self.missing
            else str(min(MAX_REPLICAS, self.replicas[block, expert]))
            for expert in range(count)
        )

    def _load_text(self, block: int, count: int) -> str:
        """Return a digit for each expert: 0 no rows, 1 below half the mean of the block, 2 below
        it, 3 below twice the mean, 4 above."""
        rows = [self.rows[block, expert] for expert in range(count)]
        mean = sum(rows) / count
        return "".join(
            str(min(4, max(1, 3 + math.floor(math.log2(each / mean)))) if each else 0) for each in rows
        )


def _experts(blocks: Iterable[report_pb2.BlockExperts]) -> BlockExperts:
    return {each.block: _experts_in(each.experts) for each in blocks}


def _grouped(cells: Iterable[Cell]) -> BlockExperts:
    found: dict[int, set[int]] = {}
    for block, expert in cells:
        found.setdefault(block, set()).add(expert)
    return {block: frozenset(found[block]) for block in sorted(found)}


def _text(experts: BlockExperts) -> str:
    text = format_experts(experts)
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


def runs(blocks: Iterable[int]) -> list[list[int]]:
    """Return blocks as [start, end) of each run."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1][1] = block + 1
        else:
            found.append([block, block + 1])
    return found
