"""``swarmnet demo`` with programs in the place of its nodes, client and gateway;
``e2e/test_cli.py`` has the real ones."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from swarmnet.cli import execute
from swarmnet.cli.demo import demo

PROGRAM = """#!{python} -S
import json, os, sys
command = sys.argv[3]
if command == "join":
    open(os.path.join({folder!r}, str(os.getpid())), "w").close()
events = {{
    "join": {{"event": "ready", "addresses": ["/ip4/127.0.0.1/tcp/1"]}},
    "run": {{"token_ids": [1], "text": "Paris"}},
    "serve": {{"event": "ready", "url": "http://127.0.0.1:1"}},
}}
print(json.dumps(events[command]), flush=True)
if command == "serve":
    sys.exit("no memory")
sys.stdin.read()
"""
"""Prints the event that the demo waits for. The gateway then ends; the others stay until their
stdin ends."""


def test_a_demo_whose_gateway_ends_says_so_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, started = tmp_path / "program", tmp_path / "started"
    started.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(started)))
    program.chmod(0o700)
    monkeypatch.setattr(demo, "_count_blocks", lambda *_: 30)
    monkeypatch.setattr(sys, "executable", str(program))
    assert execute(["demo", "--nodes", "2", "--keep", "--json"]) == 1
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "gateway stopped unexpectedly: no memory" in error["message"]
    nodes = [int(path.name) for path in started.iterdir()]
    assert len(nodes) == 2
    assert not any(psutil.pid_exists(node) for node in nodes)
