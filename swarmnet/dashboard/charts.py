"""Time series of the history as columns for charts. A gap in the samples becomes None."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from swarmnet.dashboard.history import DAY_S, MONTH_S, History
from swarmnet.dashboard.observing.counts import Work, quantile
from swarmnet.dashboard.sampling import MODELS, PEERS, JobPoint, ModelSample, PeerSample

WINDOWS_S = {"24h": DAY_S, "30d": MONTH_S}
MAX_ROUNDS = 100
Begun = Mapping[str, PeerSample]
"""Samples of peers that are not in the history yet."""
NOTHING: Begun = MappingProxyType({})
GAP = 2.5
"""Distance of two samples, in steps, beyond which a chart has a gap between them."""


def model_chart(
    history: History, model: str, window: str, now_s: float, begun: Sequence[ModelSample] = ()
) -> dict[str, list[Any]]:
    """Return the series of a model over ``window``, a key of ``WINDOWS_S``. The model "" stands for
    the whole swarm. ``begun``: samples that are not in the history yet."""
    coarse = window != "24h"
    rows = history.model_samples(model, now_s - WINDOWS_S[window], coarse=coarse)
    return _columns(
        [*rows, *begun],
        MODELS.coarse_s if coarse else MODELS.fine_s,
        {
            "tokens_per_s": lambda row: round(row.counts.answered / row.seconds, 2),
            "peers": lambda row: round(row.peers, 1),
            "weakest": lambda row: row.weakest,
            "sessions": lambda row: row.sessions,
            "first_token_p50_s": lambda row: quantile(row.counts.first_tokens, 0.5),
            "first_token_p95_s": lambda row: quantile(row.counts.first_tokens, 0.95),
            "token_p50_s": lambda row: quantile(row.counts.token_times, 0.5),
            "token_p95_s": lambda row: quantile(row.counts.token_times, 0.95),
            "failures": lambda row: row.counts.failures,
            "recoveries": lambda row: row.counts.recoveries,
        },
    )


def peer_chart(history: History, peer: str, now_s: float, begun: Begun = NOTHING) -> dict[str, list[Any]]:
    """Return the series of a peer over 24 hours."""
    rows = history.peer_samples(peer, now_s - DAY_S, coarse=False)
    if peer in begun:
        rows.append(begun[peer])
    return _columns(
        rows,
        PEERS.fine_s,
        {
            "positions_per_s": lambda row: round(row.work.positions / row.seconds, 2),
            "delay_s": lambda row: row.delay_s,
            "online": lambda row: round(row.online_s / row.seconds, 3),
        },
    )


def job_chart(points: Sequence[JobPoint]) -> dict[str, list[Any]]:
    """Return the series of a job, by round."""
    return {
        "at_s": [point.at_s for point in points],
        "round": [point.round for point in points],
        "tokens": [point.tokens for point in points],
        "bytes": [point.bytes_sent for point in points],
        "loss": [point.loss for point in points],
        "val_loss": [point.val_loss for point in points],
    }


def contributions(
    history: History, now_s: float, window: str, begun: Begun = NOTHING
) -> list[dict[str, Any]]:
    """Return each peer's work in ``window``, and the share of the observed time that it was online.

    ``share`` is the peer's part of all positions × blocks, or of all rows of experts if that part
    is larger. The largest share comes first.
    """
    seconds = WINDOWS_S[window]
    stored = {
        peer: (name, work, online_s) for peer, name, work, online_s in history.contributions(now_s, seconds)
    }
    found = [(peer, *_with(begun.get(peer), stored.get(peer))) for peer in {**stored, **begun}]
    observed_s = history.observed_s(now_s, seconds) + _begun_s(begun)
    total = sum((work for _, _, work, _ in found), Work())
    rows = [
        {"peer_id": peer, "name": name, "share": round(_share(work, total), 4), **_work_entry(work)}
        | {"uptime": _uptime(online_s, observed_s)}
        for peer, name, work, online_s in found
    ]
    return sorted(rows, key=lambda row: -row["share"])


def _with(
    begun: PeerSample | None, stored: tuple[str | None, Work, float] | None
) -> tuple[str | None, Work, float]:
    """Return name, work and seconds online of a peer: the stored sums plus the begun sample."""
    name, work, online_s = stored or (None, Work(), 0.0)
    return (
        (name, work, online_s)
        if begun is None
        else (begun.name, work + begun.work, online_s + begun.online_s)
    )


def _share(work: Work, total: Work) -> float:
    kinds = ((work.block_positions, total.block_positions), (work.rows, total.rows))
    return max((part / whole for part, whole in kinds if whole), default=0.0)


def _work_entry(work: Work) -> dict[str, int]:
    return {"block_positions": work.block_positions, "expert_rows": work.rows, "samples": work.samples}


def contribution(history: History, peer: str, now_s: float, begun: Begun = NOTHING) -> dict[str, Any]:
    """Return the work of one peer in a day and in a month. ``uptime_24h``: the part of the observed
    day in which the peer was online."""
    found: dict[str, Any] = {}
    for window, seconds in WINDOWS_S.items():
        stored = [row[1:] for row in history.contributions(now_s, seconds, peer)]
        _, work, online_s = _with(begun.get(peer), stored[0] if stored else None)
        found[window] = _work_entry(work)
        if window == "24h":
            found["uptime_24h"] = _uptime(online_s, history.observed_s(now_s, seconds) + _begun_s(begun))
    return found


def _begun_s(begun: Begun) -> float:
    return max((sample.seconds for sample in begun.values()), default=0.0)


def _uptime(online_s: float, observed_s: float) -> float:
    return round(min(1.0, online_s / observed_s), 4) if observed_s else 0.0


def last_rounds(points: Sequence[JobPoint]) -> list[dict[str, Any]]:
    """Return the last ``MAX_ROUNDS`` rounds, newest first."""
    return [
        {"round": point.round, "at_s": point.at_s, "loss": point.loss, "workers": point.workers}
        for point in reversed(points[-MAX_ROUNDS:])
    ]


def _columns(
    rows: Sequence[ModelSample | PeerSample], step_s: int, columns: dict[str, Callable[[Any], Any]]
) -> dict[str, list[Any]]:
    """Return a column of times, ``at_s``, and a column for each function in ``columns``, applied to
    each row. In each gap all columns but ``at_s`` have None."""
    found: dict[str, list[Any]] = {"at_s": [], **{name: [] for name in columns}}
    for row in rows:
        if found["at_s"] and row.at_s - found["at_s"][-1] > GAP * step_s:
            found["at_s"].append(found["at_s"][-1] + step_s)
            for name in columns:
                found[name].append(None)
        found["at_s"].append(row.at_s)
        for name, value in columns.items():
            found[name].append(value(row))
    return found
