"""The files of pages: each page loads its modules at once, and nothing from other servers."""

import asyncio
import posixpath
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from swarmnet.dashboard import server
from swarmnet.gateway import page
from swarmnet.web.pages import PAGE, add_page, static_files


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


@pytest.mark.parametrize("folder", [server.STATIC, page.STATIC])
def test_a_page_runs_no_inline_script_and_asks_no_other_server(folder: Path) -> None:
    async def policies() -> list[str]:
        app = FastAPI()
        add_page(app, folder)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
            answers = [await client.get(path) for path in ("/", "/static/main.js")]
        assert all(answer.status_code == 200 for answer in answers)
        return [answer.headers["content-security-policy"] for answer in answers]

    for policy in asyncio.run(policies()):
        rules = dict(each.split(maxsplit=1) for each in policy.split("; "))
        assert rules["default-src"] == rules["style-src"] == "'self'"
        assert rules.get("script-src", "'self'") == rules.get("connect-src", "'self'") == "'self'"
        assert rules["object-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
