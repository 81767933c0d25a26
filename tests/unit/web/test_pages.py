"""The files of pages: each page loads its modules at once."""

import posixpath
import re
from pathlib import Path

import pytest

from swarmnet.dashboard import server
from swarmnet.gateway import page
from swarmnet.web.pages import PAGE, static_files


@pytest.mark.parametrize("folder", [server.STATIC, page.STATIC])
def test_every_imported_module_is_preloaded(folder: Path) -> None:
    files = {
        path: file.content.decode()
        for path, file in static_files(folder).items()
        if path[-2:] in {"js", "ml"}
    }
    listed = set(re.findall(r'modulepreload" href="/static/([^"]+)"', files[PAGE]))
    needed: set[str] = set()
    coming = ["main.js"]
    while coming:
        module = coming.pop()
        needed.add(module)
        imports = re.findall(r'^import .* from "([^"]+)"', files[module], re.MULTILINE)
        found = [posixpath.normpath(posixpath.join(posixpath.dirname(module), each)) for each in imports]
        coming += [path for path in found if path not in needed]
    assert needed - listed == {"main.js"}
    assert listed <= needed
