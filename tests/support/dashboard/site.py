"""Dashboards of recorded swarms, served in this process, and a browser that looks at them."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, Page, sync_playwright

from swarmnet.dashboard import server
from swarmnet.dashboard.feed import Feed
from swarmnet.dashboard.history import History
from swarmnet.web.middleware import AccessPolicy
from tests.support.dashboard.recorded_swarm import RecordedSwarm, recorded_history
from tests.support.network.loop_thread import LoopThread

T = TypeVar("T")
NOW_S = 1_790_000_000.0
CHROMIUM = "/usr/bin/chromium"
OPTIONS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--no-first-run",
)


@dataclass
class Site:
    """One dashboard. Its swarm changes only when a test calls ``move``."""

    url: str
    swarm: RecordedSwarm
    feed: Feed
    now_s: list[float]
    _sites: "Sites"

    def move(self, seconds: float) -> None:
        """Advance the swarm's clock, and send the changes to the viewers."""
        self.now_s[0] += seconds
        self._sites.run(self.feed.tick())

    @contextmanager
    def full_of_viewers(self) -> Iterator[None]:
        """Connect ``MAX_VIEWERS`` viewers for the duration of the context."""
        viewers = AsyncExitStack()

        async def connect() -> None:
            while not self.feed.is_full:
                await viewers.enter_async_context(self.feed.watching())

        self._sites.run(connect())
        try:
            yield
        finally:
            self._sites.run(viewers.aclose())

    @property
    def state(self) -> Any:
        """The JSON that the page shows."""
        return self.feed.now.body


MEMBERS = {
    "members": [
        {
            "peer_id": "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq",
            "client": None,
            "label": "<img src=x onerror=alert(1)>",
            "roles": ["client", "host"],
            "state": "member",
            "until": "2026-11-27T12:00:00+00:00",
            "invite": "00" * 16,
            "last_seen": "2026-11-27T12:00:00+00:00",
        }
    ],
    "invites": [
        {
            "id": "ab" * 16,
            "label": "our lab",
            "roles": ["host"],
            "uses": 5,
            "used": 2,
            "peer_id": None,
            "expires": "2026-12-04T12:00:00+00:00",
        }
    ],
}
"""What the owner of the swarm ``full`` sees of its members. The label is hostile."""


class Sites:
    """Dashboards by the kind of their swarm, started at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sites: dict[str, Site] = {}
        self._loop = LoopThread(asyncio.new_event_loop)
        self._open = AsyncExitStack()

    def __enter__(self) -> "Sites":
        self._loop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._open.aclose())
        finally:
            self._loop.__exit__()

    def __getitem__(self, kind: str) -> Site:
        if kind not in self._sites:
            self._sites[kind] = self.run(self._started(kind))
        return self._sites[kind]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the event loop of the dashboards."""
        return self._loop.run(coroutine)

    async def _started(self, kind: str) -> Site:
        now_s = [NOW_S]
        swarm = RecordedSwarm(kind, lambda: now_s[0])
        folder = self._folder / kind
        folder.mkdir()
        opened = recorded_history(swarm, folder, NOW_S) if kind == "full" else History.open(folder)
        with ExitStack() as stack:
            history = stack.enter_context(opened)
            feed = await self._open.enter_async_context(Feed(swarm, history).running())
            lists = (lambda: MEMBERS) if kind == "full" else None
            endpoint = await self._open.enter_async_context(
                server.serve(feed, "127.0.0.1", 0, AccessPolicy(), lists)
            )
            self._open.push(stack.pop_all())
        return Site(endpoint.url, swarm, feed, now_s, self)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium without background traffic."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def looking(browser: Browser, **options: Any) -> Iterator[Page]:
    """A fresh page. On exit, fails if the console has an error or a request went to another
    host."""
    with browser.new_context(**{"timezone_id": "UTC", "locale": "en-GB", **options}) as context:
        page = context.new_page()
        wrong: list[str] = []
        hosts: set[str] = set()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        yield page
        assert not wrong, wrong
        assert len(hosts) == 1, hosts


def show(page: Page, url: str) -> Page:
    """Open a page of the dashboard and wait until the swarm is on it."""
    page.goto(url)
    page.wait_for_selector("main[aria-busy=false]")
    return page
