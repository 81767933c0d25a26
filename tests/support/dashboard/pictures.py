"""Takes the pictures of the dashboard in docs/, of a simulated swarm: ``python -m
tests.support.dashboard.pictures``."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.dashboard.recorded_peers import SCRIPTS
from tests.support.dashboard.site import Sites, chromium, looking, show

DOCS = Path(__file__).parents[3] / "docs"
SIZE = {"width": 1360, "height": 1130}
PICTURES = {"dashboard.png": "light", "dashboard-dark.png": "dark"}
NAMES = dict(zip(SCRIPTS, ("mara", "attic-2", "lab-1"), strict=True))
"""Harmless names for the hosts whose names are script attacks."""
TICKS = 12


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
