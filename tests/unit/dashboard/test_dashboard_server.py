"""The dashboard over HTTP, before a swarm that does not exist."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarmnet.dashboard import feed as feeds
from swarmnet.dashboard.feed import MAX_QUEUED, MAX_VIEWERS, RECENT_STATES, Feed
from swarmnet.dashboard.history import DAY_S, History
from swarmnet.dashboard.server import STATIC, create_app, serve
from swarmnet.web.middleware import AccessPolicy, ApiKeys
from swarmnet.web.server import serve_http
from swarmnet_protocols.errors import ConfigError, OutOfResources
from tests.support.dashboard.merge_patches import merged, without_nulls
from tests.support.dashboard.recorded_swarm import RecordedSwarm

START_S = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


class Site:
    """A feed that ticks only when a test calls ``tick``."""

    def __init__(self, swarm: RecordedSwarm, feed: Feed, clock: Clock) -> None:
        self.swarm = swarm
        self.feed = feed
        self._clock = clock

    async def tick(self, seconds: float = 2.0) -> None:
        self._clock.now_s += seconds
        await self.feed.tick()


def with_site(tmp_path: Path, scenario: Callable[[Site], Awaitable[None]], kind: str = "full") -> None:
    async def run() -> None:
        clock = Clock()
        swarm = RecordedSwarm(kind, clock)
        with History.open(tmp_path) as history:
            await scenario(Site(swarm, Feed(swarm, history), clock))

    asyncio.run(run())


@asynccontextmanager
async def client_of(site: Site, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(site.feed))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


def test_the_state_is_compressed_and_sent_only_if_changed(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        async with client_of(site) as client:
            first = await client.get("/api/v1/state")
            assert first.json() == json.loads(site.feed.now.text)
            assert first.headers["content-encoding"] == "gzip"
            assert gzip.decompress(site.feed.now.content.zipped).decode() == site.feed.now.text
            again = await client.get("/api/v1/state", headers={"if-none-match": first.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            plain = await client.get("/api/v1/state", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            await site.tick()
            changed = await client.get("/api/v1/state", headers={"if-none-match": first.headers["etag"]})
            assert changed.status_code == 200

    with_site(tmp_path, scenario)


def test_all_paths_of_the_page_serve_the_same_file(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        async with client_of(site) as client:
            pages = [await client.get(path) for path in ("/", "/peers/x", "/jobs/y")]
            assert len({page.text for page in pages}) == 1
            assert pages[0].headers["content-type"].startswith("text/html")
            same = await client.get("/", headers={"if-none-match": pages[0].headers["etag"]})
            assert same.status_code == 304
            script = await client.get("/static/main.js")
            assert script.headers["content-type"].startswith("text/javascript")
            assert (
                await client.get("/static/main.js", headers={"if-none-match": script.headers["etag"]})
            ).status_code == 304
            assert script.headers["content-encoding"] == "gzip"
            plain = await client.get("/static/main.js", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            assert plain.text == script.text == (STATIC / "main.js").read_text()
            for path in (
                "/static/../server.py",
                "/static/%2e%2e/server.py",
                "/static/nothing",
                "/static/README.md",
                "/api/v1/nothing",
                "/docs",
            ):
                assert (await client.get(path)).status_code == 404

    with_site(tmp_path, scenario)


def test_peers_jobs_and_history_are_served(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        site.swarm.snapshot()
        async with client_of(site) as client:
            for _ in range(20):
                await site.tick(20.0)
            peer = next(
                peer for peer, each in site.feed.now.body["peers"].items() if each["state"] == "online"
            )
            found = (await client.get(f"/api/v1/peers/{peer}")).json()
            assert found["state"] == "online"
            assert found["history"]["online"] == [1.0, 1.0]
            assert found["contribution"]["24h"]["block_positions"] > 0
            chart = (await client.get("/api/v1/history")).json()
            assert len(chart["at_s"]) == len(chart["tokens_per_s"]) in {9, 10}
            assert any(chart["token_p50_s"])
            (job,) = site.feed.now.body["jobs"]
            body = (await client.get(f"/api/v1/jobs/{job}")).json()
            assert body["curve"]["loss"]
            assert body["last_rounds"][0]["round"] == body["round"] < body["rounds"]
            shares = (await client.get("/api/v1/contributions?window=24h")).json()
            assert shares[0]["share"] >= shares[-1]["share"]

    with_site(tmp_path, scenario)


def test_what_is_known_is_served_within_two_states(tmp_path: Path) -> None:
    """The history has no sample for 30 s of a model, and for 5 minutes of a peer."""

    async def scenario(site: Site) -> None:
        async with client_of(site) as client:
            for _ in range(3):
                await site.tick(2.0)
            shares = (await client.get("/api/v1/contributions?window=24h")).json()
            assert shares[0]["block_positions"] > 0
            assert shares[0]["uptime"] == 1.0
            found = (await client.get(f"/api/v1/peers/{shares[0]['peer_id']}")).json()
            assert found["contribution"]["24h"] == {
                name: shares[0][name] for name in ("block_positions", "expert_rows", "samples")
            }
            assert found["given"]["block_positions"] >= shares[0]["block_positions"]
            assert len(found["history"]["at_s"]) == 1
            chart = (await client.get("/api/v1/history")).json()
            assert chart["tokens_per_s"][0] > 0

    with_site(tmp_path, scenario)


def test_members_are_served_to_the_owner_alone(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        async with client_of(site) as client:
            assert (await client.get("/api/v1/members")).json() is None
        lists = {"members": [{"peer_id": "a", "roles": ["host"]}], "invites": []}
        transport = httpx.ASGITransport(create_app(site.feed, lambda: lists))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/api/v1/members")).json() == lists

    with_site(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/peers/unknown", 404),
        ("/api/v1/jobs/nothing", 404),
        ("/api/v1/history?window=1y", 422),
        ("/api/v1/history?model=';DROP TABLE events", 422),
        ("/api/v1/contributions?window=", 422),
    ],
)
def test_unknown_peers_jobs_and_windows_are_refused(tmp_path: Path, path: str, status: int) -> None:
    async def scenario(site: Site) -> None:
        async with client_of(site) as client:
            assert (await client.get(path)).status_code == status

    with_site(tmp_path, scenario, "empty")


def test_viewers_share_one_patch_and_slow_ones_get_the_whole_state(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        async with site.feed.watching() as quick, site.feed.watching() as slow:
            assert (await quick.next(site.feed))[0] == (await slow.next(site.feed))[0] == "state"
            for _ in range(MAX_QUEUED + 1):
                await site.tick()
                name, patch = await quick.next(site.feed)
                assert name == "patch"
                assert json.loads(patch)["swarm"] == {"now_s": site.feed.now_s}
            assert await slow.next(site.feed) == ("state", site.feed.now.text)
            await site.tick()
            (_, one), (_, other) = await quick.next(site.feed), await slow.next(site.feed)
            assert one is other, "it is encoded once"

    with_site(tmp_path, scenario)


def test_a_viewer_with_a_recent_state_gets_a_patch(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        old = site.feed.now
        async with site.feed.watching(old.etag) as viewer:
            assert await viewer.next(site.feed) == ("patch", "{}")
        newcomer = site.swarm.add("newcomer")
        for _ in range(RECENT_STATES):
            await site.tick()
        async with site.feed.watching(old.etag) as viewer:
            name, patch = await viewer.next(site.feed)
            assert name == "patch"
            now = merged(old.body, json.loads(patch))
            assert without_nulls(now) == without_nulls(json.loads(site.feed.now.text))
            assert newcomer in json.loads(patch)["peers"]
            await site.tick()
            assert (await viewer.next(site.feed))[0] == "patch"
        async with site.feed.watching(old.etag) as viewer:
            assert await viewer.next(site.feed) == ("state", site.feed.now.text)

    with_site(tmp_path, scenario)


def test_the_number_of_viewers_is_limited(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        stack = [site.feed.watching() for _ in range(MAX_VIEWERS)]
        for each in stack:
            await each.__aenter__()
        with pytest.raises(OutOfResources):
            await site.feed.watching().__aenter__()
        async with client_of(site) as client:
            refused = await client.get("/api/v1/events")
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert f"{MAX_VIEWERS} viewers" in refused.json()["detail"]
            assert "/api/v1/state" in refused.json()["detail"]
        for each in stack:
            await each.__aexit__(None, None, None)
        assert not site.feed._viewers

    with_site(tmp_path, scenario)


def test_events_are_sent_at_once_and_open_streams_delay_no_shutdown(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        async with (
            asyncio.timeout(50),
            serve_http(create_app(site.feed), "127.0.0.1", 0) as endpoint,
            httpx.AsyncClient() as client,
            client.stream("GET", f"{endpoint.url}/api/v1/events?have=nothing") as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            events = _events(stream)
            name, state = await anext(events)
            assert (name, state["swarm"]["name"]) == ("state", "neighbours")
            newcomer = site.swarm.add("<script>")
            await site.tick()
            name, patch = await anext(events)
            assert name == "patch"
            assert patch["peers"][newcomer]["name"] == "<script>"
        assert not site.feed._viewers

    with_site(tmp_path, scenario)


async def _events(stream: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in stream.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_other_machines_need_a_key_and_other_origins_are_refused(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(ConfigError, match="without a key"):
            async with serve(site.feed, "0.0.0.0", 0, AccessPolicy()):
                pass
        access = AccessPolicy(ApiKeys({"dashboard": "correct-horse"}), basic_auth=True)
        async with (
            serve(site.feed, "127.0.0.1", 0, access) as served,
            httpx.AsyncClient() as client,
        ):
            state = f"{served.url}/api/v1/state"
            assert (await client.get(state)).status_code == 401
            assert (await client.get(state)).headers["www-authenticate"].startswith("Basic")
            assert (await client.get(state, auth=("", "correct-horse"))).status_code == 200
            key = {"authorization": "Bearer correct-horse"}
            answer = await client.get(state, headers=key)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith("default-src 'self'")
            assert (
                await client.get(state, headers=key | {"origin": "https://evil.example"})
            ).status_code == 403
            assert (await client.get(state, headers=key | {"host": "evil.example"})).status_code == 421

    with_site(tmp_path, scenario)


def test_a_tick_that_fails_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "TICK_S", 0.0)

    class FailingSource:
        def __init__(self, swarm: RecordedSwarm) -> None:
            self.swarm = swarm
            self.snapshots = 0
            self.recovered = asyncio.Event()

        def snapshot(self) -> Any:
            self.snapshots += 1
            if self.snapshots == 2:
                raise RuntimeError("no snapshot")
            if self.snapshots > 2:
                self.recovered.set()
            return self.swarm.snapshot()

    async def run() -> None:
        source = FailingSource(RecordedSwarm("empty", Clock()))
        with History.open(tmp_path) as history:
            async with Feed(source, history).running(), asyncio.timeout(50):
                await source.recovered.wait()

    asyncio.run(run())
    assert "cannot update the dashboard" in caplog.text


def test_a_restart_continues_events_and_history(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.tick(20.0)
        newcomer = site.swarm.add("newcomer")
        await site.tick(40.0)
        with History.open(tmp_path) as again:
            feed = Feed(RecordedSwarm("empty", Clock()), again)
            assert newcomer in [event["peer_id"] for event in feed.now.body["events"]]
            assert len(again.model_samples("", START_S - DAY_S, coarse=False)) == 1

    with_site(tmp_path, scenario)
