"""Writes docs/families.md: ``python -m tests.support.models.family_page``."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.gguf.families import FILES
from tests.support.models.hub_families import PAGE, REFUSED, page, reason_for


def reasons_in(folder: Path) -> dict[str, str]:
    """Why each of ``REFUSED`` is refused. ``folder`` is for its files."""
    return {name: reason_for(name, folder / name) for name in REFUSED}


def current(reasons: Mapping[str, str]) -> str:
    """The text of the page."""
    files = {name: file.architecture for name, file in FILES.items()}
    named = {file.family.config["model_type"]: file.architecture for file in FILES.values()}
    return page(reasons, named | files)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(current(reasons_in(Path(scratch))))
