"""Time series of the history as columns for charts. A gap in the samples becomes None."""

from collections.abc import Callable, Sequence
from typing import Any

from swarmnet.dashboard.history import DAY_S, MONTH_S, History
from swarmnet.dashboard.observing.counts import quantile
from swarmnet.dashboard.sampling import MODELS, PEERS, JobPoint, ModelSample, PeerSample

WINDOWS_S = {"24h": DAY_S, "30d": MONTH_S}
MAX_ROUNDS = 100
GAP = 2.5
"""Distance of two samples, in steps, beyond which a chart has a gap between them."""


def model_chart(history: History, model: str, window: str, now_s: float) -> dict[str, list[Any]]:
    """Return the series of a model, or of the whole swarm for "", over ``window`` (a key of
    ``WINDOWS_S``)."""
    coarse = window != "24h"
    rows = history.model_samples(model, now_s - WINDOWS_S[window], coarse=coarse)
    return _columns(
        rows,
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


def peer_chart(history: History, peer: str, now_s: float) -> dict[str, list[Any]]:
    """Return the series of a peer over 24 hours."""
    rows = history.peer_samples(peer, now_s - DAY_S, coarse=False)
    return _columns(
        rows,
        PEERS.fine_s,
        {
            "tokens_per_s": lambda row: round(row.positions / row.seconds, 2),
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


def contributions(history: History, now_s: float, window: str) -> list[dict[str, Any]]:
    """Return the tokens that each peer computed in ``window``, most first, and the share of the
    time that the peer was online."""
    seconds = WINDOWS_S[window]
    return [
        {"peer_id": peer, "name": name, "tokens": positions, "uptime": round(min(1.0, online_s / seconds), 4)}
        for peer, name, positions, online_s in history.contributions(now_s, seconds)
    ]


def contribution(history: History, peer: str, now_s: float) -> dict[str, Any]:
    """Return the tokens that one peer computed in a day and in a month, and the share of the day
    that the peer was online."""
    found: dict[str, Any] = {}
    for window, seconds in WINDOWS_S.items():
        rows = history.contributions(now_s, seconds, peer)
        found[f"tokens_{window}"] = rows[0][2] if rows else 0
        if window == "24h":
            found["uptime_24h"] = round(min(1.0, rows[0][3] / seconds), 4) if rows else 0.0
    return found


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
