"""Pictures of pages: pictures of the dashboard for docs/ (``python -m
tests.support.dashboard.pictures``), and pictures that tests leave for reviewers."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.support.dashboard.recorded_peers import SCRIPTS
from tests.support.dashboard.site import Sites, chromium, looking, show
from tests.support.house.doc_blocks import Step

DOCS = Path(__file__).parents[3] / "docs"
SIZE = {"width": 1360, "height": 1130}
PICTURES = {"dashboard.png": "light", "dashboard-dark.png": "dark"}
NAMES = dict(zip(SCRIPTS, ("mara", "attic-2", "lab-1"), strict=True))
"""Harmless names for the hosts whose names are script attacks."""
TICKS = 12

WIDTHS = (390, 1360)
"""Pixels of a telephone and of a wide window."""
SCHEMES: dict[Literal["light", "dark"], tuple[str, ...]] = {"light": (), "dark": ("color-contrast",)}
"""The rules of axe for each scheme, all of them for light."""
SETTLED = """new Promise(done => {
    let frames = 0;
    (function look() {
        if (document.documentElement.scrollWidth <= innerWidth || frames++ > 60) done();
        else requestAnimationFrame(look);
    })();
})"""
TERMINAL = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark }} body {{ font: min(14px, 1.9vw)/1.45 monospace; width: 80ch; margin: 1.5rem auto }}
pre {{ font: inherit; white-space: pre-wrap; overflow-wrap: anywhere }} h1 {{ font-size: 1.2em }}
</style><main><h1>{title}</h1>{steps}</main></html>"""
"""A page that looks like a terminal of 80 columns."""
MAX_LINES = 60
"""Lines of one output in a picture. Metrics have hundreds."""


def violations(page: Page, *rules: str) -> list[str]:
    """Return the faults that axe finds in a page, by all of its rules or by some."""
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = {"type": "rule", "values": list(rules)}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{flaw['id']}: {node['html']}" for flaw in found for node in flaw["nodes"]]


def portray(page: Page, folder: Path, name: str) -> None:
    """Leave pictures of an open page in ``folder``: wide and narrow, light and dark. Fails if the
    page scrolls sideways, or axe finds a violation."""
    has_theme = page.locator("html[data-theme]").count()
    for scheme, rules in SCHEMES.items():
        page.emulate_media(color_scheme=scheme)
        if has_theme:
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            page.evaluate(SETTLED)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
        assert violations(page, *rules) == [], (name, scheme)


def portray_terminal(browser: Browser, folder: Path, name: str, steps: Iterable[Step]) -> None:
    """Leave pictures of a terminal in which a reader typed ``steps``."""
    typed = "".join(
        f"<pre><b>$ {escape(step.typed.strip())}</b>\n{escape(_beginning(step.printed))}</pre>"
        for step in steps
    )
    with browser.new_context() as context:
        page = context.new_page()
        page.set_content(TERMINAL.format(title=escape(name), steps=typed))
        portray(page, folder, f"{name}-terminal")


def _beginning(printed: str) -> str:
    shown, left = printed.splitlines()[:MAX_LINES], printed.splitlines()[MAX_LINES:]
    return "\n".join([*shown, *([f"… and {len(left)} lines"] if left else [])])


def main() -> None:
    with TemporaryDirectory() as folder, Sites(Path(folder)) as sites, chromium() as browser:
        site = sites["full"]
        for host in site.swarm.hosts.values():
            host.name = NAMES.get(host.name, host.name)
        for _ in range(TICKS):
            site.move(2.0)
        for name, scheme in PICTURES.items():
            with looking(browser, viewport=SIZE, color_scheme=scheme) as page:
                show(page, site.url).wait_for_load_state("networkidle")
                page.screenshot(path=DOCS / name)


if __name__ == "__main__":
    main()
