"""The stored history: time series in SQLite, fine samples for 24 hours and coarse ones for 30 days,
at most ``MAX_BYTES``."""

import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from swarmnet.dashboard.observing.counts import NO_TIMES, Counts, Work
from swarmnet.dashboard.sampling import MODELS, PEERS, JobPoint, ModelSample, PeerSample, Resolution

FILE_NAME = "history.sqlite"
MAX_BYTES = 192 << 20
MAX_EVENTS = 10_000
MAX_JOB_POINTS = 2000
"""Most points of one job; beyond that, every second one is deleted."""
MAX_JOBS = 64
MAX_PEERS = 4096
"""Most peers with a history. The peers seen last are kept."""
DAY_S = 24 * 3600
MONTH_S = 30 * DAY_S
_VERSION = 2
_PAGE_BYTES = 4096
NO_ENTRIES: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
_log = logging.getLogger(__name__)


_JOBS = "CREATE TABLE jobs (job TEXT PRIMARY KEY, seen_s INTEGER, entry TEXT) WITHOUT ROWID;"
_FROM_1 = f"""
ALTER TABLE peer_samples ADD COLUMN block_positions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE peer_samples ADD COLUMN rows INTEGER NOT NULL DEFAULT 0;
ALTER TABLE peer_samples ADD COLUMN samples INTEGER NOT NULL DEFAULT 0;
{_JOBS}
PRAGMA user_version = {_VERSION};
"""
"""Upgrades a history of version 1. Peers then have no work of that time."""
_SCHEMA = f"""
CREATE TABLE model_samples (
  step_s INTEGER, model TEXT, at_s INTEGER, seconds REAL, answered INTEGER, peers REAL, weakest INTEGER, sessions INTEGER,
  failures INTEGER, recoveries INTEGER, first_tokens TEXT, token_times TEXT,
  PRIMARY KEY (step_s, model, at_s)) WITHOUT ROWID;
CREATE TABLE peers (id INTEGER PRIMARY KEY, peer TEXT UNIQUE, name TEXT, seen_s INTEGER);
CREATE TABLE peer_samples (
  step_s INTEGER, peer INTEGER, at_s INTEGER, seconds REAL, positions INTEGER, delay_s REAL, online_s REAL,
  block_positions INTEGER NOT NULL DEFAULT 0, rows INTEGER NOT NULL DEFAULT 0, samples INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (step_s, peer, at_s)) WITHOUT ROWID;
CREATE INDEX peer_samples_by_time ON peer_samples (step_s, at_s);
CREATE TABLE events (number INTEGER PRIMARY KEY, peer TEXT, event TEXT);
CREATE TABLE job_points (
  job TEXT, at_s INTEGER, round INTEGER, tokens INTEGER, bytes INTEGER, loss REAL, val_loss REAL, workers INTEGER,
  PRIMARY KEY (job, round)) WITHOUT ROWID;
{_JOBS}
PRAGMA user_version = {_VERSION};
"""
_MERGED_MODELS = (
    "SUM(seconds), SUM(answered), AVG(peers), MIN(weakest), MAX(sessions), SUM(failures), SUM(recoveries),"
    " sum_times(first_tokens), sum_times(token_times)"
)
_WORK = ("positions", "block_positions", "rows", "samples")
"""The columns of ``Work``, in its order."""
_MERGED_PEERS = (
    "SUM(seconds), SUM(positions), AVG(delay_s), SUM(online_s), SUM(block_positions), SUM(rows), SUM(samples)"
)


