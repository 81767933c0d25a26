"""How long a browser needs until the dashboard of 500 peers and 126 blocks is on the screen:
``python -m tests.bench.dashboard_page``.

Real Chromium, a fresh profile each time, the server in the same machine. Prints one JSON object.
"""

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.dashboard.site import Sites, chromium, looking

WATCH = """new MutationObserver((_, watch) => {
    if (document.querySelector('main[aria-busy=false]') && !window.seen_ms) {
        watch.disconnect();
        requestAnimationFrame(() => setTimeout(() => { window.seen_ms = performance.now(); }));
    }
}).observe(document, { attributes: true, childList: true, subtree: true });"""
SENT = "performance.getEntriesByType('resource').reduce((sum, each) => sum + each.transferSize, 0)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    seen_s, sent_bytes = [], 0
    with TemporaryDirectory() as folder, Sites(Path(folder)) as sites, chromium() as browser:
        site = sites["large"]
        for _ in range(arguments.runs):
            with looking(browser) as page:
                page.add_init_script(WATCH)
                page.goto(site.url)
                page.wait_for_selector("main[aria-busy=false]")
                while not (seen_ms := page.evaluate("window.seen_ms")):
                    page.evaluate("new Promise(requestAnimationFrame)")
                seen_s.append(seen_ms / 1000)
                sent_bytes = page.evaluate(SENT)
        figures = {
            "peers": len(site.state["peers"]),
            "blocks": max(model["blocks"] for model in site.state["models"].values()),
            "runs": arguments.runs,
            "first_view_s": {"median": round(statistics.median(seen_s), 3), "worst": round(max(seen_s), 3)},
            "sent_bytes": sent_bytes,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
