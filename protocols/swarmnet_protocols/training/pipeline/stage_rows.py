"""The stages of a job as their workers report them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2 as pb

REPLICAS = 2
"""Workers of a stage that keep its state when one of them is lost."""


def stage_rows(stages: Sequence[Mapping[PeerId, pb.WorkerReport | None]]) -> list[dict[str, Any]]:
    """Return one JSON object for each stage.

    ``stages``: the workers of each stage, with the report of each, or None if it gives none. Rates
    are recent ones, and null until a round has ended.
    """
    known = [[report for report in each.values() if report is not None] for each in stages]
    busy = [_ratio(reports, "compute_s", "seconds") for reports in known]
    busiest = max(range(len(stages)), key=lambda stage: busy[stage] or 0.0)
    rows = []
    for stage, (workers, reports) in enumerate(zip(stages, known, strict=True)):
        forward = _ratio(reports, "forward_bytes", "tokens")
        backward = _ratio(known[(stage + 1) % len(stages)], "backward_bytes", "tokens")
        rates = [each.recent.tokens / each.recent.seconds for each in reports if each.recent.seconds]
        held = next((each.stage for each in reports if each.HasField("stage")), None)
        rows.append(
            {
                "stage": stage,
                "blocks": None if held is None else [held.start, held.end],
                "workers": sorted(workers),
                "missing": max(0, REPLICAS - len(workers)),
                "occupancy": busy[stage],
                "tokens_per_s": round(sum(rates), 1) if rates else None,
                "bytes_per_token": None
                if forward is None or backward is None
                else round(forward + backward, 1),
                "waits_for": busiest if busy[busiest] and stage != busiest else None,
            }
        )
    return rows


def _ratio(reports: Sequence[pb.WorkerReport], part: str, whole: str) -> float | None:
    total = sum(getattr(each.recent, whole) for each in reports)
    return round(sum(getattr(each.recent, part) for each in reports) / total, 4) if total else None