class History:
    """The history of one swarm, in one SQLite database. Thread-safe: a lock serialises all
    methods."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator["History"]:
        """Open the history in ``folder``, or make one. A file that cannot be used is renamed to
        ``*.damaged``, with a warning in the log."""
        path = folder / FILE_NAME
        try:
            connection = _open(path)
        except sqlite3.DatabaseError as error:
            aside = path.with_suffix(".damaged")
            _log.warning(
                "cannot use the history %s (%s): it is renamed to %s, and a new one is made",
                path,
                error,
                aside.name,
            )
            path.replace(aside)
            for rest in ("-wal", "-shm"):
                path.with_name(path.name + rest).unlink(missing_ok=True)
            connection = _open(path)
        history = cls(connection)
        try:
            yield history
        finally:
            with history._lock:  # a thread whose caller was cancelled may still be writing
                connection.close()

    def add(
        self,
        *,
        models: Iterable[ModelSample] = (),
        peers: Iterable[PeerSample] = (),
        jobs: Iterable[JobPoint] = (),
        job_entries: Mapping[str, Mapping[str, Any]] = NO_ENTRIES,
        events: Iterable[Mapping[str, Any]] = (),
        now_s: float = 0.0,
    ) -> None:
        """Store all samples in one transaction. If the disk is full, none is stored, and a warning
        is logged. ``job_entries``: the JSON of jobs at ``now_s``."""
        try:
            with self._lock, self._db:
                for sample in models:
                    self._add_model(sample)
                for peer in peers:
                    self._add_peer(peer)
                for point in jobs:
                    self._add_point(point)
                for job, entry in job_entries.items():
                    self._insert("jobs", job, int(now_s), json.dumps(entry))
                self._db.executemany(
                    "INSERT INTO events (peer, event) VALUES (?, ?)",
                    [(event["peer_id"], json.dumps(event)) for event in events],
                )
        except sqlite3.OperationalError as error:
            _log.warning("cannot store samples in the history: %s", error)

    def downsample(self, now_s: float) -> None:
        """Merge the fine samples of complete intervals into coarse ones, and delete expired
        samples. Call it every few minutes."""
        try:
            with self._lock, self._db:
                self._downsample("model", MODELS, _MERGED_MODELS, now_s)
                self._downsample("peer", PEERS, _MERGED_PEERS, now_s)
                self._delete_old(now_s)
        except sqlite3.OperationalError as error:
            _log.warning("cannot downsample the history: %s", error)

    def model_samples(self, model: str, since_s: float, *, coarse: bool) -> list[ModelSample]:
        """Return the samples of a model, oldest first."""
        step_s = MODELS.coarse_s if coarse else MODELS.fine_s
        with self._lock:
            rows = self._db.execute(
                "SELECT * FROM model_samples WHERE step_s = ? AND model = ? AND at_s > ? ORDER BY at_s",
                (step_s, model, int(since_s)),
            ).fetchall()
        return [_model_sample(row) for row in rows]

    def peer_samples(self, peer: str, since_s: float, *, coarse: bool) -> list[PeerSample]:
        """Return the samples of a peer, oldest first."""
        step_s = PEERS.coarse_s if coarse else PEERS.fine_s
        with self._lock:
            rows = self._db.execute(
                f"SELECT p.peer, p.name, s.at_s, s.seconds, s.delay_s, s.online_s, {', '.join(_WORK)}"  # noqa: S608 - constants
                " FROM peer_samples s JOIN peers p ON p.id = s.peer"
                " WHERE p.peer = ? AND s.step_s = ? AND s.at_s > ? ORDER BY s.at_s",
                (peer, step_s, int(since_s)),
            ).fetchall()
        return [
            PeerSample(peer_id, name, at_s, seconds, Work(*work), delay_s, online_s)
            for peer_id, name, at_s, seconds, delay_s, online_s, *work in rows
        ]

    def contributions(
        self, now_s: float, window_s: int, peer: str | None = None
    ) -> list[tuple[str, str | None, Work, float]]:
        """Return id, name, work and seconds online of each peer, or only of ``peer``. ``window_s``
        is a day or a month."""
        with self._lock:
            sums = ", ".join(f"SUM(s.{each})" for each in _WORK)
            rows = self._db.execute(
                f"SELECT p.peer, p.name, SUM(s.online_s), {sums} FROM peer_samples s"  # noqa: S608 - constants
                " JOIN peers p ON p.id = s.peer WHERE (:peer IS NULL OR p.peer = :peer)"
                " AND ((s.step_s = :coarse AND s.at_s > :coarse_since)"
                " OR (s.step_s = :fine AND s.at_s > :fine_since))"
                " GROUP BY s.peer ORDER BY p.peer",
                {"peer": peer, **self._steps(now_s, window_s)},
            ).fetchall()
        return [(found, name, Work(*work), online_s) for found, name, online_s, *work in rows]

    def observed_s(self, now_s: float, window_s: int) -> float:
        """Return the seconds of a window of a day or a month in which peers were sampled."""
        with self._lock:
            (seconds,) = self._db.execute(
                "SELECT SUM(longest) FROM (SELECT MAX(seconds) AS longest FROM peer_samples"
                " WHERE (step_s = :coarse AND at_s > :coarse_since) OR (step_s = :fine AND at_s > :fine_since)"
                " GROUP BY step_s, at_s)",
                self._steps(now_s, window_s),
            ).fetchone()
        return float(seconds or 0.0)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return the stored JSON of each job."""
        with self._lock:
            rows = self._db.execute("SELECT job, entry FROM jobs").fetchall()
        return {job: json.loads(entry) for job, entry in rows}

    def job_points(self, job: str) -> list[JobPoint]:
        """Return the points of a job, by round."""
        with self._lock:
            rows = self._db.execute(
                "SELECT * FROM job_points WHERE job = ? ORDER BY round", (job,)
            ).fetchall()
        return [JobPoint(*row) for row in rows]

    def events(self, limit: int, peer: str | None = None) -> list[dict[str, Any]]:
        """Return the newest events, newest first. With ``peer``: only this peer's events."""
        with self._lock:
            rows = self._db.execute(
                "SELECT event FROM events WHERE :peer IS NULL OR peer = :peer ORDER BY number DESC LIMIT :limit",
                {"peer": peer, "limit": limit},
            ).fetchall()
        return [json.loads(event) for (event,) in rows]

    def peak_sessions(self, model: str, since_s: float) -> int | None:
        """Return the most open sessions of a model in any sample since ``since_s``; None without
        samples."""
        with self._lock:
            (peak,) = self._db.execute(
                "SELECT MAX(sessions) FROM model_samples WHERE step_s = ? AND model = ? AND at_s > ?",
                (MODELS.fine_s, model, int(since_s)),
            ).fetchone()
        return None if peak is None else int(peak)

    def _steps(self, now_s: float, window_s: int) -> dict[str, int]:
        """Return the steps of peers' samples in seconds, and the times after which coarse and fine
        samples make up a window."""
        coarse_since_s, fine_since_s = now_s, now_s - window_s
        if window_s > DAY_S:
            newest = "SELECT MAX(at_s) FROM peer_samples WHERE step_s = ?"
            (until_s,) = self._db.execute(newest, (PEERS.coarse_s,)).fetchone()
            # the newest interval exists in fine samples only
            coarse_since_s, fine_since_s = now_s - window_s, max(now_s - window_s, until_s or 0)
        return {
            "coarse": PEERS.coarse_s,
            "coarse_since": int(coarse_since_s),
            "fine": PEERS.fine_s,
            "fine_since": int(fine_since_s),
        }

    # ---- within a transaction -------------------------------------------------------------------

    def _insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)  # noqa: S608 - constants

    def _add_model(self, sample: ModelSample) -> None:
        counts = sample.counts
        self._insert(
            "model_samples",
            *(MODELS.fine_s, sample.model, int(sample.at_s), sample.seconds, counts.answered),
            *(sample.peers, sample.weakest, sample.sessions, counts.failures, counts.recoveries),
            *(_encode_times(counts.first_tokens), _encode_times(counts.token_times)),
        )

    def _add_peer(self, sample: PeerSample) -> None:
        self._db.execute(
            "INSERT INTO peers (peer, name, seen_s) VALUES (?, ?, ?)"
            " ON CONFLICT (peer) DO UPDATE SET name = excluded.name, seen_s = excluded.seen_s",
            (sample.peer, sample.name, int(sample.at_s)),
        )
        (number,) = self._db.execute("SELECT id FROM peers WHERE peer = ?", (sample.peer,)).fetchone()
        self._insert(
            "peer_samples",
            *(PEERS.fine_s, number, int(sample.at_s), sample.seconds, sample.work.positions),
            *(sample.delay_s, sample.online_s, *astuple(sample.work)[1:]),
        )

    def _add_point(self, point: JobPoint) -> None:
        self._insert("job_points", *astuple(replace(point, at_s=int(point.at_s))))
        (count,) = self._db.execute("SELECT COUNT(*) FROM job_points WHERE job = ?", (point.job,)).fetchone()
        if count > MAX_JOB_POINTS:
            self._db.execute(
                "DELETE FROM job_points WHERE job = :job AND round IN (SELECT round FROM"
                " (SELECT round, ROW_NUMBER() OVER (ORDER BY round) AS place FROM job_points WHERE job = :job)"
                " WHERE place % 2 = 0)",
                {"job": point.job},
            )

    def _downsample(self, key: str, resolution: Resolution, merged: str, now_s: float) -> None:
        """Merge the fine samples of each complete interval that has no coarse sample yet.

        ``key``: "model" or "peer". ``merged``: the columns after the time, in SQL.
        """
        coarse_s = resolution.coarse_s
        self._db.execute(
            f"INSERT OR REPLACE INTO {key}_samples"  # noqa: S608 - constants
            f" SELECT :coarse, {key}, (at_s + :coarse - 1) / :coarse * :coarse AS ending, {merged}"
            f" FROM {key}_samples WHERE step_s = :fine AND at_s <= :until AND at_s >"
            f" COALESCE((SELECT MAX(at_s) FROM {key}_samples WHERE step_s = :coarse), 0) GROUP BY {key}, ending",
            {"coarse": coarse_s, "fine": resolution.fine_s, "until": int(now_s) // coarse_s * coarse_s},
        )

    def _delete_old(self, now_s: float) -> None:
        for table, resolution in (("model_samples", MODELS), ("peer_samples", PEERS)):
            for step_s, kept_s in ((resolution.fine_s, DAY_S), (resolution.coarse_s, MONTH_S)):
                self._db.execute(
                    f"DELETE FROM {table} WHERE step_s = ? AND at_s <= ?",  # noqa: S608 - constants
                    (step_s, int(now_s - kept_s)),
                )
        self._db.execute(
            "DELETE FROM peers WHERE seen_s <= ? OR id NOT IN (SELECT id FROM peers ORDER BY seen_s DESC LIMIT ?)",
            (int(now_s - MONTH_S), MAX_PEERS),
        )
        self._db.execute("DELETE FROM peer_samples WHERE peer NOT IN (SELECT id FROM peers)")
        self._db.execute(
            "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (MAX_EVENTS,)
        )
        self._db.execute(
            "DELETE FROM job_points WHERE job NOT IN"
            " (SELECT job FROM job_points GROUP BY job ORDER BY MAX(at_s) DESC LIMIT ?)",
            (MAX_JOBS,),
        )
        self._db.execute(
            "DELETE FROM jobs WHERE seen_s <= ?"
            " OR job NOT IN (SELECT job FROM jobs ORDER BY seen_s DESC LIMIT ?)",
            (int(now_s - MONTH_S), MAX_JOBS),
        )


def _open(path: Path) -> sqlite3.Connection:
    """Open the history in ``path``, and upgrade it. Raises ``sqlite3.DatabaseError`` for a file
    that is damaged, has another version, or has other columns: development copies may."""
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 4194304")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(_SCHEMA)
        elif version == 1:
            connection.executescript(_FROM_1)
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"its format is {version}, not {_VERSION}")
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
            raise sqlite3.DatabaseError(str(found[0]))
        if _columns(connection) != _expected_columns():
            raise sqlite3.DatabaseError("its tables have other columns")
        connection.create_aggregate("sum_times", 1, _SumOfTimes)  # type: ignore[arg-type]  # SQLite takes text, too
        connection.execute(f"PRAGMA max_page_count = {MAX_BYTES // _PAGE_BYTES}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _columns(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the tables and their columns in order, as the statements of this module rely on."""
    return connection.execute(
        "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c"
        " WHERE t.type = 'table' ORDER BY t.name, c.cid"
    ).fetchall()


def _expected_columns() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_SCHEMA)
        return _columns(empty)


def _model_sample(row: Sequence[Any]) -> ModelSample:
    _, model, at_s, seconds, answered, peers, weakest, sessions, failures, recoveries, first, token = row
    counts = Counts(0, answered, failures, recoveries, _decode_times(first), _decode_times(token))
    return ModelSample(model, at_s, seconds, counts, peers, weakest, sessions)


class _SumOfTimes:
    """An aggregate function of SQL: the sum of histograms, as ``_encode_times`` stores them."""

    def __init__(self) -> None:
        self._sum = Counts()

    def step(self, text: str) -> None:
        self._sum += Counts(first_tokens=_decode_times(text))

    def finalize(self) -> str:
        return _encode_times(self._sum.first_tokens)


def _encode_times(times: tuple[int, ...]) -> str:
    return json.dumps(times) if any(times) else ""


def _decode_times(text: str) -> tuple[int, ...]:
    return tuple(json.loads(text)) if text else NO_TIMES
