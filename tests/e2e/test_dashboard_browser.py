"""The dashboard in a real browser: accessible, usable by keyboard, and equal to what the server
sends."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.dashboard.pictures import portray, violations
from tests.support.dashboard.recorded_peers import SCRIPTS
from tests.support.dashboard.site import Site, Sites, looking, show

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    with Sites(tmp_path_factory.mktemp("dashboards")) as sites:
        yield sites


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with looking(browser) as page:
        yield page


def pages_of(site: Site) -> list[str]:
    peers, jobs = list(site.state["peers"]), list(site.state["jobs"])
    return [
        site.url,
        f"{site.url}/peers/{(peers or ['unknown'])[0]}",
        f"{site.url}/jobs/{(jobs or ['none'])[0]}",
    ]


@pytest.mark.parametrize("kind", ["full", "broken", "empty", "experts", "missing"])
def test_axe_finds_no_violation_and_no_page_scrolls_sideways(
    browser: Browser, sites: Sites, pictures: Path, kind: str
) -> None:
    with looking(browser, reduced_motion="reduce") as page:
        for number, url in enumerate(pages_of(sites[kind])[: 1 if kind == "empty" else 3]):
            show(page, url)
            portray(page, pictures, f"{kind}-{('swarm', 'peer', 'job')[number]}")


def test_colours_follow_the_system_until_the_reader_chooses(page: Page, sites: Sites) -> None:
    light, dark = "rgb(246, 246, 243)", "rgb(13, 16, 19)"
    body = page.locator("body")
    page.emulate_media(color_scheme="dark")
    show(page, sites["empty"].url)
    expect(body).to_have_css("background-color", dark)
    page.emulate_media(color_scheme="light")
    expect(body).to_have_css("background-color", light)
    page.get_by_label("Colours: as the system").click()
    page.emulate_media(color_scheme="dark")
    expect(body).to_have_css("background-color", light)
    page.get_by_label("Colours: light").click()
    page.emulate_media(color_scheme="light")
    expect(body).to_have_css("background-color", dark)
    page.reload()
    expect(body).to_have_css("background-color", dark)
    page.get_by_label("Colours: dark").click()
    expect(body).to_have_css("background-color", light)


def test_the_contrast_check_finds_a_violation(page: Page, sites: Sites) -> None:
    show(page, sites["empty"].url)
    page.evaluate("document.documentElement.style.setProperty('--ink-2', '#b8b8b8')")
    assert any("color-contrast" in flaw for flaw in violations(page, "color-contrast"))


def test_every_control_is_usable_by_keyboard(page: Page, sites: Sites) -> None:
    show(page, sites["full"].url)

    def focused() -> str:
        return str(
            page.evaluate(
                "(() => { const at = document.activeElement;"
                " return at.getAttribute('aria-label') || at.placeholder || at.textContent.trim() })()"
            )
        )

    page.keyboard.press("Tab")
    assert focused() == "Skip to the content"
    page.keyboard.press("Enter")
    stops = []
    for _ in range(70):
        page.keyboard.press("Tab")
        stops.append(focused())
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{stops[-1]} shows no focus"
    for wanted in (
        "Pause the moving dots",
        "24 h",
        "Copy the command",
        "Filter by state",
        "Find peers",
        "Positions/s",
        "Table of peers",
    ):
        assert wanted in stops, f"{wanted} is not among {stops}"
    assert any(stop.startswith("Hosts of each block") for stop in stops)

    bar = page.get_by_role("slider")
    bar.focus()
    page.keyboard.press("End")
    expect(bar).to_have_attribute("aria-valuenow", "125")
    page.keyboard.press("ArrowLeft")
    assert (bar.get_attribute("aria-valuetext") or "").startswith("Block 124 · ")
    page.keyboard.press("Enter")
    hosts = sum(
        1
        for peer in sites["full"].state["peers"].values()
        if peer["blocks"] and peer["blocks"][0] <= 124 < peer["blocks"][1]
    )
    expect(page.locator("#peers tbody:nth-of-type(2) tr")).to_have_count(hosts)
    page.get_by_role("button", name="Only peers with block 124. Show all peers").press("Enter")

    speed = page.get_by_role("columnheader", name="Positions/s")
    speed.get_by_role("button").press("Enter")
    expect(speed).to_have_attribute("aria-sort", "descending")
    speeds = [float(text) for text in page.locator("td.c-speed").all_inner_texts() if text != "–"]
    assert speeds == sorted(speeds, reverse=True)
    page.locator("#peers tbody a").first.focus()
    rows = page.locator("#peers tbody:nth-of-type(2) tr")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('tr').dataset.key") == rows.nth(1).get_attribute(
        "data-key"
    )
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.closest('tr').ariaRowIndex") == rows.last.get_attribute(
        "aria-rowindex"
    )


def test_the_map_of_experts_is_read_by_keyboard_and_pointer(page: Page, sites: Sites) -> None:
    site = sites["missing"]
    show(page, site.url)
    expect(page.locator(".health h1")).to_have_text("Experts are missing: the model cannot answer")
    spot = page.locator(".experts-map")
    detail = page.locator(".experts .coverage-detail")
    expect(detail).to_contain_text("experts missing, as blocks:experts")
    spot.focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    expect(detail).to_contain_text("Block 4, expert 1 · missing: hosts wait for a peer with it")
    assert spot.get_attribute("aria-valuetext") == detail.text_content()
    page.keyboard.press("PageDown")
    expect(detail).to_contain_text("Block 4, expert 17 · 1 replica · load:")
    page.keyboard.press("Enter")
    expect(page.locator(".chip-button")).to_have_text("Block 4 ✕")
    painted = "document.querySelector('.experts-map canvas').toDataURL()"
    replicas = page.evaluate(painted)
    page.get_by_role("button", name="Load").click()
    assert page.evaluate(painted) != replicas
    site.move(2.0)
    expect(page.get_by_text("--experts")).to_be_visible()


def test_the_owner_sees_members_roles_and_open_invites(browser: Browser, sites: Sites) -> None:
    with looking(browser) as page:
        show(page, sites["full"].url)
        lines = page.locator("#members li")
        expect(lines).to_have_count(2)
        expect(lines.first).to_contain_text("<img src=x onerror=alert(1)>")
        expect(lines.first).to_contain_text("member · client, host")
        expect(lines.last).to_contain_text("our lab")
        expect(lines.last).to_contain_text("host · 3 uses left")
    with looking(browser) as page:
        show(page, sites["broken"].url)
        expect(page.locator("#members")).to_be_hidden()


def test_a_job_that_is_done_stays_and_its_workers_are_not_lost(page: Page, tmp_path: Path) -> None:
    with Sites(tmp_path) as sites:
        site = sites["broken"]
        site.move(2)
        show(page, site.url)
        expect(page.locator("#jobs .jobs").first).to_contain_text("diloco · training")
        site.swarm.done_s = site.now_s[0] + 2
        site.move(2)
        site.move(130)
        expect(page.locator("#jobs summary")).to_have_text("1 job without workers, kept for 30 days")
        page.locator("#jobs summary").press("Enter")
        ended = page.locator("#jobs details li")
        expect(ended).to_contain_text("diloco · finished · 2\u202fmin ago")
        expect(ended).to_contain_text("round 1\u202f000 of 1\u202f000")
        row = page.locator("#peers tr", has_text="worker")
        expect(row.locator(".state")).to_have_text("✓finished its job")
        ran = row.locator(".c-uptime").inner_text()
        expect(page.locator(".events li", has_text="finished its training job")).to_be_attached()
        ended.get_by_role("link").click()
        expect(page.locator(".detail-head .chip")).to_have_text("finished")
        expect(page.get_by_text("Last worker left")).to_be_visible()
        page.go_back()
        site.move(120)
        expect(page.locator("#peers tr", has_text="worker").locator(".c-uptime")).to_have_text(ran)


def test_charts_appear_with_their_first_measurement(page: Page, tmp_path: Path) -> None:
    """Nothing of the page is empty: what is known is shown at once, the rest in one line."""
    with Sites(tmp_path) as sites:
        site = sites["broken"]
        show(page, site.url)
        note = page.locator("#history .chart-note")
        expect(note).to_contain_text("tokens per second, peers, the time to the first token")
        expect(page.locator("#history figure:visible")).to_have_count(0)
        site.move(2)
        site.move(2)
        page.reload()
        expect(page.locator("#history figure:visible")).to_have_count(2)
        expect(note).to_contain_text("Nothing measured in this time: the time to the first token")
        expect(page.locator("#history .readout").nth(1)).to_contain_text("peers")
        expect(page.locator("#history .readout .key")).not_to_have_count(0)


def test_every_number_has_an_explanation(page: Page, sites: Sites) -> None:
    show(page, sites["full"].url)
    fold = page.get_by_text("What the numbers mean")
    fold.press("Enter")
    meanings = page.locator(".meanings dt")
    for name in page.locator(".figures dt").all_inner_texts():
        expect(meanings.get_by_text(name, exact=True)).to_be_visible()
    for name in ("Positions/s", "Delay", "Queue", "Free cache", "Uptime"):
        expect(page.get_by_role("columnheader", name=name)).to_have_attribute("title", re.compile("."))
        expect(meanings.get_by_text(name, exact=True)).to_be_visible()


def test_names_with_scripts_stay_text(page: Page, sites: Sites) -> None:
    site = sites["full"]
    hostile = next(peer for peer, entry in site.state["peers"].items() if entry["name"] == SCRIPTS[0])
    for url in (site.url, f"{site.url}/peers/{hostile}", pages_of(site)[2]):
        show(page, url)
        expect(page.get_by_text(SCRIPTS[0]).first).to_be_attached()
        assert page.evaluate("document.images.length") == 0
        assert page.title() not in {"owned", "1"}
    expect(page.locator("h1:visible")).to_have_count(1)


def test_changes_of_the_swarm_appear_on_the_page(page: Page, sites: Sites) -> None:
    site = sites["broken"]
    show(page, site.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("Incomplete: the model cannot answer")
    (model,) = [model for model in site.state["models"].values() if model["blocks"] == 126]
    expect(page.locator(".health-text")).to_contain_text(
        f"No host serves blocks {model['weakest']['block']}:"
    )
    expect(page.locator(".health-text")).to_contain_text(f"({model['replicas'].count(0)} of 126)")
    expect(page.locator("#next code")).to_contain_text("--blocks")
    site.move(3)
    site.swarm.add("newcomer")
    site.move(3)
    expect(page.locator("#peers").get_by_text("newcomer")).to_be_attached()
    expect(page.locator(".events li", has_text="newcomer joined")).to_be_attached()
    expect(page.locator("#announcer")).not_to_be_empty()  # this event, or one just before it
    site.swarm.kill(next(peer for peer, host in site.swarm.hosts.items() if host.name == "newcomer"))
    site.move(3)
    row = page.locator("#peers tr", has_text="newcomer")
    expect(row.locator(".state")).to_have_text("✕lost")


def test_a_lost_connection_is_shown_and_restored(page: Page, sites: Sites) -> None:
    page.clock.install()
    page.add_init_script(
        "window.links = []; window.EventSource = class extends EventTarget {"
        " constructor() { super(); document.documentElement.dataset.links = window.links.push(this); } close() { this.closed = true; }"
        " say(name, data) { this.dispatchEvent(Object.assign(new Event(name), { data })); } };"
    )
    site = sites["full"]
    show(page, site.url)
    say = "([name, data]) => window.links.at(-1).say(name, data)"
    page.evaluate(say, ["state", site.feed.now.text])
    expect(page.locator("#link-text")).to_have_text("Live")
    for outage, lose in enumerate(("() => window.links.at(-1).say('error')", None), start=1):
        if lose:
            page.evaluate(lose)
        else:
            page.clock.fast_forward(16_000)  # no event arrives, as with a cut cable
        expect(page.locator("#banner")).to_contain_text("The dashboard has not answered since")
        expect(page.locator("#link-text")).to_have_text("Not connected")
        page.clock.fast_forward(2_000)
        expect(page.locator("html")).to_have_attribute("data-links", str(outage + 1))
        page.evaluate(say, ["state", site.feed.now.text])
        expect(page.locator("#banner")).to_be_hidden()
    page.evaluate(say, ["patch", '{"swarm": {"name": "renamed"}}'])
    expect(page.locator("#swarm-name")).to_have_text("renamed")


def test_a_page_beyond_the_limit_of_viewers_polls(browser: Browser, sites: Sites) -> None:
    site = sites["broken"]
    with (
        browser.new_context() as context
    ):  # not ``looking``, which fails on console errors: the browser logs a refused stream as an error
        page = context.new_page()
        page.clock.install()
        with site.full_of_viewers():
            show(page, site.url)
            expect(page.locator("#banner")).to_contain_text(
                "The dashboard has reached its limit of live viewers"
            )
            expect(page.locator("#link-text")).to_have_text("Every 10 s")
            assert violations(page, "color-contrast") == []
            site.swarm.add("latecomer")
            site.move(3)
            page.clock.fast_forward(13_000)
            expect(page.locator("#peers tr", has_text="latecomer")).to_be_attached()
            expect(page.locator("#link-text")).to_have_text("Every 10 s")
        page.clock.fast_forward(13_000)
        expect(page.locator("#link-text")).to_have_text("Live")
        expect(page.locator("#banner")).to_be_hidden()


def test_a_table_of_five_hundred_peers_holds_only_the_rows_on_screen(page: Page, sites: Sites) -> None:
    show(page, sites["large"].url)
    rows = page.locator("#peers tbody:nth-of-type(2) tr")
    assert rows.count() < 60
    total = int(page.get_by_role("table", name="Peers of the swarm").get_attribute("aria-rowcount") or 0)
    assert total > 450
    page.locator("#peers .table-scroll").evaluate("node => { node.scrollTop = node.scrollHeight }")
    expect(rows.last).to_have_attribute("aria-rowindex", str(total))
    page.get_by_placeholder("Name, id").fill("küche")
    expect(page.locator("#peers .peer-name").first).to_have_text("Küche")
    assert set(page.locator("#peers .peer-name").all_inner_texts()) == {"Küche"}


def test_tokens_move_unless_the_reader_prefers_reduced_motion(browser: Browser, sites: Sites) -> None:
    pixels = "document.querySelector('.chains canvas').toDataURL()"
    frames = "new Promise(done => { let n = 0; (function next() { n++ < 12 ? requestAnimationFrame(next) : done() })() })"
    with looking(browser, reduced_motion="reduce", viewport={"width": 700, "height": 900}) as page:
        show(page, sites["full"].url)
        page.locator(".chains").scroll_into_view_if_needed()
        before = page.evaluate(pixels)
        page.evaluate(frames)
        assert page.evaluate(pixels) == before
        button = page.locator("#blocks .quiet-button")
        button.click()
        expect(button).to_have_text("‖ Pause")
        # The dots move only once the browser has reported the chart on the screen.
        page.wait_for_function(f"before => {pixels} !== before", arg=before)
        button.click()
        expect(button).to_have_text("▶ Play")


# RFC 7386, appendix A, as far as patches are objects
MERGES = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


def test_the_modules_of_the_page_compute_what_they_promise(page: Page, sites: Sites) -> None:
    page.goto(sites["empty"].url)

    def call(module: str, function: str, *arguments: Any) -> Any:
        code = "async ([module, name, given]) => (await import(`/static/${module}.js`))[name](...given)"
        return page.evaluate(code, [module, function, list(arguments)])

    for target, patch, result in MERGES:
        assert call("state", "applyPatch", target, patch) == result
    owned = """async () => (await import("/static/state.js")).applyPatch({}, JSON.parse('{"__proto__": {"owned": 1}}')).owned ?? null"""
    assert page.evaluate(owned) is None
    assert call("state", "retryDelay", 1, 0) == 750
    assert call("state", "retryDelay", 60, 0.999) <= 25_000
    assert [call("format", "number", n) for n in (0, 0.4251, 9.306, 41.23, 512.4, 18_432, 3_200_000, None)] == [
        "0", "0.43", "9.31", "41.2", "512", "18.4\u202fk", "3.20\u202fM", "–",
    ]  # fmt: skip
    assert [call("format", "seconds", n) for n in (0, 0.0004, 0.0842, 1.31, 12.34, 600)] == [
        "0\u202fs", "400\u202fµs", "84\u202fms", "1.31\u202fs", "12.3\u202fs", "10\u202fmin",
    ]  # fmt: skip
    gone = {"started_s": 100, "state": "gone", "last_seen_s": 160}
    assert call("views/peers", "upTime", gone, 1000) == 60
    assert call("views/peers", "upTime", gone | {"state": "online"}, 1000) == 900
    hosts = [
        {"id": f"peer-{n}", "state": "online", "blocks": [n % 113, n % 113 + 5 + n % 9]} for n in range(500)
    ]
    flows = [
        {"source": f"peer-{n}", "target": f"peer-{n + 7}", "positions_per_s": 1, "sessions": 1}
        for n in range(400)
    ]
    picture = call("views/chain_layout", "layout", hosts, flows, 126)
    assert len(picture["bars"]) <= 28
    assert sum(len(bar["peers"]) for bar in picture["bars"]) == 500
    for one, other in itertools.combinations(picture["bars"], 2):
        if one["row"] == other["row"]:
            assert one["end"] <= other["start"] + 0.02 or other["end"] <= one["start"] + 0.02
    downsampled = call(
        "views/history",
        "downsampled",
        {"at_s": [1, 2, 3, 4], "failures": [1, None, 2, 3], "weakest": [3, 1, 2, None], "p": [None] * 4},
        2,
    )
    assert downsampled == {"at_s": [1.5, 3.5], "failures": [1, 5], "weakest": [1, 2], "p": [None, None]}
    for replicas, text in (
        ([0, 1, 1, 3], "No host serves block 0 (1 of 4)"),
        ([2, 1, 2, 3], "Block 1 has only one host"),
        ([2, 1, 1, 3], "Blocks 1:3 have one host each"),
        ([2, 3, 3, 3], "The fewest: 2 hosts, of block 0"),
    ):
        assert text in call("words", "health", {"blocks": 4, "replicas": replicas, "peers": 3})["text"]
