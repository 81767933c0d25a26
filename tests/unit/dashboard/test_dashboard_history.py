"""The dashboard's history: its contents, its retention, and its behaviour with a damaged file or a
full disk."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from swarmnet.dashboard import charts, history
from swarmnet.dashboard.history import DAY_S, FILE_NAME, MONTH_S, History
from swarmnet.dashboard.observing.counts import NO_TIMES, Counts, Work
from swarmnet.dashboard.observing.observations import Snapshot, SwarmInfo
from swarmnet.dashboard.sampling import MODELS, PEERS, HistorySampler, JobPoint, ModelSample, PeerSample
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.net import PeerId

NOW_S = 1_800_000_000


def times(bucket: int, count: int) -> tuple[int, ...]:
    return tuple(count if index == bucket else 0 for index in range(len(NO_TIMES)))


def sample(at_s: float, model: str = "m", **fields: Any) -> ModelSample:
    known: dict[str, Any] = {
        "seconds": 30.0,
        "counts": Counts(answered=60),
        "peers": 3,
        "weakest": 1,
        "sessions": 2,
    }
    return ModelSample(model, at_s, **known | fields)


def of_peer(at_s: float, peer: str = "p", **fields: Any) -> PeerSample:
    known: dict[str, Any] = {
        "name": "a name",
        "seconds": 300.0,
        "work": Work(600, 6000),
        "delay_s": 0.02,
        "online_s": 300.0,
    }
    return PeerSample(PeerId(peer), at_s=at_s, **known | fields)


def event(number: int, peer: str | None = None) -> dict[str, Any]:
    return {"at_s": number, "kind": "joined", "peer_id": peer, "model": None, "text": str(number)}


def test_the_history_survives_a_restart(tmp_path: Path) -> None:
    with History.open(tmp_path) as before:
        before.add(
            models=[sample(NOW_S, counts=Counts(answered=60, token_times=times(4, 9)))],
            peers=[of_peer(NOW_S)],
            jobs=[JobPoint("j", NOW_S, 3, 100, 1000, 2.5, None, 4)],
            events=[event(1), event(2, "p")],
        )
    with History.open(tmp_path) as after:
        chart = charts.model_chart(after, "m", "24h", NOW_S)
        assert (chart["tokens_per_s"], chart["peers"], chart["weakest"]) == ([2.0], [3], [1])
        assert chart["token_p50_s"][0] == pytest.approx(0.075)
        assert chart["first_token_p50_s"] == [None]
        assert charts.peer_chart(after, "p", NOW_S)["online"] == [1.0]
        assert charts.job_chart(after.job_points("j"))["loss"] == [2.5]
        assert [each["text"] for each in after.events(10)] == ["2", "1"]
        assert [each["text"] for each in after.events(10, "p")] == ["2"]


def test_a_month_is_kept_coarsely_and_a_day_finely(tmp_path: Path) -> None:
    """After two days, the samples of the first day are downsampled, with the same sums and
    quantiles."""
    with History.open(tmp_path) as kept:
        start_s = NOW_S // MODELS.coarse_s * MODELS.coarse_s - 2 * DAY_S
        for at_s in range(start_s + MODELS.fine_s, start_s + 2 * DAY_S + 1, MODELS.fine_s):
            failures = int(at_s == start_s + 9000)
            kept.add(
                models=[sample(at_s, counts=Counts(answered=60, failures=failures, first_tokens=times(5, 2)))]
            )
            if at_s % 7200 == 0:
                kept.downsample(at_s)
        now_s = start_s + 2 * DAY_S
        kept.downsample(now_s)
        fine = kept.model_samples("m", 0, coarse=False)
        coarse = kept.model_samples("m", 0, coarse=True)
        assert len(fine) == DAY_S // MODELS.fine_s
        assert len(coarse) == 2 * DAY_S // MODELS.coarse_s
        assert sum(row.counts.answered for row in coarse) == 60 * 2 * DAY_S // MODELS.fine_s
        assert sum(row.counts.failures for row in coarse) == 1
        assert set(charts.model_chart(kept, "m", "30d", now_s)["tokens_per_s"]) == {2.0}
        kept.downsample(now_s + MONTH_S + MODELS.coarse_s)
        assert not kept.model_samples("m", 0, coarse=True)


def test_contributions_of_a_month_are_those_of_its_days(tmp_path: Path) -> None:
    start_s = NOW_S // PEERS.coarse_s * PEERS.coarse_s
    with History.open(tmp_path) as kept:
        for at_s in range(start_s + PEERS.fine_s, start_s + 2 * DAY_S + PEERS.fine_s + 1, PEERS.fine_s):
            kept.add(peers=[of_peer(at_s), of_peer(at_s, "q", work=Work(1, 10, 3), online_s=150.0)])
            if at_s % PEERS.coarse_s == 0:
                kept.downsample(at_s)
        now_s = start_s + 2 * DAY_S + PEERS.fine_s
        shares = charts.contributions(kept, now_s, "30d")
        assert {each["peer_id"] for each in shares} == {"p", "q"}
        shares.sort(key=lambda each: str(each["peer_id"]))
        assert [each["share"] for each in shares] == [pytest.approx(600 / 601, abs=1e-4), 1.0], "of q: rows"
        assert shares[0]["block_positions"] == 6000 * (2 * DAY_S // PEERS.fine_s + 1)
        assert [each["uptime"] for each in shares] == [1.0, 0.5], "of the time that was observed"
        of_q = charts.contribution(kept, "q", now_s)
        assert of_q == {
            "24h": {"block_positions": 2880, "expert_rows": 3 * 288, "samples": 0},
            "30d": {"block_positions": 5770, "expert_rows": 3 * 577, "samples": 0},
            "uptime_24h": 0.5,
        }


def test_contributions_of_a_month_include_the_newest_samples(tmp_path: Path) -> None:
    start_s = NOW_S // PEERS.coarse_s * PEERS.coarse_s
    with History.open(tmp_path) as kept:
        for at_s in range(start_s + PEERS.fine_s, start_s + 2 * PEERS.coarse_s + 1, PEERS.fine_s):
            kept.add(peers=[of_peer(at_s)])
        now_s = start_s + 2 * PEERS.coarse_s + PEERS.fine_s
        before = charts.contributions(kept, now_s, "30d")
        kept.downsample(now_s)
        assert before[0]["block_positions"] == 6000 * 2 * PEERS.coarse_s // PEERS.fine_s
        assert charts.contributions(kept, now_s, "30d") == before


def test_jobs_survive_a_restart_for_thirty_days(tmp_path: Path) -> None:
    with History.open(tmp_path) as before:
        before.add(job_entries={"j": {"round": 1}}, now_s=NOW_S)
        before.add(job_entries={"j": {"round": 2}}, now_s=NOW_S + 1)
    with History.open(tmp_path) as after:
        assert after.jobs() == {"j": {"round": 2}}
        after.downsample(NOW_S + MONTH_S - 1)
        assert after.jobs()
        after.downsample(NOW_S + MONTH_S + 1)
        assert not after.jobs()


def test_a_history_of_the_version_before_is_kept(tmp_path: Path) -> None:
    with History.open(tmp_path) as kept:
        kept.add(models=[sample(NOW_S)], peers=[of_peer(NOW_S)])
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    for column in ("block_positions", "rows", "samples"):
        connection.execute(f"ALTER TABLE peer_samples DROP COLUMN {column}")
    connection.executescript("DROP TABLE jobs; PRAGMA user_version = 1")
    connection.close()
    with History.open(tmp_path) as kept:
        assert len(kept.model_samples("m", 0, coarse=False)) == 1
        assert kept.peer_samples("p", 0, coarse=False)[0].work == Work(600)
        kept.add(peers=[of_peer(NOW_S + 300)], job_entries={"j": {}}, now_s=NOW_S)
        assert kept.contributions(NOW_S + 300, DAY_S)[0][2] == Work(1200, 6000)
        assert kept.jobs() == {"j": {}}


def test_a_gap_in_the_samples_is_a_gap_in_the_chart(tmp_path: Path) -> None:
    with History.open(tmp_path) as kept:
        kept.add(models=[sample(at_s) for at_s in (NOW_S - 300, NOW_S - 270, NOW_S - 30)])
        chart = charts.model_chart(kept, "m", "24h", NOW_S)
        assert chart["at_s"] == [NOW_S - 300, NOW_S - 270, NOW_S - 240, NOW_S - 30]
        assert chart["tokens_per_s"] == [2.0, 2.0, None, 2.0]


@pytest.mark.parametrize("damage", ["garbage", "torn", "other version", "other columns"])
def test_a_damaged_file_is_renamed_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    with History.open(tmp_path) as kept:
        kept.add(models=[sample(NOW_S + number, f"{number}") for number in range(2000)])
    if damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "torn":
        data = path.read_bytes()
        path.write_bytes(data[:8192] + bytes(len(data) - 8192))
    else:
        drop = "ALTER TABLE peer_samples DROP COLUMN samples"
        connection = sqlite3.connect(path)
        connection.execute(drop if damage == "other columns" else "PRAGMA user_version = 99")
        connection.close()
    with History.open(tmp_path) as fresh:
        assert fresh.model_samples("1", 0, coarse=False) == []
        fresh.add(models=[sample(NOW_S)])
        assert len(fresh.model_samples("m", 0, coarse=False)) == 1
    assert path.with_suffix(".damaged").exists()
    assert "cannot use the history" in caplog.text


def test_a_full_history_drops_new_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 256 << 10)
    with History.open(tmp_path) as kept:
        for number in range(40):
            kept.add(models=[sample(NOW_S + each, f"{number}") for each in range(500)])
        assert "cannot store samples" in caplog.text
        assert kept.model_samples("0", 0, coarse=False), "earlier samples are kept"
    assert (tmp_path / FILE_NAME).stat().st_size <= 256 << 10


def test_events_peers_and_jobs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_EVENTS", 10)
    monkeypatch.setattr(history, "MAX_PEERS", 5)
    monkeypatch.setattr(history, "MAX_JOBS", 2)
    monkeypatch.setattr(history, "MAX_JOB_POINTS", 8)
    with History.open(tmp_path) as kept:
        kept.add(
            events=[event(number) for number in range(50)],
            peers=[of_peer(NOW_S + number, f"p{number}") for number in range(20)],
            job_entries={str(number): {} for number in range(5)},
            now_s=NOW_S,
            jobs=[JobPoint(job, NOW_S, number, 1, 1, 1.0, None, 1) for job in "abc" for number in range(30)],
        )
        kept.downsample(NOW_S + 50)
        assert len(kept.events(100)) == 10
        assert len(kept.jobs()) == 2
        assert len(kept.contributions(NOW_S + 50, DAY_S)) == 5
        assert sum(bool(kept.job_points(job)) for job in "abc") == 2
        assert all(len(kept.job_points(job)) <= 9 for job in "abc")
        assert kept.job_points("a")[-1].round == 29 if kept.job_points("a") else True


def test_the_history_gives_the_peak_of_sessions_of_a_day(tmp_path: Path) -> None:
    with History.open(tmp_path) as kept:
        assert kept.peak_sessions("m", 0) is None
        kept.add(
            models=[sample(NOW_S, sessions=3), sample(NOW_S + 30, sessions=9), sample(NOW_S + 60, sessions=1)]
        )
        assert kept.peak_sessions("m", NOW_S - DAY_S) == 9


def test_a_sample_has_the_most_sessions_since_the_one_before() -> None:
    model = CatalogModel(bytes(32), "m", 4)
    about = SwarmInfo("lab", "id", "open", PeerId("observer"))
    sampler = HistorySampler()

    def at(now_s: float, sessions: int) -> list[int]:
        entry = {"sessions": sessions, "peers": 1, "weakest": {"replicas": 1}}
        body = {"models": {model.manifest.hex(): entry}, "peers": {}}
        snapshot = Snapshot(now_s, NOW_S, about, models=(model,))
        return [sample.sessions for sample in sampler.models(snapshot, body)]

    assert [at(NOW_S + 10 * tick, sessions) for tick, sessions in enumerate((0, 3, 0, 0, 1, 0, 1))] == [
        *([], [], [], [3, 3]),
        *([], [], [1, 1]),
    ]
