"""An exchange: by which rules, on its way, and what it gave."""

import asyncio
from dataclasses import dataclass
from typing import Any

import torch

from swarmnet_node.training.trainer import StepReport
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.jobs import Job
from swarmnet_protocols.training.rounds.aggregation_rules import aggregate, clip_to_median_norm_, outliers
from swarmnet_protocols.training.rounds.averaging import Outcome, Rules
from swarmnet_protocols.training.rounds.terms import Slice


@dataclass
class Pending:
    """An exchange on its way."""

    round: int
    weights: dict[PeerId, float]
    """Of everybody in the roster."""
    report: StepReport
    outcome: "asyncio.Task[Outcome]"
    began: float
    gather_s: float


def contributors(outcome: Outcome) -> tuple[PeerId, ...]:
    """Whoever is in some slice of the average."""
    return tuple(sorted({peer for slice in outcome.contributors for peer in slice}))


def slices_of(peer: PeerId, outcome: Outcome) -> tuple[Slice, ...]:
    """The slices of the average that the contribution of ``peer`` is in."""
    if not outcome.committed:
        return ()
    pairs = zip(outcome.slices, outcome.contributors, strict=True)
    return tuple(share for share, names in pairs if peer in names)


def facts(outcome: Outcome) -> dict[str, Any]:
    """What an event says of an exchange."""
    return {
        "committed": outcome.committed,
        "bytes_sent": outcome.bytes_sent,
        "bytes_received": outcome.bytes_received,
        "contributors": list(contributors(outcome)),
        "excluded": [{"peer_id": peer, "reason": why} for peer, why in outcome.excluded],
        "reason": outcome.reason,
    }


def round_facts(pending: Pending, outcome: Outcome) -> dict[str, Any]:
    """What the event of a round says of what went in, and of its exchange."""
    return {
        "event": "round",
        "round": pending.round,
        "loss": round(pending.report.loss, 6) if pending.report.tokens else None,
        "tokens": round(sum(pending.weights.get(peer, 0.0) for peer in contributors(outcome))),
        "workers": len(pending.weights),
        **facts(outcome),
    }


def averaging_rules(job: Job) -> Rules:
    """How contributions become an average; the same at all workers, because the job says it."""

    def aggregated(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return aggregate(job.exchange.aggregate, clip_to_median_norm_(rows, weights), weights)

    tokens = job.training.batch_size * job.data.sequence_length * job.make_method().steps_per_round
    verifiable = job.exchange.aggregate != "mean"
    return Rules(aggregated, screen=outliers, max_weight=float(tokens), verifiable=verifiable)
